//! Runs of the fuzz targets of `fuzz/` on the stable compiler: a short one of all, long ones of some.
//!
//! libFuzzer needs coverage counters in the code, which stable rustc puts there when told so by its code generator's
//! flags. Sanitizers need a nightly compiler; they are left to long runs by hand (`cargo fuzz`).

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::counts::Counts;
use crate::command::{cargo, last_lines, output, root, run as run_command, shown};

/// What each target gets.
const RUN_SECONDS: u64 = 5;
/// What a target may take beyond that: its last input may be a slow one.
const GRACE: Duration = Duration::from_secs(60);
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions=on";

/// How long a target runs.
#[derive(Clone, Copy)]
enum Limit {
    Seconds(u64),
    /// Inputs, and the seconds that they may take.
    Runs(u64, u64),
}

/// So many inputs for each of these targets.
pub(crate) fn long(wanted: &[(&str, u64)], within: Duration) -> Result<()> {
    let (_, built) = build()?;
    for (name, runs) in wanted {
        let program = Path::new(&built).join(TARGET).join("release").join(name);
        fuzz(&root().join("fuzz"), name, &program, Limit::Runs(*runs, within.as_secs()))?;
    }
    Ok(())
}

fn build() -> Result<(Vec<String>, String)> {
    let manifest = root().join("fuzz").join("Cargo.toml").display().to_string();
    let mut build =
        cargo(["build", "--quiet", "--release", "--manifest-path", &manifest, "--target", TARGET]);
    run_command(build.env("RUSTFLAGS", FLAGS)).context("the fuzz targets do not build")?;
    targets(&manifest)
}

/// Builds and runs them; each is counted as a test.
pub(crate) fn run(counts: &mut Counts) -> Result<()> {
    let directory = root().join("fuzz");
    if !directory.join("Cargo.toml").is_file() {
        return Ok(());
    }
    let (names, built) = build()?;
    let mut failed = Vec::new();
    for name in names {
        let program = Path::new(&built).join(TARGET).join("release").join(&name);
        match fuzz(&directory, &name, &program, Limit::Seconds(RUN_SECONDS)) {
            Ok(()) => counts.passed += 1,
            Err(error) => {
                eprintln!("fuzz {name}: {error:#}");
                counts.failed += 1;
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}; what failed lies in fuzz/artifacts", failed.join(", "));
}

fn fuzz(directory: &Path, name: &str, program: &Path, limit: Limit) -> Result<()> {
    let artifacts = directory.join("artifacts").join(name);
    std::fs::create_dir_all(&artifacts)?;
    // New finds go where they are forgotten; what is kept is read only.
    let kept = ["seeds", "corpus"].map(|kept| directory.join(kept).join(name));
    let finds = tempfile::tempdir()?;
    let (option, seconds) = match limit {
        Limit::Seconds(seconds) => (format!("-max_total_time={seconds}"), seconds),
        Limit::Runs(runs, seconds) => (format!("-runs={runs}"), seconds),
    };
    let within = seconds + GRACE.as_secs();
    let started = Instant::now();
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(within.to_string()).arg(program);
    command.args([option, "-print_final_stats=1".into(), "-rss_limit_mb=2048".into()]);
    command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(finds.path());
    command.args(kept.iter().filter(|kept| kept.is_dir())).current_dir(directory).stdin(Stdio::null());
    let said = command.output().with_context(|| format!("{} cannot be started", shown(&command)))?;
    let text = String::from_utf8_lossy(&said.stderr);
    if !said.status.success() {
        bail!("{} ended with {}:\n{}", shown(&command), said.status, last_lines(&text, 40));
    }
    let runs = text.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    println!(
        "fuzz: {name}, {} inputs in {:.0} s",
        runs.unwrap_or("?").trim(),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The names of the targets, and where they are built.
fn targets(manifest: &str) -> Result<(Vec<String>, String)> {
    let text =
        output(&mut cargo(["metadata", "--no-deps", "--format-version", "1", "--manifest-path", manifest]))?;
    let metadata: Value = serde_json::from_str(&text)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let binaries = targets.filter(|target| target["kind"][0] == "bin");
    let names = binaries.filter_map(|target| target["name"].as_str()).map(str::to_owned).collect();
    let built = metadata["target_directory"].as_str().context("cargo metadata without target_directory")?;
    Ok((names, built.to_owned()))
}

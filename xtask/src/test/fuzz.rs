//! Runs of the fuzz targets of `fuzz/` on the stable compiler: a short one of all, long ones of some.
//!
//! `fuzz/rustc.sh` puts libFuzzer's counters into towline's own crates; other people's are those that the
//! tests were built with. Sanitizers need a nightly compiler; they are left to long runs by hand (`cargo
//! fuzz`).

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::counts::Counts;
use super::process::in_threads;
use crate::command::{cargo, packages, root, run as run_command, shown, target_directory};

/// Time of a short run, in seconds.
pub(crate) const SECONDS: u64 = 2;
/// Time that a target may take beyond that: its last input may be slow.
const GRACE: Duration = Duration::from_secs(60);
/// Number of lines of a target's output in an error.
const LINES_SHOWN: usize = 40;

/// Runs these targets, or all, for this time and with these options of libFuzzer.
pub(crate) fn task(named: Vec<String>, seconds: u64, options: &[String]) -> Result<()> {
    let mut counts = Counts::default();
    run(&mut counts, named, seconds, options)?;
    println!("{counts}");
    Ok(())
}

/// Command that builds these targets, with the whole workspace's features, which the tests' build has too.
pub(crate) fn build(names: &[String]) -> Command {
    let mut build = cargo(["build", "--quiet", "--workspace"]);
    build.args(names.iter().flat_map(|name| ["--bin", name])).env("CARGO_INCREMENTAL", "0");
    build.env("RUSTC_WORKSPACE_WRAPPER", root().join("fuzz/rustc.sh"));
    build
}

/// Builds and runs these targets, or all, as many at once as there are processors; each is counted as a test.
pub(crate) fn run(counts: &mut Counts, named: Vec<String>, seconds: u64, options: &[String]) -> Result<()> {
    let names = if named.is_empty() { targets()? } else { named };
    run_command(&mut build(&names)).context("the fuzz targets do not build")?;
    let count = names.len();
    let each = |name: String| match fuzz(&name, seconds, options) {
        Ok(()) => None,
        Err(error) => {
            eprintln!("fuzz {name}: {error:#}");
            Some(name)
        }
    };
    let failed: Vec<String> = in_threads(0, names, each).into_iter().flatten().collect();
    counts.passed += count - failed.len();
    counts.failed += failed.len();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}; what failed lies in fuzz/artifacts", failed.join(", "));
}

/// Runs a target for this time at most.
fn fuzz(name: &str, seconds: u64, options: &[String]) -> Result<()> {
    let directory = root().join("fuzz");
    let program = target_directory()?.join("debug").join(name);
    let artifacts = directory.join("artifacts").join(name);
    std::fs::create_dir_all(&artifacts)?;
    // New finds go where they are forgotten; what is kept is read only.
    let kept = ["seeds", "corpus"].map(|kept| directory.join(kept).join(name));
    let finds = tempfile::tempdir()?;
    let within = seconds + GRACE.as_secs();
    let started = Instant::now();
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(within.to_string()).arg(program);
    command.arg(format!("-max_total_time={seconds}")).args(["-print_final_stats=1", "-rss_limit_mb=2048"]);
    command.args(options);
    command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(finds.path());
    command.args(kept.iter().filter(|kept| kept.is_dir())).current_dir(directory).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("{} cannot be started", shown(&command)))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
        bail!("{} ended with {}:\n{last}", shown(&command), output.status);
    }
    let runs = text.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    println!(
        "fuzz: {name}, {} inputs in {:.0} s",
        runs.unwrap_or("?").trim(),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The names of the targets.
pub(crate) fn targets() -> Result<Vec<String>> {
    let packages = packages()?;
    let fuzz =
        packages.iter().find(|package| package["name"] == "towline-fuzz").context("no towline-fuzz")?;
    let targets = fuzz["targets"].as_array().into_iter().flatten();
    let binaries = targets.filter(|target| target["kind"][0] == "bin");
    Ok(binaries.filter_map(|target| target["name"].as_str()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_target_is_run() {
        let files = std::fs::read_dir(root().join("fuzz/fuzz_targets")).unwrap();
        let names = files.map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned());
        assert_eq!(targets().unwrap().into_iter().collect::<BTreeSet<_>>(), names.collect());
    }
}

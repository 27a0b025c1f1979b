//! The workspace's test programs, several at the same time: those of the lab often wait for their guests.
//!
//! `cargo test` runs one after another. What a program writes is kept until it has ended and is then printed as one piece.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use super::process::{built, in_threads, watched};
use crate::command::{cargo, output, root, run as run_command, target_directory};
use crate::times::Usage;

/// Suites that take longest after the [documentation's](DOCUMENTATION), in this order; the others follow as cargo names them.
const FIRST: [&str; 14] = [
    "lab/hosts",
    "lab/run",
    "lab/net",
    "lab/cluster",
    "lab/switchover",
    "lab/protect",
    "lab/store",
    "lab/upgrade",
    "lab/live",
    "lab/faults",
    "lab/zero_copy",
    "lab/pairs",
    "lab/matrix",
    "lab/images",
];
/// Suites of which only one runs at a time: those that allocate huge pages, or expect a number of them; those of
/// several hosts, which take each other for lost after seconds without processors.
const ONE_AT_A_TIME: [&[&str]; 2] = [
    &[
        "lab/postcopy",
        "lab/upgrade",
        "crates/migration (lib)",
        "crates/vhost-user (lib)",
        "crates/vhost-user/hostile",
    ],
    &["lab/hosts", "lab/cluster", "lab/protect"],
];
/// Tests of times and rates that other tests would take from them, by their suites: they run before all others.
const ALONE: [(&str, &str); 3] = [
    ("lab/store", "standstill::a_guest_saved_over_a_slow_link_keeps_its_downtime_limit"),
    ("lab/live", "converge::a_guest_that_writes_too_fast_gets_a_verdict_and_runs_on"),
    ("lab/net", "pauses::a_move_loses_no_frame"),
];
/// Has cargo report what it built.
const MESSAGES: &str = "--message-format=json-render-diagnostics";
/// Number of mishaps in a search of a model.
const MISHAPS: &str = "TOWLINE_MODEL_MISHAPS";
/// The examples in the documentation of all crates, which cargo compiles and runs.
const DOCUMENTATION: &str = "documentation's examples";

/// Tests that a run is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Unit tests of a change that is being made: a search of a model has one mishap fewer, and takes a seventh of the time.
    Check,
    /// Those of every change.
    Change,
    /// Those with `#[ignore = "nightly"]` too.
    Nightly,
}

/// A test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Suite {
    /// Directory of its package and name of its target, as `lab/net`.
    pub(super) name: String,
    /// None: [`DOCUMENTATION`].
    program: Option<PathBuf>,
    package: PathBuf,
}

/// Result of a suite.
pub(super) struct Ended {
    pub(super) name: String,
    /// Its standard output.
    pub(super) output: String,
    pub(super) outcome: Result<()>,
    pub(super) usage: Usage,
}

/// Builds all tests, and the program that they drive, and returns the tests, those that take longest first.
pub(super) fn build() -> Result<Vec<Suite>> {
    let mut suites = suites_of(cargo(["test", "--workspace", "--no-run", MESSAGES]))?;
    suites.insert(0, Suite { name: DOCUMENTATION.into(), program: None, package: root().into() });
    let messages = compile(cargo(["build", "--package", "towline-cli", MESSAGES]))?;
    let program = messages.iter().find_map(|message| message["executable"].as_str());
    // It replaces one that runs, of an earlier test, which cannot be written.
    let mut install = Command::new("install");
    run_command(install.arg("-D").arg(program.context("cargo built no program")?).arg(shipped_program()?))?;
    Ok(suites)
}

/// Builds the unit tests of the product's crates, which need neither root nor QEMU, as [`build`] does.
pub(super) fn build_units() -> Result<Vec<Suite>> {
    let build = ["test", "--workspace", "--exclude", "towline-fuzz", "--lib", "--no-run", MESSAGES];
    let mut suites = suites_of(cargo(build))?;
    suites.retain(|suite| ["crates/", "bench/"].iter().any(|part| suite.name.starts_with(part)));
    Ok(suites)
}

/// Builds these tests, and returns those first that take longest.
fn suites_of(build: Command) -> Result<Vec<Suite>> {
    let messages = compile(build)?;
    let mut suites: Vec<_> = messages.iter().filter_map(|message| suite(message, root())).collect();
    suites.sort_by_key(|suite| FIRST.iter().position(|name| *name == suite.name).unwrap_or(FIRST.len()));
    Ok(suites)
}

/// The program as packages have it, with the features that it asks for itself: a build of the whole workspace adds those that
/// other members ask for, and puts its program where this one was.
fn shipped_program() -> Result<PathBuf> {
    Ok(target_directory()?.join("debug/shipped/towline"))
}

/// Runs this build and returns cargo's messages.
fn compile(mut command: Command) -> Result<Vec<Value>> {
    let text = output(built(&mut command)?)?;
    let messages = serde_json::Deserializer::from_str(&text).into_iter();
    messages.collect::<Result<_, _>>().context("a message of cargo's")
}

/// The test program that this message of cargo's reports.
fn suite(message: &Value, root: &Path) -> Option<Suite> {
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let program = message["executable"].as_str().filter(|_| is_test)?;
    let package = Path::new(message["manifest_path"].as_str()?).parent()?;
    let directory = package.strip_prefix(root).unwrap_or(package).display();
    let target = &message["target"];
    let name = match target["kind"][0].as_str()? {
        "test" => format!("{directory}/{}", target["name"].as_str()?),
        kind => format!("{directory} ({kind})"),
    };
    Some(Suite { name, program: Some(program.into()), package: package.into() })
}

impl Suite {
    /// Command that runs the tests of it that `filter` leaves.
    fn command(&self, filter: &[&str], extent: Extent) -> Result<Command> {
        let mut command = match &self.program {
            Some(program) => Command::new(program),
            None => cargo(["test", "--workspace", "--doc", "--no-fail-fast", "--"]),
        };
        if extent == Extent::Nightly && self.program.is_some() {
            command.arg("--include-ignored");
        }
        if extent == Extent::Check && env::var_os(MISHAPS).is_none() {
            command.env(MISHAPS, "2");
        }
        command.args(filter).env("TOWLINE_BIN", shipped_program()?);
        if self.name.starts_with("lab/") {
            // Each test has several QEMUs, of which each could use a processor.
            command.env("RUST_TEST_THREADS", "1");
        }
        // As cargo does.
        command.current_dir(&self.package).env("CARGO_MANIFEST_DIR", &self.package);
        built(&mut command)?;
        Ok(command)
    }
}

/// Runs the suites, one more at once than there are processors, until the deadline. `started` is called once the
/// first has written something.
pub(super) fn run(
    suites: &[Suite],
    extent: Extent,
    deadline: Instant,
    started: &(impl Fn() + Sync),
) -> Vec<Ended> {
    let mut ended = Vec::new();
    for (name, test) in ALONE {
        let suite = suites.iter().find(|suite| suite.name == name);
        ended.extend(suite.map(|suite| run_one(suite, &["--exact", test], extent, deadline, &|| ())));
    }
    let others = ALONE.map(|(_, test)| ["--skip", test]).concat();
    let each = |suite: &&Suite| run_one(suite, &others, extent, deadline, started);
    // One more than processors: tests wait for their guests about half of the time, and have time limits.
    let run = in_threads(1, batches(suites), |batch| batch.iter().map(each).collect::<Vec<_>>());
    ended.extend(run.into_iter().flatten());
    ended
}

/// Suites that run one after the other: those of [`ONE_AT_A_TIME`], and each other one by itself.
fn batches(suites: &[Suite]) -> Vec<Vec<&Suite>> {
    let group = |suite: &Suite| ONE_AT_A_TIME.iter().position(|names| names.contains(&suite.name.as_str()));
    let mut batches: Vec<Vec<&Suite>> = Vec::new();
    for suite in suites {
        let is_same = |batch: &&mut Vec<&Suite>| group(suite).is_some() && group(batch[0]) == group(suite);
        match batches.iter_mut().find(is_same) {
            Some(batch) => batch.push(suite),
            None => batches.push(vec![suite]),
        }
    }
    batches
}

/// Runs tests of a suite and prints what it wrote.
fn run_one(suite: &Suite, filter: &[&str], extent: Extent, deadline: Instant, started: &impl Fn()) -> Ended {
    println!("== running {}", suite.name);
    let (mut output, mut usage) = (String::new(), Usage::default());
    let outcome = suite.command(filter, extent).and_then(|command| {
        let within = deadline.saturating_duration_since(Instant::now());
        let (result, used) = watched(&command, within, |line| {
            started();
            output.push_str(line);
            output.push('\n');
        })?;
        usage = used;
        result
    });
    println!("== {}: {usage}\n{output}", suite.name);
    Ended { name: suite.name.clone(), output, outcome, usage }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(kind: &str, test: bool) -> Value {
        json!({
            "reason": "compiler-artifact", "manifest_path": "/w/crates/net/Cargo.toml", "executable": "/w/target/debug/deps/a-1",
            "profile": { "test": test }, "target": { "kind": [kind], "name": "frames" },
        })
    }

    #[test]
    fn test_programs_are_those_of_the_test_profile() {
        let program = Some("/w/target/debug/deps/a-1".into());
        let package = PathBuf::from("/w/crates/net");
        let named =
            |name: &str| Suite { name: name.into(), program: program.clone(), package: package.clone() };
        let root = Path::new("/w");
        assert_eq!(suite(&message("test", true), root), Some(named("crates/net/frames")));
        assert_eq!(suite(&message("lib", true), root), Some(named("crates/net (lib)")));
        assert_eq!(
            suite(&message("bin", true), root).map(|suite| suite.name),
            Some("crates/net (bin)".into())
        );
        assert_eq!(suite(&message("example", false), root), None);
        assert_eq!(suite(&json!({ "reason": "build-finished", "success": true }), root), None);
    }

    #[test]
    fn suites_of_a_group_follow_each_other() {
        let [[first, second, ..], _] = ONE_AT_A_TIME else { panic!("a group of one") };
        let named = |name: &&str| Suite { name: name.to_string(), program: None, package: "/".into() };
        let suites: Vec<_> = [*first, "lab/net", *second, "lab/mem"].iter().map(named).collect();
        let names: Vec<Vec<_>> = batches(&suites)
            .iter()
            .map(|batch| batch.iter().map(|suite| suite.name.as_str()).collect())
            .collect();
        assert_eq!(names, [vec![*first, *second], vec!["lab/net"], vec!["lab/mem"]]);
    }
}

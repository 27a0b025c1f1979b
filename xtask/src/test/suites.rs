//! The workspace's test programs, several at the same time: those of the lab often wait for their guests.
//!
//! `cargo test` runs one after another. What a program writes is kept until it has ended and is then printed as one piece.

use std::collections::VecDeque;
use std::env;
use std::fs::{copy, create_dir_all, remove_file};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{available_parallelism, scope};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use super::counts::Counts;
use super::process::{built, watched};
use crate::command::{cargo, output, root, target_directory};
use crate::times::Usage;

/// Suites that take longest, in this order; the others follow as cargo names them.
const FIRST: [&str; 15] = [
    DOCUMENTATION,
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
const ALONE: [(&str, &str); 2] = [
    ("lab/store", "standstill::a_guest_saved_over_a_slow_link_keeps_its_downtime_limit"),
    ("lab/live", "converge::a_guest_that_writes_too_fast_gets_a_verdict_and_runs_on"),
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
    part: Part,
}

/// Tests of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    /// This one of [`ALONE`].
    Alone(&'static str),
    /// All that are not there.
    Others,
}

/// Result of a suite.
pub(super) struct Ended {
    pub(super) suite: Suite,
    pub(super) counts: Counts,
    pub(super) outcome: Result<()>,
    pub(super) usage: Usage,
}

/// Builds all tests, and the program that they drive, and returns the tests, those that take longest first.
pub(super) fn build() -> Result<Vec<Suite>> {
    let documentation =
        Suite { name: DOCUMENTATION.into(), program: None, package: root().into(), part: Part::All };
    let mut suites = vec![documentation];
    let messages = compile(cargo(["test", "--workspace", "--no-run", MESSAGES]))?;
    suites.extend(messages.iter().filter_map(|message| suite(message, root())));
    sort(&mut suites);
    part(&mut suites);
    let messages = compile(cargo(["build", "--package", "towline-cli", MESSAGES]))?;
    let program = messages.iter().find_map(|message| message["executable"].as_str());
    let shipped = shipped_program()?;
    create_dir_all(shipped.with_file_name(""))?;
    // One that runs, of an earlier test, cannot be written.
    if shipped.exists() {
        remove_file(&shipped)?;
    }
    copy(program.context("cargo built no program")?, &shipped)
        .with_context(|| format!("{} cannot be written", shipped.display()))?;
    Ok(suites)
}

/// Builds the unit tests of the product's crates, which need neither root nor QEMU, as [`build`] does.
pub(super) fn build_units() -> Result<Vec<Suite>> {
    let messages =
        compile(cargo(["test", "--workspace", "--exclude", "towline-fuzz", "--lib", "--no-run", MESSAGES]))?;
    let mut suites: Vec<Suite> = messages.iter().filter_map(|message| suite(message, root())).collect();
    suites.retain(|suite| ["crates/", "bench/"].iter().any(|part| suite.name.starts_with(part)));
    sort(&mut suites);
    Ok(suites)
}

/// Sorts those first that take longest.
fn sort(suites: &mut [Suite]) {
    let rank = |suite: &Suite| FIRST.iter().position(|name| *name == suite.name).unwrap_or(FIRST.len());
    suites.sort_by_key(rank);
}

/// Makes a suite of each test that runs alone.
fn part(suites: &mut Vec<Suite>) {
    for (name, test) in ALONE {
        let Some(whole) = suites.iter_mut().find(|suite| suite.name == name) else { continue };
        let alone = Suite { part: Part::Alone(test), ..whole.clone() };
        whole.part = Part::Others;
        suites.insert(0, alone);
    }
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
    Some(Suite { name, program: Some(program.into()), package: package.into(), part: Part::All })
}

impl Suite {
    /// Which of [`ONE_AT_A_TIME`] it is of.
    fn group(&self) -> Option<usize> {
        ONE_AT_A_TIME.iter().position(|suites| suites.contains(&self.name.as_str()))
    }

    /// Command that runs it.
    fn command(&self, extent: Extent) -> Result<Command> {
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
        match self.part {
            Part::All => {}
            Part::Alone(test) => drop(command.args(["--exact", test])),
            Part::Others => drop(command.args(ALONE.iter().flat_map(|(_, test)| ["--skip", test]))),
        }
        command.env("TOWLINE_BIN", shipped_program()?);
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
    let (alone, others): (Vec<_>, Vec<_>) =
        suites.iter().partition(|suite| matches!(suite.part, Part::Alone(_)));
    let ended: Vec<_> = alone.iter().map(|suite| run_one(suite, extent, deadline, &|| ())).collect();
    let (queue, ended) =
        (Mutex::new(Queue { waiting: others.into(), running: Default::default() }), Mutex::new(ended));
    scope(|scope| {
        // One more than processors: tests wait for their guests about half of the time, and have time limits.
        for _ in 0..=available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(suite) = locked(&queue).next() else { return };
                    let result = run_one(suite, extent, deadline, started);
                    locked(&queue).done(suite);
                    locked(&ended).push(result);
                }
            });
        }
    });
    ended.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Suites that wait.
struct Queue<'a> {
    waiting: VecDeque<&'a Suite>,
    /// One of each of [`ONE_AT_A_TIME`] runs.
    running: [bool; ONE_AT_A_TIME.len()],
}

impl<'a> Queue<'a> {
    /// The first that may run beside those that run. Who runs one of a group takes the others afterwards.
    fn next(&mut self) -> Option<&'a Suite> {
        let fits = |suite: &&Suite| suite.group().is_none_or(|group| !self.running[group]);
        let suite = self.waiting.iter().position(fits).and_then(|index| self.waiting.remove(index))?;
        suite.group().into_iter().for_each(|group| self.running[group] = true);
        Some(suite)
    }

    fn done(&mut self, suite: &Suite) {
        suite.group().into_iter().for_each(|group| self.running[group] = false);
    }
}

/// Runs a suite and prints what it wrote.
fn run_one(suite: &Suite, extent: Extent, deadline: Instant, started: &impl Fn()) -> Ended {
    println!("== running {}", suite.name);
    let mut counts = Counts::default();
    let mut text = String::new();
    let mut usage = Usage::default();
    let outcome = suite.command(extent).and_then(|command| {
        let within = deadline.saturating_duration_since(Instant::now());
        let (result, used) = watched(&command, within, |line| {
            started();
            counts.read(line);
            text.push_str(line);
            text.push('\n');
        })?;
        usage = used;
        result
    });
    println!("== {}: {usage}\n{text}", suite.name);
    Ended { suite: suite.clone(), counts, outcome, usage }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        let named = |name: &str| Suite {
            name: name.into(),
            program: program.clone(),
            package: package.clone(),
            part: Part::All,
        };
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
        let named = |name: &&str| Suite {
            name: name.to_string(),
            program: None,
            package: "/".into(),
            part: Part::All,
        };
        let suites: Vec<_> =
            [ONE_AT_A_TIME[0][0], ONE_AT_A_TIME[0][1], "lab/net"].iter().map(named).collect();
        let mut queue = Queue { waiting: suites.iter().collect(), running: Default::default() };
        let mut next = |done: Option<usize>| {
            done.iter().for_each(|index| queue.done(&suites[*index]));
            queue.next().map(|suite| suite.name.clone())
        };
        assert_eq!(next(None).as_deref(), Some(ONE_AT_A_TIME[0][0]));
        assert_eq!(next(None).as_deref(), Some("lab/net"));
        assert_eq!(next(Some(2)), None);
        assert_eq!(next(Some(0)).as_deref(), Some(ONE_AT_A_TIME[0][1]));
    }
}

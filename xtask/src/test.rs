//! `cargo xtask test`: everything that CI runs, with one line of counts at its end.
//!
//! Tests and the towline that they drive are built with the dev profile: optimised enough, with overflow checks, and one build
//! instead of two, which clippy watches. A step that fails does not keep the next ones from running.
//!
//! The lab's guests are emulated, and what such a guest does depends on what else the machine does. A few tests that fail are
//! run again, alone, at most twice; those that pass then are reported as FLAKY, by name, and do not fail the run. They are bugs all the
//! same, of the test or of the code under test.

mod counts;
pub(crate) mod fuzz;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt as _;
use std::panic::resume_unwind;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{at_leisure, cargo, run as run_command, shown, target_directory};
use crate::{lint, publish, setup};
use counts::Counts;

/// Time limit of all tests together, their build included.
const TESTS_WITHIN: Duration = Duration::from_secs(50 * 60);
/// With more failures than this none is run again.
const RUN_AGAIN_MAX: usize = 8;
/// Maximum number of reruns.
const AGAIN_TIMES_MAX: usize = 2;

/// Runs everything; prints the closing line last.
pub(crate) fn run() -> ExitCode {
    let mut counts = Counts::default();
    if step("set-up", &mut counts, |_| setup::run(setup::Scope::Lab)) {
        step("lint", &mut counts, |_| lint::quick());
        step("build", &mut counts, |_| build());
        let mut beside = None;
        step("tests", &mut counts, |counts| tests(counts, &mut beside));
        step("documentation", &mut counts, |_| match beside {
            Some(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            None => compile_beside(),
        });
        step("fuzz", &mut counts, fuzz::run);
    }
    counts.failures.iter().for_each(|name| println!("FAILED {name}"));
    println!("{counts}");
    if counts.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The short fuzz runs alone.
pub(crate) fn fuzz() -> Result<()> {
    let mut counts = Counts::default();
    fuzz::run(&mut counts)?;
    println!("{counts}");
    Ok(())
}

/// Runs one step and counts its failure; false if it failed.
fn step(name: &str, counts: &mut Counts, work: impl FnOnce(&mut Counts) -> Result<()>) -> bool {
    println!("== {name}");
    let started = Instant::now();
    let failed_before = counts.failed;
    let outcome = work(counts);
    if let Err(error) = &outcome {
        println!("{name}: {error:#}");
        counts.failures.push(name.to_owned());
        // A failure that is not a test's is counted too.
        counts.failed = counts.failed.max(failed_before + 1);
    }
    println!("== {name}: {:.1} s", started.elapsed().as_secs_f64());
    outcome.is_ok()
}

/// Builds towline, examples and all tests: what `cargo clippy --all-targets` looks at.
fn build() -> Result<()> {
    run_command(built(&mut cargo(["test", "--workspace", "--no-run"]))?)
}

/// Compiles, in the time that tests leave, what later steps need.
fn compile_beside() -> Result<()> {
    let documented = run_command(&mut at_leisure(&lint::documentation()));
    // A failure is reported by the step that uses the targets.
    let _ = run_command(&mut at_leisure(&fuzz::build(&fuzz::targets()?)));
    documented.and(publish::check_packages()).and(publish::api::check())
}

/// Settings of the one build: nothing is kept for an incremental one.
fn built(command: &mut Command) -> Result<&mut Command> {
    lint::with_clippy(command.env("CARGO_INCREMENTAL", "0"))
}

/// Runs all tests, and `beside` them what is compiled at leisure: the lab often waits for its guests.
fn tests(counts: &mut Counts, beside: &mut Option<JoinHandle<Result<()>>>) -> Result<()> {
    let mut found = Counts::default();
    let outcome = watched(&mut tests_command(&[])?, TESTS_WITHIN, |line| {
        // With the first of them running cargo lets others compile.
        beside.get_or_insert_with(|| spawn(compile_beside));
        found.read(line);
    });
    // Not if a build failed or time ran out: such failures have no names.
    let all_named = found.failed == found.failures.len() && !found.failures.is_empty();
    let outcome = match outcome {
        Err(_) if all_named && found.failed <= RUN_AGAIN_MAX => (1..AGAIN_TIMES_MAX)
            .fold(run_again(&mut found), |outcome, _| outcome.or_else(|_| run_again(&mut found))),
        outcome => outcome,
    };
    counts.add(&found);
    outcome
}

/// Runs the tests that failed once more; those that fail again are what is left in `found`.
fn run_again(found: &mut Counts) -> Result<()> {
    let names = found.failures.clone();
    println!("== once more: {}", names.join(", "));
    let mut again = Counts::default();
    let outcome = watched(&mut tests_command(&names)?, TESTS_WITHIN, |line| again.read(line));
    if again.failed != again.failures.len() || again.passed + again.skipped + again.failed < names.len() {
        return outcome.and_then(|()| bail!("not all of {} ran when they were run again", names.join(", ")));
    }
    for name in names.iter().filter(|name| !again.failures.contains(name)) {
        println!("FLAKY {name}: failed, and passed when it was run again");
        found.passed += 1;
    }
    found.failed = again.failed;
    found.failures = again.failures;
    outcome
}

/// All tests, or those with exactly these names.
fn tests_command(names: &[String]) -> Result<Command> {
    let mut command = cargo(["test", "--workspace", "--no-fail-fast"]);
    if !names.is_empty() {
        command.args(["--", "--exact"]).args(names);
    }
    built(command.env("TOWLINE_BIN", target_directory()?.join("debug/towline")))?;
    Ok(command)
}

/// Runs `command`, shows its standard output line by line and gives each to `look`. Past `within` it is killed with
/// all that it started.
fn watched(command: &mut Command, within: Duration, mut look: impl FnMut(&str)) -> Result<()> {
    let deadline = Instant::now() + within;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| format!("{} cannot be started", shown(command)))?;
    let output = child.stdout.take().context("the output was asked for")?;
    let (sender, lines) = channel();
    let reader = spawn(move || {
        // Ends with the output; bytes that are not UTF-8 are replaced.
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
        }
    });
    let outcome = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                println!("{line}");
                look(&line);
            }
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                run_command(Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]))?;
                break Err(anyhow::anyhow!("{} killed after {} s", shown(command), within.as_secs()));
            }
        }
    };
    let status = child.wait()?;
    drop(lines);
    reader.join().map_err(|_| anyhow::anyhow!("the reader of {} panicked", shown(command)))?;
    outcome?;
    if !status.success() {
        bail!("{} failed with {status}", shown(command));
    }
    Ok(())
}

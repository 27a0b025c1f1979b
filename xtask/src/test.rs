//! `cargo xtask test`: everything that CI runs, with one line of counts at its end.
//!
//! Tests and the towline that they drive are built with the dev profile: optimised enough, with overflow
//! checks, and one build instead of two, which clippy watches. A step that fails does not keep the next ones
//! from running. Test programs run several at the same time, and a table of what each part took is printed
//! before the counts.
//!
//! The lab's guests are emulated, and what such a guest does depends on what else the machine does. A few
//! tests that fail are run again, alone, at most twice; those that pass then are reported as FLAKY, by name,
//! and do not fail the run. They are bugs all the same, of the test or of the code under test.

mod counts;
pub(crate) mod fuzz;
mod process;
mod suites;

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::thread::spawn;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::command::{at_leisure, run as run_command, script};
use crate::times::{self, Times, Usage};
use crate::{lint, publish};
use counts::Counts;
use suites::{Ended, Suite};

/// Time limit of all tests together, their build included.
const TESTS_WITHIN: Duration = Duration::from_secs(50 * 60);
/// With more failures than this none is run again.
const RUN_AGAIN_MAX: usize = 8;
/// Maximum number of reruns.
const AGAIN_TIMES_MAX: usize = 2;

/// Formatting, quick lints, clippy, and unit tests: what needs neither root nor QEMU.
pub(crate) fn check() -> ExitCode {
    let mut report = TestReport::default();
    report.step("lint", |_| lint::quick());
    let mut built = Vec::new();
    if report.step("build", |_| suites::build_units().map(|suites| built = suites)) {
        report.step("tests", |report| tests(report, &built, &|| ()));
    }
    report.end()
}

/// Runs everything; prints the closing line last.
pub(crate) fn run() -> ExitCode {
    let mut report = TestReport::default();
    if report.step("set-up", |_| script("setup.sh", [])) {
        report.step("lint", |_| lint::quick());
        let mut built = Vec::new();
        report.step("build", |_| suites::build().map(|suites| built = suites));
        let beside = OnceLock::new();
        let compile = || {
            // With the examples of the documentation compiled cargo lets others compile.
            beside.get_or_init(|| spawn(compile_beside));
        };
        report.step("tests", |report| tests(report, &built, &compile));
        report.step("documentation", |_| match beside.into_inner() {
            Some(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            None => compile_beside(),
        });
        report.step("fuzz", |report| fuzz::run(&mut report.counts));
    }
    report.end()
}

/// Counts and times of the steps so far.
#[derive(Default)]
struct TestReport {
    counts: Counts,
    times: Times,
}

impl TestReport {
    /// Runs one step and counts its failure; false if it failed.
    fn step(&mut self, name: &str, work: impl FnOnce(&mut Self) -> Result<()>) -> bool {
        println!("== {name}");
        let (started, processor) = (Instant::now(), times::children());
        let failed_before = self.counts.failed;
        let outcome = work(self);
        if let Err(error) = &outcome {
            println!("{name}: {error:#}");
            self.counts.failures.push(name.to_owned());
            // A failure that is not a test's is counted too.
            self.counts.failed = self.counts.failed.max(failed_before + 1);
        }
        let usage =
            Usage { elapsed: started.elapsed(), processor: times::children().saturating_sub(processor) };
        println!("== {name}: {usage}");
        self.times.step(name, usage);
        outcome.is_ok()
    }

    /// Prints the times, and the counts as the closing line.
    fn end(self) -> ExitCode {
        let Self { counts, times } = self;
        println!("== times\n{times}");
        counts.skips.iter().for_each(|name| println!("SKIPPED {name}"));
        counts.failures.iter().for_each(|name| println!("FAILED {name}"));
        println!("{counts}");
        if counts.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Compiles, in the time that tests leave, what later steps need.
fn compile_beside() -> Result<()> {
    let documented = run_command(&mut at_leisure(&lint::documentation()));
    // A failure is reported by the step that uses the targets.
    let _ = run_command(&mut at_leisure(&fuzz::build(&fuzz::targets()?)));
    documented.and(publish::check_minimal_program()).and(publish::check_packages()).and(publish::api::check())
}

/// Runs these tests; `started` is called once they have begun.
fn tests(report: &mut TestReport, suites: &[Suite], started: &(impl Fn() + Sync)) -> Result<()> {
    let deadline = Instant::now() + TESTS_WITHIN;
    let ended = suites::run(suites, deadline, started);
    let failed: usize = ended.iter().map(|ended| ended.counts.failed).sum();
    let mut wrong = Vec::new();
    for mut ended in ended {
        if failed <= RUN_AGAIN_MAX {
            (0..AGAIN_TIMES_MAX).for_each(|_| run_again(&mut ended, deadline));
        }
        report.times.part(&ended.suite.name, ended.usage);
        report.counts.add(&ended.counts);
        if let Err(error) = ended.outcome {
            wrong.push(format!("{}: {error:#}", ended.suite.name));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("{}", wrong.join("\n  "));
}

/// Runs the tests of a suite that failed once more; those that fail again are what is left in `ended`.
fn run_again(ended: &mut Ended, deadline: Instant) {
    let names = ended.counts.failures.clone();
    // Not if the program died or time ran out: such failures have no names.
    if names.is_empty() || ended.counts.failed != names.len() {
        return;
    }
    println!("== once more: {}", names.join(", "));
    let again = suites::run_one(&ended.suite, &names, deadline, &|| ());
    let counts = again.counts;
    if counts.failed != counts.failures.len() || counts.passed + counts.skipped + counts.failed < names.len()
    {
        return;
    }
    for name in names.iter().filter(|name| !counts.failures.contains(name)) {
        println!("FLAKY {name}: failed, and passed when it was run again");
        ended.counts.passed += 1;
    }
    ended.counts.failed = counts.failed;
    ended.counts.failures = counts.failures;
    ended.outcome = again.outcome;
}

//! `cargo xtask test`: everything that CI runs, with one line of counts at its end.
//!
//! Tests and the towline that they drive are built with the dev profile: optimised enough, with overflow
//! checks, and one build instead of two, which clippy watches. A step that fails does not keep the next ones
//! from running. Test programs run several at the same time, and a table of what each part took is printed
//! before the counts. Tests with `#[ignore = "nightly"]` are left to `cargo xtask nightly`, which adds the
//! features of each crate by themselves and the long runs.

mod counts;
pub(crate) mod fuzz;
mod process;
mod suites;

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::thread::spawn;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::command::{at_leisure, refuse, run as run_command, script};
use crate::times::{self, Times, Usage};
use crate::{lint, publish};
use counts::Counts;
pub(crate) use suites::Extent;
use suites::Suite;

impl Extent {
    /// Time limit of all tests together.
    fn within(self) -> Duration {
        match self {
            Self::Check | Self::Change => Duration::from_secs(40 * 60),
            Self::Nightly => Duration::from_secs(3 * 60 * 60),
        }
    }
}

/// Formatting, quick lints, clippy, and unit tests: what needs neither root nor QEMU.
pub(crate) fn check() -> ExitCode {
    let mut report = TestReport::default();
    report.step("lint", |_| lint::quick());
    let mut built = Vec::new();
    if report.step("build", |_| suites::build_units().map(|suites| built = suites)) {
        report.step("tests", |report| tests(report, Extent::Check, &built, &|| ()));
    }
    report.end()
}

/// Runs tests of this extent and all that CI checks besides; prints the closing line last.
pub(crate) fn run(extent: Extent) -> ExitCode {
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
        report.step("tests", |report| tests(report, extent, &built, &compile));
        report.step("documentation", |_| match beside.into_inner() {
            Some(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            None => compile_beside(),
        });
        let seconds = if extent == Extent::Nightly { 60 } else { fuzz::SECONDS };
        report.step("fuzz", |report| fuzz::run(&mut report.counts, Vec::new(), seconds, &[]));
        if extent == Extent::Nightly {
            report.step("features", |_| publish::check_features());
            report.step("long runs", |_| script("soak.sh", ["nightly"]));
        }
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
        if counts.nightly > 0 {
            println!("{} tests are left to `make nightly`", counts.nightly);
        }
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
fn tests(
    report: &mut TestReport,
    extent: Extent,
    suites: &[Suite],
    started: &(impl Fn() + Sync),
) -> Result<()> {
    let deadline = Instant::now() + extent.within();
    let mut wrong = Vec::new();
    for ended in suites::run(suites, extent, deadline, started) {
        report.times.part(&ended.name, ended.usage);
        report.counts.read(&ended.output);
        if let Err(error) = ended.outcome {
            wrong.push(format!("{}: {error:#}", ended.name));
        }
    }
    refuse("", &wrong)
}

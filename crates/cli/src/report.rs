//! `--report FILE.html`: one page about a copy, move, run or upgrade, readable without a network, light and dark.
//!
//! ```text
//!   Observer ─► ReportRecorder: phases, samples of the estimates, lanes ─► Page ─► HTML with charts as SVG
//! ```
//! The page has no scripts and loads nothing; `inspect --html` makes its page by the same template (`towline_report`). Out of
//! scope: pages about clones of `copy`, which has one for each command.

mod page;
mod recorded;
mod several;

use std::fmt::Display;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use towline_control::plan::{CopyPhase, CopyReport, Failure, HostFacts, Observer, Progress};
use towline_image::Existing;
use towline_image::atomic_file::write_sidecar;
use towline_migration::LaneSends;

use crate::console;
use crate::endpoint::Endpoint;
use crate::lock::lock;
use recorded::{CopyRecording, PhaseStart, TimedEstimate};
pub(crate) use recorded::{GuestReport, ReportRecorder};
pub(crate) use several::html as html_of_several;

/// Beginning of every page, by which an existing file is recognised.
const DOCTYPE: &[u8] = b"<!doctype html>";

/// Option of the commands that have a report.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ReportArgs {
    /// Page about this command, with charts of its rates and its phases; an existing page is replaced
    #[arg(long, value_name = "FILE.html", value_hint = clap::ValueHint::FilePath, help_heading = crate::args::OUTPUT)]
    pub(crate) report: Option<PathBuf>,
}

impl ReportArgs {
    /// Refuses a file that is an endpoint of the copy, or anything but a page, before a guest is touched.
    ///
    /// # Errors
    /// The text for the user.
    pub(crate) fn check(&self, ends: &[&Endpoint]) -> Result<(), String> {
        let Some(path) = &self.report else { return Ok(()) };
        let is_same =
            |end: &&&Endpoint| matches!(end, Endpoint::Image(image) if place_of(image) == place_of(path));
        if let Some(end) = ends.iter().find(is_same) {
            return Err(format!(
                "--report {}: it is an endpoint of this copy ({end}); choose another name",
                path.display()
            ));
        }
        check_existing(path).map_err(|error| format!("--report {}", crate::errors::text(&error)))
    }

    /// Writes the page, if it was asked for. A failure does not change the result of the command.
    pub(crate) fn write(&self, html: impl FnOnce() -> Result<String>) {
        let Some(path) = &self.report else { return };
        match html().and_then(|html| write_page(path, &html)) {
            Ok(()) => tracing::info!(path = %path.display(), "wrote the report"),
            Err(error) => console::error(&format!("--report {}", crate::errors::text(&error))),
        }
    }
}

/// Directory and name of a path, so that two ways to write it are equal.
fn place_of(path: &Path) -> Option<(PathBuf, std::ffi::OsString)> {
    let path = std::path::absolute(path).ok()?;
    let parent = path.parent()?;
    Some((parent.canonicalize().unwrap_or_else(|_| parent.into()), path.file_name()?.into()))
}

/// Refuses to replace a file that is not a page. A FIFO is not opened.
fn check_existing(path: &Path) -> Result<()> {
    let context = || path.display().to_string();
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.with_context(context)?,
    };
    let mut begin = Vec::new();
    if metadata.is_file() {
        let file = std::fs::File::open(path).with_context(context)?;
        file.take(DOCTYPE.len() as u64).read_to_end(&mut begin).with_context(context)?;
    }
    if begin != DOCTYPE {
        bail!("{}: it exists and is not an HTML page; choose another name, or remove it", path.display());
    }
    Ok(())
}

/// Writes a page, readable for this user only: the command lines of endpoints stand in it.
pub(crate) fn write_page(path: &Path, html: &str) -> Result<()> {
    check_existing(path)?;
    Ok(write_sidecar(path, html.as_bytes(), Existing::Replace)?)
}

impl ReportRecorder {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), recorded: Mutex::default() }
    }

    /// Creates the recorder of a guest that is started first: with a phase from the begin of the command on.
    pub(crate) fn of_started(begun: Instant) -> Self {
        let start = PhaseStart { at: Duration::ZERO, name: "start" };
        let recorded = CopyRecording { phases: vec![start], ..CopyRecording::default() };
        Self { started: begun, recorded: Mutex::new(recorded) }
    }

    /// Writes the page that was asked for.
    pub(crate) fn write(
        &self,
        args: &ReportArgs,
        ends: [&dyn Display; 2],
        copied: Result<&CopyReport, &Failure>,
    ) {
        args.write(|| page::html(ends, self.started.elapsed(), &lock(&self.recorded), copied));
    }
}

impl Observer for ReportRecorder {
    fn phase(&self, phase: CopyPhase) {
        let start = PhaseStart { at: self.started.elapsed(), name: phase.name() };
        lock(&self.recorded).phases.push(start);
    }

    fn progress(&self, progress: &Progress) {
        let at = self.started.elapsed();
        let mut recorded = lock(&self.recorded);
        let estimate = recorded.estimator.observe(at, progress);
        recorded.samples.push(TimedEstimate { at, estimate });
    }

    fn lanes(&self, lanes: &[LaneSends]) {
        lock(&self.recorded).lanes = lanes.to_vec();
    }

    fn hosts(&self, hosts: &[HostFacts; 2]) {
        lock(&self.recorded).hosts = hosts.to_vec();
    }

    fn notice(&self, text: &str) {
        lock(&self.recorded).notices.push(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::os::unix::fs::PermissionsExt as _;

    use super::recorded::{SAMPLES_MAX, Samples};
    use super::*;
    use crate::progress::Estimator;

    #[test]
    fn samples_of_a_long_copy_are_equally_far_apart() {
        let estimate = Estimator::default().observe(Duration::ZERO, &Progress::default());
        let mut samples = Samples::default();
        // Ten hours at 20 a second.
        let all = 36_000 * 20;
        for index in 0..all {
            samples.push(TimedEstimate { at: Duration::from_millis(50 * index), estimate });
        }
        assert!((SAMPLES_MAX / 2..=SAMPLES_MAX).contains(&samples.kept.len()), "{}", samples.kept.len());
        let step = samples.kept[1].at - samples.kept[0].at;
        assert!(samples.kept.windows(2).all(|pair| pair[1].at - pair[0].at == step));
        assert_eq!(samples.kept[0].at, Duration::ZERO);
        assert!(samples.kept.last().unwrap().at + step >= Duration::from_millis(50 * (all - 1)));
    }

    #[test]
    fn a_report_replaces_only_pages() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (image, page) = (path("a.img"), path("a.html"));
        std::fs::write(&image, b"QEVM").unwrap();
        let args = |path: &Path| ReportArgs { report: Some(path.into()) };
        let error = args(&image).check(&[]).unwrap_err();
        assert!(error.contains("is not an HTML page"), "{error}");
        assert!(write_page(&image, "<!doctype html>").is_err());
        assert_eq!(std::fs::read(&image).unwrap(), b"QEVM");
        // An endpoint that does not exist yet.
        let new = directory.path().join("./new.img");
        let error = args(&path("new.img")).check(&[&Endpoint::Null, &Endpoint::Image(new)]).unwrap_err();
        assert!(error.contains("it is an endpoint of this copy"), "{error}");
        assert_eq!(args(&page).check(&[&Endpoint::Image(image)]), Ok(()));
        std::fs::write(&page, "<!doctype html>\nold").unwrap();
        write_page(&page, "<!doctype html>\nnew").unwrap();
        assert_eq!(std::fs::read_to_string(&page).unwrap(), "<!doctype html>\nnew");
        assert_eq!(std::fs::metadata(&page).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(args(directory.path()).check(&[]).is_err());
    }
}

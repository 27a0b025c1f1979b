//! Helpers of these tests.

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use towline_lab::expect::{qmp, wait_transferred};
pub(crate) use towline_lab::signal;
use towline_lab::{Finished, Qemu, Towline, towline_binary};

/// Timeout of anything that must happen.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);

/// A directory for images, and one for towline's temporary files.
pub(crate) struct Fixture(TempDir);

impl Fixture {
    pub(crate) fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        for name in ["work", "tmp", "run"] {
            let mut builder = std::fs::DirBuilder::new();
            builder.mode(0o700).create(directory.path().join(name)).unwrap();
        }
        Self(directory)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        self.0.path().join("work").join(name).display().to_string()
    }

    /// Names of towline's temporary files.
    pub(crate) fn temporary(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path().join("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    /// Returns true if there is a journal of this QEMU.
    pub(crate) fn is_journaled(&self, qemu: &Qemu) -> bool {
        let base = if user() == 0 { PathBuf::from("/run") } else { self.0.path().join("run") };
        let entries = std::fs::read_dir(base.join("towline/journal")).unwrap();
        let prefix = format!("qemu-{}-", qemu.pid());
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
    }

    /// Starts `towline` with these space-separated arguments.
    pub(crate) fn towline(&self, arguments: &str) -> Towline {
        self.start(&[], arguments)
    }

    /// Starts towline by another command, which receives its command line as the last arguments.
    pub(crate) fn start(&self, by: &[&str], arguments: &str) -> Towline {
        let tmp = format!("TMPDIR={}", self.0.path().join("tmp").display());
        let binary = towline_binary().unwrap().display().to_string();
        // Used by other users than root, whose runtime directory is /run.
        let run = format!("XDG_RUNTIME_DIR={}", self.0.path().join("run").display());
        let line = [tmp.as_str(), &run].into_iter().chain(by.iter().copied()).chain([binary.as_str()]);
        Towline::start(Path::new("/usr/bin/env"), line.chain(arguments.split(' '))).unwrap()
    }

    /// Runs `towline` until it exits.
    pub(crate) fn run(&self, arguments: &str) -> Finished {
        self.towline(arguments).wait(WITHIN).unwrap()
    }

    /// Starts a slow copy, and waits until a MiB was sent.
    pub(crate) fn copy_slowly(&self, source: &Qemu, destination: &str) -> Towline {
        let options = "--json --max-bandwidth 4M --downtime-limit 77 --multifd-channels 3";
        let mut towline = self.towline(&format!("copy {options} {} {destination}", qmp(source)));
        wait_transferred(&mut towline, 1 << 20, WITHIN);
        towline
    }
}

/// Starts a copy and kills it (SIGKILL) under way; returns its process ID.
pub(crate) fn killed_copy(fixture: &Fixture, source: &Qemu) -> u32 {
    let mut towline = fixture.copy_slowly(source, &fixture.name("killed.img"));
    let pid = towline.pid();
    towline.kill().unwrap();
    pid
}

/// User ID of this test.
pub(crate) fn user() -> u32 {
    std::fs::metadata("/proc/self").unwrap().uid()
}

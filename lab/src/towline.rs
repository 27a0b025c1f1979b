//! The towline binary under test, run as a user would.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::wait::wait_until;
use crate::{paths, process, sys};

/// A running towline. Dropping it kills it.
pub struct Towline {
    child: Child,
    line: String,
    directory: TempDir,
}

/// A towline that has ended.
#[derive(Debug)]
pub struct Finished {
    /// How.
    pub status: ExitStatus,
    /// All that it wrote to its standard output.
    pub stdout: String,
    /// All that it wrote to its standard error.
    pub stderr: String,
}

/// Starts the towline to be tested with these arguments and no terminal.
pub fn towline<I: IntoIterator<Item: AsRef<OsStr>>>(arguments: I) -> Result<Towline> {
    Towline::start(&towline_binary()?, arguments)
}

/// The binary to be tested: `$TOWLINE_BIN`, else the one built beside this test, else the workspace's.
pub fn towline_binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("TOWLINE_BIN") {
        return Ok(binary.into());
    }
    let test = std::env::current_exe()?;
    // A test lies in target/PROFILE/deps, a program in target/PROFILE.
    let profiles = test.ancestors().skip(1).take(2).map(Path::to_path_buf);
    let target = paths::workspace().join("target");
    let places: Vec<PathBuf> =
        profiles.chain(["release", "debug"].map(|profile| target.join(profile))).collect();
    let binaries = places.iter().map(|place| place.join("towline"));
    binaries.into_iter().find(|binary| binary.is_file()).with_context(|| {
        format!("no towline in {places:?}; run `cargo build -p towline-cli` or set TOWLINE_BIN")
    })
}

impl Towline {
    /// Starts this binary with these arguments and no terminal.
    pub fn start<I: IntoIterator<Item: AsRef<OsStr>>>(binary: &Path, arguments: I) -> Result<Self> {
        Self::start_inheriting(binary, arguments, &[])
    }

    /// As [`Towline::start`], with descriptors that stay open in it under the numbers that they have here.
    pub fn start_inheriting<I: IntoIterator<Item: AsRef<OsStr>>>(
        binary: &Path,
        arguments: I,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir()?;
        // Files, not pipes: whatever it writes, it never waits for us to read it.
        let file = |name: &str| File::create(directory.path().join(name)).map(Stdio::from);
        let output = [file("stdout")?, file("stderr")?];
        Self::spawn(binary, arguments, (directory, output), descriptors)
    }

    /// As [`Towline::start`], with a standard output and a standard error of the caller's, whose content is not in
    /// [`Finished`].
    pub fn start_writing_to<I: IntoIterator<Item: AsRef<OsStr>>>(
        binary: &Path,
        arguments: I,
        output: [Stdio; 2],
    ) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir()?;
        Self::spawn(binary, arguments, (directory, output), &[])
    }

    fn spawn<I: IntoIterator<Item: AsRef<OsStr>>>(
        binary: &Path,
        arguments: I,
        (directory, [stdout, stderr]): (TempDir, [Stdio; 2]),
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let mut command = Command::new(binary);
        command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let line = format!("{command:?}");
        sys::keep_open(&mut command, descriptors);
        let child = process::spawn(command).with_context(|| format!("{line} cannot be started"))?;
        Ok(Self { child, line, directory })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Memory that is its own at this moment, in bytes: resident, and backed by no file (`RssAnon` and `RssShmem` of
    /// proc(5)). `None` once it has ended.
    pub fn own_memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        };
        Some((kib("RssAnon:")? + kib("RssShmem:")?) * 1024)
    }

    /// The file that its standard output goes to.
    pub fn stdout_path(&self) -> PathBuf {
        self.directory.path().join("stdout")
    }

    /// What it wrote to its standard output so far.
    pub fn stdout(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stdout")).unwrap_or_default()
    }

    /// What it wrote to its standard error so far.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap_or_default()
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Where it listens for its source, once it does; with `--json` an event says so.
    pub fn listens_at(&mut self, within: Duration) -> Result<String> {
        wait_until("a towline that listens", within, || {
            let (runs, said) = (self.runs()?, self.stderr() + &self.stdout());
            ensure!(runs, "{} ended: {said}", self.line);
            let address = said.lines().find_map(|line| line.split_once("listening on "));
            Ok(address.map(|(_, address)| address.trim().trim_end_matches(['"', '}']).to_owned()))
        })
    }

    /// Kills it (SIGKILL), as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for its end, whatever its exit status.
    pub fn wait(mut self, within: Duration) -> Result<Finished> {
        let status = wait_until("end of towline", within, || Ok(self.child.try_wait()?));
        let status =
            status.with_context(|| format!("{} wrote: {}{}", self.line, self.stdout(), self.stderr()))?;
        Ok(Finished { status, stdout: self.stdout(), stderr: self.stderr() })
    }

    /// Waits for its end and fails unless it exits with 0.
    pub fn wait_done(self, within: Duration) -> Result<Finished> {
        let line = self.line.clone();
        let finished = self.wait(within)?;
        if !finished.status.success() {
            bail!("{line} failed with {}: {}{}", finished.status, finished.stdout, finished.stderr);
        }
        Ok(finished)
    }
}

impl Drop for Towline {
    fn drop(&mut self) {
        // It may be gone already, and a destructor has nobody to tell.
        let _ = self.kill();
    }
}

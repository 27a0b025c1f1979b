//! The towline binary under test, run as a user would.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::process::{self, KilledChild};
#[cfg(feature = "schema")]
use crate::schema::EventSchema;
use crate::wait::wait_until;
use crate::{paths, sys};

/// Number of lines of output in an error.
const OUTPUT_LINES: usize = 5;

/// A running towline. Dropping it kills it.
pub struct Towline {
    child: KilledChild,
    /// Its command line, each word in quotation marks.
    line: String,
    directory: TempDir,
}

/// A towline that has exited.
#[derive(Debug)]
pub struct Finished {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output, complete.
    pub stdout: String,
    /// Standard error, complete.
    pub stderr: String,
}

/// Starts the towline under test with these arguments and no terminal.
pub fn towline<I: IntoIterator<Item: AsRef<OsStr>>>(arguments: I) -> Result<Towline> {
    Towline::start(&towline_binary()?, arguments)
}

/// Returns the path of the binary under test: `$TOWLINE_BIN`, else the one built beside this test, else the
/// workspace's.
pub fn towline_binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("TOWLINE_BIN") {
        return Ok(binary.into());
    }
    let test = std::env::current_exe()?;
    // Tests are in target/PROFILE/deps, programs in target/PROFILE.
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
        Self::start_with(binary, arguments, None, &[])
    }

    /// Starts towline after the words of a program that it replaces, as those of a network.
    pub fn start_after(prefix: &[String], words: &[&str]) -> Result<Self> {
        Self::start_within(prefix, &towline_binary()?, words)
    }

    /// Starts a program after such words.
    pub fn start_within<I: IntoIterator<Item: AsRef<OsStr>>>(
        prefix: &[String],
        program: &Path,
        arguments: I,
    ) -> Result<Self> {
        let mut line: Vec<OsString> = prefix[1..].iter().map(OsString::from).collect();
        line.push(program.into());
        line.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        Self::start(prefix[0].as_ref(), line)
    }

    /// As [`Towline::start`], with the caller's standard output and standard error, if any, whose content is not in
    /// [`Finished`], and with descriptors that stay open in the process under their numbers here.
    pub fn start_with<I: IntoIterator<Item: AsRef<OsStr>>>(
        binary: &Path,
        arguments: I,
        output: Option<[Stdio; 2]>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        // Files, not pipes, and no files of a disk: towline never blocks on a write.
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir_in("/dev/shm")?;
        let file = |name: &str| File::create(directory.path().join(name)).map(Stdio::from);
        let [stdout, stderr] =
            output.map_or_else(|| Ok::<_, io::Error>([file("stdout")?, file("stderr")?]), Ok)?;
        let mut command = Command::new(binary);
        command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let line = format!("{command:?}");
        sys::keep_open(&mut command, descriptors);
        let child = process::spawn(command).with_context(|| format!("{line} cannot be started"))?;
        Ok(Self { child, line, directory })
    }

    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Returns the process's private memory in bytes: resident, and backed by no file (`RssAnon` and
    /// `RssShmem` of proc(5)). `None` once it has exited.
    pub fn own_memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        };
        Some((kib("RssAnon:")? + kib("RssShmem:")?) * 1024)
    }

    /// Path of the file that receives its standard output.
    pub fn stdout_path(&self) -> PathBuf {
        self.directory.path().join("stdout")
    }

    /// Standard output so far.
    pub fn stdout(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stdout")).unwrap_or_default()
    }

    /// Standard error so far.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap_or_default()
    }

    /// Returns true if the process is running.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.child.0.try_wait()?.is_none())
    }

    /// Fails with the end of its output if it has exited.
    pub fn check(&mut self) -> Result<()> {
        if self.runs()? {
            return Ok(());
        }
        let output = self.stdout() + &self.stderr();
        let lines: Vec<&str> = output.lines().collect();
        bail!("{} ended: {}", self.line, lines[lines.len().saturating_sub(OUTPUT_LINES)..].join(" | "))
    }

    /// Waits until it listens for its source, and returns the address; with `--json` an event has it.
    pub fn listens_at(&mut self, within: Duration) -> Result<String> {
        wait_until("a towline that listens", within, || {
            self.check()?;
            let text = self.stderr() + &self.stdout();
            let address = text.lines().find_map(|line| line.split_once("listening on "));
            // In an event, a quotation mark ends it.
            Ok(address.and_then(|(_, rest)| rest.split('"').next()).map(|address| address.trim().to_owned()))
        })
    }

    /// Kills it (SIGKILL), as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    /// Waits until it exits, with any exit status. With `--json`, each event is validated by the schema of
    /// events.
    pub fn wait(mut self, within: Duration) -> Result<Finished> {
        let status = wait_until("end of towline", within, || Ok(self.child.0.try_wait()?));
        let status =
            status.with_context(|| format!("{} wrote: {}{}", self.line, self.stdout(), self.stderr()))?;
        let finished = Finished { status, stdout: self.stdout(), stderr: self.stderr() };
        #[cfg(feature = "schema")]
        if self.line.contains("\"--json\"") {
            finished.check_events().with_context(|| self.line.clone())?;
        }
        Ok(finished)
    }

    /// Waits until it exits, and fails unless the exit status is 0.
    pub fn wait_done(self, within: Duration) -> Result<Finished> {
        let line = self.line.clone();
        let finished = self.wait(within)?;
        if !finished.status.success() {
            bail!("{line} failed with {}: {}{}", finished.status, finished.stdout, finished.stderr);
        }
        Ok(finished)
    }
}

#[cfg(feature = "schema")]
impl Finished {
    /// Validates standard output by the schema of events. A process that was killed may have written a part
    /// of a line.
    fn check_events(&self) -> Result<()> {
        let schema = EventSchema::load(paths::workspace())?;
        let whole = self.stdout.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        for line in whole {
            let event = serde_json::from_str(line).with_context(|| format!("not an event: {line}"))?;
            schema.validate(&event).with_context(|| format!("not as in docs/schema/events.json: {line}"))?;
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "schema"))]
mod tests {
    use super::*;

    fn checked(stdout: &str) -> Result<(), String> {
        let finished =
            Finished { status: ExitStatus::default(), stdout: stdout.into(), stderr: String::new() };
        finished.check_events().map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn events_that_are_not_in_the_schema_are_refused() {
        let phase = |name: &str| {
            format!(
                "{{\"event\":\"phase\",\"phase\":\"{name}\",\"schema\":2,\"time\":\"2026-11-22T00:00:00Z\"}}\n"
            )
        };
        assert_eq!(checked(&phase("transfer")), Ok(()));
        // The process was killed within a line.
        assert_eq!(checked(&(phase("transfer") + "{\"event\":\"pro")), Ok(()));
        let refused = checked(&phase("soon")).unwrap_err();
        assert!(refused.contains("event.phase: \"prepare\" was expected"), "{refused}");
        let refused = checked("{\"event\":\"begin\",\"schema\":2}\n").unwrap_err();
        assert!(refused.contains("unknown event begin"), "{refused}");
        assert!(checked("listening on tcp:127.0.0.1:1\n").unwrap_err().starts_with("not an event"));
    }
}

//! A namespace of the kernel that is removed when its [`Namespace`] is dropped.
//!
//! ```text
//!   unshare … sh -c 'SCRIPT; sleep'   holds the namespace; dies with this process, and the namespace with its last user
//!   nsenter … PROGRAM                 a program inside it
//! ```
//! Limits: needs root.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::{self, KilledChild};
use crate::wait::wait_until;

const MADE_WITHIN: Duration = Duration::from_secs(60);

/// A namespace; see the module's picture.
pub struct Namespace {
    holder: KilledChild,
    /// Options of nsenter.
    entered_by: &'static [&'static str],
}

impl Namespace {
    /// Creates a namespace by this option of unshare, to be entered by these of nsenter, and runs a script in it. `is_made` returns
    /// true once that has been done in the namespace of a process.
    ///
    /// # Errors
    /// It cannot be made here: the reason for which a test is skipped.
    pub fn new(
        option: &str,
        entered_by: &'static [&'static str],
        script: &str,
        mut is_made: impl FnMut(u32) -> bool,
    ) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args([option, "sh", "-c", &format!("{script} && exec sleep infinity")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let holder = process::spawn(command).context("unshare cannot be started")?;
        let mut namespace = Self { holder, entered_by };
        wait_until("namespace", MADE_WITHIN, || {
            let ended = namespace.holder.0.try_wait()?;
            ensure!(ended.is_none(), "`{script}` fails in `unshare {option}` (root is needed)");
            Ok(is_made(namespace.pid()).then_some(()))
        })?;
        Ok(namespace)
    }

    /// A process in it.
    pub fn pid(&self) -> u32 {
        self.holder.0.id()
    }

    /// Command that runs a program in this namespace; the program and its arguments follow.
    pub fn prefix(&self) -> Vec<String> {
        let pid = self.pid().to_string();
        let words = ["/usr/bin/nsenter", "--target", &pid].into_iter();
        words.chain(self.entered_by.iter().copied()).chain(["--"]).map(str::to_owned).collect()
    }

    /// Runs a command in this namespace, as `["ip", "link"]`.
    pub fn run(&self, line: &[&str]) -> Result<()> {
        let prefix = self.prefix();
        let output = process::command_after(&prefix).args(line).output();
        let output = output.with_context(|| format!("{prefix:?} cannot be started"))?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{}` fails: {}", line.join(" "), message.trim());
        Ok(())
    }
}

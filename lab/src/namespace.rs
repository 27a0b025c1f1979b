//! A namespace of the kernel that is removed when its [`Namespace`] is dropped.
//!
//! ```text
//!   unshare … sh -c 'SCRIPT; echo; sleep'   holds the namespace; dies with this process, and the namespace with its last user
//!   nsenter … PROGRAM                       a program inside it
//! ```
//! Limits: needs root.

use std::io::Read as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::process::{self, KilledChild};

/// Runs the script in its argument, and prints a newline once that is done.
const HOLD: &str = "timeout 60 sh -c \"$0\" >&2 && echo && exec sleep infinity";

/// A namespace; see the module's picture.
pub struct Namespace {
    holder: KilledChild,
    /// Options of nsenter.
    entered_by: &'static [&'static str],
}

impl Namespace {
    /// Creates a namespace by this option of unshare, to be entered by these of nsenter, in which a script has run.
    ///
    /// # Errors
    /// It cannot be made here: the reason for which a test is skipped.
    pub fn new(option: &str, entered_by: &'static [&'static str], script: &str) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args([option, "sh", "-c", HOLD, script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut holder = process::spawn(command).context("unshare cannot be started")?;
        let made = holder.0.stdout.take().context("its output was asked for")?.read_exact(&mut [0]);
        ensure!(made.is_ok(), "`{script}` fails in `unshare {option}` (root is needed)");
        Ok(Self { holder, entered_by })
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

//! `--sandbox`: the policies of the commands, applied by [`towline_sandbox`].

mod copy;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::OnceLock;

use clap::ValueEnum;
use rustix::io::Errno;
pub(crate) use towline_sandbox::{AllowedPorts, PendingSandbox, Policy, parent_directory};
use towline_sandbox::{Denied, Mode};

/// Confinement of a process that was not asked about it.
pub(crate) const BEST_EFFORT: Mode = Mode::BestEffort;

#[cfg(feature = "store")]
pub(crate) use copy::policy_of_store;
pub(crate) use copy::{
    EXEC_UNCONFINED, permit_image, permit_mapped_images, policy_of_copy, policy_of_images,
};

/// Values of `--sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Setting {
    /// Restrict this process
    On,
    /// No restrictions
    None,
}

/// Option of every confined command.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SandboxArgs {
    /// Restriction of this process to the files, connections and system calls that it needs (docs/sandbox.md)
    /// [default: on]
    #[arg(long, value_name = "ON|NONE", hide_short_help = true, help_heading = crate::args::PROCESS)]
    sandbox: Option<Setting>,
    /// Policy of this process, once it is confined.
    #[arg(skip)]
    applied: OnceLock<Policy>,
}

impl SandboxArgs {
    /// Returns true if the sandbox was requested explicitly.
    pub(crate) fn is_requested(&self) -> bool {
        self.sandbox == Some(Setting::On)
    }

    /// Confines this process. To be called before any thread is started.
    pub(crate) fn confine(&self, policy: Policy) {
        if let Some(mode) = self.mode() {
            self.applied.get_or_init(|| policy).confine(mode);
        }
    }

    /// Takes the first step for a device, before any thread is started: files and ports.
    pub(crate) fn begin(&self, policy: Policy) -> PendingSandbox {
        let begin = |mode| self.applied.get_or_init(|| policy).begin(mode);
        self.mode().map_or_else(PendingSandbox::disabled, begin)
    }

    /// Returns an explanation of an error with this number, about this file, that the sandbox has caused.
    pub(crate) fn explain(&self, errno: Errno, file: Option<&Path>) -> Option<String> {
        Some(match self.applied.get()?.denied(errno, file)? {
            Denied::Call => "the sandbox refused the system call that is named above (docs/sandbox.md); --sandbox none runs without it".into(),
            Denied::File(file) => format!(
                "the sandbox permits only the files that the command line names, and not {} (docs/sandbox.md); --sandbox none runs without it",
                file.display()
            ),
        })
    }

    /// Logs the reason that this process remains unconfined, unless that was requested.
    pub(crate) fn log_unconfined(&self, reason: &str) {
        match self.mode() {
            Some(Mode::Requested) => tracing::warn!("no sandbox: {reason}"),
            Some(Mode::BestEffort) => tracing::info!("no sandbox: {reason}"),
            None => {}
        }
    }

    fn mode(&self) -> Option<Mode> {
        match self.sandbox {
            Some(Setting::On) => Some(Mode::Requested),
            None => Some(Mode::BestEffort),
            Some(Setting::None) => None,
        }
    }
}

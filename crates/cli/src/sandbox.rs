//! `--sandbox`: the policies of the commands, applied by [`towline_sandbox`].

mod copy;
#[cfg(test)]
mod tests;

use clap::ValueEnum;
use towline_sandbox::Mode;
pub(crate) use towline_sandbox::{AllowedPorts, PendingSandbox, Policy, explain, parent_directory};

#[cfg(feature = "store")]
pub(crate) use copy::policy_of_store;
pub(crate) use copy::{EXEC_UNCONFINED, permit_image, policy_of_copy, policy_of_images};

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
}

impl SandboxArgs {
    /// Returns true if the sandbox was requested explicitly.
    pub(crate) fn is_requested(&self) -> bool {
        self.sandbox == Some(Setting::On)
    }

    /// Confines this process. To be called before any thread is started.
    pub(crate) fn confine(&self, policy: &Policy) {
        if let Some(mode) = self.mode() {
            policy.confine(mode);
        }
    }

    /// Takes the first step for a device, before any thread is started: files and ports.
    pub(crate) fn begin(&self, policy: &Policy) -> PendingSandbox {
        self.mode().map_or_else(PendingSandbox::disabled, |mode| policy.begin(mode))
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

//! Restricts a process that reads untrusted input to what it needs.
//!
//! ```text
//!   open what is needed ─► landlock ─► threads, control sockets ─► seccomp ─► peers, guests
//!                             │                                      └─ system calls of all threads
//!                             └─ no_new_privs, files, directories, TCP ports, other processes' signals and abstract sockets
//! ```
//! A [`Policy`] lists what stays permitted. Landlock restricts the calling thread and the threads that it
//! starts, so the main thread applies it before it starts any; sockets whose threads start with them
//! (`--qmp`, `--metrics`) are opened after it. A device takes the two steps separately ([`Policy::begin`],
//! [`PendingSandbox::finish`]), a copy takes both at once ([`Policy::confine`]). Restrictions can only be
//! added. A mechanism that the kernel lacks is logged and left out.
//!
//! Limits: a Unix socket is connected to by its path, which neither seccomp sees nor landlock before Linux
//! 7.0 checks. A process that may connect to one may connect to all that its user may. Listening sockets
//! accept connections of any process.

mod attribution;
mod filesystem;
#[cfg(test)]
mod interpreter;
mod policy;
mod program;
mod seccomp;
mod sockets;
mod sys;
#[cfg(test)]
mod tests;

use std::path::Path;

use seccompiler::{apply_filter, apply_filter_all_threads};
use sockets::OwnSockets;

pub use attribution::Denied;
pub use policy::{AllowedPorts, Policy, parent_directory};

/// Origin of the restriction, which decides the log level of what the kernel lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By default: logged at `info`.
    BestEffort,
    /// By an explicit option: logged at `warn`.
    Requested,
}

impl Policy {
    /// Permits the removal of an existing socket.
    pub fn removes(&mut self, path: &Path) {
        self.remove.push(path.to_owned());
    }

    /// Permits the creation of a socket between the two steps, and its removal.
    pub fn listens_unix(&mut self, path: &Path) {
        self.listen.push(path.to_owned());
    }

    /// Confines the process in one call. To be called before any thread is started.
    pub fn confine(&self, mode: Mode) {
        self.restrict_files(mode);
        self.filter_calls(None, mode);
    }

    /// Takes a device's first step, before any thread is started: files and ports. Sockets of the policy can
    /// still be created.
    pub fn begin(&self, mode: Mode) -> PendingSandbox {
        let sockets = OwnSockets::new(self.remove.iter().chain(&self.listen)).inspect_err(|error| {
            tracing::info!(%error, "the sandbox is only partially enforced: files in the directories of sockets can be removed");
        });
        self.restrict_files(mode);
        PendingSandbox(Some(Steps { policy: self.clone(), mode, sockets: sockets.ok() }))
    }

    /// Filters the system calls of the calling thread and of threads that it starts, and nothing else: for
    /// measurements.
    ///
    /// # Errors
    /// A description of what the kernel lacks.
    pub fn filter_calls_of_thread(&self) -> Result<(), String> {
        seccomp::apply(self, Some(&[]), apply_filter)
    }

    fn restrict_files(&self, mode: Mode) {
        if !self.inspects_processes {
            log_shortcoming(filesystem::apply(self), mode);
        }
    }

    fn filter_calls(&self, sockets: Option<&OwnSockets>, mode: Mode) {
        let addresses = sockets.map(OwnSockets::addresses);
        log_shortcoming(seccomp::apply(self, addresses.as_deref(), apply_filter_all_threads), mode);
    }
}

/// A device's sandbox between its two steps and after them. Dropping it removes the device's sockets.
#[derive(Debug)]
#[must_use]
pub struct PendingSandbox(Option<Steps>);

#[derive(Debug)]
struct Steps {
    policy: Policy,
    mode: Mode,
    sockets: Option<OwnSockets>,
}

impl PendingSandbox {
    /// Returns the confinement of a process without a sandbox.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// Takes the second step, once every listener is open and before guest input is read: system calls of all
    /// threads.
    pub fn finish(&mut self) {
        if let Self(Some(Steps { policy, mode, sockets })) = self {
            sockets.iter_mut().for_each(OwnSockets::identify);
            policy.filter_calls(sockets.as_ref(), *mode);
        }
    }
}

impl Drop for PendingSandbox {
    fn drop(&mut self) {
        if let Self(Some(Steps { sockets: Some(sockets), .. })) = self {
            sockets.remove();
        }
    }
}

fn log_shortcoming(applied: Result<(), String>, mode: Mode) {
    match (applied, mode) {
        (Ok(()), _) => {}
        (Err(shortcoming), Mode::Requested) => {
            tracing::warn!("the sandbox is only partially enforced: {shortcoming}");
        }
        (Err(shortcoming), Mode::BestEffort) => {
            tracing::info!("the sandbox is only partially enforced: {shortcoming}");
        }
    }
}

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

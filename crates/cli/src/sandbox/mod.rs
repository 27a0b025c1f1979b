//! What a process that reads what others wrote may still do.
//!
//! ```text
//!   open all that is needed ─► confine ─► threads, peers, guests
//!                                 ├─ no_new_privs
//!                                 ├─ landlock: files, directories, TCP ports, signals and abstract sockets of others
//!                                 └─ seccomp: calls
//! ```
//! Landlock binds a thread and those that it starts, so that the first thread confines itself before it starts any.
//! Both only ever take away. What a kernel does not have is told and left out; `docs/sandbox.md` has the lists for users.
//!
//! Limits: whom a Unix socket leads to is decided by its path, which no filter of calls sees and landlock does not know (it
//! does from Linux 7.0 on): who may connect to one may connect to all that its user may. Who listens may be connected to.

mod calls;
mod files;
mod needs;
mod sys;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::ValueEnum;

pub(crate) use needs::of_copy;

/// `--sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Setting {
    On,
    None,
}

/// Whether a device is confined if nothing is said of it.
const DEVICES: Setting = Setting::None;
/// And a copy.
const COPIES: Setting = Setting::None;

/// The option that every confined command has.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SandboxArgs {
    /// Whether files, connections, programs and system calls that are not needed are given up once all is open
    /// (docs/sandbox.md) [default: none]
    #[arg(long, value_name = "ON|NONE")]
    sandbox: Option<Setting>,
}

impl SandboxArgs {
    /// Whether it was asked for.
    pub(crate) fn is_wanted(&self) -> bool {
        self.sandbox == Some(Setting::On)
    }

    /// Confines this process, if that is wished. To be called before any thread is started.
    pub(crate) fn confine(&self, policy: &Policy) {
        let default = if policy.opens { COPIES } else { DEVICES };
        if self.sandbox.unwrap_or(default) == Setting::On {
            policy.confine();
        }
    }
}

/// TCP ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ports {
    Any,
    Only(Vec<u16>),
}

impl Default for Ports {
    fn default() -> Self {
        Self::Only(Vec::new())
    }
}

impl Ports {
    fn add(&mut self, port: u16) {
        if let Self::Only(ports) = self {
            ports.push(port);
        }
    }

    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// What is left to a process. The default is a device's that needs nothing but what it has open.
#[derive(Debug, Clone, Default)]
pub(crate) struct Policy {
    /// Files, and directories with all that is in them, that may be read.
    read: Vec<PathBuf>,
    /// Directories in which files may be made, written and removed.
    write: Vec<PathBuf>,
    /// Directories out of which files may be removed.
    remove: Vec<PathBuf>,
    /// Ports that may be listened at.
    bind: Ports,
    /// Ports that may be connected to.
    connect: Ports,
    /// Whether Unix sockets may be connected to.
    connects_unix: bool,
    /// Whether sockets of the host's own vsock may be connected to.
    connects_vsock: bool,
    /// Whether files are opened and sockets listened at: a copy, no device.
    opens: bool,
    /// Whether it looks into other processes' files through `/proc`, which landlock forbids: then only calls are confined.
    looks_into_others: bool,
    /// Whether names are looked up, for which the C library loads plugins and asks over UDP.
    resolves: bool,
}

impl Policy {
    /// A socket that was made at this path is removed in the end.
    pub(crate) fn removes(&mut self, path: &Path) {
        self.remove.push(directory(path));
    }

    /// Unix sockets are connected to.
    pub(crate) fn connects_unix(&mut self) {
        self.connects_unix = true;
    }

    /// Sockets of the host's own vsock are connected to.
    pub(crate) fn connects_vsock(&mut self) {
        self.connects_vsock = true;
    }

    /// This TCP port is listened at.
    pub(crate) fn listens_tcp(&mut self, port: u16) {
        self.bind.add(port);
    }

    /// This TCP port is connected to.
    pub(crate) fn connects_tcp(&mut self, port: u16) {
        self.connect.add(port);
    }

    /// What this kernel lacks is told, and the rest holds.
    fn confine(&self) {
        if !self.looks_into_others
            && let Err(lack) = files::confine(self)
        {
            tracing::warn!("the sandbox is not whole: {lack}");
        }
        if let Err(lack) = calls::confine(self) {
            tracing::warn!("the sandbox is not whole: {lack}");
        }
    }
}

/// Where a file is.
fn directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

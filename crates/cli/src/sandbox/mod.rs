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

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use clap::ValueEnum;

pub(crate) use needs::{COMMANDS, of_copy};

/// Whether this process is.
static CONFINED: AtomicBool = AtomicBool::new(false);

/// What there is to add to an error of a confined process that may be of the sandbox's making.
pub(crate) fn hint(error: &str) -> Option<&'static str> {
    let is_denied = |errno| error.contains(&io::Error::from_raw_os_error(errno).to_string());
    let is_ours = CONFINED.load(Relaxed) && (is_denied(libc::EACCES) || is_denied(libc::EPERM));
    is_ours.then_some(
        "this process has only the files and ports that its command line names (docs/sandbox.md); if that is why, \
         --sandbox none goes on without",
    )
}

/// `--sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Setting {
    On,
    None,
}

/// The option that every confined command has.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SandboxArgs {
    /// Whether files, connections, programs and system calls that are not needed are given up once all is open
    /// (docs/sandbox.md) [default: on]
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
        if self.sandbox != Some(Setting::None) {
            policy.confine(self.is_wanted());
        }
    }

    /// Tells why this process goes on unconfined, unless that was asked for.
    pub(crate) fn cannot_confine(&self, why: &str) {
        match self.sandbox {
            Some(Setting::On) => tracing::warn!("no sandbox: {why}"),
            Some(Setting::None) => {}
            None => tracing::info!("no sandbox: {why}"),
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

    /// What this kernel lacks is told, as a warning if the sandbox `is_wanted` by name, and the rest holds.
    fn confine(&self, is_wanted: bool) {
        CONFINED.store(true, Relaxed);
        let files = if self.looks_into_others { Ok(()) } else { files::confine(self) };
        for lack in [files, calls::confine(self)].into_iter().filter_map(Result::err) {
            match is_wanted {
                true => tracing::warn!("the sandbox is not whole: {lack}"),
                false => tracing::info!("the sandbox is not whole: {lack}"),
            }
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

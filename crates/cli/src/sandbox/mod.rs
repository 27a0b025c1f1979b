//! What a process that reads what others wrote may still do.
//!
//! ```text
//!   open all that is needed ─► landlock ─► threads, control sockets ─► seccomp ─► peers, guests
//!                               │                                       └─ system calls, of all threads
//!                               └─ no_new_privs, files, directories, TCP ports, signals and abstract sockets of others
//! ```
//! Landlock binds a thread and those that it starts, so that the first thread confines itself before it starts any; threads
//! that answer `--qmp` and `--metrics` are started by what listens, which therefore is opened behind it. A copy has no such, and
//! does both at once.
//! Both only ever take away. What a kernel does not have is told and left out; `docs/sandbox.md` has the lists for users.
//!
//! Limits: whom a Unix socket leads to is decided by its path, which no filter of calls sees and landlock does not know (it
//! does from Linux 7.0 on): who may connect to one may connect to all that its user may. Who listens may be connected to.

mod blame;
mod calls;
mod files;
mod names;
mod needs;
mod sys;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::ValueEnum;
use towline_bench::sandbox::calls::Filter;

use calls::Threads;
use names::Names;

pub(crate) use blame::hint;
pub(crate) use needs::{COMMANDS, of_copy};

/// What is left to this process, if it is confined.
static CONFINED: OnceLock<Policy> = OnceLock::new();

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
            policy.confine_files(self.is_wanted());
            policy.confine_calls(None, self.is_wanted());
        }
    }

    /// The first step for a device, before any thread is started: files and ports. It still listens where its policy says.
    pub(crate) fn begin(&self, policy: &Policy) -> Confinement {
        if self.sandbox == Some(Setting::None) {
            return Confinement(None);
        }
        let names = Names::new(policy.remove.iter().chain(&policy.listen)).inspect_err(|error| {
            tracing::info!(%error, "the sandbox is not whole: files can be removed in directories of sockets");
        });
        policy.confine_files(self.is_wanted());
        Confinement(Some(Steps { policy: policy.clone(), is_wanted: self.is_wanted(), names: names.ok() }))
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

/// A device's sandbox between its two steps and behind them. When it is dropped, the sockets are removed.
#[derive(Debug)]
#[must_use]
pub(crate) struct Confinement(Option<Steps>);

#[derive(Debug)]
struct Steps {
    policy: Policy,
    is_wanted: bool,
    names: Option<Names>,
}

impl Confinement {
    /// The second step, once all that listens is open, and before a guest is heard: system calls, of all threads.
    pub(crate) fn finish(&mut self) {
        if let Self(Some(Steps { policy, is_wanted, names })) = self {
            names.iter_mut().for_each(Names::remember);
            policy.confine_calls(names.as_ref(), *is_wanted);
        }
    }
}

impl Drop for Confinement {
    fn drop(&mut self) {
        if let Self(Some(Steps { names: Some(names), .. })) = self {
            names.remove();
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
    /// Sockets that were made, and are removed.
    remove: Vec<PathBuf>,
    /// Sockets that are still to be made, and are removed.
    listen: Vec<PathBuf>,
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
        self.remove.push(path.to_owned());
    }

    /// A socket is made at this path between the two steps, and removed in the end.
    pub(crate) fn listens_unix(&mut self, path: &Path) {
        self.listen.push(path.to_owned());
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

    fn confine_files(&self, is_wanted: bool) {
        let _ = CONFINED.set(self.clone());
        if !self.looks_into_others {
            tell_lack(files::confine(self), is_wanted);
        }
    }

    fn confine_calls(&self, names: Option<&Names>, is_wanted: bool) {
        let addresses = names.map(Names::addresses);
        tell_lack(calls::confine(self, addresses.as_deref(), Threads::All), is_wanted);
    }

    /// Confines the calls of the calling thread alone.
    fn confine_calls_of_thread(&self) -> Result<(), String> {
        calls::confine(self, Some(&[]), Threads::This)
    }
}

/// The filters that there are, each of which confines a thread, for their cost to be measured.
pub(crate) fn filters() -> Vec<Filter> {
    let device = || Policy::default().confine_calls_of_thread();
    let copy = || Policy { connects_unix: true, opens: true, ..Policy::default() }.confine_calls_of_thread();
    vec![Filter { name: "a device", confine: device }, Filter { name: "a copy", confine: copy }]
}

/// What this kernel lacks is told, as a warning if the sandbox `is_wanted` by name, and the rest holds.
fn tell_lack(confined: Result<(), String>, is_wanted: bool) {
    match confined {
        Ok(()) => {}
        Err(lack) if is_wanted => tracing::warn!("the sandbox is not whole: {lack}"),
        Err(lack) => tracing::info!("the sandbox is not whole: {lack}"),
    }
}

/// Where a file is.
fn directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

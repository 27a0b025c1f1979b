//! The request, what is reported, and the guests that are refused before anything is changed.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use towline_compat::checkpoints::{CannotCheckpoint, DirtyLog, check};
use towline_compat::facts::QemuFacts;
use towline_qmp as qmp;

use crate::arbiter::{Arbiter, ArbiterError};
use crate::generations;
use crate::plan::{self, Observer};
use crate::qemu;
use crate::remote::{self, DepartingGuest, NewGuest, SessionTimeouts, SshTarget};

/// Guest to protect, and the way to do it.
#[derive(Debug)]
pub struct ProtectRequest {
    /// Monitor of its QEMU.
    pub socket: PathBuf,
    /// The other host.
    pub target: SshTarget,
    /// OpenSSH's client with its options.
    pub ssh: String,
    /// Timeouts of the session with that host.
    pub timeouts: SessionTimeouts,
    /// The QEMU that is started there.
    pub guest: NewGuest,
    /// Arbiter, which decides who goes on with the guest.
    pub arbiter: Arbiter,
    /// Time from one checkpoint to the next, at most.
    pub epoch: Duration,
    /// The next one is taken as soon as the guest sends something.
    pub ends_on_output: bool,
    /// Silence after which the other host is lost.
    pub peer_timeout: Duration,
    /// Maximum size of a checkpoint.
    pub checkpoint_bytes_max: usize,
    /// Protects a guest with networks of others, whose output is not held.
    pub leaks_output: bool,
    /// Command that runs [`ferry`](super::super::ferry) on its standard input.
    pub ferry: Vec<OsString>,
}

/// Receives what becomes of a protection; its progress is that of the copies of disks.
pub trait ProtectObserver: Observer {
    /// The other host has the first checkpoint: the guest survives its own host from now on.
    fn protected(&self, generation: u64);

    /// The checkpoints since the last call, at least one.
    fn checkpoints(&self, checkpoints: &Checkpoints);

    /// The other host may not have the guest any more, and what the guest sends is held until that is decided.
    fn losing(&self);

    /// The other host does not have the guest any more. It runs on here, its output goes, and it will be protected again.
    fn unprotected(&self, reason: &str);
}

/// Checkpoints of some time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checkpoints {
    /// Number of the last one.
    pub epoch: u64,
    /// Number of them.
    pub count: u64,
    /// Bytes of all.
    pub bytes: u64,
    /// Pages of all.
    pub pages: u64,
    /// Standstills of the guest.
    pub pause: Times,
    /// From the end of a standstill until its output was sent.
    pub latency: Times,
}

/// Times of several checkpoints, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// The median.
    pub median_us: u64,
    /// The longest.
    pub longest_us: u64,
    /// All of them.
    pub total_us: u64,
}

/// End of a protection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProtectEnd {
    /// As requested; the guest runs on.
    Cancelled,
    /// The guest was shut down, or its QEMU received `quit`.
    GuestEnded,
    /// The QEMU has died: the other host takes the guest over.
    Died {
        /// It has confirmed a checkpoint; else it may have none.
        is_confirmed: bool,
    },
    /// The other host has the guest, which was ended here.
    TakenOver {
        /// The guest's generation there.
        generation: u64,
        /// Reason of the loss.
        reason: String,
    },
}

/// Error of a protection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Version(#[from] CannotCheckpoint),
    #[error("the guest is {status}, expected running: only a running guest is protected")]
    NotRunning { status: String },
    #[error(
        "disk {drive} is not copied: {text}; see that the other host has room for it, and that its messages (above) name no other reason"
    )]
    DiskNotCopied { drive: String, text: String },
    #[error("QEMU cannot migrate this guest: {reason}; detach what it names")]
    Blocked { reason: String },
    #[error(
        "network {id} is of type {kind}, whose output cannot be held: the network would see what the other host's copy has not done. Use a \
         card of `towline net` with a control socket beside its own (net0.qmp beside net0.sock), or --leak-output"
    )]
    OutputNotHeld { id: String, kind: String },
    #[error(
        "generation {generation} of the guest was claimed by another towline at the same time; try again"
    )]
    Claimed { generation: u64 },
    #[error(
        "it is not decided who goes on with the guest: {source}. It runs here, and its output is held; `towline repair` decides"
    )]
    Undecided { source: ArbiterError },
    #[error("{0}")]
    Arbiter(#[from] ArbiterError),
    #[error("{0}")]
    Plan(Box<plan::Error>),
    #[error("{0}")]
    Remote(Box<remote::Error>),
    #[error("{0}")]
    Qemu(Box<qemu::Error>),
    #[error(
        "the guest may be stopped: {0}; `towline repair` has it run, or ends it if the other host has it"
    )]
    Stopped(Box<qemu::Error>),
    #[error("{0}")]
    Settings(Box<qemu::ApplyError>),
    #[error("{0}")]
    Managed(Box<generations::Error>),
    #[error(
        "a card of the guest: {0}; what the guest sends may be held: start the card again (with --hold), then `towline repair`"
    )]
    Card(qmp::Error),
    #[error(
        "the process that takes checkpoints cannot be started: {0}; see that this program's file is there"
    )]
    Ferry(io::Error),
    #[error(
        "the journal of the guest's QEMU cannot be written: if this towline was killed, the guest could stand for ever; see \
         the directory of journals (`towline repair --help`)"
    )]
    NoJournal,
    #[error(
        "changes of a towline that was killed are left in the guest's QEMU: {left}; `towline repair` tries again"
    )]
    LeftByOther { left: String },
    #[error("the guest is not protected: {reason}")]
    NotProtected { reason: String },
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Generation of a guest that goes on at the other host.
    pub(super) fn goes_on_elsewhere(&self) -> Option<u64> {
        match self {
            Self::Qemu(error) => match **error {
                qemu::Error::GoesOnElsewhere { generation, .. } => Some(generation),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns true if the guest's QEMU has ended.
    pub(super) fn has_no_listener(&self) -> bool {
        matches!(self, Self::Qemu(error) if error.has_no_listener())
    }

    /// Returns true if the guest may be stopped, or its output be held.
    pub fn needs_attention(&self) -> bool {
        matches!(self, Self::Undecided { .. } | Self::Card(_) | Self::Stopped(_) | Self::LeftByOther { .. })
    }
}

/// Errors that are larger than the others.
macro_rules! boxed {
    ($($variant:ident: $error:ty,)*) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        }
    )*};
}

boxed! {
    Plan: plan::Error,
    Remote: remote::Error,
    Qemu: qemu::Error,
    Settings: qemu::ApplyError,
    Managed: generations::Error,
}

impl From<qmp::Error> for Error {
    fn from(error: qmp::Error) -> Self {
        qemu::Error::from(error).into()
    }
}

/// Refuses a guest that would be lost, or whose output would not be held.
pub(crate) fn check_departing(guest: &DepartingGuest, leaks_output: bool) -> Result<(), Error> {
    let Some(facts) = guest.qemu() else { return Ok(()) };
    let line = guest.new_guest().map(|guest| &*guest.command_line).unwrap_or_default();
    check(facts, dirty_log(facts, line))?;
    if facts.status != "running" {
        return Err(Error::NotRunning { status: facts.status.clone() });
    }
    if let Some(reason) = facts.blocked_reasons.first() {
        return Err(Error::Blocked { reason: reason.clone() });
    }
    let networks = facts.netdevs.iter().flatten();
    let (ours, others): (Vec<_>, Vec<_>) = networks.partition(|network| network.kind == "vhost-user");
    // As many cards of towline as have a control socket.
    let without = others.first().or_else(|| ours.get(guest.card_controls().len()));
    match without {
        Some(network) if !leaks_output => {
            Err(Error::OutputNotHeld { id: network.id.clone(), kind: network.kind.clone() })
        }
        _ => Ok(()),
    }
}

/// Tracker of the guest's writes, by its command line: a query that tells would change a capability.
fn dirty_log(guest: &QemuFacts, command_line: &str) -> DirtyLog {
    match guest.kvm {
        Some(true) if command_line.contains("dirty-ring-size") => DirtyLog::KvmRing,
        Some(true) => DirtyLog::KvmBitmap,
        _ => DirtyLog::Emulation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_writes_is_that_of_the_guests_own_command_line() {
        let kvm = |kvm| QemuFacts { kvm: Some(kvm), ..QemuFacts::default() };
        let ring = "-accel kvm,dirty-ring-size=4096";
        assert_eq!(dirty_log(&kvm(true), ring), DirtyLog::KvmRing);
        assert_eq!(dirty_log(&kvm(true), "-accel kvm"), DirtyLog::KvmBitmap);
        assert_eq!(dirty_log(&kvm(false), ""), DirtyLog::Emulation);
    }
}

//! What a record holds, and how its file reads.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};
use towline_protocol::session::MoveId;

use crate::journal::{now_ms, pid_namespace};
use crate::process::own_process;
use crate::process::{Process, start_time};
use crate::switchover::{Decision, GuestRunState, RunRequest, SourceAction};

/// The version of the file.
pub(super) const VERSION: u32 = 1;
/// How the name of every record begins and ends.
const PREFIX: &str = "move-";
const SUFFIX: &str = ".json";

/// Names a move, at both of its ends: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Id(String);

impl Id {
    pub(crate) fn of(id: MoveId) -> Self {
        Self(id.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// All of its digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether these are its first digits.
    #[must_use]
    pub fn begins_with(&self, digits: &str) -> bool {
        self.0.starts_with(&digits.to_ascii_lowercase())
    }

    fn is_valid(&self) -> bool {
        self.0.len() == 32 && self.0.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which ends of the move the towline that recorded it drove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The source's QEMU.
    Source,
    /// The destination's.
    Destination,
    /// Both, on one host.
    Both,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Both => "both",
        }
    }
}

/// An end of a move, as seen by who recorded it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum MoveEnd {
    /// A QEMU whose monitor is at hand.
    Qemu {
        /// The monitor's socket.
        socket: PathBuf,
        /// QEMU's process; `None`: it could not be identified.
        pid: Option<i32>,
        /// When that started, in clock ticks since boot.
        start_time: Option<u64>,
    },
    /// Whoever is at the other end of a connection.
    Peer {
        /// Its address, as it was connected to or from.
        address: String,
    },
    /// An image or memory.
    Stored,
}

impl MoveEnd {
    /// A QEMU by its monitor and process.
    pub(crate) fn qemu(socket: &str, process: &Process) -> Self {
        let (pid, start_time) = match process {
            Process::Known { pid, start_time, .. } => (Some(*pid), Some(*start_time)),
            Process::Unknown { .. } => (None, None),
        };
        let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.into());
        Self::Qemu { socket, pid, start_time }
    }

    /// Whether it is this QEMU. One that was not identified is known by its socket.
    pub(crate) fn is_same_qemu(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Qemu { pid: Some(pid), start_time, .. },
                Self::Qemu { pid: Some(of_other), start_time: started, .. },
            ) => (pid, start_time) == (of_other, started),
            (Self::Qemu { socket, pid: None, .. }, Self::Qemu { socket: of_other, pid: None, .. }) => {
                socket == of_other
            }
            _ => false,
        }
    }

    /// Whether it may be this QEMU: the same socket, where not both are identified.
    pub(super) fn may_be_same_qemu(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Qemu { pid: Some(_), .. }, Self::Qemu { pid: Some(_), .. }) => self.is_same_qemu(other),
            (Self::Qemu { socket, .. }, Self::Qemu { socket: of_other, .. }) => socket == of_other,
            _ => false,
        }
    }

    /// Whether it is a QEMU that is known to have exited. Its process is one of this namespace.
    pub(super) fn has_exited(&self) -> bool {
        let Self::Qemu { pid: Some(pid), start_time: Some(started), .. } = self else { return false };
        match start_time(*pid) {
            Ok(now) => now != *started,
            // A `/proc` that hides processes of others says the same of one that runs.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Pid::from_raw(*pid).is_some_and(|pid| {
                    pidfd_open(pid, PidfdFlags::empty()).is_err_and(|errno| errno == Errno::SRCH)
                })
            }
            Err(_) => false,
        }
    }
}

impl fmt::Display for MoveEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu { socket, .. } => write!(f, "qmp:{}", socket.display()),
            Self::Peer { address } => f.write_str(address),
            Self::Stored => f.write_str("an image"),
        }
    }
}

/// How far a move has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// A destination that runs the guest by itself is given the last bytes.
    Commit,
    /// The destination holds the guest; its source is acknowledged, and may be done with it.
    Acknowledge,
    /// The source is done; the towline at the destination is told to run the guest.
    Complete,
    /// The source is done; the guest is run at its destination.
    Run,
    /// It is over. The source keeps an older state of the guest, which is not to be run on by a later copy.
    Left,
}

impl Stage {
    pub(crate) fn of(decision: Decision) -> Self {
        match decision {
            Decision::Commit => Self::Commit,
            Decision::Acknowledge => Self::Acknowledge,
            Decision::Complete => Self::Complete,
            Decision::Run => Self::Run,
        }
    }

    /// `None`: nothing is left to be decided.
    pub(crate) fn decision(self) -> Option<Decision> {
        match self {
            Self::Commit => Some(Decision::Commit),
            Self::Acknowledge => Some(Decision::Acknowledge),
            Self::Complete => Some(Decision::Complete),
            Self::Run => Some(Decision::Run),
            Self::Left => None,
        }
    }
}

/// What is to become of the guest, and what it did before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GuestPlan {
    /// Whether it ran, or slept, when it was stopped at its source.
    pub live: bool,
    /// Whether it is to run at its destination.
    pub run: bool,
    /// Whether its source is ended when it is there: a move.
    pub quit: bool,
}

impl GuestPlan {
    pub(crate) fn of(guest: GuestRunState, run: RunRequest, after: SourceAction) -> Self {
        let live = guest.is_live();
        let run = match run {
            RunRequest::AsItWas => live,
            RunRequest::Run => true,
            RunRequest::Pause => false,
        };
        Self { live, run, quit: after == SourceAction::Quit }
    }
}

/// A process that works on a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Owner {
    pub(super) pid: i32,
    start_time: u64,
    pid_namespace: Option<PathBuf>,
}

impl Owner {
    fn this() -> Self {
        let (pid, start_time) = own_process();
        Self { pid, start_time, pid_namespace: pid_namespace() }
    }
}

/// The record of one move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MoveRecord {
    version: u32,
    /// Names the move.
    pub id: Id,
    /// Which ends are at hand.
    pub role: Role,
    /// What was decided last.
    pub stage: Stage,
    /// What the towline that recorded it said at its end; `None`: it was killed.
    pub message: Option<String>,
    /// What is to become of the guest.
    pub guest_plan: GuestPlan,
    /// Where the guest comes from.
    pub source: MoveEnd,
    /// Where it goes.
    pub destination: MoveEnd,
    /// When it was decided that something had to be recorded, in milliseconds since 1970.
    pub begun_ms: u64,
    /// When the stage was recorded, in milliseconds since 1970.
    pub changed_ms: u64,
    pub(super) owner: Owner,
}

impl MoveRecord {
    /// One that is begun now, by this process.
    pub(crate) fn new(
        id: Id,
        source: MoveEnd,
        destination: MoveEnd,
        stage: Stage,
        guest_plan: GuestPlan,
    ) -> Self {
        let role = match (&source, &destination) {
            (MoveEnd::Qemu { .. }, MoveEnd::Qemu { .. }) => Role::Both,
            (MoveEnd::Qemu { .. }, _) => Role::Source,
            _ => Role::Destination,
        };
        let (begun_ms, owner) = (now_ms(), Owner::this());
        let (version, message, changed_ms) = (VERSION, None, begun_ms);
        Self {
            version,
            id,
            role,
            stage,
            message,
            guest_plan,
            source,
            destination,
            begun_ms,
            changed_ms,
            owner,
        }
    }

    /// Time at which the move began, in UTC, to the second (RFC 3339).
    pub fn begun(&self) -> String {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(self.begun_ms)).to_string()
    }

    /// The same at a later stage, by this process.
    pub(crate) fn at_stage(&self, stage: Stage) -> Self {
        Self { stage, changed_ms: now_ms(), owner: Owner::this(), ..self.clone() }
    }

    /// The same, with what its towline says at its end.
    pub(crate) fn with_message(&self, message: &str) -> Self {
        Self { message: Some(message.to_owned()), ..self.at_stage(self.stage) }
    }

    /// Whether process ids that it holds are those of this process's namespace.
    pub(super) fn is_of_this_namespace(&self) -> bool {
        self.owner.pid_namespace.is_some() && self.owner.pid_namespace == pid_namespace()
    }

    /// Whether the QEMU of this end is known to have exited.
    #[must_use]
    pub fn has_exited(&self, end: &MoveEnd) -> bool {
        self.is_of_this_namespace() && end.has_exited()
    }

    /// The name of its file, which [`is_name`] knows.
    pub(super) fn name(&self) -> String {
        format!("{PREFIX}{}-{}{SUFFIX}", self.id, self.role.name())
    }

    /// Reads one; an error says what does not fit.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let found: serde_json::Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match &found["version"] {
            version if *version == VERSION => {}
            version => return Err(format!("version {version}")),
        }
        let record: Self = serde_json::from_value(found).map_err(|error| error.to_string())?;
        if !record.id.is_valid() {
            return Err(format!("the id {:?}, which is not 32 hexadecimal digits", record.id.0));
        }
        Ok(record)
    }
}

/// Whether a file of this name is a record.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

//! Contents and file format of a record.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use towline_channel::{Address, OneTimeCredentials, OneTimeKey};
use towline_protocol::session::MoveId;

use crate::generations::{self, ManagedGuest};
use crate::hex::{from_hex, to_hex};
use crate::journal::{Owner, UndoRecord, now_ms};
use crate::process::has_exited;
use crate::qemu::Qemu;
use crate::switchover::{
    Decision, FinalRunState, GuestRunState, MemorySharing, SourceAction, SwitchoverRequest,
};

/// Version of the format.
pub(super) const VERSION: u32 = 1;
/// Prefix and suffix of every record's name.
const PREFIX: &str = "move-";
const SUFFIX: &str = ".json";

/// Id of a move at both of its ends: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Id(String);

impl Id {
    pub(crate) fn of(id: MoveId) -> Self {
        Self(to_hex(&id))
    }

    /// The id between two towlines.
    pub(crate) fn to_move_id(&self) -> MoveId {
        // A record is parsed with 32 digits only.
        from_hex(&self.0).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default()
    }

    /// All of its digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if these are its first digits.
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

/// Ends of the move that the recording towline drove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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

/// An end of a move, as the recording towline sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum MoveEnd {
    /// A QEMU whose monitor is connected.
    Qemu {
        /// The monitor's socket.
        socket: PathBuf,
        /// QEMU's process; `None` if it could not be identified.
        pid: Option<i32>,
        /// Start time of the process, in clock ticks since boot.
        start_time: Option<u64>,
    },
    /// The peer of a connection.
    Peer {
        /// Its address, as it was connected to or from.
        address: String,
    },
    /// An image or memory.
    Stored,
}

impl MoveEnd {
    /// A QEMU by its monitor and process.
    pub(crate) fn qemu(qemu: &Qemu) -> Self {
        let (pid, start_time) = qemu.process().identity().unzip();
        Self::Qemu { socket: qemu.socket_path(), pid, start_time }
    }

    /// The guest in it, if that has generations.
    ///
    /// # Errors
    /// [`generations::Error::Guests`].
    pub(crate) fn managed(&self) -> Result<Option<ManagedGuest>, generations::Error> {
        let Self::Qemu { socket, pid, .. } = self else { return Ok(None) };
        ManagedGuest::find(*pid, socket)
    }

    /// Returns true if both are the same QEMU. QEMUs that were not identified are compared by socket.
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

    /// Returns true if both may be the same QEMU: the same socket, unless both are identified.
    pub(super) fn may_be_same_qemu(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Qemu { pid: Some(_), .. }, Self::Qemu { pid: Some(_), .. }) => self.is_same_qemu(other),
            (Self::Qemu { socket, .. }, Self::Qemu { socket: of_other, .. }) => socket == of_other,
            _ => false,
        }
    }

    /// Returns true if it is a QEMU that is known to have exited. Its process id must be of this namespace.
    pub(super) fn has_exited(&self) -> bool {
        let Self::Qemu { pid: Some(pid), start_time: Some(started), .. } = self else { return false };
        has_exited(*pid, *started)
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

/// Ends of a move in a record of any version: `source` and `destination` have this form in all of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RecordedEnds {
    pub(super) source: MoveEnd,
    pub(super) destination: MoveEnd,
}

impl RecordedEnds {
    pub(super) fn of(record: &str) -> Option<Box<Self>> {
        serde_json::from_str(record).ok()
    }
}

/// Requested result for the guest, and its run state before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GuestPlan {
    /// It was running or suspended when it was stopped at its source.
    pub live: bool,
    /// It is to run at its destination.
    pub run: bool,
    /// True for a move: the source is ended when the guest is at its destination.
    pub quit: bool,
    /// Both QEMUs map the same memory: an upgrade.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared_memory: bool,
}

impl GuestPlan {
    pub(crate) fn of(guest: GuestRunState, request: SwitchoverRequest) -> Self {
        let live = guest.is_live();
        let run = FinalRunState::requested(request.run, guest) == FinalRunState::Running;
        let (quit, shared_memory) =
            (request.after == SourceAction::Quit, request.memory == MemorySharing::Shared);
        Self { live, run, quit, shared_memory }
    }
}

/// The record of one move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MoveRecord {
    version: u32,
    /// Id of the move.
    pub id: Id,
    /// Ends that are driven here.
    pub role: Role,
    /// The last decision.
    pub stage: Decision,
    /// Final message of the recording towline; `None` if it was killed.
    pub message: Option<String>,
    /// Requested result for the guest.
    pub guest_plan: GuestPlan,
    /// Source of the guest.
    pub source: MoveEnd,
    /// Destination of the guest.
    pub destination: MoveEnd,
    /// Number of times that the vCPU threads of the source had been scheduled at the last decision, of a guest that ran until it was sent: a
    /// source that is done with it keeps this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source_vcpu_switches: Option<u64>,
    /// Devices that were detached at the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices: Vec<UndoRecord>,
    /// The way to the other host, of a guest that may be switched to postcopy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) way: Option<RecordedWay>,
    /// Time of the first decision, in milliseconds since 1970.
    pub begun_ms: u64,
    /// Time of the last decision, in milliseconds since 1970.
    pub changed_ms: u64,
    /// The process that works on it.
    pub(super) owner: Owner,
}

impl MoveRecord {
    /// A record of this process, starting now.
    pub(crate) fn new(
        id: Id,
        source: MoveEnd,
        destination: MoveEnd,
        stage: Decision,
        guest_plan: GuestPlan,
    ) -> Self {
        let role = match (&source, &destination) {
            (MoveEnd::Qemu { .. }, MoveEnd::Qemu { .. }) => Role::Both,
            (MoveEnd::Qemu { .. }, _) => Role::Source,
            _ => Role::Destination,
        };
        let begun_ms = now_ms();
        Self {
            version: VERSION,
            id,
            role,
            stage,
            message: None,
            guest_plan,
            source,
            destination,
            source_vcpu_switches: None,
            devices: Vec::new(),
            way: None,
            begun_ms,
            changed_ms: begun_ms,
            owner: Owner::this(),
        }
    }

    /// Time at which the move began, in UTC, to the second (RFC 3339).
    pub fn started_at(&self) -> String {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(self.begun_ms)).to_string()
    }

    /// The same record at another stage, by this process.
    pub(crate) fn at_stage(&self, stage: Decision) -> Self {
        Self { stage, changed_ms: now_ms(), owner: Owner::this(), ..self.clone() }
    }

    /// The same record with the final message of its towline.
    pub(crate) fn with_message(&self, message: &str) -> Self {
        Self { message: Some(message.to_owned()), ..self.at_stage(self.stage) }
    }

    /// Returns true if its process ids are of this process's namespace.
    pub(super) fn is_of_this_namespace(&self) -> bool {
        self.owner.is_of_this_namespace()
    }

    /// Returns true if the QEMU of this end is known to have exited.
    pub fn has_exited(&self, end: &MoveEnd) -> bool {
        self.is_of_this_namespace() && end.has_exited()
    }

    /// Name of its file, which [`is_name`] accepts.
    pub(super) fn name(&self) -> String {
        format!("{PREFIX}{}-{}{SUFFIX}", self.id, self.role.name())
    }

    /// Parses a record; the error describes the difference.
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

/// Returns true if a file of this name is a record.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// A record, with the state of its QEMUs.
#[derive(Clone, Debug)]
pub struct ListedMove {
    /// The record.
    pub record: MoveRecord,
    /// Process of the towline that works on the move.
    pub owner: Option<i32>,
    /// Monitors of QEMUs of this host that are known to have exited.
    pub exited: Vec<String>,
    /// Monitors of QEMUs that a killed towline has left changed.
    pub changed: Vec<String>,
}

/// The way to another host in a record, by which a later towline connects to it again. Its `Debug` form is without the key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RecordedWay {
    address: String,
    /// Certificates and this end's key, in hexadecimal digits of DER.
    certificate: String,
    key: String,
    peer: String,
}

impl RecordedWay {
    pub(crate) fn new(address: &Address, credentials: &OneTimeCredentials) -> Self {
        let own = credentials.own();
        Self {
            address: address.to_string(),
            certificate: to_hex(own.certificate()),
            key: to_hex(own.secret()),
            peer: to_hex(credentials.peer()),
        }
    }

    /// Where the other towline listens.
    pub(crate) fn address(&self) -> Option<Address> {
        self.address.parse().ok()
    }

    /// The keys of the move.
    pub(crate) fn credentials(&self) -> Option<OneTimeCredentials> {
        let key = OneTimeKey::from_der(from_hex(&self.certificate)?, from_hex(&self.key)?).ok()?;
        Some(key.with_peer(from_hex(&self.peer)?))
    }
}

impl fmt::Debug for RecordedWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedWay").field("address", &self.address).finish_non_exhaustive()
    }
}

//! Another host, driven through OpenSSH: the towline there speaks QMP on its standard input and output, with the rights of that user.
//!
//! ```text
//!   here                                  there: towline agent
//!   ssh HOST towline agent ────────────►
//!                          ◄──────────── greeting: session, name of the host, its address as ssh has reached it
//!   prepare: place, facts  ────────────► a QEMU waits there, or one is started; both ends judge its facts
//!                          ◄──────────── facts, refusals
//!   receive: certificate   ────────────► listens
//!                          ◄──────────── certificate, port for disks; event LISTENING: port
//!   ═════ disks, and the guest's stream, over TCP, with TLS by these two one-time certificates ═════
//!   give-frames            ────────────► the cards there; meanwhile, and until the network sends to that host
//!                          ◄──────────── events NOTICE, ENDED
//! ```
//! A guest that comes from an image there goes the other way: `send` has the agent listen, and this end connects all the same, since the
//! other host may not be able to.
//!
//! The stream has its own session, by which the two agree who runs the guest ([`towline_protocol::session`]); this one only prepares it.
//! If it ends, the agent cancels what it does, as with Ctrl-C, and ends a QEMU that it has started and that has no guest.
//!
//! Values of the other host are as untrusted as an image's: bounded, and a command line from it is used only as
//! [`Recorded::allow`](towline_launch::Recorded::allow) permits.

mod agent;
mod disks;
mod error;
mod frames;
mod guest;
mod host;
mod new_disks;
mod protection;
mod room;
mod waiting;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use towline_launch::GuestGenerations;
use towline_migration::Compression;
use towline_qmp::commands::Capability;
use towline_qmp::{Command, CommandError};

pub use agent::{Agent, AgentCopy, AgentTask, ended, greeting, listening, notice};
use disks::DisksToJudge;
pub use disks::{CopiedDisk, DiskPolicy, DiskToken};
pub use error::Error;
pub use frames::{FramePassing, FrameReceiver};
pub use guest::{DepartingGuest, Departure, Fit};
pub use host::{Arrival, RemoteHost, SessionTimeouts, SshTarget};
pub use protection::AgentStandby;

/// Version of the commands of an agent.
const SESSION: u64 = 2;
/// Member of the greeting with that version.
const SESSION_KEY: &str = "towline-agent";
/// Member of the greeting with the version of `give-frames`; none of an older towline.
const FRAMES_KEY: &str = "frames";
/// That version.
const FRAMES: u64 = 1;
/// Event: the agent listens.
const LISTENING: &str = "LISTENING";
/// Event: a notice for the user.
const NOTICE: &str = "NOTICE";
/// Event: the guest is there, or not.
const ENDED: &str = "ENDED";

/// Place of a guest on another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The waiting QEMU with this monitor.
    Qmp(PathBuf),
    /// A QEMU that is started for it.
    Guest(NewGuest),
    /// An image in this file.
    File(PathBuf),
    /// An image in an object store.
    Store(String),
}

/// A QEMU that is started on another host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NewGuest {
    /// Name of the guest; empty for that which it has.
    pub name: String,
    /// The guest's command line, as an image records it.
    pub command_line: String,
    /// The QEMU; one of the same name in PATH if there is no such file. `None` for the guest's.
    pub binary: Option<PathBuf>,
    /// Directory of relative paths in a command line that is trusted.
    pub working_directory: Option<PathBuf>,
    /// Values of that host for the command line, as `OPTION.KEY=VALUE`.
    pub settings: Vec<String>,
    /// True if the command line is used unchanged, with its files and programs.
    pub is_trusted: bool,
    /// Its memory is one that this agent writes: it stands by for a guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_standby: bool,
    /// Unique id of the protection that it stands by for: files with this id, which a former standby has left, are replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<String>,
    /// Generations of the guest, of which it runs the next there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generations: Option<GuestGenerations>,
}

/// Has the agent make a place for a guest, and judge whether that would run there.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Prepare {
    place: Place,
    /// Facts about the guest, as a file of facts has them.
    facts: Value,
    lanes: usize,
    disks: DisksToJudge,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Prepared {
    /// Facts about the QEMU there; none of an image.
    facts: Option<Value>,
    /// Reasons against, for which the agent would not receive the guest.
    refusals: Vec<String>,
    /// Chardev ids of the QEMU's cards that take frames.
    #[serde(default)]
    cards: Vec<String>,
}

/// Has the agent listen for the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Receive {
    /// Certificate of this end, in hexadecimal digits of DER.
    certificate: String,
    lanes: usize,
    /// Name of the method in QEMU's `multifd-compression`.
    compression: String,
    compression_level: u8,
    run: Option<bool>,
    overwrite: bool,
    peer_timeout_ms: u64,
    /// Present if the QEMUs are connected to each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    direct: Option<ReceiveDirect>,
}

/// Options of QEMUs that are connected to each other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ReceiveDirect {
    is_encrypted: bool,
    capabilities: Vec<Capability>,
    /// Time for which the hosts are connected again after a switch to postcopy; 0: they are not.
    #[serde(default)]
    recover_timeout_ms: u64,
}

/// Has the agent listen for the destination of an image.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SendImage {
    place: Place,
    /// As in [`Receive`].
    certificate: String,
    lanes: usize,
    compression: String,
    compression_level: u8,
    /// Bytes per second.
    max_bandwidth: Option<u64>,
    verify: bool,
    peer_timeout_ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sending {
    certificate: String,
    /// Facts about the guest; none of an image in a store.
    facts: Option<Value>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Receiving {
    certificate: String,
    /// Port for the content of disks that are copied.
    disk_port: Option<u16>,
    /// True if the QEMU there is connected to from this one.
    #[serde(default)]
    is_direct: bool,
    /// True if it connects again to a host that it has lost after a switch to postcopy.
    #[serde(default)]
    recovers: bool,
}

/// Result of the agent's part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Ended {
    /// The error; `None`: the guest is there.
    pub error: Option<String>,
    /// Notes beside it.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Command for Prepare {
    const NAME: &'static str = "prepare";
    type Return = Prepared;
}

impl Command for Receive {
    const NAME: &'static str = "receive";
    type Return = Receiving;
}

impl Command for SendImage {
    const NAME: &'static str = "send";
    type Return = Sending;
}

/// Level of a compression for the other end.
fn level(compression: Compression) -> u8 {
    match compression {
        Compression::None => 0,
        Compression::Zlib { level } | Compression::Zstd { level } => level,
    }
}

fn compression_of(method: &str, level: u8) -> Result<Compression, CommandError> {
    match (method, level) {
        ("none", _) => Ok(Compression::None),
        ("zlib", level @ 0..=Compression::ZLIB_LEVEL_MAX) => Ok(Compression::Zlib { level }),
        ("zstd", level @ 0..=Compression::ZSTD_LEVEL_MAX) => Ok(Compression::Zstd { level }),
        _ => Err(CommandError::generic(format!("compression {method}:{level} is not known"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_session_come_back_as_they_were() {
        for compression in [Compression::None, Compression::Zlib { level: 9 }, Compression::Zstd { level: 0 }]
        {
            let method = compression.method().name();
            assert_eq!(compression_of(method, level(compression)).ok(), Some(compression));
        }
        assert!(compression_of("zstd", 99).is_err() && compression_of("qpl", 1).is_err());
    }
}

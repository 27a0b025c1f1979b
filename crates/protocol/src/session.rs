//! Messages between two towlines, in addition to QEMU's stream: their identity, and the outcome at the
//! source.
//!
//! ```text
//!   source's towline                                     destination's towline
//!   PING 0x747773vv ──────────────────────────────────►  asks: a towline, of version vv at most?
//!                   ◄──────────────────────────────────  message 0x7477 BASE: memory of a block is an image's (from version 2 on)
//!                   ◄──────────────────────────────────  PONG 0x74778avv: a towline; a = what it does with the guest
//!   COMMAND 0x7477 HELLO move id ─────────────────────►  behind the block list
//!   … the stream …                   ◄─────────────────  SHUT 0: the guest is held here
//!   COMMAND 0x7477 OUTCOME completed, or aborted ─────►
//!                   ◄──────────────────────────────────  message 0x7477 PLACED or NOT_RUN
//! ```
//! If the two QEMUs are connected to each other, this session has a separate connection:
//!
//! ```text
//!   HELLO move id ────────────────────────────────────►
//!                   ◄──────────────────────────────────  LISTENS: port of the QEMU there
//!   … the QEMUs transfer the guest, which is then stopped …
//!   STOPPED run state ────────────────────────────────►
//!                   ◄──────────────────────────────────  AWAITS: the source may complete; as SHUT above
//!   OUTCOME completed, or aborted ────────────────────►
//!                   ◄──────────────────────────────────  PLACED or NOT_RUN
//! ```
//! ALIVE is sent every second: by the destination from HELLO to SHUT and from OUTCOME to its report, by the
//! source from SHUT to OUTCOME. It shows that the process is at work, while the host of a stopped one still
//! acknowledges what TCP delivers. A QEMU repeats the value of a PING, so both ends know the peer's kind
//! before the first page, and a stream to a QEMU contains nothing that QEMU does not know. Frames of unknown
//! kinds are kept as such: a later version adds kinds, and uses them only with a peer of that version.

use alloc::string::String;
use alloc::vec::Vec;

use crate::return_path::ReturnPathMessage;
use crate::section::{CommandKind, SectionType, VmCommand};
use crate::wire::{Reader, lossy};
use crate::{PeerMisbehaved, Result};

/// The version of this session.
pub const VERSION: u8 = 2;
/// The first version in which a destination reports [`FromDestination::Base`].
const BASE_VERSION: u8 = 2;
/// The kind of its commands and of its messages on the return path: `tw`.
pub const KIND: u16 = 0x7477;
/// Bytes that name a move.
pub const MOVE_ID_BYTES: usize = 16;
/// Bytes that name the memory of a block of an image.
pub const BASE_ID_BYTES: usize = 32;
/// The longest text of a [`FromDestination::NotRun`], in bytes; a longer one is truncated.
pub const REASON_BYTES_MAX: usize = 400;

/// Queries if the other end is a towline; the low byte is the version.
const PING: u32 = 0x7477_7300;
/// The reply; bits 8 to 11 are the [`ReceiverMode`].
const PONG: u32 = 0x7477_8000;
const VERSION_BITS: u32 = 0xff;
const RECEIVER_BITS: u32 = 0xf00;
const HELLO: u8 = 1;
const OUTCOME: u8 = 2;
const PLACED: u8 = 3;
const NOT_RUN: u8 = 4;
const ALIVE: u8 = 5;
const BASE: u8 = 6;
const LISTENS: u8 = 7;
const STOPPED: u8 = 8;
const AWAITS: u8 = 9;

/// Names one move at both ends.
pub type MoveId = [u8; MOVE_ID_BYTES];

/// Use of an acknowledged guest by a towline at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverMode {
    /// Holds it, paused, until it has the outcome.
    Waits = 0,
    /// Has stored it; no guest runs there.
    Stores = 1,
    /// Has forwarded the guest to a QEMU that runs it on its own.
    RunsByItself = 2,
}

/// The value of the PING of a source's towline.
pub fn ping() -> u32 {
    PING | u32::from(VERSION)
}

/// The version of a PING that requests a session.
pub fn ping_version(value: u32) -> Option<u8> {
    let version = (value & VERSION_BITS) as u8;
    (value & !VERSION_BITS == PING && version > 0).then_some(version)
}

/// Returns true if a source of this version reads [`FromDestination::Base`]; an earlier one would forward it to its QEMU.
pub fn knows_bases(version: u8) -> bool {
    version >= BASE_VERSION
}

/// Value of the PONG in reply to a PING of this version.
pub fn pong(version: u8, receiver: ReceiverMode) -> u32 {
    PONG | (receiver as u32) << 8 | u32::from(version.min(VERSION))
}

/// Decodes the PONG of a destination; `None`: it is not a towline.
pub fn decode_pong(value: u32) -> Option<ReceiverMode> {
    if value & !(VERSION_BITS | RECEIVER_BITS) != PONG || value & VERSION_BITS == 0 {
        return None;
    }
    let all = [ReceiverMode::Waits, ReceiverMode::Stores, ReceiverMode::RunsByItself];
    all.into_iter().find(|receiver| *receiver as u32 == (value & RECEIVER_BITS) >> 8)
}

/// Requested run state of the guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunRequest {
    /// The state that it had at its source when it was stopped for the switchover.
    AsItWas = 0,
    /// Always running.
    Run = 1,
    /// Always paused.
    Pause = 2,
}

/// Run state of the guest when it was stopped for the switchover, from QEMU's `globalstate` section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestRunState {
    /// `running`, or no section, which QEMU treats alike.
    Running = 0,
    /// `suspended`: the guest is in S3 and wakes up by itself or by an event. It is live.
    Suspended = 1,
    /// Paused, shut down, panicked or stopped by an I/O error: a migration does not resume it.
    Stopped = 2,
}

impl GuestRunState {
    /// Parses the text of the `globalstate` section; `None` for a stream without one.
    pub fn from_state(state: Option<&str>) -> Self {
        match state {
            None | Some("running") => Self::Running,
            Some("suspended") => Self::Suspended,
            Some(_) => Self::Stopped,
        }
    }

    /// Returns true if its vCPUs run, or will when it wakes up.
    pub fn is_live(self) -> bool {
        self != Self::Stopped
    }
}

/// A frame from the source's towline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromSource {
    /// Announces that the outcome of this move will follow.
    Hello(MoveId),
    /// The source is done with the guest, which is the destination's.
    Completed(RunRequest),
    /// The source has its guest back.
    Aborted,
    /// The source is still at work.
    Alive,
    /// The source has stopped its guest, and completes once the destination awaits it.
    Stopped(GuestRunState),
}

impl FromSource {
    /// The command that carries it.
    pub fn to_command(self) -> VmCommand {
        let data: Vec<u8> = match self {
            Self::Hello(id) => [&[HELLO][..], &id].concat(),
            Self::Completed(run) => [OUTCOME, 1, run as u8].into(),
            Self::Aborted => [OUTCOME, 0, 0].into(),
            Self::Alive => [ALIVE].into(),
            Self::Stopped(state) => [STOPPED, state as u8].into(),
        };
        VmCommand::Other { kind: CommandKind(KIND), data }
    }

    /// Reads the next frame that a source sends after the end of its stream; `None`: more bytes are needed.
    ///
    /// # Errors
    /// The data is not a valid frame.
    pub fn decode(input: &mut Reader<'_>) -> Result<Option<Self>> {
        let unexpected = |found| PeerMisbehaved::Unexpected { found, expected: "the outcome of the move" };
        input.whole(|input| {
            let first = input.u8()?;
            if first != SectionType::Command as u8 {
                return Err(unexpected(alloc::format!("a byte {first:#04x} after the stream")).into());
            }
            let command = VmCommand::decode(input)?;
            let frame = Self::of(&command);
            frame.ok_or_else(|| unexpected(alloc::format!("{command:?}")).into())
        })
    }

    /// The frame in a command; `None`: not of a session, or of a kind that this version does not know.
    pub fn of(command: &VmCommand) -> Option<Self> {
        let VmCommand::Other { kind: CommandKind(KIND), data } = command else { return None };
        match data.as_slice() {
            [HELLO, id @ ..] => Some(Self::Hello(id.try_into().ok()?)),
            [OUTCOME, 0, _] => Some(Self::Aborted),
            [ALIVE] => Some(Self::Alive),
            [STOPPED, 0] => Some(Self::Stopped(GuestRunState::Running)),
            [STOPPED, 1] => Some(Self::Stopped(GuestRunState::Suspended)),
            [STOPPED, 2] => Some(Self::Stopped(GuestRunState::Stopped)),
            [OUTCOME, 1, 0] => Some(Self::Completed(RunRequest::AsItWas)),
            [OUTCOME, 1, 1] => Some(Self::Completed(RunRequest::Run)),
            [OUTCOME, 1, 2] => Some(Self::Completed(RunRequest::Pause)),
            _ => None,
        }
    }
}

/// State of the guest at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Running, or suspended.
    Running = 0,
    /// Loaded and paused.
    Paused = 1,
    /// Loaded by a QEMU that another party drives.
    Loaded = 2,
    /// Stored, or received into memory.
    Stored = 3,
}

/// A frame from the destination's towline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromDestination {
    /// The guest is there.
    Placed(Placement),
    /// The guest is held there, and could not be run, for this reason.
    NotRun(String),
    /// The destination is still at work.
    Alive,
    /// Before any page arrives, the memory is that of this block of an image: pages with equal content may be left out. Sent once for each
    /// block.
    Base([u8; BASE_ID_BYTES]),
    /// The QEMU there listens on this TCP port for the other one.
    Listens(u16),
    /// The guest is awaited: its source may complete.
    Awaits,
}

impl FromDestination {
    /// The message that carries it.
    pub fn to_message(&self) -> ReturnPathMessage {
        let data = match self {
            Self::Placed(placement) => [PLACED, *placement as u8].into(),
            Self::NotRun(reason) => {
                let bytes = &reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)];
                [&[NOT_RUN][..], bytes].concat()
            }
            Self::Alive => [ALIVE].into(),
            Self::Base(id) => [&[BASE][..], id].concat(),
            Self::Listens(port) => [&[LISTENS][..], &port.to_be_bytes()].concat(),
            Self::Awaits => [AWAITS].into(),
        };
        ReturnPathMessage::Other { kind: KIND, data }
    }

    /// The frame in a message; `None`: not of a session, or of a kind that this version does not know.
    pub fn of(message: &ReturnPathMessage) -> Option<Self> {
        let ReturnPathMessage::Other { kind: KIND, data } = message else { return None };
        match data.as_slice() {
            [PLACED, 0] => Some(Self::Placed(Placement::Running)),
            [PLACED, 1] => Some(Self::Placed(Placement::Paused)),
            [PLACED, 2] => Some(Self::Placed(Placement::Loaded)),
            [PLACED, 3] => Some(Self::Placed(Placement::Stored)),
            [NOT_RUN, reason @ ..] => Some(Self::NotRun(lossy(reason))),
            [ALIVE] => Some(Self::Alive),
            [BASE, id @ ..] => Some(Self::Base(id.try_into().ok()?)),
            [LISTENS, port @ ..] => Some(Self::Listens(u16::from_be_bytes(port.try_into().ok()?))),
            [AWAITS] => Some(Self::Awaits),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::ReturnPathReader;

    #[test]
    fn a_ping_is_answered_with_what_the_towline_does() {
        let version = ping_version(ping()).expect("it requests a session");
        for receiver in [ReceiverMode::Waits, ReceiverMode::Stores, ReceiverMode::RunsByItself] {
            assert_eq!(decode_pong(pong(version, receiver)), Some(receiver));
            assert_eq!(
                decode_pong(pong(200, receiver)),
                Some(receiver),
                "a later version is answered in this one"
            );
        }
    }

    #[test]
    fn a_base_is_reported_to_those_who_read_it() {
        assert!(knows_bases(ping_version(ping()).expect("it requests a session")));
        assert!(!knows_bases(1));
    }

    #[test]
    fn a_qemu_that_repeats_a_ping_is_no_towline() {
        for value in [0, 1, ping(), crate::source::PING_LOADED, u32::MAX] {
            assert_eq!(decode_pong(value), None, "{value:#x}");
        }
        assert_eq!(ping_version(crate::source::PING_LOADED), None);
        assert_eq!(ping_version(crate::source::PING_SETUP), None);
    }

    #[test]
    fn frames_of_the_source_come_back_as_they_were() {
        let frames = [
            FromSource::Hello([7; MOVE_ID_BYTES]),
            FromSource::Completed(RunRequest::AsItWas),
            FromSource::Completed(RunRequest::Run),
            FromSource::Completed(RunRequest::Pause),
            FromSource::Aborted,
            FromSource::Alive,
            FromSource::Stopped(GuestRunState::Running),
            FromSource::Stopped(GuestRunState::Suspended),
            FromSource::Stopped(GuestRunState::Stopped),
        ];
        for frame in frames {
            assert_eq!(FromSource::of(&frame.to_command()), Some(frame));
            let mut bytes = Vec::new();
            frame.to_command().encode(&mut bytes);
            assert_eq!(FromSource::decode(&mut Reader::new(&bytes[..bytes.len() - 1])), Ok(None));
            assert_eq!(FromSource::decode(&mut Reader::new(&bytes)), Ok(Some(frame)));
        }
        let short = VmCommand::Other { kind: CommandKind(KIND), data: [HELLO, 1].into() };
        assert_eq!(FromSource::of(&short), None);
        assert_eq!(
            FromSource::of(&VmCommand::Other { kind: CommandKind(9), data: [OUTCOME, 0, 0].into() }),
            None
        );
    }

    #[test]
    fn heartbeats_may_come_at_any_time_and_answer_nothing() {
        let mut answers = ReturnPathReader::default();
        let alive = FromDestination::Alive.to_message();
        for message in
            [alive.clone(), ReturnPathMessage::Pong(pong(VERSION, ReceiverMode::Waits)), alive.clone()]
        {
            answers.handle(&message).expect("no fault of the peer");
        }
        answers.expect_shut();
        assert_eq!(answers.handle(&alive), Ok(()));
        assert!(!answers.has_shut());
        assert_eq!(answers.handle(&ReturnPathMessage::Shut(0)), Ok(()));
        assert!(answers.has_shut());
        // Reports come after SHUT.
        let report = FromDestination::Placed(Placement::Running).to_message();
        assert!(ReturnPathReader::default().handle(&report).is_err());
    }

    #[test]
    fn frames_of_the_destination_pass_through_the_return_path() {
        let long = "x".repeat(REASON_BYTES_MAX + 1);
        let placed = FromDestination::Placed(Placement::Paused);
        let base = FromDestination::Base([3; BASE_ID_BYTES]);
        let listens = FromDestination::Listens(0x1234);
        let not_run = FromDestination::NotRun(long.clone());
        for frame in [placed, base, listens, FromDestination::Awaits, FromDestination::Alive, not_run] {
            let mut bytes = Vec::new();
            frame.to_message().encode(&mut bytes);
            let message = ReturnPathMessage::decode(&mut Reader::new(&bytes)).expect("whole").expect("one");
            match (frame, FromDestination::of(&message).expect("of a session")) {
                (FromDestination::NotRun(_), FromDestination::NotRun(reason)) => {
                    assert_eq!(reason, long[..REASON_BYTES_MAX]);
                }
                (sent, found) => assert_eq!(sent, found),
            }
        }
    }
}

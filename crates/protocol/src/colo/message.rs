//! Messages: be32, in both directions; the size has a be64 after it.

use alloc::format;
use alloc::vec::Vec;

use crate::wire::put32;
use crate::{PeerMisbehaved, Result};

/// Length of a message.
pub const MESSAGE_BYTES: usize = 4;

/// A message (QEMU's `COLOMessage`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    Ready = 0,
    CheckpointRequest = 1,
    CheckpointReply = 2,
    VmstateSend = 3,
    VmstateSize = 4,
    VmstateReceived = 5,
    VmstateLoaded = 6,
}

impl Message {
    const NAMES: [&'static str; 7] = [
        "CHECKPOINT_READY",
        "CHECKPOINT_REQUEST",
        "CHECKPOINT_REPLY",
        "VMSTATE_SEND",
        "VMSTATE_SIZE",
        "VMSTATE_RECEIVED",
        "VMSTATE_LOADED",
    ];

    /// Appends the message.
    pub(super) fn encode(self, out: &mut Vec<u8>) {
        put32(out, self as u32);
    }

    /// Checks that the number `found` is this message.
    pub(super) fn expect(self, found: u32) -> Result<()> {
        if found == self as u32 {
            return Ok(());
        }
        let name = usize::try_from(found).ok().and_then(|found| Self::NAMES.get(found));
        let found =
            name.map_or_else(|| format!("COLO message {found}"), |name| format!("COLO message {name}"));
        Err(PeerMisbehaved::Unexpected { found, expected: Self::NAMES[self as usize] }.into())
    }
}

/// A message that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct PartialMessage {
    bytes: [u8; MESSAGE_BYTES],
    filled: usize,
}

impl PartialMessage {
    pub(super) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    /// The number of the message, once it is complete.
    pub(super) fn received(&mut self, bytes: usize) -> Option<u32> {
        self.filled = MESSAGE_BYTES.min(self.filled + bytes);
        (self.filled == MESSAGE_BYTES).then(|| u32::from_be_bytes(self.bytes))
    }
}

//! The primary's part of the messages, for a program that passes checkpoints on to a further secondary.
//!
//! ```text
//!   ◄ READY                                              once, after the first copy
//!   CHECKPOINT_REQUEST, VMSTATE_SEND, the stream ►       ◄ CHECKPOINT_REPLY, VMSTATE_RECEIVED, VMSTATE_LOADED
//! ```
//! The request does not wait for its reply: the guest was stopped for this checkpoint before it is passed on. A secondary reads each message
//! by itself, so the stream may follow at once.

use alloc::vec::Vec;

use super::checkpoint::Checkpoint;
use super::message::{MESSAGE_BYTES, Message};
use crate::Result;

/// Length of the replies to a checkpoint.
pub const REPLIES_BYTES: usize = 3 * MESSAGE_BYTES;

/// Checks that a secondary awaits checkpoints.
///
/// # Errors
/// Another message.
pub fn check_ready(message: [u8; MESSAGE_BYTES]) -> Result<()> {
    Message::Ready.expect(u32::from_be_bytes(message))
}

/// Checks that a secondary has taken a checkpoint.
///
/// # Errors
/// Other messages.
pub fn check_replies(replies: &[u8; REPLIES_BYTES]) -> Result<()> {
    let expected = [Message::CheckpointReply, Message::VmstateReceived, Message::VmstateLoaded];
    let (found, _) = replies.as_chunks::<MESSAGE_BYTES>();
    found.iter().zip(expected).try_for_each(|(found, expected)| expected.expect(u32::from_be_bytes(*found)))
}

impl Checkpoint {
    /// Messages before its stream.
    pub fn head() -> Vec<u8> {
        let mut head = Vec::with_capacity(2 * MESSAGE_BYTES);
        Message::CheckpointRequest.encode(&mut head);
        Message::VmstateSend.encode(&mut head);
        head
    }

    /// The received stream, from the memory to the end of the device state.
    pub fn stream(&self) -> &[u8] {
        self.buffer.bytes(0, self.buffer.filled())
    }
}

//! A checkpoint that is whole.

use super::buffer::CheckpointBuffer;
use crate::PageRef;
use crate::device_state::DeviceState;
use crate::ram::PAGE_SIZE;

/// The guest at one stop: the pages that were written since the stop before, and all device state. Together
/// with the memory as of the checkpoint before it is the whole guest.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) number: u64,
    pub(super) buffer: CheckpointBuffer,
    pub(super) device_state: DeviceState,
}

impl Checkpoint {
    /// 1 for the first one after the first copy, and so on.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The pages with their content, in the order in which they must be written. `None`: all bytes are zero.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = (PageRef, Option<&[u8]>)> {
        self.buffer.pages.iter().map(|buffered| {
            let content = buffered.content.map(|start| self.buffer.bytes(start.get(), PAGE_SIZE as usize));
            (buffered.page, content)
        })
    }

    /// The device state, with a description of those devices that the first copy had.
    pub fn device_state(&self) -> &DeviceState {
        &self.device_state
    }

    /// Bytes that were received for it.
    pub fn stream_bytes(&self) -> u64 {
        self.buffer.filled() as u64
    }

    /// Gives its buffer back, for another checkpoint.
    pub fn into_buffer(self) -> CheckpointBuffer {
        self.buffer
    }
}

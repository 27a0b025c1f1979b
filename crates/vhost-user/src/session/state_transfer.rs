//! The device's own state, through a pipe of the frontend's, while the session goes on answering.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::device::{Device, Refusal};
use crate::message::Direction;

/// The longest state that is taken. A device's own state is small: what is in rings and memory travels with the guest.
pub(super) const DEVICE_STATE_BYTES_MAX: u64 = 64 << 20;

/// A transfer under way.
pub(super) struct StateTransfer {
    device: Arc<dyn Device>,
    thread: JoinHandle<std::io::Result<Option<Vec<u8>>>>,
}

impl StateTransfer {
    /// Begins it: a pipe holds less than a state, and the frontend reads only when it has our answer.
    pub(super) fn begin(device: Arc<dyn Device>, direction: Direction, fd: OwnedFd) -> Result<Self, Refusal> {
        let mut file = File::from(fd);
        let saved = match direction {
            Direction::Save => Some(device.save()?),
            Direction::Load => None,
        };
        let transfer = move || match saved {
            Some(state) => file.write_all(&state).map(|()| None),
            None => {
                let mut state = Vec::new();
                file.take(DEVICE_STATE_BYTES_MAX + 1).read_to_end(&mut state).map(|_| Some(state))
            }
        };
        let thread = std::thread::Builder::new().name("device-state".into()).spawn(transfer)?;
        Ok(Self { device, thread })
    }

    /// Waits for its end, which the frontend has seen already, and hands what was read to the device.
    pub(super) fn finish(self) -> Result<(), Refusal> {
        let transferred = self.thread.join().map_err(|_| Refusal::new("the transfer's thread panicked"))?;
        match transferred? {
            Some(state) if state.len() as u64 > DEVICE_STATE_BYTES_MAX => Err(Refusal::new(format!(
                "the state is longer than {DEVICE_STATE_BYTES_MAX} bytes; is it this device's?"
            ))),
            Some(state) => self.device.load(&state),
            None => Ok(()),
        }
    }
}

//! Requests about the transfer of the device's own state.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::state_transfer::StateTransfer;
use super::{Rings, Session};
use crate::device::BackendError;
use crate::message::TransferDirection;

impl<R: Rings> Session<R> {
    /// Begins a transfer of the device's state. Reply: bits 0–7 are 0 on success; bit 8 is set without a
    /// descriptor.
    pub(super) fn begin_transfer(&mut self, direction: TransferDirection, fd: OwnedFd) -> u64 {
        const NO_FD: u64 = 1 << 8;
        match self.start_transfer(direction, fd) {
            Ok(()) => NO_FD,
            Err(reason) => {
                tracing::error!(%reason, "cannot begin the transfer of the device's state");
                NO_FD | 1
            }
        }
    }

    fn start_transfer(&mut self, direction: TransferDirection, fd: OwnedFd) -> Result<(), BackendError> {
        if let Some(ring) = self.vrings.iter().position(|vring| vring.running) {
            return Err(BackendError::new(format!("ring {ring} runs; stop it first")));
        }
        if self.transfer.as_ref().is_some_and(StateTransfer::is_under_way) {
            let why = "another one is under way; close its descriptor and send CHECK_DEVICE_STATE first";
            return Err(BackendError::new(why));
        }
        // A finished transfer without CHECK_DEVICE_STATE is dropped.
        self.transfer = None;
        let orphans = self.orphans.count();
        if orphans > 0 {
            let why = format!("{orphans} earlier ones still block on their descriptors");
            return Err(BackendError::new(why));
        }
        let (device, orphans) = (Arc::clone(&self.device), Arc::clone(&self.orphans));
        self.transfer = Some(StateTransfer::begin(device, orphans, direction, fd)?);
        Ok(())
    }

    /// Waits for the end of the transfer. Reply: 0 on success.
    pub(super) fn check_transfer(&mut self) -> u64 {
        let Some(transfer) = self.transfer.take() else {
            tracing::error!("CHECK_DEVICE_STATE without SET_DEVICE_STATE_FD");
            return 1;
        };
        match transfer.finish(self.cancel.as_ref()) {
            Ok(()) => 0,
            Err(reason) => {
                tracing::error!(%reason, "the transfer of the device's state failed");
                1
            }
        }
    }
}

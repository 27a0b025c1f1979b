//! Requests about the transfer of the device's own state.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::state_transfer::StateTransfer;
use super::{Rings, Session};
use crate::message::TransferDirection;

impl<R: Rings> Session<R> {
    /// Begins a transfer of the device's state. Reply: bits 0–7 are 0 on success; bit 8 is set without a
    /// descriptor.
    pub(super) fn begin_transfer(&mut self, direction: TransferDirection, fd: OwnedFd) -> u64 {
        const NO_FD: u64 = 1 << 8;
        if let Some(ring) = self.vrings.iter().position(|vring| vring.running) {
            tracing::error!(ring, "SET_DEVICE_STATE_FD while a ring runs; stop it first");
            return NO_FD | 1;
        }
        if self.transfer.as_ref().is_some_and(StateTransfer::is_under_way) {
            tracing::error!(
                "SET_DEVICE_STATE_FD during a transfer; close its descriptor and send CHECK_DEVICE_STATE first"
            );
            return NO_FD | 1;
        }
        // A finished transfer without CHECK_DEVICE_STATE is dropped.
        self.transfer = None;
        let orphans = self.orphans.count();
        if orphans > 0 {
            tracing::error!(
                orphans,
                "SET_DEVICE_STATE_FD while earlier transfers still block on their descriptors"
            );
            return NO_FD | 1;
        }
        match StateTransfer::begin(Arc::clone(&self.device), Arc::clone(&self.orphans), direction, fd) {
            Ok(transfer) => {
                self.transfer = Some(transfer);
                NO_FD
            }
            Err(reason) => {
                tracing::error!(%reason, "cannot begin the transfer of the device's state");
                NO_FD | 1
            }
        }
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

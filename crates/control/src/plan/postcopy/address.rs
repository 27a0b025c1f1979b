//! An address of a QEMU that another party drives, as destination of a postcopy.

use towline_channel::Address;

use super::super::context::Context;
use super::super::destination::RecoveryState;
use super::super::error::Error;
use super::super::request::PostcopyOptions;
use super::destination::PostcopyDestination;
use crate::switchover::FinalRunState;

/// See the module's text.
pub(super) struct AddressDestination(pub(super) Address);

impl PostcopyDestination for AddressDestination {
    fn listen(&mut self, _: PostcopyOptions, _: FinalRunState) -> Result<Address, Error> {
        Ok(self.0.clone())
    }

    /// The destination cannot be queried: it listens again after a `migrate-recover` there.
    fn recovery_state(&mut self) -> Result<RecoveryState, Error> {
        Ok(RecoveryState::Listening(self.0.clone()))
    }

    fn reconnect_manually(&mut self, reason: &towline_migration::Error, context: &Context<'_>) {
        let address = &self.0;
        context.observer.notice(&format!(
            "{reason}; the guest waits at its destination; {address} is tried again and again: if its QEMU does not listen there any more, send it `migrate-recover` with that uri"
        ));
    }
}

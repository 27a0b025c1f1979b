//! A QEMU that takes a stored guest by postcopy.

use towline_channel::Address;
use towline_image::StoredGuest;
use towline_migration::Compression;
use towline_protocol::RamBlock;
use towline_protocol::ram::PAGE_SIZE;

use super::super::context::Context;
use super::super::destination::{QmpDestination, RecoveryState};
use super::super::endpoint::{DestinationEndpoint, QemuDestination, StreamDestination};
use super::super::ends::Destination;
use super::super::error::Error;
use super::super::invalid::InvalidPostcopy;
use super::super::preflight::GuestFacts;
use super::super::request::PostcopyOptions;
use crate::switchover::{DestinationKind, FinalRunState};

/// See the module's text.
pub(super) enum Target {
    /// Its monitor is connected.
    Driven(Box<QmpDestination>),
    /// It listens here, and another party drives it.
    Address(Address),
}

impl Target {
    /// Connects to it, and checks it; nothing is changed.
    pub(super) fn open(
        destination: &Destination,
        image: &dyn StoredGuest,
        options: PostcopyOptions,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        let path = match (destination.monitor(), destination.stream()) {
            (Some(path), _) => path,
            (None, Some(address)) => return Ok(Self::Address(address.clone())),
            (None, None) => {
                let destination = destination.to_string();
                return Err(InvalidPostcopy::To { destination }.into());
            }
        };
        let mut qemu = if options.recover {
            QmpDestination::prepare_recovery(path, context)?
        } else {
            QmpDestination::prepare_postcopy(path, context)?
        };
        let machine_type = &image.configuration().machine_type;
        GuestFacts::of_blocks(machine_type, image.blocks()).check(&mut qemu.qemu, context)?;
        let expected = qemu.requested_pages();
        if options.recover && expected != options.requested_pages {
            return Err(InvalidPostcopy::OtherChannel { expected }.into());
        }
        Ok(Self::Driven(Box::new(qemu)))
    }

    /// Kind of the destination, for the switchover.
    pub(super) fn kind(&self) -> DestinationKind {
        match self {
            Self::Driven(_) => DestinationKind::Qemu,
            Self::Address(_) => DestinationKind::Stream,
        }
    }

    pub(super) fn is_driven(&self) -> bool {
        matches!(self, Self::Driven(_))
    }

    /// Returns true if the guest ran when it was connected to.
    pub(super) fn was_running(&self) -> bool {
        match self {
            Self::Driven(qemu) => qemu.facts().status.running,
            Self::Address(_) => true,
        }
    }

    /// Sizes of the pages that back each block; 4 KiB if they cannot be queried.
    pub(super) fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        match self {
            Self::Driven(qemu) => qemu.page_bytes(blocks),
            Self::Address(_) => vec![PAGE_SIZE; blocks.len()],
        }
    }

    /// Has it listen, if it is driven; returns its address.
    pub(super) fn listen(
        &mut self,
        options: PostcopyOptions,
        run_state: FinalRunState,
    ) -> Result<Address, Error> {
        match self {
            Self::Driven(qemu) => {
                qemu.start_postcopy(options.requested_pages, run_state, 0, Compression::None)
            }
            Self::Address(address) => Ok(address.clone()),
        }
    }

    /// Returns true if the guest is seen to run.
    pub(super) fn runs_now(&mut self) -> bool {
        match self {
            Self::Driven(qemu) => qemu.runs_now().is_ok_and(|runs| runs == Some(true)),
            Self::Address(_) => false,
        }
    }

    /// State after its connection was lost. One that cannot be queried listens again after a `migrate-recover` there.
    pub(super) fn recovery_state(&mut self) -> RecoveryState {
        match self {
            Self::Driven(qemu) => qemu.recovery_state(),
            Self::Address(address) => RecoveryState::Listening(address.clone()),
        }
    }

    /// Called when it does not listen again by itself.
    pub(super) fn reconnect_manually(&mut self, reason: &towline_migration::Error, context: &Context<'_>) {
        match self {
            Self::Driven(qemu) => qemu.pause_migration(),
            Self::Address(address) => context.observer.notice(&format!(
                "{reason}; the guest waits at its destination; {address} is tried again and again: if its QEMU does not listen there any more, send it `migrate-recover` with that uri"
            )),
        }
    }

    /// The destination, for the end of the command.
    pub(super) fn into_endpoint(self) -> Box<dyn DestinationEndpoint> {
        match self {
            Self::Driven(qemu) => Box::new(QemuDestination::of(*qemu)),
            Self::Address(address) => Box::new(StreamDestination::new(&address, None, None, None)),
        }
    }
}

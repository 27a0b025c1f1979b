//! Ends in this process, which the caller of the copy provides.

use std::sync::Arc;

use towline_image::Origin;
use towline_migration::{Sink, Snapshot};

use super::super::context::Context;
use super::super::ends::{ProcessDestination, ProcessGuest, ProcessSource};
use super::super::error::{Error, Failure};
use super::super::preflight::FactsExtent;
use super::super::report::DestinationState;
use super::super::shared_switchover::TransferContext;
use super::driven::{GuestDescription, LocalGuest};
use super::traits::{DestinationEndpoint, SourceEndpoint};
use crate::switchover::SourceKind;

/// A guest of this process, which ends when this is dropped.
pub(in super::super) struct LocalSource {
    guest: Box<dyn ProcessGuest>,
    name: String,
    moved: Snapshot,
}

impl LocalSource {
    /// Creates the guest.
    pub(in super::super) fn new(source: &dyn ProcessSource) -> Result<Self, Error> {
        let (guest, name) = (source.create()?, source.name().to_owned());
        Ok(Self { guest, name, moved: Snapshot::default() })
    }
}

impl SourceEndpoint for LocalSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Stored
    }

    fn describe_guest(
        &mut self,
        _: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        context.check_cancelled().map_err(Failure::untouched)?;
        let origin = Origin { source: self.name.clone(), ..Origin::default() };
        Ok(GuestDescription { guest: None, origin, file: None })
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let mut moved = Ok(self.moved);
        self.guest.run(&mut |guest| {
            moved = to.receive_guest(&LocalGuest { guest, file: None, is_stored: false }, run);
        })?;
        self.moved = moved?;
        Ok(())
    }

    fn moved(&self) -> Snapshot {
        self.moved
    }
}

/// A sink of this process.
pub(in super::super) struct LocalDestination(Arc<dyn Sink>);

impl LocalDestination {
    /// Creates the sink.
    pub(in super::super) fn new(destination: &dyn ProcessDestination) -> Result<Self, Error> {
        Ok(Self(destination.create()?))
    }
}

impl DestinationEndpoint for LocalDestination {
    fn sink(&self) -> &dyn Sink {
        &*self.0
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Received
    }
}

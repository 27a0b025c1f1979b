//! `null:`, which counts and discards.

use std::sync::Arc;

use towline_migration::{Sink, Snapshot};

use super::super::context::Context;
use super::super::discard_sink::DiscardSink;
use super::super::error::Error;
use super::super::in_process;
use super::super::report::DestinationState;
use super::super::shared_switchover::SharedSwitchover;
use super::traits::{DestinationEndpoint, LocalGuest};

/// The destination `null:`.
#[derive(Debug, Default)]
pub(in super::super) struct NullDestination(DiscardSink);

impl DestinationEndpoint for NullDestination {
    fn sink(&self) -> &dyn Sink {
        &self.0
    }

    fn receive_guest(
        &mut self,
        local: &LocalGuest<'_>,
        switchover: &Arc<SharedSwitchover>,
        context: &Context<'_>,
    ) -> Result<Snapshot, Error> {
        in_process::copy(local.guest, &self.0, context.lanes, switchover, context)
    }

    fn has_discarded(&self) -> bool {
        self.0.is_complete()
    }

    fn finalize(&mut self, _: &Context<'_>) -> Result<Vec<String>, Error> {
        Ok(Vec::new())
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Dropped
    }
}

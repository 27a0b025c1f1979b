//! `null:`, which counts and discards.

use towline_migration::Sink;

use super::super::discard_sink::DiscardSink;
use super::super::report::DestinationState;
use super::traits::DestinationEndpoint;

/// The destination `null:`.
#[derive(Debug, Default)]
pub(in super::super) struct NullDestination(DiscardSink);

impl DestinationEndpoint for NullDestination {
    fn sink(&self) -> &dyn Sink {
        &self.0
    }

    fn has_discarded(&self) -> bool {
        self.0.is_complete()
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Dropped
    }
}

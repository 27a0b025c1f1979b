//! `null:`, which counts and drops.

use std::sync::Arc;

use towline_migration::{Sink, Snapshot};

use super::super::context::Run;
use super::super::error::Error;
use super::super::local;
use super::super::report::DestinationState;
use super::super::survey::Survey;
use super::super::switch::Switch;
use super::contract::{DestinationEndpoint, Local};

/// See the module's text.
#[derive(Debug, Default)]
pub(in super::super) struct NullDestination(Survey);

impl DestinationEndpoint for NullDestination {
    fn sink(&self) -> &dyn Sink {
        &self.0
    }

    fn take(&mut self, local: &Local<'_>, switch: &Arc<Switch>, run: &Run<'_>) -> Result<Snapshot, Error> {
        local::copy(local.guest, &self.0, run.lanes, switch, run)
    }

    fn has_dropped(&self) -> bool {
        self.0.is_complete()
    }

    fn settle(&mut self, _: &Run<'_>) -> Result<Vec<String>, Error> {
        Ok(Vec::new())
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Dropped
    }
}

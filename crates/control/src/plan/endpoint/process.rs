//! Ends in this process: those that the caller of the copy provides, and `null:`, which counts and discards.

use std::sync::{Arc, Mutex};

use towline_image::Origin;
use towline_migration::{ChannelId, Pages, Sink, Snapshot};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::super::context::Context;
use super::super::ends::{ProcessGuest, ProcessSource};
use super::super::error::{Error, Failure};
use super::super::preflight::FactsExtent;
use super::super::progress::DestinationState;
use super::super::shared_switchover::TransferContext;
use super::driven::{GuestDescription, LocalGuest};
use super::traits::{DestinationEndpoint, SourceEndpoint};
use crate::lock::lock;

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
    fn describe_guest(
        &mut self,
        _: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        context.check_cancelled().map_err(Failure::untouched)?;
        let origin = Origin { source: self.name.clone(), ..Origin::default() };
        Ok(GuestDescription { guest: None, origin, file: None, base: None })
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let mut moved = Ok(self.moved);
        self.guest.run(&mut |guest| {
            moved = to.receive_guest(&LocalGuest { guest, file: None, base: None, is_stored: false }, run);
        })?;
        self.moved = moved?;
        Ok(())
    }

    fn moved(&self) -> Snapshot {
        self.moved
    }
}

/// A sink of this process.
impl DestinationEndpoint for Arc<dyn Sink> {
    fn sink(&self) -> &dyn Sink {
        &**self
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Received
    }
}

/// The destination `null:`.
impl DestinationEndpoint for DiscardSink {
    fn sink(&self) -> &dyn Sink {
        self
    }

    fn has_discarded(&self) -> bool {
        self.is_complete()
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Dropped
    }
}

/// Summary of a stream. Its source gets an error, so the guest runs on there.
#[derive(Debug, Default)]
pub struct DiscardSink {
    summary: Mutex<StreamSummary>,
}

/// Contents of a stream without its memory.
#[derive(Debug, Default, Clone)]
pub struct StreamSummary {
    /// Machine type and capabilities.
    pub configuration: Option<Configuration>,
    /// RAM blocks.
    pub blocks: Vec<RamBlock>,
    /// Device state, at the end of the stream.
    pub device_state: Option<DeviceState>,
}

/// Keeps the engine from acknowledging.
#[derive(Debug, thiserror::Error)]
#[error("null: discards the guest, so its source is not acknowledged")]
struct NothingKept;

impl DiscardSink {
    /// The summary so far.
    pub fn summary(&self) -> StreamSummary {
        lock(&self.summary).clone()
    }

    /// Returns true if the whole stream has arrived.
    pub fn is_complete(&self) -> bool {
        lock(&self.summary).device_state.is_some()
    }
}

impl Sink for DiscardSink {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        lock(&self.summary).configuration = Some(configuration.clone());
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        lock(&self.summary).blocks = blocks.to_vec();
        Ok(())
    }

    fn pages(&self, _stream: ChannelId, _pages: &Pages<'_>) -> towline_migration::Result<()> {
        Ok(())
    }

    fn zero(
        &self,
        _stream: ChannelId,
        _block: BlockIndex,
        _offsets: &[u64],
    ) -> towline_migration::Result<()> {
        Ok(())
    }

    fn current(&self, _page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        content.fill(0);
        Ok(())
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        lock(&self.summary).device_state = Some(state);
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        Err(towline_migration::Error::guest(NothingKept))
    }
}

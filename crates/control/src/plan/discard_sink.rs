//! A sink that discards the memory: for `null:`, and to inspect a guest in its stream.

use std::sync::Mutex;

use towline_migration::{ChannelId, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::lock::lock;

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

    fn note(&self, note: impl FnOnce(&mut StreamSummary)) {
        note(&mut lock(&self.summary));
    }
}

impl Sink for DiscardSink {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.note(|summary| summary.configuration = Some(configuration.clone()));
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        self.note(|summary| summary.blocks = blocks.to_vec());
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
        self.note(|summary| summary.device_state = Some(state));
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        Err(towline_migration::Error::guest(NothingKept))
    }
}

//! Memory that the destination already has: its blocks are announced, and their pages are not sent.
//!
//! ```text
//!   Guest ─► GuestWithPresentBlocks ─► Outgoing ─► block list, pages of the other blocks, device state ─► destination
//!   source that sends all ─► Incoming ─► SinkWithPresentBlocks ─► the same ─► Relay ─► destination
//! ```
//!
//! The memory of a block is present where the destination maps the image that the guest is stored in, or the
//! memory of the QEMU that runs it. A source that does not know this sends the block's pages anyway;
//! [`SinkWithPresentBlocks`] drops them on arrival.
//!
//! Where a running guest arrives at a destination that has mapped an image, the guest is that image but for
//! some pages, and the stream does not say which. Each page is therefore compared with the image's (`base`), and dropped
//! if it is the same and no other content of it was sent before.
//!
//! Out of scope: the proof that the memory is there and stays unchanged until the guest runs. The caller
//! provides it; nothing in the stream would show that memory is missing. Limits: not with postcopy, which
//! discards the destination's memory.

mod base;

use std::collections::BTreeSet;
use std::ops::{Deref, Range};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use towline_channel::{Channel, IoBuf, IoBufMut, ZeroCopyTicket};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::guest::{BaseId, ChannelId, Extent, Guest, Pages, ReturnPathWriter, Sink};
use crate::{Error, Result};
use base::BaseBlock;

pub use base::{Base, BasePresence};

/// A guest with blocks whose memory the destination already has, but for the guest's [`Guest::difference`].
#[derive(Debug)]
pub struct GuestWithPresentBlocks<P> {
    guest: P,
    is_present: Vec<bool>,
    /// Of each block, in place of the guest's own.
    difference: Option<Vec<Vec<Range<u64>>>>,
}

/// A sink that drops pages that its destination already has: all of some blocks, and of others those that are equal to an image's.
#[derive(Debug)]
pub struct SinkWithPresentBlocks<P> {
    sink: P,
    names: BTreeSet<String>,
    old: BTreeSet<String>,
    base: Option<Base>,
    /// Set with the block list.
    blocks: OnceLock<Vec<BlockPresence>>,
    dropped: AtomicU64,
}

/// Memory of a block at the destination.
#[derive(Debug)]
enum BlockPresence {
    /// It is zero.
    Absent,
    /// It is not known.
    Old,
    Present,
    Based(BaseBlock),
}

/// The first present block of a guest.
pub(crate) fn first(guest: &dyn Guest) -> Option<&RamBlock> {
    let is_present = |index| guest.is_present(BlockIndex(index));
    (0..).zip(guest.blocks()).find(|(index, _)| is_present(*index)).map(|(_, block)| block)
}

/// The blocks that have these names; a block of each name must exist.
fn flags(blocks: &[RamBlock], names: &BTreeSet<String>) -> Result<Vec<bool>> {
    let is_missing = |name: &&String| !blocks.iter().any(|block| block.name == **name);
    if let Some(name) = names.iter().find(is_missing) {
        let found = blocks.iter().map(|block| block.name.clone()).collect();
        return Err(Error::NoSuchBlock { block: name.clone(), found });
    }
    Ok(blocks.iter().map(|block| names.contains(&block.name)).collect())
}

impl<P: Deref<Target: Guest>> GuestWithPresentBlocks<P> {
    /// `guest`, whose blocks of these names are present at the destination.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`].
    pub fn new(guest: P, names: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let names = names.into_iter().map(Into::into).collect();
        let is_present = flags(guest.blocks(), &names)?;
        Ok(Self { guest, is_present, difference: None })
    }

    /// The guest, whose difference the present blocks have as well.
    #[must_use]
    pub fn with_difference(self) -> Self {
        Self { difference: Some(Vec::new()), ..self }
    }

    /// `guest`, all of which is present at the destination but for these ranges of each block, in the form of
    /// [`Guest::difference`].
    pub fn but_for(guest: P, difference: Vec<Vec<Range<u64>>>) -> Self {
        let is_present = vec![true; guest.blocks().len()];
        Self { guest, is_present, difference: Some(difference) }
    }
}

impl<P: Deref<Target: Guest> + Sync> Guest for GuestWithPresentBlocks<P> {
    fn configuration(&self) -> &Configuration {
        self.guest.configuration()
    }

    fn blocks(&self) -> &[RamBlock] {
        self.guest.blocks()
    }

    fn ram_section_id(&self) -> u32 {
        self.guest.ram_section_id()
    }

    fn is_present(&self, block: BlockIndex) -> bool {
        self.is_present.get(block.index()) == Some(&true) || self.guest.is_present(block)
    }

    fn difference(&self, block: BlockIndex) -> &[Range<u64>] {
        match &self.difference {
            Some(difference) => difference.get(block.index()).map_or(&[], Vec::as_slice),
            None => self.guest.difference(block),
        }
    }

    fn start_tracking(&self) -> Result<()> {
        self.guest.start_tracking()
    }

    fn stop_tracking(&self) -> Result<()> {
        self.guest.stop_tracking()
    }

    fn extent(&self, page: PageRef) -> Extent {
        self.guest.extent(page)
    }

    fn prepare(&self, page: PageRef, length: u64) -> Result<()> {
        self.guest.prepare(page, length)
    }

    fn unit_bytes(&self) -> u64 {
        self.guest.unit_bytes()
    }

    fn release(&self, page: PageRef, length: u64) {
        self.guest.release(page, length);
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        self.guest.memory(page, length)
    }

    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        self.guest.immutable(page, length)
    }

    fn is_zero(&self, page: PageRef) -> bool {
        self.guest.is_zero(page)
    }

    fn harvest_dirty(&self, report: &mut dyn FnMut(PageRef, u64)) -> Result<()> {
        self.guest.harvest_dirty(report)
    }

    fn stop(&self) -> Result<()> {
        self.guest.stop()
    }

    fn start(&self) -> Result<()> {
        self.guest.start()
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        self.guest.device_state()
    }
}

impl<P: Deref<Target: Sink>> SinkWithPresentBlocks<P> {
    /// `sink`, which gets no pages of the blocks of these names: its destination has their memory.
    pub fn new(sink: P, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        let (old, base, blocks) = (BTreeSet::new(), None, OnceLock::new());
        Self { sink, names, old, base, blocks, dropped: AtomicU64::new(0) }
    }

    /// The sink, whose destination's blocks of these names are not known to be zero.
    #[must_use]
    pub fn over_old(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { old: names.into_iter().map(Into::into).collect(), ..self }
    }

    /// The sink, which gets only pages that differ from `base` where its destination has that.
    #[must_use]
    pub fn based_on(self, base: Base) -> Self {
        Self { base: Some(base), ..self }
    }

    /// The sink that gets the rest.
    pub fn inner(&self) -> &P::Target {
        &self.sink
    }

    /// Number of pages that were dropped so far, zero pages included.
    pub fn dropped_pages(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn presence(&self, block: BlockIndex) -> &BlockPresence {
        let known = self.blocks.get().and_then(|blocks| blocks.get(block.index()));
        known.unwrap_or(&BlockPresence::Absent)
    }

    /// Returns true if pages of the block are not forwarded unseen.
    fn inspects(&self, block: BlockIndex) -> bool {
        !matches!(self.presence(block), BlockPresence::Absent | BlockPresence::Old)
    }

    /// Forwards zero pages into memory that is not zero.
    fn clear(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        match stream {
            _ if offsets.is_empty() => Ok(()),
            ChannelId::Main => self.sink.zero(stream, block, offsets),
            // QEMU takes memory for zero until a lane has brought the page, and skips the first zero page.
            ChannelId::Lane(_) => {
                let contents = vec![base::ZERO_PAGE; offsets.len()];
                self.sink.pages(stream, &Pages { block, offsets, contents: &contents })
            }
        }
    }

    fn count_dropped(&self, pages: usize) {
        self.dropped.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Presence of each of these blocks; the destination has reported what it has.
    fn presence_of(&self, blocks: &[RamBlock]) -> Result<Vec<BlockPresence>> {
        let is_present = flags(blocks, &self.names)?;
        let reported = self.sink.bases();
        let base_of = |block: &RamBlock| {
            let base = self.base.as_ref()?;
            let id = base.blocks.get(&block.name)?;
            let is_reported = || id.is_some_and(|id| reported.contains(&id));
            let is_there = base.presence == BasePresence::Proven || is_reported();
            is_there.then(|| BaseBlock::of(&base.guest, block)).flatten()
        };
        let of_block = |(block, is_present): (&RamBlock, bool)| {
            if is_present {
                return BlockPresence::Present;
            }
            let is_old = self.old.contains(&block.name);
            let unbased = if is_old { BlockPresence::Old } else { BlockPresence::Absent };
            base_of(block).map_or(unbased, BlockPresence::Based)
        };
        Ok(blocks.iter().zip(is_present).map(of_block).collect())
    }
}

impl<P: Deref<Target: Sink> + Sync> Sink for SinkWithPresentBlocks<P> {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        self.sink.configuration(configuration)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        flags(blocks, &self.names)?;
        self.sink.blocks(blocks)?;
        let presence = self.presence_of(blocks)?;
        self.blocks.get_or_init(|| presence);
        Ok(())
    }

    fn bases(&self) -> Vec<BaseId> {
        match &self.base {
            Some(Base { blocks, presence: BasePresence::Proven, .. }) => {
                blocks.values().flatten().copied().collect()
            }
            _ => self.sink.bases(),
        }
    }

    fn buffer_for(&self, page: PageRef, length: u64) -> Option<IoBufMut<'_>> {
        // Nothing is received into memory that the destination already has.
        if self.inspects(page.block) { None } else { self.sink.buffer_for(page, length) }
    }

    fn pages_received_in_place(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.sink.pages_received_in_place(stream, block, offsets)
    }

    fn splice_from(
        &self,
        stream: ChannelId,
        from: &dyn Channel,
        block: BlockIndex,
        offsets: &[u64],
    ) -> Option<Result<u64>> {
        if self.inspects(block) { None } else { self.sink.splice_from(stream, from, block, offsets) }
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        match self.presence(pages.block) {
            BlockPresence::Absent | BlockPresence::Old => self.sink.pages(stream, pages),
            BlockPresence::Present => {
                self.count_dropped(pages.offsets.len());
                Ok(())
            }
            BlockPresence::Based(base) => {
                let (offsets, contents) = base.changed(pages);
                self.count_dropped(pages.offsets.len() - offsets.len());
                if offsets.is_empty() {
                    return Ok(());
                }
                self.sink.pages(stream, &Pages { offsets: &offsets, contents: &contents, ..*pages })
            }
        }
    }

    fn zero_copy_ticket(&self, stream: ChannelId) -> ZeroCopyTicket {
        self.sink.zero_copy_ticket(stream)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        match self.presence(block) {
            BlockPresence::Absent => self.sink.zero(stream, block, offsets),
            BlockPresence::Old => self.clear(stream, block, offsets),
            BlockPresence::Present => {
                self.count_dropped(offsets.len());
                Ok(())
            }
            BlockPresence::Based(base) => {
                let zeroed = base.zeroed(offsets);
                self.count_dropped(offsets.len() - zeroed.len());
                self.clear(stream, block, &zeroed)
            }
        }
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()> {
        if let BlockPresence::Present = self.presence(page.block) {
            // The page decoded from it is dropped.
            content.fill(0);
            return Ok(());
        }
        self.sink.current(page, content)
    }

    fn barrier(&self) -> Result<()> {
        self.sink.barrier()
    }

    fn section_start(&self, section: RamSection) -> Result<()> {
        self.sink.section_start(section)
    }

    fn section_end(&self, kind: SectionKind) -> Result<()> {
        self.sink.section_end(kind)
    }

    fn device_state(&self, state: DeviceState) -> Result<()> {
        self.sink.device_state(state)
    }

    fn commit(&self) -> Result<()> {
        self.sink.commit()?;
        let is_used =
            |blocks: &Vec<BlockPresence>| blocks.iter().any(|block| matches!(block, BlockPresence::Based(_)));
        let base = self.base.as_ref().filter(|_| self.blocks.get().is_some_and(is_used));
        base.map_or(Ok(()), |base| (base.check)())
    }

    fn publish(&self) -> Result<()> {
        self.sink.publish()
    }

    fn return_path(&self, writer: ReturnPathWriter) {
        self.sink.return_path(writer);
    }
}

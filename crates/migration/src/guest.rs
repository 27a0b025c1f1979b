//! The engine's interfaces to a guest: [`Guest`] to read one, [`Sink`] to store one.
//!
//! Both are the consumer's traits. A stored guest, live memory, a relay implement them; the engine knows none
//! of these.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use towline_channel::{Channel, ChannelExt, IoBuf, IoBufMut, SendFlags, ZeroCopyTicket};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::Result;
use crate::lock::lock;

/// The number of a QEMU's `ram` sections, unless other sections come before.
pub(crate) const RAM_SECTION_ID: u32 = 2;

/// Names the memory of a block of an image, by a hash of its content.
pub type BaseId = [u8; towline_protocol::session::BASE_ID_BYTES];

/// A guest to be read. Methods that name pages are called from every lane's thread at once.
#[expect(unused_variables, reason = "defaults need none of their arguments")]
pub trait Guest: Sync {
    /// Machine type, and the other fields that begin the stream.
    fn configuration(&self) -> &Configuration;

    /// The RAM blocks, in the order in which they are sent.
    fn blocks(&self) -> &[RamBlock];

    /// The number that the `ram` sections carry. A guest received in a stream keeps that stream's, because
    /// its device sections have numbers too.
    fn ram_section_id(&self) -> u32 {
        RAM_SECTION_ID
    }

    /// Returns true if the destination already has the memory of this block, the same memory or a copy of it
    /// as it will be when the guest is stopped: the block is announced, and none of its pages but those of
    /// [`Self::difference`] are named, prepared or sent. Constant during a migration; refused by postcopy,
    /// whose destination discards what it has.
    fn is_present(&self, block: BlockIndex) -> bool {
        false
    }

    /// Ranges of a block, in bytes, whole pages in ascending order, that differ from the image that the guest is
    /// based on: a destination that has mapped the image lacks these alone. A guest that is its image has none.
    fn difference(&self, block: BlockIndex) -> &[Range<u64>] {
        &[]
    }

    /// Starts to track writes: every write after it returns is in a later [`Self::harvest_dirty`]. Called
    /// before any page is named.
    ///
    /// # Errors
    /// Writes cannot be tracked; the migration ends before the destination has a page.
    fn start_tracking(&self) -> Result<()> {
        Ok(())
    }

    /// Stops tracking. Called at the end of every migration, before a guest is started again.
    ///
    /// # Errors
    /// The guest may still be slowed down; the result of the migration does not change.
    fn stop_tracking(&self) -> Result<()> {
        Ok(())
    }

    /// The state of the pages from `page` on, without touching them: at least one page, all alike.
    fn extent(&self, page: PageRef) -> Extent;

    /// Starts [`Self::prepare`] without waiting for it. In postcopy that call follows, for the same bytes.
    fn request(&self, page: PageRef, length: u64) {}

    /// Announces that `length` bytes from `page` on are about to be sent: a guest that has to fetch or verify
    /// them does it now. In precopy a unit: 2 MiB, or less at the block's end (a live guest's later passes:
    /// the dirty part of one). In postcopy whole [`Self::unit_bytes`], several of them within 2 MiB, by
    /// several threads at once; faults first, and nothing that is prepared already.
    ///
    /// # Errors
    /// The memory cannot be fetched or fails its verification; the migration ends.
    fn prepare(&self, page: PageRef, length: u64) -> Result<()> {
        Ok(())
    }

    /// Bytes that are prepared for one fault: a power of two from 64 KiB to 2 MiB.
    fn unit_bytes(&self) -> u64 {
        64 << 10
    }

    /// Releases prepared bytes; they are not read again without being prepared again, so a cache of fetched
    /// memory can drop them. Postcopy releases each unit; precopy, which reads once, does not.
    fn release(&self, page: PageRef, length: u64) {}

    /// The memory of `length` bytes from `page` on, within one block and not across a multiple of 2 MiB of
    /// it, so each such unit may be in another place. With zero-copy sends the kernel reads it after the call
    /// too: until [`crate::Outgoing::run`] returns it must stay mapped, keep its length and belong to this
    /// guest.
    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_>;

    /// The same memory, if nothing can change it while it is read: it is compressed in place; other memory is
    /// copied first.
    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        None
    }

    /// Returns true if a page of an [`ExtentKind::Unknown`] extent is zero now.
    fn is_zero(&self, page: PageRef) -> bool {
        false
    }

    /// Takes the pages written since the last call and reports each run of them. A guest that cannot change
    /// reports none.
    ///
    /// # Errors
    /// The tracker failed; pages may have been missed, so the migration ends.
    fn harvest_dirty(&self, report: &mut dyn FnMut(PageRef, u64)) -> Result<()> {
        Ok(())
    }

    /// Stops the guest; its memory does not change from then on.
    ///
    /// # Errors
    /// The guest runs on.
    fn stop(&self) -> Result<()> {
        Ok(())
    }

    /// Lets a guest that [`Self::stop`] stopped run again, because the migration failed. Not called where it
    /// was not.
    ///
    /// # Errors
    /// The guest is still stopped.
    fn start(&self) -> Result<()> {
        Ok(())
    }

    /// The device state of the stopped guest, as [`DeviceState::bytes`] has it.
    ///
    /// # Errors
    /// The device state is not available.
    fn device_state(&self) -> Result<Vec<u8>>;
}

/// Pages that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Number of pages, at least 1, within the block.
    pub pages: u64,
    /// Kind of all these pages.
    pub kind: ExtentKind,
}

/// Knowledge about a page without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Content to send.
    Data,
    /// Zero.
    Zero,
    /// Must be read to find out.
    Unknown,
}

/// The part of an incoming stream on which an item arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelId {
    /// The main channel.
    Main,
    /// The lane of this number.
    Lane(usize),
}

/// Contents of pages of one block, where they were received.
#[derive(Debug, Clone, Copy)]
pub struct Pages<'a> {
    /// The block.
    pub block: BlockIndex,
    /// Each page's offset in it.
    pub offsets: &'a [u64],
    /// The contents in the same order; each slice holds one page or several.
    pub contents: &'a [&'a [u8]],
}

/// Runs of consecutive pages among these of a block: the first page and the length in bytes.
pub(crate) fn runs_of(block: BlockIndex, offsets: &[u64]) -> impl Iterator<Item = (PageRef, u64)> + '_ {
    offsets
        .chunk_by(|first, second| first.checked_add(PAGE_SIZE) == Some(*second))
        .map(move |run| (PageRef { block, offset: run[0] }, run.len() as u64 * PAGE_SIZE))
}

/// Receiver of a guest. Methods that name pages are called from every lane's thread at once; between two
/// barriers a page comes at most once, or on one stream only.
#[expect(unused_variables, reason = "defaults need none of their arguments")]
pub trait Sink: Sync {
    /// The stream's beginning.
    ///
    /// # Errors
    /// The sink refuses this guest.
    fn configuration(&self, configuration: &Configuration) -> Result<()>;

    /// The complete block list.
    ///
    /// # Errors
    /// The guest does not fit.
    fn blocks(&self, blocks: &[RamBlock]) -> Result<()>;

    /// Blocks of images that the destination's memory is before any page arrives: a source may leave out pages with equal content. Of a
    /// destination that reports them, known once [`Self::blocks`] has returned.
    fn bases(&self) -> Vec<BaseId> {
        Vec::new()
    }

    /// Memory into which the contents of `length` bytes from `page` on can be received directly; `None`: they
    /// are received into a buffer and given to [`Self::pages`].
    ///
    /// Nothing may use this memory before [`Self::commit`]: a lane with TLS decrypts pages into it before it
    /// has authenticated them, and when that fails, and the migration with it, they hold bytes that the
    /// source did not send.
    fn buffer_for(&self, page: PageRef, length: u64) -> Option<IoBufMut<'_>> {
        None
    }

    /// Pages whose contents were received into [`Self::buffer_for`].
    ///
    /// # Errors
    /// As [`Self::pages`].
    fn pages_received_in_place(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        Ok(())
    }

    /// Takes the contents of the next `offsets.len()` pages directly from `from`, and nothing else: for a
    /// sink that forwards pages unseen. Returns the number of calls. `None`: deliver them by [`Self::pages`].
    ///
    /// # Errors
    /// As [`Self::pages`].
    fn splice_from(
        &self,
        stream: ChannelId,
        from: &dyn Channel,
        block: BlockIndex,
        offsets: &[u64],
    ) -> Option<Result<u64>> {
        None
    }

    /// Returns true if [`Self::splice_records`] may be called for pages that come on `from`, the main
    /// channel.
    fn splices_records(&self, from: &dyn Channel) -> bool {
        false
    }

    /// As [`Self::splice_from`] for the main channel: takes the records of these pages, which continue the
    /// block of the previous record, each followed by its page.
    ///
    /// # Errors
    /// As [`Self::pages`].
    fn splice_records(&self, from: &dyn Channel, block: BlockIndex, offsets: &[u64]) -> Option<Result<u64>> {
        None
    }

    /// Pages received with content.
    ///
    /// # Errors
    /// The pages cannot be stored; the migration ends.
    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()>;

    /// Ticket of the contents that were given to [`Self::pages`] on this stream and are read without a copy:
    /// their buffer is not reused before it is done. The default is done from the beginning.
    fn zero_copy_ticket(&self, stream: ChannelId) -> ZeroCopyTicket {
        ZeroCopyTicket::default()
    }

    /// Pages that are zero.
    ///
    /// # Errors
    /// As [`Self::pages`].
    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()>;

    /// Reads the present content of a page; XBZRLE sends only differences.
    ///
    /// # Errors
    /// The page cannot be read back.
    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()>;

    /// All lanes are at a barrier: pages after it may replace pages before it. Called with every lane
    /// waiting.
    ///
    /// # Errors
    /// The migration ends.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    /// A `ram` section begins on the main channel.
    ///
    /// # Errors
    /// The migration ends.
    fn section_start(&self, section: RamSection) -> Result<()> {
        Ok(())
    }

    /// A `ram` section is complete.
    ///
    /// # Errors
    /// The migration ends.
    fn section_end(&self, kind: SectionKind) -> Result<()> {
        Ok(())
    }

    /// The guest is stopped at its source, and this is its device state. All memory has arrived.
    ///
    /// # Errors
    /// The device state cannot be stored; the source's guest runs on.
    fn device_state(&self, state: DeviceState) -> Result<()>;

    /// The stream is complete. Returns only when the guest is safe here, because the source is acknowledged
    /// next.
    ///
    /// # Errors
    /// The guest is not safe here; its source keeps it.
    fn commit(&self) -> Result<()>;

    /// The last step: makes the committed guest visible. Called when the migration can no longer be
    /// cancelled, so a cancelled one leaves nothing; or later by the caller
    /// ([`Publication::ByCaller`](crate::incoming::Publication::ByCaller)).
    ///
    /// # Errors
    /// The guest is not visible here; its source keeps it.
    fn publish(&self) -> Result<()> {
        Ok(())
    }

    /// The source opened a return path: for a sink that sends further messages there (a relay forwards those
    /// of its destination).
    fn return_path(&self, writer: ReturnPathWriter) {
        drop(writer);
    }
}

/// Writes messages to the source, whole ones, from any thread. Clones share the lock, which is held while a
/// message is sent: a call may send a part of it, and the rest in another.
#[derive(Debug, Clone)]
pub struct ReturnPathWriter(Arc<Mutex<Arc<dyn Channel>>>);

impl ReturnPathWriter {
    pub(crate) fn new(channel: Arc<dyn Channel>) -> Self {
        Self(Arc::new(Mutex::new(channel)))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The source is gone.
    pub fn send(&self, message: &ReturnPathMessage) -> Result<()> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        lock(&self.0).send_all(&[IoBuf::from(&bytes[..])], SendFlags::empty())?;
        Ok(())
    }
}

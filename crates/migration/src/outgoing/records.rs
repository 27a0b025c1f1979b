//! Records of a main channel with their pages: record, page, record, page in one vectored call, no page
//! copied.
//!
//! Precopy and postcopy write the same records; the order is enforced by the protocol's states, which belong
//! to the caller.

use std::sync::Arc;

use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags, Splice};
use towline_protocol::ram::{CONTINUED_RECORD_BYTES, PAGE_SIZE};
use towline_protocol::source::RamWriter;
use towline_protocol::{BlockIndex, PageRef};

use crate::statistics::Statistics;
use crate::{ExtentKind, Guest, Result};

/// Pages of one vectored call: two buffers each, within the kernel's 1024.
const CALL_PAGES_MAX: usize = 256;
/// A record that continues a block, and its page.
const RECORD_AND_PAGE_BYTES: usize = CONTINUED_RECORD_BYTES + PAGE_SIZE as usize;

/// One channel's sending side.
#[derive(Debug)]
pub(crate) struct RecordSender {
    channel: Arc<dyn Channel>,
    statistics: Arc<Statistics>,
    /// Written and not yet sent.
    pending: Vec<u8>,
    /// Made when it is needed first.
    splice: Option<Splice>,
}

/// Pages to be sent, each with its position in the pending bytes.
type Marks<'a> = Vec<(usize, IoBuf<'a>)>;

impl RecordSender {
    pub(crate) fn new(channel: Arc<dyn Channel>, statistics: Arc<Statistics>) -> Self {
        Self { channel, statistics, pending: Vec::new(), splice: None }
    }

    pub(crate) fn channel(&self) -> &dyn Channel {
        self.channel.as_ref()
    }

    /// The pending bytes of the channel, to be appended to.
    pub(crate) fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Writes pages as zero.
    pub(crate) fn zero(&mut self, records: &mut RamWriter, block: BlockIndex, offsets: &[u64]) {
        for &offset in offsets {
            records.zero(PageRef { block, offset }, &mut self.pending);
        }
        Statistics::add(&self.statistics.duplicate, offsets.len() as u64);
    }

    /// Sends the pages with content of these bytes of the guest, which are prepared, and all before them;
    /// records of zero pages after the last of them may be pending. Returns the bytes of pages with content.
    pub(crate) fn unit(
        &mut self,
        records: &mut RamWriter,
        guest: &dyn Guest,
        page: PageRef,
        length: u64,
    ) -> Result<u64> {
        let (mut marks, mut sent, mut zeros) = (Vec::with_capacity(CALL_PAGES_MAX), 0, 0);
        for (offset, is_zero) in classify(guest, page, length) {
            let page = PageRef { offset, ..page };
            if is_zero {
                // Its record goes between those of the pages, in the same call.
                records.zero(page, &mut self.pending);
                zeros += 1;
                continue;
            }
            records.page(page, &mut self.pending);
            marks.push((self.pending.len(), guest.memory(page, PAGE_SIZE)));
            sent += PAGE_SIZE;
            if marks.len() == CALL_PAGES_MAX {
                self.send(&mut marks)?;
            }
        }
        Statistics::add(&self.statistics.duplicate, zeros);
        self.send(&mut marks)?;
        Ok(sent)
    }

    /// Sends pages, each with its content, which is one page long.
    pub(crate) fn pages(
        &mut self,
        records: &mut RamWriter,
        block: BlockIndex,
        offsets: &[u64],
        contents: &[IoBuf<'_>],
    ) -> Result<()> {
        let mut marks = Vec::with_capacity(offsets.len().min(CALL_PAGES_MAX));
        for (&offset, &content) in offsets.iter().zip(contents) {
            records.page(PageRef { block, offset }, &mut self.pending);
            marks.push((self.pending.len(), content));
            if marks.len() == CALL_PAGES_MAX {
                self.send(&mut marks)?;
            }
        }
        self.send(&mut marks)
    }

    /// Sends `pages` records, each with its page, which come next on `from`. Returns the number of calls;
    /// `None` if there is no pipe for it.
    pub(crate) fn splice(&mut self, from: &dyn Channel, pages: usize) -> Result<Option<u64>> {
        if self.splice.is_none() {
            self.splice = Splice::new().inspect_err(|error| tracing::debug!(%error, "no splicing")).ok();
        }
        if self.splice.is_none() {
            return Ok(None);
        }
        if !self.pending.is_empty() {
            self.send_pending(SendFlags::MORE)?;
        }
        let Some(splice) = &self.splice else { return Ok(None) };
        let bytes = pages * RECORD_AND_PAGE_BYTES;
        let calls = splice.move_exact(from, self.channel.as_ref(), bytes)?;
        self.statistics.count_spliced(pages as u64, bytes as u64, calls);
        Ok(Some(calls))
    }

    /// Sends what is pending.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.flush_if(1)
    }

    /// Flushes the pending bytes if there are at least `bytes`.
    pub(crate) fn flush_if(&mut self, bytes: usize) -> Result<()> {
        if self.pending.len() >= bytes {
            self.send_pending(SendFlags::empty())?;
        }
        Ok(())
    }

    /// Sends bytes that are no records.
    pub(crate) fn send_bytes(&self, bytes: &[u8], flags: SendFlags) -> Result<()> {
        self.channel.send_all(&[IoBuf::from(bytes)], flags)?;
        Statistics::add(&self.statistics.transferred, bytes.len() as u64);
        Ok(())
    }

    fn send_pending(&mut self, flags: SendFlags) -> Result<()> {
        self.send_bytes(&self.pending, flags)?;
        self.pending.clear();
        Ok(())
    }

    /// Sends what is pending, and after each mark its page; without a mark it stays pending.
    fn send(&mut self, marks: &mut Marks<'_>) -> Result<()> {
        if marks.is_empty() {
            return Ok(());
        }
        let mut buffers = Vec::with_capacity(2 * marks.len() + 1);
        let mut start = 0;
        for &(end, content) in marks.iter() {
            buffers.extend([IoBuf::from(&self.pending[start..end]), content]);
            start = end;
        }
        if start < self.pending.len() {
            buffers.push(IoBuf::from(&self.pending[start..]));
        }
        self.channel.send_all(&buffers, SendFlags::empty())?;
        let (pages, bytes) = (marks.len() as u64, self.pending.len() as u64);
        self.statistics.count_content_pages(pages, bytes + pages * PAGE_SIZE);
        self.pending.clear();
        marks.clear();
        Ok(())
    }
}

/// Each page of a unit, and whether it is zero.
pub(super) fn classify(
    guest: &dyn Guest,
    page: PageRef,
    length: u64,
) -> impl Iterator<Item = (u64, bool)> + '_ {
    let end = page.offset + length;
    let mut extent_end = page.offset;
    let mut kind = ExtentKind::Unknown;
    (page.offset..end).step_by(PAGE_SIZE as usize).map(move |offset| {
        let page = PageRef { block: page.block, offset };
        if offset >= extent_end {
            let extent = guest.extent(page);
            extent_end = offset + extent.pages * PAGE_SIZE;
            kind = extent.kind;
        }
        let zero = match kind {
            ExtentKind::Data => false,
            ExtentKind::Zero => true,
            ExtentKind::Unknown => guest.is_zero(page),
        };
        (offset, zero)
    })
}

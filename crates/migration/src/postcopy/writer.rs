//! Records and pages onto one channel: record, page, record, page in one vectored call, no page copied.

use std::sync::Arc;

use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags};
use towline_protocol::PageRef;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::RamWriter;

use crate::outgoing::classify;
use crate::statistics::Statistics;
use crate::{Guest, Result};

/// Pages of one call: two buffers each, within the kernel's 1024.
const CALL_PAGES_MAX: usize = 256;

/// One channel's sending side.
#[derive(Debug)]
pub(super) struct Writer {
    channel: Arc<dyn Channel>,
    statistics: Arc<Statistics>,
    /// Written and not yet sent.
    pending: Vec<u8>,
}

impl Writer {
    pub(super) fn new(channel: Arc<dyn Channel>, statistics: Arc<Statistics>) -> Self {
        Self { channel, statistics, pending: Vec::new() }
    }

    /// What comes next on the channel, to be written into.
    pub(super) fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Sends these bytes of the guest, which are prepared, and all before them. Returns the bytes of pages with content.
    pub(super) fn pages(
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

    /// Sends what was written.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.send(&mut Vec::new())
    }

    /// Sends what is pending, and behind each mark its page.
    fn send(&mut self, marks: &mut Vec<(usize, IoBuf<'_>)>) -> Result<()> {
        if self.pending.is_empty() {
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
        match pages {
            0 => Statistics::add(&self.statistics.transferred, bytes),
            pages => self.statistics.count_pages(pages, bytes + pages * PAGE_SIZE, buffers.len()),
        }
        self.pending.clear();
        marks.clear();
        Ok(())
    }
}

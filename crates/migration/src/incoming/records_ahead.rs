//! Records of pages that a main channel holds, seen before they are received: a relay splices the pages to
//! its destination, memory receives them in place, and an image receives them in whole pages.
//!
//! ```text
//!   channel   record page │ record page │ record page │ …      stays there
//!   peek      headers[0] gap  headers[1] gap  headers[2] gap   one call; all gaps are the same memory
//! ```
//! Only records of [`CONTINUED_RECORD_BYTES`] are evaluated, as they all have one length. The first other
//! record ends a run. The number of records peeked grows step by step, because the call copies the pages too
//! (into the processor's nearest cache).
//!
//! The records are evaluated here and forwarded from the channel. A process that spliced its own memory into
//! a Unix socket could change them in between: the destination then receives what that source could have sent
//! to it directly.

use towline_channel::{Channel, RecvFlags, total_len_mut, with_gaps};
use towline_protocol::ram::{CONTINUED_RECORD_BYTES, PAGE_SIZE, is_continued_page};

use crate::Result;

const PAGE: usize = PAGE_SIZE as usize;
/// Records looked for first.
const LOOK_MIN: usize = 4;
/// Maximum number of records that are peeked: a Unix socket with its usual buffer holds 51.
pub(super) const LOOK_MAX: usize = 64;

/// A record that continues the block of the record before.
pub(super) type Record = [u8; CONTINUED_RECORD_BYTES];

/// See the module.
#[derive(Debug)]
pub(super) struct RecordsAhead {
    records: Vec<Record>,
    gap: Vec<u8>,
    look: usize,
}

impl RecordsAhead {
    pub(super) fn new() -> Self {
        Self { records: vec![[0; CONTINUED_RECORD_BYTES]; LOOK_MAX], gap: vec![0; PAGE], look: LOOK_MIN }
    }

    /// Waits for input, and returns the records of pages with which it begins; none at the stream's end.
    pub(super) fn peek(&mut self, channel: &dyn Channel) -> Result<&[Record]> {
        let mut room = with_gaps(&mut self.records[..self.look], &mut self.gap);
        let wanted = total_len_mut(&room);
        let got = channel.recv(&mut room, RecvFlags::PEEK)?;
        let complete = (got + PAGE) / (CONTINUED_RECORD_BYTES + PAGE);
        let records = &self.records[..complete];
        let run = records.iter().position(|&record| !is_continued_page(record)).unwrap_or(complete);
        self.look = match (run == complete, got == wanted) {
            (true, true) => (2 * self.look).min(LOOK_MAX),
            (true, false) => self.look,
            (false, _) => LOOK_MIN,
        };
        Ok(&self.records[..run])
    }
}

#[cfg(test)]
mod tests {
    use towline_channel::{ChannelExt, IoBuf, IoBufMut, SendFlags, pair};
    use towline_protocol::ram::RamFlags;

    use super::*;

    fn record(offset: u64, flags: RamFlags) -> Record {
        (offset | flags.bits()).to_be_bytes()
    }

    /// Sends `pages` records with pages, and then `rest`; returns the number of records that are seen each
    /// time, if they are received as a relay does.
    fn seen(pages: u64, rest: &[u8]) -> Vec<usize> {
        let (near, far) = pair(8 << 20);
        let continued = RamFlags::PAGE | RamFlags::CONTINUE;
        for page in 0..pages {
            let content = [page as u8; PAGE];
            let record = record(page * PAGE_SIZE, continued);
            near.send_all(&[IoBuf::from(&record), IoBuf::from(&content)], SendFlags::empty()).unwrap();
        }
        near.send_all(&[IoBuf::from(rest)], SendFlags::empty()).unwrap();
        drop(near);
        let (mut ahead, mut next, mut numbers) = (RecordsAhead::new(), 0, Vec::new());
        loop {
            let records = ahead.peek(&far).unwrap();
            for &found in records {
                assert_eq!(found, record(next * PAGE_SIZE, continued));
                next += 1;
            }
            numbers.push(records.len());
            if records.is_empty() {
                return numbers;
            }
            let mut run = vec![0; records.len() * (CONTINUED_RECORD_BYTES + PAGE)];
            far.recv_exact(&mut [IoBufMut::from(&mut run[..])]).unwrap();
        }
    }

    #[test]
    fn runs_grow_until_another_record() {
        let zero = [&record(0, RamFlags::ZERO | RamFlags::CONTINUE)[..], &[0; 20_000]].concat();
        assert_eq!(seen(100, &zero), [4, 8, 16, 32, 40, 0]);
    }

    #[test]
    fn a_stream_may_end_in_a_record() {
        assert_eq!(seen(3, &record(0, RamFlags::PAGE | RamFlags::CONTINUE)[..7]), [3, 0]);
        assert_eq!(seen(0, &[]), [0]);
    }

    #[test]
    fn the_page_of_the_last_record_may_be_missing() {
        let (near, far) = pair(1 << 20);
        let last = record(0, RamFlags::PAGE | RamFlags::CONTINUE);
        near.send_all(&[IoBuf::from(&last)], SendFlags::empty()).unwrap();
        assert_eq!(RecordsAhead::new().peek(&far).unwrap(), [last]);
    }
}

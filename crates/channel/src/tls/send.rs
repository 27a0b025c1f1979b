//! The sending half: pages are sealed from their own memory into records.

use super::keys::Keys;
use super::record::{
    CONTENT_BYTES_MAX, HEADER_BYTES, Protection, RECORD_BYTES_MAX, RecordContent, TRAILER_BYTES,
};
use crate::framed::Pack;
use crate::{IoBuf, IoCursor, Result};
use std::ops::Range;
use std::sync::Arc;

/// Room for one batch of records, which stays in a processor's second-level cache beside the pages being
/// sealed.
pub(super) const BATCH_BYTES: usize = 16 * RECORD_BYTES_MAX;
/// The alert that ends a stream in order (RFC 8446, section 6.1).
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
/// A KeyUpdate that does not request one in return (RFC 8446, section 4.6.3).
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// The sending half.
#[derive(Debug)]
pub(super) struct Sealer {
    protection: Protection,
    keys: Arc<Keys>,
}

impl Sealer {
    pub(super) fn new(protection: Protection, keys: Arc<Keys>) -> Self {
        Self { protection, keys }
    }

    fn seal_one(&mut self, content: &[u8], kind: RecordContent, room: &mut [u8]) -> Range<usize> {
        let record = &mut room[..HEADER_BYTES + content.len() + TRAILER_BYTES];
        self.protection.seal(&mut IoCursor::new(&[IoBuf::from(content)]), record, kind);
        0..record.len()
    }
}

impl Pack for Sealer {
    /// A key update, before the old key expires or at the peer's request.
    fn due(&mut self, room: &mut [u8], peer: &str) -> Result<Option<Range<usize>>> {
        if !self.keys.take_request() && !self.protection.is_worn() {
            return Ok(None);
        }
        let record = self.seal_one(&KEY_UPDATE, RecordContent::Handshake, room);
        self.protection = self.keys.next_to_send(peer)?;
        Ok(Some(record))
    }

    fn pack(&mut self, data: &mut IoCursor<'_, '_>, room: &mut [u8]) -> Range<usize> {
        let mut end = 0;
        while !data.is_empty() && end + RECORD_BYTES_MAX <= room.len() && !self.protection.is_worn() {
            let length = HEADER_BYTES + content_length(data) + TRAILER_BYTES;
            self.protection.seal(data, &mut room[end..end + length], RecordContent::Data);
            end += length;
        }
        0..end
    }

    fn end(&mut self, room: &mut [u8]) -> Range<usize> {
        self.seal_one(&CLOSE_NOTIFY, RecordContent::Alert, room)
    }
}

/// Length of the next record's content. A first buffer before the others (the header of a packet) gets its
/// own record if that adds none: the pages then start on a record boundary, and the peer decrypts them in
/// place.
fn content_length(data: &IoCursor<'_, '_>) -> usize {
    let (all, first) = (data.remaining(), data.first().map_or(0, |buf| buf.len()));
    let records = |bytes: usize| bytes.div_ceil(CONTENT_BYTES_MAX);
    if records(first) + records(all - first) == records(all) {
        first.min(CONTENT_BYTES_MAX)
    } else {
        all.min(CONTENT_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of the records' contents for buffers of these lengths.
    fn contents(buffers: &[usize]) -> Vec<usize> {
        let memory = vec![0; buffers.iter().copied().max().unwrap_or(0)];
        let bufs: Vec<_> = buffers.iter().map(|length| IoBuf::from(&memory[..*length])).collect();
        let mut cursor = IoCursor::new(&bufs);
        let mut lengths = Vec::new();
        while !cursor.is_empty() {
            lengths.push(content_length(&cursor));
            cursor.advance(lengths[lengths.len() - 1]);
        }
        lengths
    }

    #[test]
    fn a_header_has_a_record_of_its_own_if_that_costs_none() {
        let packet = [&[1344][..], &[4096; 128]].concat();
        assert_eq!(contents(&packet), [&[1344][..], &[CONTENT_BYTES_MAX; 32]].concat());
        assert_eq!(contents(&[100, 4096]), [4196]);
        assert_eq!(contents(&[0, 100, 40_000]), [16_384, 16_384, 7332]);
        assert_eq!(contents(&[40_000, 100]), [16_384, 16_384, 7332]);
        assert_eq!(contents(&[4096; 8]), [16_384; 2]);
    }
}

//! The sending half: pages are gathered into records, and sealed in place.

use super::keys::Keys;
use super::record::{CONTENT_BYTES_MAX, Content, HEADER_BYTES, Protection, RECORD_BYTES_MAX, TRAILER_BYTES};
use crate::framed::Pack;
use crate::{IoCursor, Result, gather};
use std::ops::Range;
use std::sync::Arc;

/// Room for one batch of records: what they take stays in a processor's second-level cache beside the pages that go in.
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

    fn seal_one(&mut self, content: &[u8], kind: Content, room: &mut [u8]) -> Range<usize> {
        let record = &mut room[..HEADER_BYTES + content.len() + TRAILER_BYTES];
        record[HEADER_BYTES..HEADER_BYTES + content.len()].copy_from_slice(content);
        self.protection.seal(record, kind);
        0..record.len()
    }
}

impl Pack for Sealer {
    /// A key update, before the old key expires or at the peer's request.
    fn due(&mut self, room: &mut [u8], peer: &str) -> Result<Option<Range<usize>>> {
        if !self.keys.take_request() && !self.protection.is_worn() {
            return Ok(None);
        }
        let record = self.seal_one(&KEY_UPDATE, Content::Handshake, room);
        self.protection = self.keys.next_to_send(peer)?;
        Ok(Some(record))
    }

    fn pack(&mut self, data: &mut IoCursor<'_, '_>, room: &mut [u8]) -> Range<usize> {
        let mut end = 0;
        while !data.is_empty() && end + RECORD_BYTES_MAX <= room.len() && !self.protection.is_worn() {
            let record = &mut room[end..end + RECORD_BYTES_MAX];
            let content = &mut record[HEADER_BYTES..HEADER_BYTES + CONTENT_BYTES_MAX];
            let mut length = 0;
            while length < CONTENT_BYTES_MAX && !data.is_empty() {
                let gathered = gather(data.chunk(), &mut content[length..]);
                data.advance(gathered);
                length += gathered;
            }
            let record = &mut record[..HEADER_BYTES + length + TRAILER_BYTES];
            self.protection.seal(record, Content::Data);
            end += record.len();
        }
        0..end
    }

    fn end(&mut self, room: &mut [u8]) -> Range<usize> {
        self.seal_one(&CLOSE_NOTIFY, Content::Alert, room)
    }
}

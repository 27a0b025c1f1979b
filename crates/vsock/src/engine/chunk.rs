//! Payload that was copied because the socket was full, and the ends of messages in it.
//!
//! ```text
//!   bytes     sent │ offset ► waiting │ room up to the size of the chunk
//!   messages  one bit for each byte: set for the last byte of a message
//!   records   the same for records
//! ```
//! The marks take two bits per byte for any lengths of messages, so messages of one byte take no more memory
//! than is reserved for their window ([`ConnectionLimits::cost`](crate::ConnectionLimits::cost)).

use crate::packet::{SeqFlags, SocketType};

/// Minimum growth of a buffer in bytes.
const STEP_BYTES: usize = 512;

/// A part of the copied payload.
#[derive(Debug, Default)]
pub(super) struct PayloadChunk {
    bytes: Vec<u8>,
    /// Number of bytes that were sent.
    offset: usize,
    size: usize,
    messages: Vec<u64>,
    records: Vec<u64>,
}

impl PayloadChunk {
    /// Creates an empty chunk for up to `size` bytes.
    pub(super) fn new(size: usize) -> Self {
        Self { size, ..Self::default() }
    }

    /// Returns the number of bytes that can be appended.
    pub(super) fn room(&self) -> usize {
        self.size.saturating_sub(self.bytes.len())
    }

    /// Returns true if all of it was sent.
    pub(super) fn is_sent(&self) -> bool {
        self.offset == self.bytes.len()
    }

    /// Appends `len` bytes, at most [`PayloadChunk::room`], that `fill` writes.
    pub(super) fn append(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) {
        let (start, capacity) = (self.bytes.len(), self.bytes.capacity());
        let end = start + len;
        if end > capacity {
            let grown = (capacity + capacity / 4 + STEP_BYTES).min(self.size).max(end);
            self.bytes.reserve_exact(grown - start);
        }
        self.bytes.resize(end, 0);
        fill(&mut self.bytes[start..]);
    }

    /// Marks the last byte as the end of a message. Returns false if all was sent, or the byte is marked
    /// already.
    pub(super) fn end_message(&mut self, flags: SeqFlags) -> bool {
        if self.is_sent() {
            return false;
        }
        let (last, words) = (self.bytes.len() - 1, self.bytes.capacity().div_ceil(64));
        if bit(&self.messages, last) {
            return false;
        }
        set(&mut self.messages, last, words);
        if flags.contains(SeqFlags::EOR) {
            set(&mut self.records, last, words);
        }
        true
    }

    /// Returns the bytes that were not sent. For messages, those are the bytes up to the end of the first
    /// one, with its flags; without flags the message continues in the next chunk.
    pub(super) fn front(&self, kind: SocketType) -> (&[u8], SeqFlags) {
        let last = match kind {
            SocketType::Stream => None,
            SocketType::Seqpacket => next(&self.messages, self.offset),
        };
        let Some(last) = last else { return (&self.bytes[self.offset..], SeqFlags::empty()) };
        let flags = if bit(&self.records, last) { SeqFlags::all() } else { SeqFlags::EOM };
        (&self.bytes[self.offset..=last], flags)
    }

    /// Marks up to `bytes` bytes as sent. Returns the number of them that were in this chunk.
    pub(super) fn advance(&mut self, bytes: usize) -> usize {
        let here = bytes.min(self.bytes.len() - self.offset);
        self.offset += here;
        here
    }

    /// Returns its memory in bytes.
    pub(super) fn footprint(&self) -> usize {
        size_of::<Self>() + self.bytes.capacity() + 8 * (self.messages.capacity() + self.records.capacity())
    }
}

fn bit(words: &[u64], at: usize) -> bool {
    words.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 != 0)
}

fn set(words: &mut Vec<u64>, at: usize, most: usize) {
    if words.len() <= at / 64 {
        words.reserve_exact(most - words.len());
        words.resize(most, 0);
    }
    words[at / 64] |= 1 << (at % 64);
}

/// Returns the first set bit at or after `from`.
fn next(words: &[u64], from: usize) -> Option<usize> {
    let first = words.get(from / 64)? & (u64::MAX << (from % 64));
    let rest = words[from / 64 + 1..].iter().copied();
    let (index, word) = std::iter::once(first).chain(rest).enumerate().find(|(_, word)| *word != 0)?;
    Some((from / 64 + index) * 64 + word.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(chunk: &mut PayloadChunk, bytes: &[u8]) {
        chunk.append(bytes.len(), |room| room.copy_from_slice(bytes));
    }

    #[test]
    fn messages_keep_their_boundaries() {
        let mut chunk = PayloadChunk::new(1000);
        let lengths = [1, 63, 1, 64, 65, 200, 1, 1];
        let mut expected = Vec::new();
        for (index, len) in lengths.into_iter().enumerate() {
            let flags = if index % 3 == 0 { SeqFlags::all() } else { SeqFlags::EOM };
            let bytes = vec![index as u8; len];
            // In two parts, where it has two bytes.
            append(&mut chunk, &bytes[..len / 2]);
            append(&mut chunk, &bytes[len / 2..]);
            assert!(chunk.end_message(flags));
            assert!(!chunk.end_message(flags), "a byte ends one message");
            expected.push((bytes, flags));
        }
        append(&mut chunk, b"unfinished");
        assert_eq!(chunk.room(), 1000 - lengths.iter().sum::<usize>() - 10);
        for (bytes, flags) in expected {
            let (found, found_flags) = chunk.front(SocketType::Seqpacket);
            assert_eq!((found, found_flags), (&bytes[..], flags));
            assert_eq!(chunk.advance(bytes.len()), bytes.len());
        }
        assert_eq!(chunk.front(SocketType::Seqpacket), (&b"unfinished"[..], SeqFlags::empty()));
        assert_eq!(chunk.front(SocketType::Stream), (&b"unfinished"[..], SeqFlags::empty()));
        assert_eq!((chunk.advance(100), chunk.is_sent()), (10, true));
        assert!(!chunk.end_message(SeqFlags::EOM), "all was sent");
    }

    #[test]
    fn memory_is_bounded_whatever_the_messages_are() {
        for size in [1024, 32 << 10, 64 << 10] {
            let mut chunk = PayloadChunk::new(size);
            for _ in 0..size {
                append(&mut chunk, b"x");
                assert!(chunk.end_message(SeqFlags::all()));
                let len = chunk.bytes.len();
                let most = size_of::<PayloadChunk>() + len * 5 / 4 * 5 / 4 + 2 * STEP_BYTES;
                assert!(chunk.footprint() <= most, "{} bytes for {len} messages", chunk.footprint());
            }
            assert_eq!(chunk.room(), 0);
            assert!(chunk.footprint() <= size_of::<PayloadChunk>() + size * 5 / 4, "{}", chunk.footprint());
        }
    }
}

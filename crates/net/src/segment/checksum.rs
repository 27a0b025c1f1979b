//! The Internet checksum of IP, TCP and UDP (RFC 1071), over scattered bytes.
//!
//! Sums are in native byte order, which gives the same bytes on any machine (RFC 1071, 2B). Only parts that
//! begin at an odd offset are swapped.

/// Bytes that are added as one integer; 64 bits have room for the sum of any frame.
const STRIDE: usize = 4;

/// A running sum over consecutive parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    words: u64,
    /// True if the next byte is the second of a word.
    odd: bool,
}

impl Sum {
    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.append(of(bytes), bytes.len());
    }

    /// Adds the sum of the next `len` bytes, computed by [`of`].
    pub fn append(&mut self, sum: u16, len: usize) {
        let sum = if self.odd { sum.swap_bytes() } else { sum };
        self.words += u64::from(sum);
        self.odd ^= len % 2 == 1;
    }

    /// Adds a word that is big-endian on the wire.
    pub fn word(&mut self, word: u16) {
        self.append(word.to_be(), 2);
    }

    /// Contents of a checksum field that will be completed later: not inverted.
    pub fn partial(self) -> [u8; 2] {
        fold(self.words).to_ne_bytes()
    }

    /// Contents of a complete checksum field. 0 is replaced by 0xffff, its equivalent, as UDP reserves 0 for
    /// "no checksum".
    pub fn finish(self) -> [u8; 2] {
        match !fold(self.words) {
            0 => [0xff; 2],
            sum => sum.to_ne_bytes(),
        }
    }
}

/// Sum of these bytes, which begin at an even offset.
pub fn of(bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<STRIDE>();
    let sum: u64 = words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
    let mut last = [0; STRIDE];
    last[..rest.len()].copy_from_slice(rest);
    fold(sum + u64::from(u32::from_ne_bytes(last)))
}

fn fold(sum: u64) -> u16 {
    let mut sum = sum;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("a folded sum has 16 bits")
}

/// A checksum to be completed: it covers the frame from `start` on, and is stored `offset` bytes further,
/// where the guest has put the sum of the pseudo-header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartialChecksum {
    /// Offset of the first byte that is summed (`csum_start`).
    pub start: u16,
    /// Offset of the field from there (`csum_offset`).
    pub offset: u16,
}

impl PartialChecksum {
    /// Offset of the first byte after the field.
    pub(super) fn end(self) -> usize {
        usize::from(self.start) + usize::from(self.offset) + 2
    }

    /// Computes the checksum in software. `headers` is the beginning of the packet, with the field in it;
    /// `add_rest` adds the rest of the packet.
    ///
    /// # Panics
    /// If the field is not within `headers`.
    pub fn finish(self, headers: &mut [u8], add_rest: impl FnOnce(&mut Sum)) {
        let mut sum = Sum::default();
        sum.add(&headers[usize::from(self.start)..]);
        add_rest(&mut sum);
        let end = self.end();
        headers[end - 2..end].copy_from_slice(&sum.finish());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071_has_its_sum() {
        let mut sum = Sum::default();
        sum.add(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!((sum.partial(), sum.finish()), ([0xdd, 0xf2], [0x22, 0x0d]));
    }

    #[test]
    fn parts_at_odd_offsets_have_the_sum_of_the_whole() {
        let bytes: Vec<u8> = (0..251u8).map(|byte| byte.wrapping_mul(37)).collect();
        let mut whole = Sum::default();
        whole.add(&bytes);
        for (first, second) in [(0, 1), (1, 2), (3, 200), (7, 7), (250, 251)] {
            let mut parts = Sum::default();
            for part in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                parts.add(part);
            }
            assert_eq!(parts.partial(), whole.partial(), "{first} {second}");
        }
    }

    #[test]
    fn a_checksum_of_zero_is_sent_as_all_ones() {
        let mut sum = Sum::default();
        sum.add(&[0xff, 0xff]);
        assert_eq!(sum.finish(), [0xff, 0xff]);
    }
}

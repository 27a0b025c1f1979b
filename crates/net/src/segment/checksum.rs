//! The checksum of IP, TCP and UDP (RFC 1071), over bytes that lie in several places.
//!
//! A sum is kept in the order in which its bytes lie in memory, which is the same sum on any machine (RFC 1071, 2B): it
//! is stored as it is loaded, and nothing is swapped but what begins at an odd place.

/// Bytes that are summed in one go: their sum fits into 64 bits many times over.
const STRIDE: usize = 4;

/// A sum that grows by parts, as they follow each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    words: u64,
    /// Whether the next byte is the second of a word.
    odd: bool,
}

impl Sum {
    /// Adds the bytes that come next.
    pub fn add(&mut self, bytes: &[u8]) {
        self.append(of(bytes), bytes.len());
    }

    /// Adds the sum of `len` bytes that come next, as [`of`] has it.
    pub fn append(&mut self, sum: u16, len: usize) {
        let sum = if self.odd { sum.swap_bytes() } else { sum };
        self.words += u64::from(sum);
        self.odd ^= len % 2 == 1;
    }

    /// Adds a word as it is on the wire.
    pub fn word(&mut self, word: u16) {
        self.append(word.to_be(), 2);
    }

    /// What stands in a checksum's field while the rest is still to be added: not inverted.
    pub fn partial(self) -> [u8; 2] {
        fold(self.words).to_ne_bytes()
    }

    /// What stands in the field at the end. Never 0, which UDP takes for "none" and means the same as this.
    pub fn finish(self) -> [u8; 2] {
        match !fold(self.words) {
            0 => [0xff; 2],
            sum => sum.to_ne_bytes(),
        }
    }
}

/// The sum of these bytes, which begin at an even place.
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
    u16::try_from(sum).expect("it was folded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071() {
        let mut sum = Sum::default();
        sum.add(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!((sum.partial(), sum.finish()), ([0xdd, 0xf2], [0x22, 0x0d]));
    }

    #[test]
    fn parts_at_odd_places_sum_up_to_the_whole() {
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
    fn nothing_is_not_said_to_be_none() {
        let mut sum = Sum::default();
        sum.add(&[0xff, 0xff]);
        assert_eq!(sum.finish(), [0xff, 0xff]);
    }
}

//! A bitmap whose bits several threads set and clear.

use std::sync::atomic::{AtomicU64, Ordering};

/// A bitmap of little-endian 64-bit words. A set bit publishes what its thread wrote before.
#[derive(Debug)]
pub(crate) struct Bitmap {
    words: Vec<AtomicU64>,
}

impl Bitmap {
    /// A bitmap of `bits` cleared bits.
    pub(crate) fn new(bits: u64) -> Self {
        Self { words: (0..bits.div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn is_set(&self, bit: u64) -> bool {
        self.word(bit).load(Ordering::Acquire) & mask(bit) != 0
    }

    pub(crate) fn set(&self, bit: u64) {
        self.word(bit).fetch_or(mask(bit), Ordering::Release);
    }

    /// Clears a bit. Returns true if it was set.
    pub(crate) fn clear(&self, bit: u64) -> bool {
        self.word(bit).fetch_and(!mask(bit), Ordering::AcqRel) & mask(bit) != 0
    }

    /// Number of set bits.
    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Acquire).count_ones())).sum()
    }

    /// The bitmap as it is stored in a mapped-ram file.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Ordering::Acquire).to_le_bytes()).collect()
    }

    fn word(&self, bit: u64) -> &AtomicU64 {
        &self.words[(bit / 64) as usize]
    }
}

fn mask(bit: u64) -> u64 {
    1 << (bit % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_stored_in_little_endian_words() {
        let bitmap = Bitmap::new(65);
        [0, 9, 64].into_iter().for_each(|bit| bitmap.set(bit));
        assert!(bitmap.is_set(9) && !bitmap.is_set(8));
        assert_eq!((bitmap.clear(0), bitmap.clear(0), bitmap.count()), (true, false, 2));
        assert_eq!(bitmap.to_bytes(), [0, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
}

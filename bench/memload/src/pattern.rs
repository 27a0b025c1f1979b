//! Content of a synthetic guest's pages.
//!
//! ```text
//!   word 0   number of the page
//!   word 1   its generation
//!   word k   a hash of seed, number, generation and k            … or all 512 words are zero
//! ```
//!
//! Words are little-endian.

use std::fmt;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
const WORD_BYTES: usize = 8;
/// Words before the hashed ones.
const HEAD_WORDS: usize = 2;
/// 2^64 divided by the golden ratio: the steps of splitmix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Decides the content of every page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) seed: u64,
    pub(crate) zero_percent: u8,
}

/// A page with wrong content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("page {page} (at {:#x}) of {block:?} {content}; expected generation {expected}", page * PAGE_BYTES as u64)]
pub struct WrongPage {
    /// The RAM block.
    pub block: String,
    /// The page's number in it.
    pub page: u64,
    /// The generation that the source had when it stopped.
    pub expected: u32,
    /// Content that was found.
    pub content: WrongContent,
}

/// Content of a wrong page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrongContent {
    /// An earlier content of this page.
    Stale {
        /// The generation that is there.
        found: u32,
    },
    /// Another page, whole.
    Other {
        /// Number of the page that is there.
        found: u64,
    },
    /// Zero, and should not be.
    Zero,
    /// Parts of two contents.
    Torn {
        /// Offset of the first wrong word in bytes.
        offset: usize,
    },
}

impl fmt::Display for WrongContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale { found } => write!(f, "is stale: its generation {found} is there"),
            Self::Other { found } => write!(f, "holds page {found}"),
            Self::Zero => f.write_str("is zero"),
            Self::Torn { offset } => write!(f, "is torn or damaged from byte {offset:#x} on"),
        }
    }
}

impl Pattern {
    /// Returns true if a page of this generation is zero.
    pub(crate) fn is_zero(self, page: u64, generation: u32) -> bool {
        self.base(page, generation) % 100 < u64::from(self.zero_percent)
    }

    /// Writes what the page holds.
    pub(crate) fn fill(self, page: u64, generation: u32, content: &mut [u8; PAGE_BYTES]) {
        if self.is_zero(page, generation) {
            content.fill(0);
            return;
        }
        for (word, bytes) in self.words(page, generation).zip(content.chunks_exact_mut(WORD_BYTES)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The content of a page that is wrong.
    pub(crate) fn wrong_content(
        self,
        page: u64,
        generation: u32,
        content: &[u8; PAGE_BYTES],
    ) -> Option<WrongContent> {
        let offset = self.first_wrong(page, generation, content)?;
        if content.iter().all(|&byte| byte == 0) {
            return Some(WrongContent::Zero);
        }
        let word = |index: usize| {
            u64::from_le_bytes(
                content[index * WORD_BYTES..][..WORD_BYTES].try_into().expect("a word's length"),
            )
        };
        let found = word(0);
        Some(match u32::try_from(word(1)) {
            Ok(other) if self.first_wrong(found, other, content).is_none() => {
                if found == page {
                    WrongContent::Stale { found: other }
                } else {
                    WrongContent::Other { found }
                }
            }
            _ => WrongContent::Torn { offset },
        })
    }

    /// Where the first wrong word is.
    fn first_wrong(self, page: u64, generation: u32, content: &[u8; PAGE_BYTES]) -> Option<usize> {
        let words = content.chunks_exact(WORD_BYTES);
        let wrong = if self.is_zero(page, generation) {
            words.into_iter().position(|bytes| bytes != [0; WORD_BYTES])
        } else {
            words.zip(self.words(page, generation)).position(|(bytes, word)| bytes != word.to_le_bytes())
        };
        wrong.map(|word| word * WORD_BYTES)
    }

    fn words(self, page: u64, generation: u32) -> impl Iterator<Item = u64> {
        let base = self.base(page, generation);
        let hashed = (HEAD_WORDS as u64..).map(move |index| mix(base.wrapping_add(index.wrapping_mul(STEP))));
        [page, generation.into()].into_iter().chain(hashed)
    }

    fn base(self, page: u64, generation: u32) -> u64 {
        mix(mix(self.seed.wrapping_add(page.wrapping_mul(STEP))) ^ u64::from(generation))
    }
}

/// The finishing step of splitmix64: every bit of the result depends on every bit of the word.
pub(crate) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: Pattern = Pattern { seed: 7, zero_percent: 25 };

    fn page(number: u64, generation: u32) -> [u8; PAGE_BYTES] {
        let mut content = [0xff; PAGE_BYTES];
        PATTERN.fill(number, generation, &mut content);
        content
    }

    /// The first page from `from` on that is zero in this generation, or the first that is not.
    fn find(from: u64, generation: u32, is_zero: bool) -> u64 {
        (from..).find(|&number| PATTERN.is_zero(number, generation) == is_zero).unwrap()
    }

    #[test]
    fn each_wrong_content_is_distinguished() {
        let number = (0..).find(|&n| !PATTERN.is_zero(n, 3) && !PATTERN.is_zero(n, 2)).unwrap();
        let wrong_content = |content: &[u8; PAGE_BYTES]| PATTERN.wrong_content(number, 3, content);
        assert_eq!(wrong_content(&page(number, 3)), None);
        assert_eq!(wrong_content(&page(number, 2)), Some(WrongContent::Stale { found: 2 }));
        let other = find(number + 1, 3, false);
        assert_eq!(wrong_content(&page(other, 3)), Some(WrongContent::Other { found: other }));
        assert_eq!(wrong_content(&[0; PAGE_BYTES]), Some(WrongContent::Zero));
        let mut torn = page(number, 3);
        torn[2048..].copy_from_slice(&page(number, 2)[2048..]);
        assert_eq!(wrong_content(&torn), Some(WrongContent::Torn { offset: 2048 }));
        torn = page(number, 3);
        torn[4095] ^= 1;
        assert_eq!(wrong_content(&torn), Some(WrongContent::Torn { offset: 4088 }));
    }

    #[test]
    fn a_page_that_should_be_zero_is_compared_too() {
        let number = find(0, 1, true);
        assert_eq!(PATTERN.wrong_content(number, 1, &page(number, 1)), None);
        let before = find(0, 0, false);
        let wrong_content = PATTERN.wrong_content(number, 1, &page(before, 0));
        assert!(
            matches!(wrong_content, Some(WrongContent::Other { .. } | WrongContent::Stale { .. })),
            "{wrong_content:?}"
        );
        let mut content = [0; PAGE_BYTES];
        content[100] = 1;
        assert_eq!(PATTERN.wrong_content(number, 1, &content), Some(WrongContent::Torn { offset: 96 }));
    }

    #[test]
    fn the_share_of_zero_pages_is_about_what_was_asked_for() {
        let zero = (0..10_000).filter(|&number| PATTERN.is_zero(number, 0)).count();
        assert!((2300..2700).contains(&zero), "{zero}");
        assert!((0..1000).all(|number| !Pattern { zero_percent: 0, ..PATTERN }.is_zero(number, 0)));
        assert!((0..1000).all(|number| Pattern { zero_percent: 100, ..PATTERN }.is_zero(number, 0)));
    }
}

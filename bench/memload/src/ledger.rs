//! The expected content of each page of a stopped synthetic guest, as its device state.
//!
//! ```text
//!   section "towline-mem" 1:  be64 seed  u8 zero-percent  be64 pages  32 bytes BLAKE3  { varint count  varint generation }*
//! ```
//!
//! Pages stand in their order, those of the same generation in succession as one pair, and the hash covers
//! everything around it: a ledger that was damaged is refused rather than believed. Varints are LEB128.

use towline_protocol::device_state::{self, DeviceSection, DeviceState};
use towline_protocol::limits::RAM_BYTES_MAX;
use towline_protocol::ram::PAGE_SIZE;

use crate::pattern::Pattern;

const SECTION: &str = "towline-mem";
const VERSION: u32 = 1;
/// Seed, share of zero pages, pages.
const FACTS_BYTES: usize = 8 + 1 + 8;
const HASH_BYTES: usize = 32;

/// Generation of each page of a stopped synthetic guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    pub(crate) pattern: Pattern,
    pub(crate) generations: Vec<u32>,
}

/// Fault of a received ledger.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// The ledger has a version that is not known here.
    #[error(
        "the synthetic guest's ledger has version {found}, expected {VERSION}: run the same towline at both ends"
    )]
    Version {
        /// Version of the ledger.
        found: u32,
    },
    /// The ledger is truncated or too long.
    #[error("the synthetic guest's ledger is damaged: {what}")]
    Damaged {
        /// In what way.
        what: &'static str,
    },
    /// The ledger belongs to another guest.
    #[error("the synthetic guest's ledger has {found} pages, its memory {expected}")]
    Pages {
        /// Pages of the ledger.
        found: u64,
        /// Pages of the memory.
        expected: u64,
    },
}

impl Ledger {
    /// Number of times that the load has written a page.
    pub fn writes(&self) -> u64 {
        self.generations.iter().map(|&generation| u64::from(generation)).sum()
    }

    /// The device state of a guest that has nothing else.
    pub fn encode(&self) -> Vec<u8> {
        let (mut facts, mut runs) = (Vec::new(), Vec::new());
        facts.extend(self.pattern.seed.to_be_bytes());
        facts.push(self.pattern.zero_percent);
        facts.extend((self.generations.len() as u64).to_be_bytes());
        for run in self.generations.chunk_by(|first, second| first == second) {
            put_varint(&mut runs, run.len() as u64);
            put_varint(&mut runs, run[0].into());
        }
        let content = [&facts, hash(&facts, &runs).as_bytes().as_slice(), &runs].concat();
        device_state::encode(&[(SECTION, VERSION, &content)])
    }

    /// Decodes it; `None` if the guest is not a synthetic one.
    ///
    /// # Errors
    /// The guest is synthetic, and its ledger is damaged or of an unknown version.
    pub fn decode(state: &DeviceState) -> Result<Option<Self>, LedgerError> {
        let [device @ DeviceSection { name, version, .. }] = state.devices() else { return Ok(None) };
        if name != SECTION {
            return Ok(None);
        }
        if *version != VERSION {
            return Err(LedgerError::Version { found: *version });
        }
        let (body, cut) = (state.content(device), LedgerError::Damaged { what: "it is too short" });
        let (facts, rest) = body.split_at_checked(FACTS_BYTES).ok_or_else(|| cut.clone())?;
        let (digest, runs) = rest.split_at_checked(HASH_BYTES).ok_or(cut)?;
        if hash(facts, runs) != *<&[u8; HASH_BYTES]>::try_from(digest).expect("split there") {
            return Err(LedgerError::Damaged { what: "its BLAKE3 is another" });
        }
        let number = |at: usize| u64::from_be_bytes(facts[at..at + 8].try_into().expect("8 bytes"));
        let pattern = Pattern { seed: number(0), zero_percent: facts[8] };
        Ok(Some(Self { pattern, generations: generations(runs, number(9))? }))
    }

    pub(crate) fn check_pages(&self, expected: u64) -> Result<(), LedgerError> {
        let found = self.generations.len() as u64;
        if found == expected { Ok(()) } else { Err(LedgerError::Pages { found, expected }) }
    }
}

fn generations(mut runs: &[u8], pages: u64) -> Result<Vec<u32>, LedgerError> {
    let damaged = |what| LedgerError::Damaged { what };
    if pages > RAM_BYTES_MAX / PAGE_SIZE {
        return Err(damaged("it has more pages than a guest can have"));
    }
    let mut generations = Vec::new();
    while !runs.is_empty() {
        let count = take_varint(&mut runs).ok_or_else(|| damaged("a count is cut"))?;
        let generation = take_varint(&mut runs).and_then(|generation| u32::try_from(generation).ok());
        let generation = generation.ok_or_else(|| damaged("a generation is cut or too large"))?;
        let end = (generations.len() as u64).saturating_add(count);
        if end > pages {
            return Err(damaged("it has more pages than its header declares"));
        }
        generations.resize(usize::try_from(end).expect("pages of memory that is here"), generation);
    }
    if generations.len() as u64 == pages {
        Ok(generations)
    } else {
        Err(damaged("it has fewer pages than its header declares"))
    }
}

fn hash(facts: &[u8], runs: &[u8]) -> blake3::Hash {
    blake3::Hasher::new().update(facts).update(runs).finalize()
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take_varint(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        *input = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ledger(generations: Vec<u32>) -> Ledger {
        Ledger { pattern: Pattern { seed: 9, zero_percent: 25 }, generations }
    }

    proptest! {
        #[test]
        fn facts_written_are_read_back(generations in prop::collection::vec(prop_oneof![Just(0), Just(1), any::<u32>()], 0..300)) {
            let ledger = ledger(generations);
            let state = DeviceState::parse(&ledger.encode()).unwrap();
            prop_assert_eq!(Ledger::decode(&state), Ok(Some(ledger)));
        }
    }

    #[test]
    fn a_damaged_ledger_is_refused() {
        let bytes = ledger(vec![0, 0, 5, 1 << 20]).encode();
        let header_bytes = 1 + 4 + 1 + SECTION.len() + 4 + 4;
        for at in header_bytes..header_bytes + FACTS_BYTES + HASH_BYTES + 8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            let state = DeviceState::parse(&bytes).unwrap();
            assert_eq!(
                Ledger::decode(&state),
                Err(LedgerError::Damaged { what: "its BLAKE3 is another" }),
                "byte {at}"
            );
        }
    }

    #[test]
    fn a_ledger_that_lies_is_refused() {
        let lies = |pages: u64, runs: &[u8]| generations(runs, pages).unwrap_err().to_string();
        assert!(lies(3, &[4, 0]).ends_with("more pages than its header declares"));
        assert!(lies(3, &[2, 0]).ends_with("fewer pages than its header declares"));
        assert!(lies(3, &[3]).ends_with("a generation is cut or too large"));
        assert!(lies(3, &[0x80]).ends_with("a count is cut"));
        assert!(lies(u64::MAX, &[]).ends_with("more pages than a guest can have"));
        let all = [&[0xff_u8; 9][..], &[1, 0]].concat();
        assert!(lies(3, &all).ends_with("more pages than its header declares"));
    }
}

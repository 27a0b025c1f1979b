//! Checksums of packets, between two towlines: in header bytes that QEMU leaves zero and does not read.
//!
//! ```text
//!   header 40   "twl1"   be32 bit 31: of the pages too, bits 0–30: h₁   be64 Σ hᵢ   be64 Σ i·hᵢ       i = 1, 2, …
//!          h₁: the header with these 24 bytes zero      h₂ …: each page that follows, or all of them compressed
//! ```
//!
//! The hᵢ are the driver's 64-bit hashes (XXH3), the sums are modulo 2⁶¹ − 1. If one piece is damaged, both sums
//! differ, and their ratio is its number: so two sums detect damage as 122 bits do, and name the page. The header is
//! verified by itself before it is used. Not a MAC: it does not protect from an attacker, TLS does.
//!
//! Written by a source whose destination has answered [`crate::source::PING_CHECKSUMS`] with [`PONG_CHECKSUMS`].

use super::HEADER_BYTES;
use crate::wire::Reader;

/// PONG of a destination that compares checksums; any other repeats the PING's value.
pub const PONG_CHECKSUMS: u32 = 0x7477_6c02;
/// Where the checksum is in the header.
const AT: usize = 40;
const BYTES: usize = 24;
const MARK: [u8; 4] = *b"twl1";
const OF_PAGES: u32 = 1 << 31;
/// 2⁶¹ − 1, a prime.
const MODULUS: u64 = (1 << 61) - 1;

/// Checksum of a packet, in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum {
    /// It is of the pages, too; else they were in memory that might change while they were sent.
    pub of_pages: bool,
    /// The header's hash, without its highest bits: as [`Checksum::of_header`] has it.
    pub header: u32,
    /// The sums.
    pub sums: Sums,
}

/// Sums of hashes, not reduced yet: they stay far below 2¹²⁸, as a packet has few pieces.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    plain: u128,
    weighted: u128,
    pieces: u64,
}

/// Location of the damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// The header.
    Header,
    /// This piece behind it, counted from 0.
    Piece(usize),
    /// More than one of them.
    Several,
}

impl PartialEq for Sums {
    fn eq(&self, other: &Self) -> bool {
        self.reduced() == other.reduced()
    }
}

impl Eq for Sums {}

impl Sums {
    /// Adds the hash of the next part. The header is the first part.
    pub fn add(&mut self, hash: u64) {
        self.pieces += 1;
        self.plain += u128::from(hash);
        self.weighted += u128::from(hash) * u128::from(self.pieces);
    }

    /// The sums modulo 2⁶¹ − 1.
    fn reduced(&self) -> [u64; 2] {
        [reduce(self.plain), reduce(self.weighted)]
    }

    /// Locates the damaged part by the sums that were sent; `None` if there is none.
    pub fn compare(&self, sent: &Self) -> Option<Damage> {
        let ([plain, weighted], [sent_plain, sent_weighted]) = (self.reduced(), sent.reduced());
        let difference = |here: u64, there: u64| (here + MODULUS - there) % MODULUS;
        let (plain, weighted) = (difference(plain, sent_plain), difference(weighted, sent_weighted));
        if (plain, weighted) == (0, 0) {
            return None;
        }
        // By Fermat, the power of MODULUS − 2 is the inverse.
        let number = product(weighted, power(plain, MODULUS - 2));
        Some(match number {
            1 => Damage::Header,
            number if number >= 2 && number <= self.pieces => {
                Damage::Piece(usize::try_from(number - 2).expect("no more than the pages of a packet"))
            }
            _ => Damage::Several,
        })
    }
}

impl Checksum {
    /// The part of a header's hash that is kept.
    pub fn of_header(hash: u64) -> u32 {
        u32::try_from(hash & u64::from(!OF_PAGES)).expect("31 bits")
    }

    /// Writes it into a header.
    pub fn put(&self, header: &mut [u8; HEADER_BYTES]) {
        let out = &mut header[AT..AT + BYTES];
        out[..4].copy_from_slice(&MARK);
        let word = self.header | if self.of_pages { OF_PAGES } else { 0 };
        out[4..8].copy_from_slice(&word.to_be_bytes());
        let [plain, weighted] = self.sums.reduced();
        out[8..16].copy_from_slice(&plain.to_be_bytes());
        out[16..].copy_from_slice(&weighted.to_be_bytes());
    }

    /// Removes it from a header, restoring the header as it was before. `None`: it has none.
    pub fn take(header: &mut [u8; HEADER_BYTES]) -> Option<Self> {
        let bytes: [u8; BYTES] = header[AT..AT + BYTES].try_into().expect("within the header");
        let rest = bytes.strip_prefix(&MARK)?;
        header[AT..AT + BYTES].fill(0);
        let mut input = Reader::new(rest);
        let word = super::field(input.be32());
        let (plain, weighted): (u64, u64) = (super::field(input.be64()), super::field(input.be64()));
        Some(Self {
            of_pages: word & OF_PAGES != 0,
            header: word & !OF_PAGES,
            sums: Sums { plain: plain.into(), weighted: weighted.into(), pieces: 0 },
        })
    }
}

fn reduce(sum: u128) -> u64 {
    u64::try_from(sum % u128::from(MODULUS)).expect("less than the modulus")
}

fn product(a: u64, b: u64) -> u64 {
    reduce(u128::from(a) * u128::from(b))
}

fn power(base: u64, mut exponent: u64) -> u64 {
    let (mut base, mut result) = (base, 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = product(result, base);
        }
        base = product(base, base);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn sums(hashes: &[u64]) -> Sums {
        let mut sums = Sums::default();
        hashes.iter().for_each(|&hash| sums.add(hash));
        sums
    }

    #[test]
    fn one_changed_piece_is_named() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let hashes: Vec<_> = (0..rng.usize(1..130)).map(|_| rng.u64(..)).collect();
            let sent = sums(&hashes);
            assert_eq!(sums(&hashes).compare(&sent), None);
            let mut changed = hashes.clone();
            let piece = rng.usize(0..hashes.len());
            changed[piece] = rng.u64(..);
            let damage = if piece == 0 { Damage::Header } else { Damage::Piece(piece - 1) };
            assert_eq!(sums(&changed).compare(&sent), Some(damage));
        }
    }

    #[test]
    fn several_changed_pieces_and_others_in_their_place_are_found() {
        let hashes: Vec<u64> = (1..100_u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let sent = sums(&hashes);
        let mut changed = hashes.clone();
        (changed[3], changed[70]) = (5, 6);
        assert_eq!(sums(&changed).compare(&sent), Some(Damage::Several));
        let mut swapped = hashes.clone();
        swapped.swap(3, 70);
        assert_eq!(sums(&swapped).compare(&sent), Some(Damage::Several));
    }

    #[test]
    fn a_header_carries_it_and_is_as_before_without() {
        let mut header = [7; HEADER_BYTES];
        header[AT..AT + BYTES].fill(0);
        let before = header;
        assert_eq!(Checksum::take(&mut header), None);
        let checksum =
            Checksum { of_pages: true, header: Checksum::of_header(u64::MAX), sums: sums(&[1, 2, 3]) };
        checksum.put(&mut header);
        assert_ne!(header, before);
        assert_eq!(Checksum::take(&mut header), Some(checksum));
        assert_eq!(header, before);
    }
}

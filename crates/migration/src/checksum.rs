//! Hashing packets, for the checksums between two towlines: what [`towline_protocol::multifd::Checksum`] sums up.
//!
//! Pages are hashed where they are, by vectors, while the next one is loaded: at the source they come from
//! memory, and the send that follows reads them from the cache. At the destination they were just received.

use std::hash::Hasher;
use towline_channel::{IoBuf, gather, hash_page, prefetch_page};
use towline_protocol::multifd::{Damage, HEADER_BYTES, Method, Packet, Sums};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{InvalidMessage, RamBlock};
use twox_hash::XxHash3_64;

const PAGE: usize = PAGE_SIZE as usize;

/// The hash of a header without a checksum.
pub(crate) fn of_header(header: &[u8; HEADER_BYTES]) -> u64 {
    XxHash3_64::oneshot(header)
}

/// The sums of a packet: its header's hash, then that of each page of `contents`, or of all together if they are
/// compressed.
pub(crate) fn sums(header: u64, method: Method, contents: &[IoBuf<'_>]) -> Sums {
    let mut sums = Sums::default();
    sums.add(header);
    match method {
        Method::None => add_pages(&mut sums, contents),
        _ if contents.is_empty() => {}
        _ => sums.add(hash_together(contents)),
    }
    sums
}

/// Adds the hash of each page.
pub(crate) fn add_pages(sums: &mut Sums, contents: &[IoBuf<'_>]) {
    let mut ahead = pages(contents).skip(1);
    for page in pages(contents) {
        ahead.next().into_iter().for_each(prefetch_page);
        sums.add(hash(page));
    }
}

/// Pieces of at most a page, in order.
fn pages<'a>(contents: &'a [IoBuf<'a>]) -> impl Iterator<Item = IoBuf<'a>> {
    let pieces = |buf: &'a IoBuf<'a>| (0..buf.len()).step_by(PAGE).map(|at| buf.skip(at).prefix(PAGE));
    contents.iter().flat_map(pieces)
}

/// The hash of a piece of at most a page. It is copied where there is no code for it: a library's hash takes only slices,
/// which memory of a guest never is.
fn hash(piece: IoBuf<'_>) -> u64 {
    hash_page(piece).unwrap_or_else(|| {
        let mut copy = [0; PAGE];
        let length = gather(&[piece], &mut copy);
        XxHash3_64::oneshot(&copy[..length])
    })
}

/// The hash of all contents as one piece.
fn hash_together(contents: &[IoBuf<'_>]) -> u64 {
    let mut whole = XxHash3_64::new();
    let mut copy = [0; PAGE];
    for piece in pages(contents) {
        let length = gather(&[piece], &mut copy);
        whole.write(&copy[..length]);
    }
    whole.finish()
}

/// The error for a damaged packet.
pub(crate) fn damaged(damage: Damage, packet: &Packet, blocks: &[RamBlock]) -> InvalidMessage {
    let block = packet.block.map_or("", |block| blocks[block.index()].name.as_str());
    let page = match damage {
        Damage::Piece(piece) if packet.method == Method::None => packet.normal.get(piece).copied(),
        _ => None,
    };
    let what = match (damage, page, packet.normal.first(), packet.normal.last()) {
        (Damage::Header, ..) => "the header of a packet".to_owned(),
        (_, Some(offset), ..) => format!("the page at {offset:#x} of block {block:?}"),
        (_, None, Some(first), Some(last)) => {
            format!("one or more pages of those from {first:#x} to {last:#x} of block {block:?}")
        }
        _ => "a packet".to_owned(),
    };
    InvalidMessage::Checksum { what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hash_as_the_library_hashes_them() {
        let mut rng = fastrand::Rng::with_seed(3);
        // Aligned to a page and not, whole pages and a rest.
        let memory: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(12 * PAGE).collect();
        let aligned = memory.as_ptr().align_offset(PAGE);
        for (at, length) in
            [(aligned, 8 * PAGE), (aligned + 1, 8 * PAGE), (aligned + 64, PAGE), (aligned, 5000)]
        {
            let bytes = &memory[at..at + length];
            let (first, second) = bytes.split_at(length.min(3 * PAGE));
            let mut expected = Sums::default();
            expected.add(7);
            bytes.chunks(PAGE).for_each(|page| expected.add(XxHash3_64::oneshot(page)));
            assert_eq!(sums(7, Method::None, &[first.into(), second.into()]), expected, "{at} {length}");
            let mut whole = Sums::default();
            whole.add(7);
            whole.add(XxHash3_64::oneshot(bytes));
            assert_eq!(sums(7, Method::Zstd, &[first.into(), second.into()]), whole, "{at} {length}");
        }
    }
}

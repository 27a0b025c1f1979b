//! Hashing packets, for the checksums between two towlines: what [`towline_protocol::multifd::Checksum`] sums up.
//!
//! Pages are copied for it, one at a time into the nearest cache, because memory of a guest is never a slice. Where they are
//! hashed they are sent or received next or just were, so they come from there.

use towline_channel::{IoBuf, gather};
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
        Method::None => each_page(contents, |page| sums.add(XxHash3_64::oneshot(page))),
        _ => {
            let mut whole = XxHash3_64::new();
            each_page(contents, |piece| std::hash::Hasher::write(&mut whole, piece));
            if !contents.is_empty() {
                sums.add(std::hash::Hasher::finish(&whole));
            }
        }
    }
    sums
}

/// Pieces of at most a page, in order.
fn each_page(contents: &[IoBuf<'_>], mut take: impl FnMut(&[u8])) {
    let mut page = [0; PAGE];
    for &buffer in contents {
        let mut rest = buffer;
        while !rest.is_empty() {
            let length = gather(&[rest], &mut page);
            take(&page[..length]);
            rest = rest.skip(length);
        }
    }
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

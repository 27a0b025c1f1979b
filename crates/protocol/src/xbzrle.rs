//! XBZRLE: a page as its changes since it was last sent (QEMU `migration/xbzrle.c`).
//!
//! Alternating run lengths in ULEB128 of at most two bytes: the number of unchanged bytes, then the number of
//! new bytes (the bytes themselves, not their difference). Only the first unchanged run may be 0 long.

use crate::{InvalidMessage, Result};

/// Applies `data` over `page`, which has the destination's content.
pub fn decode(data: &[u8], page: &mut [u8]) -> Result<()> {
    let (mut read, mut written) = (0, 0);
    while read < data.len() {
        let first = read == 0;
        let unchanged = run_length(data, &mut read)?;
        if unchanged == 0 && !first {
            return Err(InvalidMessage::Xbzrle("an unchanged run of no bytes inside the page").into());
        }
        written += unchanged;
        if written > page.len() {
            return Err(InvalidMessage::Xbzrle("an unchanged run beyond the page's end").into());
        }
        if read == data.len() {
            break;
        }
        let changed = run_length(data, &mut read)?;
        if changed == 0 {
            return Err(InvalidMessage::Xbzrle("a changed run of no bytes").into());
        }
        let new = data.get(read..read + changed);
        let new = new.ok_or(InvalidMessage::Xbzrle("a changed run beyond the record's end"))?;
        let old = page.get_mut(written..written + changed);
        old.ok_or(InvalidMessage::Xbzrle("a changed run beyond the page's end"))?.copy_from_slice(new);
        (read, written) = (read + changed, written + changed);
    }
    Ok(())
}

fn run_length(data: &[u8], read: &mut usize) -> Result<usize> {
    let low = *data.get(*read).ok_or(InvalidMessage::Xbzrle("a run length is missing"))?;
    *read += 1;
    if low & 0x80 == 0 {
        return Ok(low.into());
    }
    let high = *data.get(*read).ok_or(InvalidMessage::Xbzrle("a run length is truncated"))?;
    *read += 1;
    match high & 0x80 {
        0 => Ok(usize::from(low & 0x7f) | usize::from(high) << 7),
        _ => Err(InvalidMessage::Xbzrle("a run length of more than two bytes").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn runs_alternate_between_old_and_new_bytes() {
        let mut page = vec![7u8; 4096];
        decode(&[2, 3, b'a', b'b', b'c', 0x80 | 0x0b, 0x1f, 1, b'z'], &mut page).unwrap();
        let mut expected = vec![7u8; 4096];
        expected[2..5].copy_from_slice(b"abc");
        expected[5 + 0xf8b] = b'z';
        assert_eq!(page, expected);
    }

    #[test]
    fn runs_outside_the_page_are_refused() {
        let mut page = [0u8; 4];
        for (data, text) in [
            (&[5u8][..], "an unchanged run beyond the page's end"),
            (&[3, 2, 1, 1], "a changed run beyond the page's end"),
            (&[0, 2, 1], "a changed run beyond the record's end"),
            (&[0, 0], "a changed run of no bytes"),
            (&[0, 1, 9, 0, 1, 9], "an unchanged run of no bytes inside the page"),
            (&[0x80], "a run length is truncated"),
            (&[0x80, 0x80], "a run length of more than two bytes"),
        ] {
            assert_eq!(decode(data, &mut page), Err(InvalidMessage::Xbzrle(text).into()), "{data:?}");
        }
    }
}

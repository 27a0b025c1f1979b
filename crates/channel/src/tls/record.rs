//! TLS 1.3's record protection, one direction of it (RFC 8446, section 5).
//!
//! ```text
//!   23 · 3 · 3 · length   │ content · its type │ tag           content ≤ 16 KiB
//!   ───── authenticated ──┴──── encrypted ─────┘
//! ```
//!
//! Both directions work in place: a page is copied once into its record, and once out of it. The handshake is rustls'
//! ([`super::handshake`]); keys come from there, also new ones.

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;
use std::ops::Range;

/// Size of a record's header.
pub(super) const HEADER_BYTES: usize = 5;
/// Size of a record's trailer: its type, the tag.
pub(super) const TRAILER_BYTES: usize = 1 + TAG_BYTES;
/// The most content of one record.
pub(super) const CONTENT_BYTES_MAX: usize = 1 << 14;
/// The longest record that is sent.
pub(super) const RECORD_BYTES_MAX: usize = HEADER_BYTES + CONTENT_BYTES_MAX + TRAILER_BYTES;
/// Maximum size of a received record's payload: a peer may pad.
const PAYLOAD_BYTES_MAX: usize = CONTENT_BYTES_MAX + 256;
/// The longest record that may come.
pub(super) const INCOMING_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX;
const TAG_BYTES: usize = 16;
/// Records that one AES-GCM key may protect. The standard's limit is 2^24.5 (RFC 8446, section 5.5).
const AES_GCM_RECORDS_MAX: u64 = 1 << 24;

/// Decoded content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Alert,
    Handshake,
    Data,
}

impl Content {
    fn byte(self) -> u8 {
        match self {
            Self::Alert => 21,
            Self::Handshake => 22,
            Self::Data => 23,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        [Self::Alert, Self::Handshake, Self::Data].into_iter().find(|content| content.byte() == byte)
    }
}

/// Reason why a record is rejected.
///
/// Remedy: none at this end: the connection carries other bytes than those that were sent. Look for a proxy
/// or a port that is not TLS, and try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum RecordRejection {
    /// Remedy: give both ends `--tls-creds`, and the port at which the other end accepts TLS.
    #[error("it sent no TLS record (first byte {found:#04x}, expected 0x17)")]
    NoRecord { found: u8 },
    /// Remedy: give both ends `--tls-creds`, and the port at which the other end accepts TLS.
    #[error("it sent a TLS record of {found} bytes, the limit is {PAYLOAD_BYTES_MAX}")]
    TooLong { found: usize },
    /// Remedy: look for a proxy or a damaged link between the two hosts, and run the command again.
    #[error("a TLS record from it was damaged or forged on the way")]
    Forged,
    /// Remedy: none at this end: the other end's TLS library is at fault; report it with both versions.
    #[error("it sent a TLS record with content of an unknown type")]
    UnknownContent,
}

/// One direction's key, and the number of the next record.
pub(super) struct Protection {
    key: LessSafeKey,
    iv: [u8; 12],
    sequence: u64,
    records_max: u64,
}

impl std::fmt::Debug for Protection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the key.
        f.debug_struct("Protection").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Protection {
    /// `None` for a cipher that this module does not have; [`super::credentials`] offers no other.
    pub(super) fn new((sequence, secrets): &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        use ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
        let (algorithm, key, iv, records_max) = match secrets {
            Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv, AES_GCM_RECORDS_MAX),
            Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv, AES_GCM_RECORDS_MAX),
            Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv, u64::MAX),
            _ => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self { key, iv: iv.as_ref().try_into().ok()?, sequence: *sequence, records_max })
    }

    /// Makes the key expire after `records` records.
    #[cfg(test)]
    pub(super) fn wears_out_after(mut self, records: u64) -> Self {
        self.records_max = records;
        self
    }

    /// Returns true if the next record but one needs another key.
    pub(super) fn is_worn(&self) -> bool {
        self.sequence >= self.records_max - 1
    }

    /// Protects a record whose content stands at its place in `record`, with room for header and trailer.
    pub(super) fn seal(&mut self, record: &mut [u8], content: Content) {
        self.seal_as(record, content.byte());
    }

    fn seal_as(&mut self, record: &mut [u8], content: u8) {
        let payload = record.len() - HEADER_BYTES;
        let length = u16::try_from(payload).expect("at most CONTENT_BYTES_MAX and a trailer").to_be_bytes();
        let header = [Content::Data.byte(), 3, 3, length[0], length[1]];
        let (head, body) = record.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&header);
        let (inner, tag) = body.split_at_mut(payload - TAG_BYTES);
        inner[payload - TRAILER_BYTES] = content;
        let nonce = self.nonce();
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), inner);
        tag.copy_from_slice(sealed.expect("a record is shorter than the cipher's limit").as_ref());
    }

    /// Opens a whole record in place; returns the range of its content.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<(Content, Range<usize>), RecordRejection> {
        let (header, payload) = record.split_at_mut(HEADER_BYTES);
        let aad = Aad::from(<[u8; HEADER_BYTES]>::try_from(&*header).expect("split there"));
        let nonce = self.nonce();
        let inner = self.key.open_in_place(nonce, aad, payload).map_err(|_| RecordRejection::Forged)?;
        // Zeros behind the type are padding.
        let end = inner.iter().rposition(|byte| *byte != 0).ok_or(RecordRejection::UnknownContent)?;
        if end > CONTENT_BYTES_MAX {
            return Err(RecordRejection::TooLong { found: end });
        }
        let content = Content::of(inner[end]).ok_or(RecordRejection::UnknownContent)?;
        Ok((content, HEADER_BYTES..HEADER_BYTES + end))
    }

    /// Each is used once: the number goes up with it, and a new key begins at 0.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence = self.sequence.checked_add(1).expect("no connection lives for 2^64 records");
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The length of the record that `bytes` begin with; `None` if its header is not whole.
pub(super) fn record_length(bytes: &[u8]) -> Result<Option<usize>, RecordRejection> {
    let Some(&[kind, _, _, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else {
        return match bytes.first() {
            Some(&kind) if kind != Content::Data.byte() => Err(RecordRejection::NoRecord { found: kind }),
            _ => Ok(None),
        };
    };
    if kind != Content::Data.byte() {
        return Err(RecordRejection::NoRecord { found: kind });
    }
    match usize::from(u16::from_be_bytes([high, low])) {
        found if found > PAYLOAD_BYTES_MAX => Err(RecordRejection::TooLong { found }),
        payload => Ok(Some(HEADER_BYTES + payload)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair(suite: u8) -> (Protection, Protection) {
        // rustls lets others make keys of this length only; AES-128 is met in every handshake.
        let (key, iv) = (|| [9; 32].into(), || [7; 12].into());
        let secrets = || match suite {
            0 => ConnectionTrafficSecrets::Aes256Gcm { key: key(), iv: iv() },
            _ => ConnectionTrafficSecrets::Chacha20Poly1305 { key: key(), iv: iv() },
        };
        (Protection::new(&(0, secrets())).unwrap(), Protection::new(&(0, secrets())).unwrap())
    }

    fn sealed(protection: &mut Protection, content: &[u8]) -> Vec<u8> {
        let mut record = vec![0; HEADER_BYTES + content.len() + TRAILER_BYTES];
        record[HEADER_BYTES..HEADER_BYTES + content.len()].copy_from_slice(content);
        protection.seal(&mut record, Content::Data);
        record
    }

    proptest! {
        #[test]
        fn sealed_records_open_in_order(
            suite in 0..2u8,
            contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20),
        ) {
            let (mut there, mut here) = pair(suite);
            for content in contents {
                let mut record = sealed(&mut there, &content);
                prop_assert_eq!(record_length(&record).unwrap(), Some(record.len()));
                let (kind, range) = here.open(&mut record).unwrap();
                prop_assert_eq!((kind, &record[range]), (Content::Data, &content[..]));
            }
        }

        #[test]
        fn no_bit_may_change(content in prop::collection::vec(any::<u8>(), 0..60), at: usize, bit in 0..8u8) {
            let (mut there, mut here) = pair(1);
            let mut record = sealed(&mut there, &content);
            let at = at % record.len();
            record[at] ^= 1 << bit;
            prop_assert_eq!(here.open(&mut record), Err(RecordRejection::Forged));
        }

        #[test]
        fn any_bytes_have_a_length_or_a_fault(bytes in prop::collection::vec(any::<u8>(), 0..8)) {
            match record_length(&bytes) {
                Ok(Some(length)) => prop_assert!(length <= INCOMING_BYTES_MAX),
                Ok(None) => prop_assert!(bytes.len() < HEADER_BYTES),
                Err(RecordRejection::NoRecord { .. } | RecordRejection::TooLong { .. }) => {}
                Err(fault) => prop_assert!(false, "{fault}"),
            }
        }
    }

    #[test]
    fn a_record_does_not_open_twice_or_out_of_turn() {
        let (mut there, mut here) = pair(0);
        let first = sealed(&mut there, b"first");
        let second = sealed(&mut there, b"second");
        assert_eq!(here.open(&mut second.clone()), Err(RecordRejection::Forged));
        let (mut there, mut here) = pair(0);
        let again = sealed(&mut there, b"first");
        assert_eq!(first, again);
        here.open(&mut again.clone()).unwrap();
        assert_eq!(here.open(&mut again.clone()), Err(RecordRejection::Forged));
    }

    #[test]
    fn padding_is_taken_off_and_nothing_but_padding_is_refused() {
        let seal_inner = |inner: &[u8]| {
            let (mut there, here) = pair(1);
            let (last, content) = inner.split_last().unwrap();
            let mut record = vec![0; HEADER_BYTES + content.len() + TRAILER_BYTES];
            record[HEADER_BYTES..HEADER_BYTES + content.len()].copy_from_slice(content);
            there.seal_as(&mut record, *last);
            (record, here)
        };
        let (mut record, mut here) = seal_inner(b"abc\x17\0\0\0");
        let (kind, range) = here.open(&mut record).unwrap();
        assert_eq!((kind, &record[range]), (Content::Data, &b"abc"[..]));
        let (mut record, mut here) = seal_inner(b"\0\0\0\0");
        assert_eq!(here.open(&mut record), Err(RecordRejection::UnknownContent));
        let (mut record, mut here) = seal_inner(b"abc\x19");
        assert_eq!(here.open(&mut record), Err(RecordRejection::UnknownContent));
    }
}

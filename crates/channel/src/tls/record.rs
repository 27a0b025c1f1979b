//! TLS 1.3's record protection, one direction of it (RFC 8446, section 5).
//!
//! ```text
//!   23 · 3 · 3 · length   │ content · its type │ tag           content ≤ 16 KiB
//!   ───── authenticated ──┴──── encrypted ─────┘
//! ```
//!
//! A page is encrypted from its memory into its record, and decrypted from there into its memory, without a
//! copy ([`crate::sys::aead`]). A record is opened in place, and its content copied, where no byte may be
//! written before it is authenticated
//! ([`RecvFlags::UNAUTHENTICATED`](crate::RecvFlags::UNAUTHENTICATED)). The handshake is rustls'
//! ([`super::handshake`]); keys come from there, also new ones.

use crate::sys::aead::{Aead, AeadCipher, NONCE_BYTES, TAG_BYTES};
use crate::{IoBufMut, IoCursor};
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
/// Minimum length of content that is opened into its memory. Messages of TLS itself (an alert has 2 bytes, a
/// KeyUpdate 5) are shorter.
const DIRECT_BYTES_MIN: usize = 512;
/// Records that one AES-GCM key may protect. The standard's limit is 2^24.5 (RFC 8446, section 5.5).
const AES_GCM_RECORDS_MAX: u64 = 1 << 24;

/// Decoded content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordContent {
    Alert = 21,
    Handshake = 22,
    Data = 23,
}

impl RecordContent {
    fn of(byte: u8) -> Option<Self> {
        [Self::Alert, Self::Handshake, Self::Data].into_iter().find(|content| *content as u8 == byte)
    }
}

/// Reason why a record is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum RecordRejection {
    #[error("it sent no TLS record (first byte {found:#04x}, expected 0x17)")]
    NoRecord { found: u8 },
    #[error("it sent a TLS record of {found} bytes, the limit is {PAYLOAD_BYTES_MAX}")]
    TooLong { found: usize },
    #[error("a TLS record from it was damaged or forged on the way")]
    Forged,
    #[error("it sent a TLS record with content of an unknown type")]
    UnknownContent,
}

/// One direction's key, and the number of the next record.
pub(super) struct Protection {
    /// Opens records in place.
    key: LessSafeKey,
    /// The same key for records over memory that is not ours.
    direct: Aead,
    iv: [u8; NONCE_BYTES],
    sequence: u64,
    records_max: u64,
}

impl std::fmt::Debug for Protection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Omits the key.
        f.debug_struct("Protection").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Protection {
    /// `None` for a cipher that this module lacks; [`super::credentials`] offers no other.
    pub(super) fn new(sequence: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        use ConnectionTrafficSecrets::{Aes128Gcm, Aes256Gcm, Chacha20Poly1305};
        let (algorithm, cipher, key, iv) = match secrets {
            Aes128Gcm { key, iv } => (&AES_128_GCM, AeadCipher::Aes128Gcm, key, iv),
            Aes256Gcm { key, iv } => (&AES_256_GCM, AeadCipher::Aes256Gcm, key, iv),
            Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, AeadCipher::ChaCha20Poly1305, key, iv),
            _ => return None,
        };
        let records_max = match cipher {
            AeadCipher::ChaCha20Poly1305 => u64::MAX,
            AeadCipher::Aes128Gcm | AeadCipher::Aes256Gcm => AES_GCM_RECORDS_MAX,
        };
        let direct = Aead::new(cipher, key.as_ref())?;
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self { key, direct, iv: iv.as_ref().try_into().ok()?, sequence, records_max })
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

    /// Seals the next bytes of `data` into `record`, as many as fit between header and trailer.
    pub(super) fn seal(&mut self, data: &mut IoCursor<'_, '_>, record: &mut [u8], content: RecordContent) {
        self.seal_as(data, record, content as u8);
    }

    fn seal_as(&mut self, data: &mut IoCursor<'_, '_>, record: &mut [u8], content: u8) {
        let payload = record.len() - HEADER_BYTES;
        let length = u16::try_from(payload).expect("at most CONTENT_BYTES_MAX and a trailer").to_be_bytes();
        let header = [RecordContent::Data as u8, 3, 3, length[0], length[1]];
        let (head, body) = record.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&header);
        let nonce = self.take_nonce();
        self.direct.seal(&nonce, &header, data, &[content], body);
    }

    /// Opens a whole record in place; returns the range of its content.
    pub(super) fn open(
        &mut self,
        record: &mut [u8],
    ) -> Result<(RecordContent, Range<usize>), RecordRejection> {
        let (header, payload) = record.split_at_mut(HEADER_BYTES);
        let aad = Aad::from(<[u8; HEADER_BYTES]>::try_from(&*header).expect("split there"));
        let nonce = Nonce::assume_unique_for_key(self.take_nonce());
        let inner = self.key.open_in_place(nonce, aad, payload).map_err(|_| RecordRejection::Forged)?;
        // Zeros after the type are padding.
        let end = inner.iter().rposition(|byte| *byte != 0).ok_or(RecordRejection::UnknownContent)?;
        if end > CONTENT_BYTES_MAX {
            return Err(RecordRejection::TooLong { found: end });
        }
        let content = RecordContent::of(inner[end]).ok_or(RecordRejection::UnknownContent)?;
        Ok((content, HEADER_BYTES..HEADER_BYTES + end))
    }

    /// Opens a whole record of data into `room`; returns the length of its content. `None`: the record is
    /// another, has padding, or the room is too small; it is still to be opened by [`Self::open`]. In any
    /// case the room may be overwritten.
    pub(super) fn open_into(
        &mut self,
        record: &[u8],
        room: &mut [IoBufMut<'_>],
    ) -> Result<Option<usize>, RecordRejection> {
        let nonce = self.nonce();
        let (header, sealed) = record.split_at(HEADER_BYTES);
        let length = sealed.len().saturating_sub(TRAILER_BYTES);
        if !(DIRECT_BYTES_MIN..=CONTENT_BYTES_MAX).contains(&length) || !has_room(room, length) {
            return Ok(None);
        }
        let mut kind = [0];
        self.direct.open(&nonce, header, sealed, room, &mut kind).map_err(|_| RecordRejection::Forged)?;
        if kind[0] != RecordContent::Data as u8 {
            return Ok(None);
        }
        self.take_nonce();
        Ok(Some(length))
    }

    /// Each is used for one record: the number goes up with it, and a new key begins at 0.
    fn take_nonce(&mut self) -> [u8; NONCE_BYTES] {
        let nonce = self.nonce();
        self.sequence = self.sequence.checked_add(1).expect("no connection lives for 2^64 records");
        nonce
    }

    /// Nonce of the next record. Opening may use it repeatedly until that record is complete.
    fn nonce(&self) -> [u8; NONCE_BYTES] {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        nonce
    }
}

/// Returns true if the buffers have room for `length` bytes.
fn has_room(room: &[IoBufMut<'_>], length: usize) -> bool {
    let mut found = 0;
    room.iter().any(|buf| {
        found += buf.len();
        found >= length
    })
}

/// The length of the record that `bytes` begin with; `None` if its header is not whole.
pub(super) fn record_length(bytes: &[u8]) -> Result<Option<usize>, RecordRejection> {
    let Some(&found) = bytes.first() else { return Ok(None) };
    if found != RecordContent::Data as u8 {
        return Err(RecordRejection::NoRecord { found });
    }
    let Some(&[.., high, low]) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    match usize::from(u16::from_be_bytes([high, low])) {
        found if found > PAYLOAD_BYTES_MAX => Err(RecordRejection::TooLong { found }),
        payload => Ok(Some(HEADER_BYTES + payload)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuf;
    use proptest::prelude::*;
    use rustls::crypto::aws_lc_rs::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    use rustls::crypto::cipher::{
        InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
    };
    use rustls::{ContentType, ProtocolVersion, SupportedCipherSuite};

    fn pair(suite: u8) -> (Protection, Protection) {
        // rustls lets others make keys of this length only; AES-128 is met in every handshake.
        let (key, iv) = (|| [9; 32].into(), || [7; 12].into());
        let secrets = || match suite {
            0 => ConnectionTrafficSecrets::Aes256Gcm { key: key(), iv: iv() },
            _ => ConnectionTrafficSecrets::Chacha20Poly1305 { key: key(), iv: iv() },
        };
        (Protection::new(0, &secrets()).unwrap(), Protection::new(0, &secrets()).unwrap())
    }

    fn sealed(protection: &mut Protection, content: &[u8]) -> Vec<u8> {
        sealed_as(protection, content, RecordContent::Data as u8)
    }

    fn sealed_as(protection: &mut Protection, content: &[u8], kind: u8) -> Vec<u8> {
        let mut record = vec![0; HEADER_BYTES + content.len() + TRAILER_BYTES];
        protection.seal_as(&mut IoCursor::new(&[IoBuf::from(content)]), &mut record, kind);
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
                prop_assert_eq!((kind, &record[range]), (RecordContent::Data, &content[..]));
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

    /// rustls' own record layer, with the keys of [`pair`].
    fn rustls_layer(suite: u8) -> (Box<dyn MessageEncrypter>, Box<dyn MessageDecrypter>) {
        let suite = match suite {
            0 => TLS13_AES_256_GCM_SHA384,
            _ => TLS13_CHACHA20_POLY1305_SHA256,
        };
        let suite = match suite {
            SupportedCipherSuite::Tls13(suite) => suite,
            // There are others only where another crate of the build enables TLS 1.2.
            #[allow(unreachable_patterns)]
            _ => panic!("named for it"),
        };
        let (key, iv) = (|| [9; 32].into(), || Iv::from([7; NONCE_BYTES]));
        (suite.aead_alg.encrypter(key(), iv()), suite.aead_alg.decrypter(key(), iv()))
    }

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 7 + (at >> 8)) as u8).collect()
    }

    /// Cuts memory into buffers of these lengths, as often as it takes.
    fn cut_mut<'m>(mut rest: &'m mut [u8], lengths: &[usize]) -> Vec<IoBufMut<'m>> {
        let cut = |length: &usize| {
            let length = (*length).min(rest.len());
            (!rest.is_empty())
                .then(|| IoBufMut::from(rest.split_off_mut(..length).expect("at most its length")))
        };
        lengths.iter().cycle().map_while(cut).collect()
    }

    /// Lengths of fragments: some inside a block of the cipher, some pages.
    fn fragments() -> impl Strategy<Value = Vec<usize>> {
        let odd = prop_oneof![0..40usize, 1..5000usize, Just(4096)];
        prop::collection::vec(odd, 1..12)
            .prop_filter("ends", |lengths| lengths.iter().any(|length| *length > 0))
    }

    /// Lengths of records' contents.
    fn contents() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![1..600usize, 1..CONTENT_BYTES_MAX, Just(CONTENT_BYTES_MAX)], 1..6)
    }

    proptest! {
        #[test]
        fn records_of_any_fragments_are_opened_by_rustls(
            suite in 0..2u8,
            lengths in contents(),
            fragments in fragments(),
        ) {
            let mut data = bytes(lengths.iter().sum());
            let expected = data.clone();
            let bufs = cut_mut(&mut data, &fragments);
            let bufs: Vec<_> = bufs.iter().map(IoBufMut::as_io_buf).collect();
            let mut cursor = IoCursor::new(&bufs);
            let ((mut here, _), (_, mut rustls)) = (pair(suite), rustls_layer(suite));
            let mut opened = Vec::new();
            for (sequence, length) in (0..).zip(&lengths) {
                let mut record = vec![0; HEADER_BYTES + length + TRAILER_BYTES];
                here.seal(&mut cursor, &mut record, RecordContent::Data);
                let (kind, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
                let message = InboundOpaqueMessage::new(kind, version, &mut record[HEADER_BYTES..]);
                let message = rustls.decrypt(message, sequence).unwrap();
                prop_assert_eq!(message.typ, ContentType::ApplicationData);
                opened.extend_from_slice(message.payload);
            }
            prop_assert!(cursor.is_empty() && opened == expected);
        }

        #[test]
        fn records_of_rustls_are_opened_into_any_fragments(
            suite in 0..2u8,
            lengths in contents(),
            fragments in fragments(),
        ) {
            let data = bytes(lengths.iter().sum());
            let ((_, mut here), (mut rustls, _)) = (pair(suite), rustls_layer(suite));
            let mut rest = &data[..];
            for (sequence, length) in (0..).zip(&lengths) {
                let content = rest.split_off(..*length).unwrap();
                let message = OutboundPlainMessage {
                    typ: ContentType::ApplicationData,
                    version: ProtocolVersion::TLSv1_3,
                    payload: OutboundChunks::Single(content),
                };
                let mut record = rustls.encrypt(message, sequence).unwrap().encode();
                let mut memory = vec![0; *length];
                let opened = here.open_into(&record, &mut cut_mut(&mut memory, &fragments)).unwrap();
                let is_direct = *length >= DIRECT_BYTES_MIN;
                prop_assert_eq!(opened, is_direct.then_some(*length));
                if opened.is_none() {
                    let (_, range) = here.open(&mut record).unwrap();
                    memory.copy_from_slice(&record[range]);
                }
                prop_assert!(memory == content);
            }
        }
    }

    #[test]
    fn no_byte_may_change_on_its_way_into_memory() {
        let (mut there, _) = pair(0);
        let content = bytes(DIRECT_BYTES_MIN + 3);
        let record = sealed(&mut there, &content);
        for at in 0..record.len() {
            let (_, mut here) = pair(0);
            let mut changed = record.clone();
            changed[at] ^= 0x10;
            let mut memory = vec![0; content.len()];
            let opened = here.open_into(&changed, &mut cut_mut(&mut memory, &[100]));
            assert_eq!(opened, Err(RecordRejection::Forged), "byte {at}");
        }
    }

    /// All keys: rustls lets others make the longer ones only, see [`pair`].
    #[test]
    fn each_cipher_seals_what_aws_lc_opens() {
        let (nonce, header, content) = ([3; NONCE_BYTES], [1, 2, 3, 4, 5], bytes(5000));
        for (cipher, algorithm, key) in [
            (AeadCipher::Aes128Gcm, &AES_128_GCM, &[5; 16][..]),
            (AeadCipher::Aes256Gcm, &AES_256_GCM, &[6; 32][..]),
            (AeadCipher::ChaCha20Poly1305, &CHACHA20_POLY1305, &[7; 32][..]),
        ] {
            let mut direct = Aead::new(cipher, key).unwrap();
            let mut sealed = vec![0; content.len() + TRAILER_BYTES];
            let bufs = [IoBuf::from(&content[..1001]), IoBuf::from(&content[1001..])];
            direct.seal(&nonce, &header, &mut IoCursor::new(&bufs), &[23], &mut sealed);
            let (mut memory, mut kind) = (vec![0; content.len()], [0]);
            direct.open(&nonce, &header, &sealed, &mut cut_mut(&mut memory, &[77]), &mut kind).unwrap();
            assert!(memory == content && kind == [23]);
            let key = LessSafeKey::new(UnboundKey::new(algorithm, key).unwrap());
            let nonce = Nonce::assume_unique_for_key(nonce);
            let opened = key.open_in_place(nonce, Aad::from(header), &mut sealed).unwrap();
            assert!(opened.split_last() == Some((&23, &content[..])));
        }
        assert!(Aead::new(AeadCipher::Aes256Gcm, &[0; 16]).is_none());
    }

    /// A long ticket and a padded record are opened in place then, with the same number.
    #[test]
    fn other_records_than_data_are_left_to_be_opened_in_place() {
        let (mut there, mut here) = pair(0);
        let ticket = bytes(DIRECT_BYTES_MIN);
        let mut padded = bytes(DIRECT_BYTES_MIN);
        padded.extend([RecordContent::Data as u8, 0, 0]);
        let mut memory = vec![0; 2 * DIRECT_BYTES_MIN];
        let mut records = [
            sealed_as(&mut there, &ticket, RecordContent::Handshake as u8),
            sealed_as(&mut there, &padded, 0),
            sealed(&mut there, &bytes(2 * DIRECT_BYTES_MIN + 1)),
        ];
        let expected = [
            (RecordContent::Handshake, ticket.len()),
            (RecordContent::Data, DIRECT_BYTES_MIN),
            (RecordContent::Data, 2 * DIRECT_BYTES_MIN + 1),
        ];
        for (record, (content, length)) in records.iter_mut().zip(expected) {
            assert_eq!(here.open_into(record, &mut [IoBufMut::from(&mut memory[..])]), Ok(None));
            let (kind, range) = here.open(record).unwrap();
            assert_eq!((kind, &record[range]), (content, &bytes(length)[..]));
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
            (sealed_as(&mut there, content, *last), here)
        };
        let (mut record, mut here) = seal_inner(b"abc\x17\0\0\0");
        let (kind, range) = here.open(&mut record).unwrap();
        assert_eq!((kind, &record[range]), (RecordContent::Data, &b"abc"[..]));
        let (mut record, mut here) = seal_inner(b"\0\0\0\0");
        assert_eq!(here.open(&mut record), Err(RecordRejection::UnknownContent));
        let (mut record, mut here) = seal_inner(b"abc\x19");
        assert_eq!(here.open(&mut record), Err(RecordRejection::UnknownContent));
    }
}

//! The return path, from the destination to the source on the main channel: be16 type, be16 length, data.

use alloc::string::String;
use alloc::vec::Vec;

use crate::error::check_length;
use crate::limits;
use crate::wire::{Reader, lossy, put_counted, put16, put32, put64};
use crate::{InvalidMessage, Result};

/// A return-path message (QEMU `enum mig_rp_message_type`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReturnPathMessage {
    /// Everything is loaded (0), or loading failed.
    Shut(u32),
    /// Reply to PING.
    Pong(u32),
    /// Postcopy: requests pages, of `block` or of the previous request's block.
    RequestPages {
        /// First byte, a multiple of the host's page size for that block.
        start: u64,
        /// Bytes.
        length: u32,
        /// `None`: as in the request before.
        block: Option<String>,
    },
    /// Recovery: the bitmap of the received pages of this block follows.
    ReceivedBitmap(String),
    /// Recovery: the destination resumes.
    ResumeAck(u32),
    /// The destination is ready for the guest to be stopped.
    SwitchoverAck,
    /// Any other, kept.
    Other {
        /// Type of the message.
        kind: u16,
        /// Data of the message.
        data: Vec<u8>,
    },
}

const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQ_PAGES_ID: u16 = 3;
const REQ_PAGES: u16 = 4;
const RECV_BITMAP: u16 = 5;
const RESUME_ACK: u16 = 6;
const SWITCHOVER_ACK: u16 = 7;
/// First bytes of a TLS record (alert, handshake) of any version 3.x: a server's reply to a client without
/// TLS.
const TLS_RECORDS: [u16; 2] = [0x1503, 0x1603];

impl ReturnPathMessage {
    /// Appends the message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        let kind = match self {
            Self::Shut(value) => number(SHUT, *value, &mut data),
            Self::Pong(value) => number(PONG, *value, &mut data),
            Self::ResumeAck(value) => number(RESUME_ACK, *value, &mut data),
            Self::RequestPages { start, length, block } => {
                put64(&mut data, *start);
                put32(&mut data, *length);
                match block {
                    Some(block) => {
                        put_counted(&mut data, block.as_bytes());
                        REQ_PAGES_ID
                    }
                    None => REQ_PAGES,
                }
            }
            Self::ReceivedBitmap(block) => {
                put_counted(&mut data, block.as_bytes());
                RECV_BITMAP
            }
            Self::SwitchoverAck => SWITCHOVER_ACK,
            Self::Other { kind, data: kept } => {
                data.extend_from_slice(kept);
                *kind
            }
        };
        put16(out, kind);
        put16(out, u16::try_from(data.len()).expect("a message is short"));
        out.extend_from_slice(&data);
    }

    /// Reads a message; `Ok(None)` and nothing consumed where more bytes are needed.
    pub fn decode(input: &mut Reader<'_>) -> Result<Option<Self>> {
        input.whole(|input| {
            let (kind, length) = (input.be16()?, usize::from(input.be16()?));
            if TLS_RECORDS.contains(&kind) {
                return Err(InvalidMessage::Tls.into());
            }
            check_length("return-path message", length as u64, limits::RETURN_PATH_BYTES_MAX)?;
            Ok(decode_data(kind, input.take(length)?)?)
        })
    }
}

fn number(kind: u16, value: u32, data: &mut Vec<u8>) -> u16 {
    put32(data, value);
    kind
}

fn decode_data(kind: u16, data: &[u8]) -> Result<ReturnPathMessage> {
    let wrong = |expected| InvalidMessage::ReturnPathLength { kind, found: data.len(), expected };
    let mut input = Reader::new(data);
    let mut be32 = || input.be32().map_err(|_| wrong(4));
    let message = match kind {
        SHUT => ReturnPathMessage::Shut(be32()?),
        PONG => ReturnPathMessage::Pong(be32()?),
        RESUME_ACK => ReturnPathMessage::ResumeAck(be32()?),
        REQ_PAGES | REQ_PAGES_ID => {
            let start = input.be64().map_err(|_| wrong(12))?;
            let length = input.be32().map_err(|_| wrong(12))?;
            let block = match kind {
                REQ_PAGES => None,
                _ => Some(lossy(input.counted().map_err(|_| wrong(13))?)),
            };
            ReturnPathMessage::RequestPages { start, length, block }
        }
        RECV_BITMAP => ReturnPathMessage::ReceivedBitmap(lossy(input.counted().map_err(|_| wrong(1))?)),
        SWITCHOVER_ACK => ReturnPathMessage::SwitchoverAck,
        kind => return Ok(ReturnPathMessage::Other { kind, data: data.into() }),
    };
    if input.position() == data.len() { Ok(message) } else { Err(wrong(input.position()).into()) }
}

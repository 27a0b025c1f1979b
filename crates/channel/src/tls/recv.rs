//! The receiving half: records, each opened in place, or into the memory that its content is for.

use super::alert;
use super::keys::Keys;
use super::record::{INCOMING_BYTES_MAX, Protection, RecordContent, RecordRejection, record_length};
use crate::framed::{Unpack, Unpacked, UnpackedInto};
use crate::{Error, IoBufMut, Result};
use std::sync::Arc;

/// Handshake messages that may come on a connection that lives (RFC 8446, section 4.6).
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The receiving half.
#[derive(Debug)]
pub(super) struct Opener {
    protection: Protection,
    keys: Arc<Keys>,
}

impl Opener {
    pub(super) fn new(protection: Protection, keys: Arc<Keys>) -> Self {
        Self { protection, keys }
    }

    /// Tickets are ignored: no session is resumed.
    fn handshake(&mut self, message: &[u8], peer: &str) -> Result<()> {
        match *message {
            [KEY_UPDATE, 0, 0, 1, request @ (0 | 1)] => {
                self.protection = self.keys.next_to_receive(peer)?;
                if request == 1 {
                    self.keys.request();
                }
                Ok(())
            }
            [NEW_SESSION_TICKET, ..] => Ok(()),
            _ => Err(Error::tls(peer, "it sent a handshake message that has no place after a handshake")),
        }
    }
}

impl Unpack for Opener {
    const PACKET_BYTES_MAX: usize = INCOMING_BYTES_MAX;

    fn unpack(&mut self, bytes: &mut [u8], peer: &str) -> Result<Unpacked> {
        let fault = |fault: RecordRejection| Error::tls(peer, fault.to_string());
        let length = match record_length(bytes).map_err(fault)? {
            Some(length) if length <= bytes.len() => length,
            _ => return Ok(Unpacked::Incomplete),
        };
        let (content, range) = self.protection.open(&mut bytes[..length]).map_err(fault)?;
        match (content, &bytes[range.clone()]) {
            (RecordContent::Data, _) => return Ok(Unpacked::Data(range, length)),
            (RecordContent::Alert, [_, 0]) => return Ok(Unpacked::End),
            (RecordContent::Alert, &[_, alert]) => return Err(alert::alert(peer, alert.into())),
            (RecordContent::Alert, _) => return Err(Error::tls(peer, "it sent a malformed TLS alert")),
            (RecordContent::Handshake, message) => self.handshake(message, peer)?,
        }
        Ok(Unpacked::Idle(length))
    }

    fn unpack_into(
        &mut self,
        bytes: &[u8],
        room: &mut [IoBufMut<'_>],
        peer: &str,
    ) -> Result<Option<UnpackedInto>> {
        let fault = |fault: RecordRejection| Error::tls(peer, fault.to_string());
        let Some(taken) = record_length(bytes).map_err(fault)?.filter(|length| *length <= bytes.len()) else {
            return Ok(None);
        };
        let opened = self.protection.open_into(&bytes[..taken], room).map_err(fault)?;
        Ok(opened.map(|data| UnpackedInto { data, taken }))
    }

    fn fault(peer: &str, why: String) -> Error {
        Error::tls(peer, why)
    }
}

//! What of a device travels with its guest: the names of its connections, so that the other side can reset them, and where
//! its ports stand, so that none is used again at once.
//!
//! ```text
//!   "TLvsock\1"  cid u64  next port u32  count u32  count × { guest port u32, peer cid u64, peer port u32, kind u16 }
//! ```
//! All little-endian, nothing behind it. Connections do not travel: they are with sockets of a host.

use towline_vhost_user::BackendError;

use crate::connection::Key;
use crate::packet::Kind;

/// The version of the state that a device saves and loads.
pub const STATE_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"TLvsock\x01";
const HEAD_BYTES: usize = 24;
const ENTRY_BYTES: usize = 18;
/// More connections than any table has ([`Limits::connections`](crate::Limits) is below, as descriptors are).
pub(crate) const CONNECTIONS_MAX: usize = 1 << 20;

/// The state of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) cid: u64,
    pub(crate) next_port: u32,
    pub(crate) connections: Vec<(Key, Kind)>,
}

impl State {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.connections.len() * ENTRY_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(self.cid.to_le_bytes());
        bytes.extend(self.next_port.to_le_bytes());
        bytes.extend(u32::try_from(self.connections.len()).expect("fewer than descriptors").to_le_bytes());
        for (key, kind) in &self.connections {
            bytes.extend(key.guest_port.to_le_bytes());
            bytes.extend(key.peer_cid.to_le_bytes());
            bytes.extend(key.peer_port.to_le_bytes());
            bytes.extend(kind.number().to_le_bytes());
        }
        bytes
    }

    /// Takes a state for the guest with this context.
    pub(crate) fn decode(bytes: &[u8], cid: u64) -> Result<Self, BackendError> {
        let Some((head, entries)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
            return Err(BackendError::new(format!("{} bytes are no state of a vsock device", bytes.len())));
        };
        if !head.starts_with(MAGIC) {
            return Err(BackendError::new("it is not a state of this device, or of another version of it"));
        }
        let found = u64::from_le_bytes(part(head, 8));
        if found != cid {
            return Err(BackendError::new(format!(
                "it is of the guest with the context {found}, and this is for {cid}; give both devices the same --cid"
            )));
        }
        let count = u32::from_le_bytes(part(head, 20)) as usize;
        if count > CONNECTIONS_MAX || entries.len() != count * ENTRY_BYTES {
            let found = entries.len();
            return Err(BackendError::new(format!("{found} bytes are not the names of {count} connections")));
        }
        let entry = |entry: &[u8]| {
            let kind = u16::from_le_bytes(part(entry, 16));
            let key = Key {
                guest_port: u32::from_le_bytes(part(entry, 0)),
                peer_cid: u64::from_le_bytes(part(entry, 4)),
                peer_port: u32::from_le_bytes(part(entry, 12)),
            };
            let kind = Kind::from_number(kind);
            kind.map(|kind| (key, kind)).ok_or_else(|| BackendError::new("a connection of no known kind"))
        };
        let connections = entries.chunks_exact(ENTRY_BYTES).map(entry).collect::<Result<_, _>>()?;
        Ok(Self { cid, next_port: u32::from_le_bytes(part(head, 16)), connections })
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the caller has compared lengths")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let key = |guest_port| Key { guest_port, peer_cid: 2, peer_port: 0x4000_0001 };
        State {
            cid: 33,
            next_port: 0x4000_0007,
            connections: vec![(key(22), Kind::Stream), (key(9), Kind::Seqpacket)],
        }
    }

    #[test]
    fn a_state_comes_back() {
        let bytes = state().encode();
        assert_eq!(bytes.len(), 24 + 2 * 18);
        assert_eq!(State::decode(&bytes, 33), Ok(state()));
    }

    #[test]
    fn a_state_that_is_none_is_refused_by_name() {
        let bytes = state().encode();
        let error = |bytes: &[u8], cid| State::decode(bytes, cid).unwrap_err().to_string();
        assert!(error(&bytes, 34).contains("context 33, and this is for 34"));
        assert!(error(&bytes[..23], 33).contains("23 bytes are no state"));
        assert!(error(&bytes[..50], 33).contains("26 bytes are not the names of 2 connections"));
        assert!(error(&[bytes.clone(), vec![0]].concat(), 33).contains("37 bytes are not"));
        let mut other = bytes.clone();
        other[7] = 2;
        assert!(error(&other, 33).contains("another version"));
        let mut kind = bytes;
        kind[24 + 16] = 9;
        assert!(error(&kind, 33).contains("no known kind"));
    }
}

//! Device state for migration: the 4-tuples of the connections, so the destination can reset them, and the
//! next ephemeral port, so no port is reused at once.
//!
//! ```text
//!   "TLvsock\1"  cid u64  next port u32  count u32  count × { guest port u32, peer cid u64, peer port u32, kind u16 }
//! ```
//! All fields are little-endian. Connections are not migrated: their sockets belong to a host.

use towline_vhost_user::BackendError;

use crate::connection::ConnectionKey;
use crate::packet::SocketType;

/// Version of the device state.
pub const STATE_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"TLvsock\x01";
const HEAD_BYTES: usize = 24;
const ENTRY_BYTES: usize = 18;
/// Maximum number of connections in a state; above any [`ConnectionLimits::connections`](crate::Limits).
pub(crate) const CONNECTIONS_MAX: usize = 1 << 20;

/// State of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) cid: u64,
    pub(crate) next_port: u32,
    pub(crate) connections: Vec<(ConnectionKey, SocketType)>,
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

    /// Decodes a state for the guest with this CID.
    pub(crate) fn decode(bytes: &[u8], cid: u64) -> Result<Self, BackendError> {
        let Some((head, entries)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
            return Err(BackendError::new(format!(
                "a state of {} bytes is shorter than the header of a vsock device's state",
                bytes.len()
            )));
        };
        if !head.starts_with(MAGIC) {
            return Err(BackendError::new("the state is not that of a vsock device, or has another version"));
        }
        let found = u64::from_le_bytes(part(head, 8));
        if found != cid {
            return Err(BackendError::new(format!(
                "the state belongs to a guest with CID {found}, this device has CID {cid}; give both devices the same --cid"
            )));
        }
        let count = u32::from_le_bytes(part(head, 20)) as usize;
        if count > CONNECTIONS_MAX || entries.len() != count * ENTRY_BYTES {
            let found = entries.len();
            return Err(BackendError::new(format!(
                "the state has {found} bytes for {count} connections; expected {ENTRY_BYTES} each"
            )));
        }
        let entry = |entry: &[u8]| {
            let kind = u16::from_le_bytes(part(entry, 16));
            let key = ConnectionKey {
                guest_port: u32::from_le_bytes(part(entry, 0)),
                peer_cid: u64::from_le_bytes(part(entry, 4)),
                peer_port: u32::from_le_bytes(part(entry, 12)),
            };
            let kind = SocketType::from_number(kind);
            kind.map(|kind| (key, kind))
                .ok_or_else(|| BackendError::new("the state has a connection of an unknown socket type"))
        };
        let connections = entries.chunks_exact(ENTRY_BYTES).map(entry).collect::<Result<_, _>>()?;
        Ok(Self { cid, next_port: u32::from_le_bytes(part(head, 16)), connections })
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the caller has checked the length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let key = |guest_port| ConnectionKey { guest_port, peer_cid: 2, peer_port: 0x4000_0001 };
        State {
            cid: 33,
            next_port: 0x4000_0007,
            connections: vec![(key(22), SocketType::Stream), (key(9), SocketType::Seqpacket)],
        }
    }

    #[test]
    fn a_state_round_trips() {
        let bytes = state().encode();
        assert_eq!(bytes.len(), 24 + 2 * 18);
        assert_eq!(State::decode(&bytes, 33), Ok(state()));
    }

    #[test]
    fn an_invalid_state_is_refused_with_its_reason() {
        let bytes = state().encode();
        let error = |bytes: &[u8], cid| State::decode(bytes, cid).unwrap_err().to_string();
        assert!(error(&bytes, 34).contains("CID 33, this device has CID 34"));
        assert!(error(&bytes[..23], 33).contains("a state of 23 bytes is shorter"));
        assert!(error(&bytes[..50], 33).contains("26 bytes for 2 connections"));
        assert!(error(&[bytes.clone(), vec![0]].concat(), 33).contains("37 bytes for 2 connections"));
        let mut other = bytes.clone();
        other[7] = 2;
        assert!(error(&other, 33).contains("another version"));
        let mut kind = bytes;
        kind[24 + 16] = 9;
        assert!(error(&kind, 33).contains("unknown socket type"));
    }
}

//! AF_XDP features of a driver and state of its queues, queried by generic netlink (`netdev` family,
//! `linux/netdev.h`; Linux 6.6 and later).

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_NAME`, `CTRL_ATTR_FAMILY_ID`.
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_NAME: u16 = 2;
const FAMILY_ID: u16 = 1;
/// `NETDEV_CMD_DEV_GET`, `NETDEV_A_DEV_IFINDEX`, `…_XDP_FEATURES`, `…_XDP_ZC_MAX_SEGS`, `…_XSK_FEATURES`.
const DEV_GET: u8 = 1;
const INTERFACE: u16 = 1;
const XDP_FEATURES: u16 = 3;
const SEGMENTS: u16 = 4;
const XSK_FEATURES: u16 = 6;
/// `NETDEV_CMD_QUEUE_GET`, `NETDEV_A_QUEUE_ID`, `…_IFINDEX`, `…_TYPE`, `…_XSK`, `NETDEV_QUEUE_TYPE_TX`.
const QUEUE_GET: u8 = 10;
const QUEUE_ID: u16 = 1;
const QUEUE_INTERFACE: u16 = 2;
const QUEUE_TYPE: u16 = 3;
const QUEUE_XSK: u16 = 7;
const TX: u32 = 1;
/// `NLA_TYPE_MASK`.
const KIND: u16 = 0x3fff;
/// `NETDEV_XDP_ACT_XSK_ZEROCOPY`.
const ZERO_COPY: u64 = 8;
/// `NETDEV_XSK_FLAGS_TX_CHECKSUM`.
const CHECKSUM: u64 = 2;
const HEADERS_BYTES: usize = 16 + 4;
const REQUEST: u16 = 1;
const ERROR: u16 = 2;
const REPLY_BYTES_MAX: usize = 8192;

/// Features of a driver. Without the netlink family none are assumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct DriverFeatures {
    /// The network card reads packets from the UMEM.
    pub(super) zero_copy: bool,
    /// Maximum number of descriptors of a packet in zero-copy mode.
    pub(super) descriptors: usize,
    /// Checksum offload in zero-copy mode.
    pub(super) checksum: bool,
}

/// A netlink attribute of a request.
struct Attribute<'v> {
    kind: u16,
    value: &'v [u8],
}

/// Sends a request to the `netdev` family. Returns the attributes of the reply.
fn request_netdev(command: u8, attributes: &[Attribute<'_>]) -> io::Result<Vec<u8>> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::GENERIC))?;
    let name = Attribute { kind: FAMILY_NAME, value: b"netdev\0" };
    let family = find(&request(&socket, CONTROL, GET_FAMILY, &[name])?, FAMILY_ID);
    let family = family.ok_or(io::ErrorKind::Unsupported)?;
    let family = u16::try_from(family).map_err(|_| io::ErrorKind::InvalidData)?;
    request(&socket, family, command, attributes)
}

/// Returns true if an AF_XDP socket is bound to a queue, as far as the kernel reports it (Linux 6.15 and
/// later). Any process may ask.
pub(super) fn has_socket(interface: u32, queue: u32) -> io::Result<bool> {
    let [queue, interface, kind] = [queue, interface, TX].map(u32::to_ne_bytes);
    let attributes = [
        Attribute { kind: QUEUE_ID, value: &queue },
        Attribute { kind: QUEUE_INTERFACE, value: &interface },
        Attribute { kind: QUEUE_TYPE, value: &kind },
    ];
    let reply = request_netdev(QUEUE_GET, &attributes)?;
    Ok(find(&reply, QUEUE_XSK).is_some())
}

impl DriverFeatures {
    /// Queries the features of an interface, by its index.
    pub(super) fn query(interface: u32) -> io::Result<Self> {
        let interface = Attribute { kind: INTERFACE, value: &interface.to_ne_bytes() };
        let reply = request_netdev(DEV_GET, &[interface])?;
        let number = |attribute| find(&reply, attribute).unwrap_or(0);
        Ok(Self {
            zero_copy: number(XDP_FEATURES) & ZERO_COPY != 0,
            descriptors: usize::try_from(number(SEGMENTS)).unwrap_or(1).max(1),
            checksum: number(XSK_FEATURES) & CHECKSUM != 0,
        })
    }
}

/// Sends a request. Returns the attributes of the reply.
fn request(socket: &OwnedFd, family: u16, command: u8, attributes: &[Attribute<'_>]) -> io::Result<Vec<u8>> {
    let mut request = vec![0; 4];
    request.extend([family.to_ne_bytes(), REQUEST.to_ne_bytes()].concat());
    // Sequence and port: not needed with one request at a time.
    request.extend([0; 8]);
    request.extend([command, 1, 0, 0]);
    for Attribute { kind, value } in attributes {
        let length = u16::try_from(4 + value.len()).expect("a request is short");
        request.extend([length.to_ne_bytes(), kind.to_ne_bytes()].concat());
        request.extend(*value);
        request.resize(request.len().next_multiple_of(4), 0);
    }
    let length = u32::try_from(request.len()).expect("a request is short");
    request[..4].copy_from_slice(&length.to_ne_bytes());
    send(socket, &request, SendFlags::empty())?;
    let mut reply = vec![0; REPLY_BYTES_MAX];
    let (received, _) = recv(socket, reply.as_mut_slice(), RecvFlags::empty())?;
    reply.truncate(received);
    let kind = reply.get(4..6).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    match (kind, reply.get(16..20)) {
        (Some(ERROR), Some(code)) => {
            let code = i32::from_ne_bytes([code[0], code[1], code[2], code[3]]);
            Err(io::Error::from_raw_os_error(code.saturating_neg()))
        }
        (Some(_), Some(_)) => Ok(reply.split_off(HEADERS_BYTES)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Value of an integer attribute.
fn find(mut attributes: &[u8], wanted: u16) -> Option<u64> {
    loop {
        let header = attributes.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & KIND;
        let value = attributes.get(4..length)?;
        if kind == wanted {
            let mut number = [0; 8];
            number.get_mut(..value.len())?.copy_from_slice(value);
            // Little-endian machines only, as everywhere in this crate.
            return Some(u64::from_le_bytes(number));
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_by_their_numbers() {
        let attributes =
            [6, 0, 1, 0, 9, 1, 0, 0, 8, 0, 4, 0, 3, 0, 0, 0, 12, 0, 6, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        let found = [1, 4, 6, 7].map(|wanted| find(&attributes, wanted));
        assert_eq!(found, [Some(0x109), Some(3), Some(2), None]);
        assert_eq!(find(&attributes[..26], 6), None, "a truncated attribute");
        assert_eq!(find(&[0; 8], 6), None, "an attribute without a length");
    }

    #[test]
    fn the_loopback_has_no_zero_copy() {
        // A kernel without the netlink family reports none either.
        assert!(!DriverFeatures::query(1).unwrap_or_default().zero_copy);
    }
}

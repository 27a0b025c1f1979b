//! Requests of the frontend, with their descriptors.

use std::os::fd::OwnedFd;

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::{
    CONFIG_BYTES_MAX, MessageError, NO_FD, RawConfig, RawRegion, RawTable, RawVringState, RegionInfo,
    RequestCode, TABLE_REGIONS_MAX, VringAddress, VringState,
};

/// A decoded request with valid lengths and descriptors. The session checks that its state permits it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Request {
    /// Get the offered virtio features.
    GetFeatures,
    /// Set the accepted virtio features.
    SetFeatures(u64),
    /// Begin a session.
    SetOwner,
    /// Obsolete; disable the rings.
    ResetOwner,
    /// Replace all memory regions.
    SetMemTable(Vec<(RegionInfo, OwnedFd)>),
    /// Set the dirty log.
    SetLogBase(LogMemory),
    /// Set an eventfd for writes to the log, which this backend does not signal.
    SetLogFd(Option<OwnedFd>),
    /// Set the size of a ring.
    SetVringNum(VringState),
    /// Set the addresses of a ring.
    SetVringAddress(VringAddress),
    /// Set the available index of a ring.
    SetVringBase(VringState),
    /// Stop a ring and get its available index.
    GetVringBase(VringState),
    /// Set the kick eventfd of a ring, and start it.
    SetVringKick(VringFd),
    /// Set the call eventfd of a ring.
    SetVringCall(VringFd),
    /// Set the error eventfd of a ring.
    SetVringErr(VringFd),
    /// Get the offered protocol features.
    GetProtocolFeatures,
    /// Set the accepted protocol features.
    SetProtocolFeatures(u64),
    /// Get the number of queues.
    GetQueueNum,
    /// Enable (1) or disable (0) a ring.
    SetVringEnable(VringState),
    /// Announce the guest's address.
    SendRarp([u8; 6]),
    /// Set the guest's MTU.
    NetSetMtu(u64),
    /// Read the configuration space.
    GetConfig {
        /// Offset of the first byte.
        offset: u32,
        /// Number of bytes, at most [`CONFIG_BYTES_MAX`].
        size: u32,
        /// 1: read by a migration's destination.
        flags: u32,
    },
    /// Write the configuration space.
    SetConfig {
        /// Offset of the first byte.
        offset: u32,
        /// 1: of a migration, not of the guest.
        flags: u32,
        /// Contents.
        bytes: Vec<u8>,
    },
    /// Reset the device.
    ResetDevice,
    /// Get the maximum number of memory regions.
    GetMaxMemSlots,
    /// Add a memory region.
    AddMemReg(RegionInfo, OwnedFd),
    /// In postcopy: acknowledge the addresses of regions.
    PostcopyRegionsAck,
    /// Remove a memory region.
    RemMemReg(RegionInfo),
    /// Set the virtio status byte.
    SetStatus(u64),
    /// Get the virtio status byte.
    GetStatus,
    /// Save the device's state to a descriptor, or load it.
    SetDeviceStateFd(TransferDirection, OwnedFd),
    /// Get the result of the transfer.
    CheckDeviceState,
    /// Prepare for postcopy and get the backend's userfaultfd.
    PostcopyAdvise,
    /// Memory that is shared from now on has not arrived yet.
    PostcopyListen,
    /// All memory has arrived.
    PostcopyEnd,
}

/// Shared memory of the dirty log.
#[derive(Debug)]
pub struct LogMemory {
    /// Length in bytes; each bit is a page of 4 KiB.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
    /// The file.
    pub fd: OwnedFd,
}

/// A ring and its eventfd.
#[derive(Debug)]
pub struct VringFd {
    /// Number of the ring.
    pub index: u8,
    /// The eventfd; without one the other end polls.
    pub fd: Option<OwnedFd>,
}

/// Direction of a transfer of device state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferDirection {
    /// The backend writes it.
    Save,
    /// The backend reads it.
    Load,
}

impl Request {
    /// Decodes a payload, with the descriptors of its message.
    ///
    /// # Errors
    /// All of [`MessageError`] except for those of a header. The next message can be read.
    pub fn decode(code: RequestCode, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let mut fds = Fds { code, fds };
        let request = match code {
            RequestCode::SET_MEM_TABLE => return Self::table(payload, fds),
            RequestCode::SET_LOG_BASE => {
                let [size, offset] = parse_exact::<[U64; 2]>(code, payload)?.map(U64::get);
                Self::SetLogBase(LogMemory { size, offset, fd: fds.one()? })
            }
            RequestCode::SET_LOG_FD => {
                let number = parse_exact::<U64>(code, payload)?.get();
                Self::SetLogFd(fds.optional(number & NO_FD != 0)?)
            }
            RequestCode::SET_VRING_KICK => Self::SetVringKick(VringFd::decode(code, payload, &mut fds)?),
            RequestCode::SET_VRING_CALL => Self::SetVringCall(VringFd::decode(code, payload, &mut fds)?),
            RequestCode::SET_VRING_ERR => Self::SetVringErr(VringFd::decode(code, payload, &mut fds)?),
            RequestCode::ADD_MEM_REG if payload == [0; 8] => Self::PostcopyRegionsAck,
            RequestCode::ADD_MEM_REG => Self::AddMemReg(single_region(code, payload)?, fds.one()?),
            RequestCode::REM_MEM_REG => {
                // Some frontends send the region's descriptor again.
                fds.fds.clear();
                Self::RemMemReg(single_region(code, payload)?)
            }
            RequestCode::SET_DEVICE_STATE_FD => {
                let direction = direction(code, payload)?;
                Self::SetDeviceStateFd(direction, fds.one()?)
            }
            RequestCode::GET_CONFIG | RequestCode::SET_CONFIG => config(code, payload)?,
            _ => Self::plain(code, payload)?,
        };
        fds.none_left()?;
        Ok(request)
    }

    /// Decodes requests without descriptors and of a fixed length.
    fn plain(code: RequestCode, payload: &[u8]) -> Result<Self, MessageError> {
        let number = || parse_exact::<U64>(code, payload).map(U64::get);
        let state = || {
            let [index, number] = parse_exact::<RawVringState>(code, payload)?.map(U32::get);
            Ok(VringState { index, number })
        };
        let nothing = |request| parse_exact::<[u8; 0]>(code, payload).map(|_| request);
        match code {
            RequestCode::GET_FEATURES => nothing(Self::GetFeatures),
            RequestCode::SET_FEATURES => number().map(Self::SetFeatures),
            RequestCode::SET_OWNER => nothing(Self::SetOwner),
            RequestCode::RESET_OWNER => nothing(Self::ResetOwner),
            RequestCode::SET_VRING_NUM => state().map(Self::SetVringNum),
            RequestCode::SET_VRING_ADDR => {
                let RawVringAddress { ring, addresses } = parse_exact(code, payload)?;
                let ([index, flags], addresses) = (ring.map(U32::get), addresses.map(U64::get));
                let [descriptors, used, available, log] = addresses;
                let address = VringAddress { index, flags, descriptors, used, available, log };
                Ok(Self::SetVringAddress(address))
            }
            RequestCode::SET_VRING_BASE => state().map(Self::SetVringBase),
            RequestCode::GET_VRING_BASE => state().map(Self::GetVringBase),
            RequestCode::GET_PROTOCOL_FEATURES => nothing(Self::GetProtocolFeatures),
            RequestCode::SET_PROTOCOL_FEATURES => number().map(Self::SetProtocolFeatures),
            RequestCode::GET_QUEUE_NUM => nothing(Self::GetQueueNum),
            RequestCode::SET_VRING_ENABLE => state().map(Self::SetVringEnable),
            RequestCode::SEND_RARP => number().map(|mac| {
                let [a, b, c, d, e, f, ..] = mac.to_le_bytes();
                Self::SendRarp([a, b, c, d, e, f])
            }),
            RequestCode::NET_SET_MTU => number().map(Self::NetSetMtu),
            RequestCode::RESET_DEVICE => nothing(Self::ResetDevice),
            RequestCode::GET_MAX_MEM_SLOTS => nothing(Self::GetMaxMemSlots),
            RequestCode::SET_STATUS => number().map(Self::SetStatus),
            RequestCode::GET_STATUS => nothing(Self::GetStatus),
            RequestCode::CHECK_DEVICE_STATE => nothing(Self::CheckDeviceState),
            RequestCode::POSTCOPY_ADVISE => nothing(Self::PostcopyAdvise),
            RequestCode::POSTCOPY_LISTEN => nothing(Self::PostcopyListen),
            RequestCode::POSTCOPY_END => nothing(Self::PostcopyEnd),
            _ => Err(MessageError::Unsupported { code, why: missing_feature_hint(code) }),
        }
    }

    fn table(payload: &[u8], mut fds: Fds) -> Result<Self, MessageError> {
        let code = RequestCode::SET_MEM_TABLE;
        let wrong = |expected| MessageError::Length { code, found: payload.len(), expected };
        let (head, rest) = RawTable::read_from_prefix(payload).map_err(|_| wrong(size_of::<RawTable>()))?;
        let [found, _] = head.map(U32::get);
        let count = found as usize;
        if count > TABLE_REGIONS_MAX {
            return Err(MessageError::Regions { found });
        }
        let bytes = count * size_of::<RawRegion>();
        // A frontend may send its whole array.
        if rest.len() < bytes || rest.len() > TABLE_REGIONS_MAX * size_of::<RawRegion>() {
            return Err(wrong(size_of::<RawTable>() + bytes));
        }
        let found = fds.fds.len();
        if found != count {
            return Err(MessageError::Descriptors { code, found, expected: count });
        }
        let regions = rest[..bytes].chunks_exact(size_of::<RawRegion>());
        let fields = |bytes| RawRegion::read_from_bytes(bytes).expect("a chunk has this length");
        let region = |bytes| RegionInfo::from_wire(fields(bytes));
        Ok(Self::SetMemTable(regions.map(region).zip(fds.fds.drain(..)).collect()))
    }
}

impl VringFd {
    fn decode(code: RequestCode, payload: &[u8], fds: &mut Fds) -> Result<Self, MessageError> {
        let number = parse_exact::<U64>(code, payload)?.get();
        if number & !(NO_FD | 0xff) != 0 {
            let expected = "a ring below 256, and bit 8 for no descriptor";
            return Err(MessageError::Value { code, what: "its payload", found: number, expected });
        }
        let index = u8::try_from(number & 0xff).expect("masked to 8 bits");
        Ok(Self { index, fd: fds.optional(number & NO_FD != 0)? })
    }
}

/// Descriptors of one message. Unused ones are closed.
struct Fds {
    code: RequestCode,
    fds: Vec<OwnedFd>,
}

impl Fds {
    fn one(&mut self) -> Result<OwnedFd, MessageError> {
        let found = self.fds.len();
        let fault = MessageError::Descriptors { code: self.code, found, expected: 1 };
        if found == 1 { self.fds.pop().ok_or(fault) } else { Err(fault) }
    }

    fn optional(&mut self, is_absent: bool) -> Result<Option<OwnedFd>, MessageError> {
        if is_absent { self.none_left().map(|()| None) } else { self.one().map(Some) }
    }

    fn none_left(&self) -> Result<(), MessageError> {
        match self.fds.len() {
            0 => Ok(()),
            found => Err(MessageError::Descriptors { code: self.code, found, expected: 0 }),
        }
    }
}

fn parse_exact<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    code: RequestCode,
    payload: &[u8],
) -> Result<T, MessageError> {
    T::read_from_bytes(payload).map_err(|_| MessageError::Length {
        code,
        found: payload.len(),
        expected: size_of::<T>(),
    })
}

fn single_region(code: RequestCode, payload: &[u8]) -> Result<RegionInfo, MessageError> {
    let [_padding, fields @ ..] = parse_exact::<[U64; 5]>(code, payload)?;
    Ok(RegionInfo::from_wire(fields))
}

/// Fields of a [`VringAddress`], in the order of the wire.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawVringAddress {
    ring: [U32; 2],
    addresses: [U64; 4],
}

fn direction(code: RequestCode, payload: &[u8]) -> Result<TransferDirection, MessageError> {
    let [direction, phase] = parse_exact::<[U32; 2]>(code, payload)?.map(U32::get);
    let wrong =
        |what, found: u32, expected| MessageError::Value { code, what, found: found.into(), expected };
    match (direction, phase) {
        (_, 1..) => Err(wrong("its phase", phase, "0, the device being stopped")),
        (0, _) => Ok(TransferDirection::Save),
        (1, _) => Ok(TransferDirection::Load),
        _ => Err(wrong("its direction", direction, "0 to save or 1 to load")),
    }
}

fn config(code: RequestCode, payload: &[u8]) -> Result<Request, MessageError> {
    let wrong = |expected| MessageError::Length { code, found: payload.len(), expected };
    let (head, bytes) = RawConfig::read_from_prefix(payload).map_err(|_| wrong(size_of::<RawConfig>()))?;
    let [offset, size, flags] = head.map(U32::get);
    let bounded = size as usize <= CONFIG_BYTES_MAX && offset as usize <= CONFIG_BYTES_MAX - size as usize;
    if !bounded {
        let found = u64::from(offset) + u64::from(size);
        let expected = "at most 256";
        return Err(MessageError::Value { code, what: "the end of the range", found, expected });
    }
    let is_read = code == RequestCode::GET_CONFIG;
    // A frontend may send a buffer for the reply.
    if bytes.len() != size as usize && !(is_read && bytes.is_empty()) {
        return Err(wrong(size_of::<RawConfig>() + size as usize));
    }
    Ok(if is_read {
        Request::GetConfig { offset, size, flags }
    } else {
        Request::SetConfig { offset, flags, bytes: bytes.to_vec() }
    })
}

/// The feature that an unsupported request belongs to.
fn missing_feature_hint(code: RequestCode) -> &'static str {
    match code {
        RequestCode::GET_INFLIGHT_FD | RequestCode::SET_INFLIGHT_FD => " (INFLIGHT_SHMFD is not offered)",
        RequestCode::SET_BACKEND_REQ_FD => " (BACKEND_REQ is not offered)",
        RequestCode::IOTLB_MSG => " (VIRTIO_F_ACCESS_PLATFORM is not offered)",
        RequestCode::SET_VRING_ENDIAN => " (CROSS_ENDIAN is not offered)",
        _ => "",
    }
}

//! vhost-user messages as a frontend writes them (QEMU's `docs/interop/vhost-user.rst`).

/// Bytes before a payload.
pub const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Virtio and vhost feature bits.
pub mod feature {
    /// `VIRTIO_RING_F_INDIRECT_DESC`.
    pub const INDIRECT: u64 = 1 << 28;
    /// `VIRTIO_RING_F_EVENT_IDX`.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// `VIRTIO_F_VERSION_1`.
    pub const VERSION_1: u64 = 1 << 32;
    /// `VHOST_F_LOG_ALL`.
    pub const LOG_ALL: u64 = 1 << 26;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
}

/// Protocol feature bits (`VHOST_USER_PROTOCOL_F_*`).
pub mod protocol {
    /// `MQ`.
    pub const MQ: u64 = 1 << 0;
    /// `LOG_SHMFD`.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// `REPLY_ACK`.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// `CONFIG`.
    pub const CONFIG: u64 = 1 << 9;
    /// `CONFIGURE_MEM_SLOTS`.
    pub const MEM_SLOTS: u64 = 1 << 15;
}

/// A request's name and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestCode(pub &'static str, pub u32);

macro_rules! codes {
    ($($name:ident = $number:literal,)*) => {
        impl RequestCode {
            $(#[doc = concat!("`VHOST_USER_", stringify!($name), "`.")] pub const $name: Self = Self(stringify!($name), $number);)*
        }
    };
}

codes! {
    GET_FEATURES = 1, SET_FEATURES = 2, SET_OWNER = 3, SET_MEM_TABLE = 5, SET_LOG_BASE = 6, SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9, SET_VRING_BASE = 10, GET_VRING_BASE = 11, SET_VRING_KICK = 12, SET_VRING_CALL = 13,
    SET_VRING_ERR = 14, GET_PROTOCOL_FEATURES = 15, SET_PROTOCOL_FEATURES = 16, GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18, SEND_RARP = 19, NET_SET_MTU = 20, GET_CONFIG = 24, SET_CONFIG = 25, POSTCOPY_ADVISE = 28,
    POSTCOPY_LISTEN = 29, POSTCOPY_END = 30, GET_INFLIGHT_FD = 31, SET_INFLIGHT_FD = 32, RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36, ADD_MEM_REG = 37, REM_MEM_REG = 38, SET_STATUS = 39, GET_STATUS = 40,
    SET_DEVICE_STATE_FD = 42, CHECK_DEVICE_STATE = 43,
}

/// A region of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// Guest address.
    pub guest_address: u64,
    /// Length in bytes.
    pub size: u64,
    /// User address, in which ring addresses are given.
    pub user_address: u64,
    /// Offset of its first byte in its file.
    pub mmap_offset: u64,
}

impl RegionInfo {
    /// Encodes it.
    pub fn encode(&self) -> Vec<u8> {
        encode_u64s(&[self.guest_address, self.size, self.user_address, self.mmap_offset])
    }
}

/// A whole request.
pub fn request(code: RequestCode, payload: &[u8]) -> Vec<u8> {
    with_flags(code, VERSION, payload)
}

/// A whole request, to be acknowledged by a reply (`REPLY_ACK`).
pub fn acknowledged_request(code: RequestCode, payload: &[u8]) -> Vec<u8> {
    with_flags(code, VERSION | NEED_REPLY, payload)
}

fn with_flags(code: RequestCode, flags: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a payload is short");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    [code.1, flags, length].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    bytes.extend_from_slice(payload);
    bytes
}

/// A reply's code, true if it is a reply, and the length of its payload.
pub fn decode_reply_header(header: &[u8; HEADER_BYTES]) -> (u32, bool, usize) {
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    (word(0), word(4) & (REPLY | 3) == REPLY | VERSION, word(8) as usize)
}

/// Encodes numbers of 64 bits.
pub fn encode_u64s(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Two numbers of 32 bits: a ring and its value.
pub fn encode_u32_pair(first: u32, second: u32) -> Vec<u8> {
    [first.to_le_bytes(), second.to_le_bytes()].concat()
}

//! Codes of requests, and limits of their payload.

use std::fmt;

/// Maximum size of a payload. The largest known one is a configuration space of
/// [`CONFIG_BYTES_MAX`](super::CONFIG_BYTES_MAX).
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Maximum number of regions in one `SET_MEM_TABLE` (`VHOST_MEMORY_BASELINE_NREGIONS`).
pub const TABLE_REGIONS_MAX: usize = 8;

/// Code of a request. Unknown codes are preserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestCode(pub u32);

macro_rules! codes {
    ($($name:ident = $number:literal,)*) => {
        impl RequestCode {
            $(#[doc = concat!("`VHOST_USER_", stringify!($name), "`.")] pub const $name: Self = Self($number);)*

            /// Name in the specification; `None` for a code that this crate does not know.
            pub fn name(self) -> Option<&'static str> {
                match self { $(Self::$name => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

codes! {
    GET_FEATURES = 1, SET_FEATURES = 2, SET_OWNER = 3, RESET_OWNER = 4, SET_MEM_TABLE = 5, SET_LOG_BASE = 6,
    SET_LOG_FD = 7, SET_VRING_NUM = 8, SET_VRING_ADDR = 9, SET_VRING_BASE = 10, GET_VRING_BASE = 11,
    SET_VRING_KICK = 12, SET_VRING_CALL = 13, SET_VRING_ERR = 14, GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16, GET_QUEUE_NUM = 17, SET_VRING_ENABLE = 18, SEND_RARP = 19, NET_SET_MTU = 20,
    SET_BACKEND_REQ_FD = 21, IOTLB_MSG = 22, SET_VRING_ENDIAN = 23, GET_CONFIG = 24, SET_CONFIG = 25,
    POSTCOPY_ADVISE = 28, POSTCOPY_LISTEN = 29, POSTCOPY_END = 30, GET_INFLIGHT_FD = 31, SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34, GET_MAX_MEM_SLOTS = 36, ADD_MEM_REG = 37, REM_MEM_REG = 38, SET_STATUS = 39, GET_STATUS = 40,
    SET_DEVICE_STATE_FD = 42, CHECK_DEVICE_STATE = 43,
}

impl fmt::Display for RequestCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "request {}", self.0),
        }
    }
}

impl fmt::Debug for RequestCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

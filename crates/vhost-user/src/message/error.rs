//! What a message can be that is none.

use super::{Code, PAYLOAD_BYTES_MAX, TABLE_REGIONS_MAX};

/// Bytes or descriptors that are no request. Always the frontend's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another protocol.
    #[error("{code} has version {found}, expected 1; is the frontend one of vhost-user?")]
    Version {
        /// What it is about.
        code: Code,
        /// The version in its flags.
        found: u32,
    },
    /// An answer came where nothing was asked.
    #[error("{code} came as a reply, expected a request; are two backends connected to each other?")]
    ReplyAsRequest {
        /// What it is about.
        code: Code,
    },
    /// A payload longer than any.
    #[error("{code} has {found} bytes of payload, at most {PAYLOAD_BYTES_MAX} are read")]
    TooLong {
        /// What it is about.
        code: Code,
        /// The length in its header.
        found: usize,
    },
    /// A payload of the wrong length.
    #[error("{code} has {found} bytes of payload, expected {expected}")]
    Length {
        /// What it is about.
        code: Code,
        /// Its length.
        found: usize,
        /// What its kind has.
        expected: usize,
    },
    /// More or fewer descriptors than its kind has.
    #[error("{code} came with {found} descriptors, expected {expected}")]
    Descriptors {
        /// What it is about.
        code: Code,
        /// How many came.
        found: usize,
        /// How many its kind has.
        expected: usize,
    },
    /// A number in the payload that cannot be.
    #[error("{code}: {what} is {found}, expected {expected}")]
    Value {
        /// What it is about.
        code: Code,
        /// Which number.
        what: &'static str,
        /// The number.
        found: u64,
        /// What it may be.
        expected: &'static str,
    },
    /// More regions than fit in one table.
    #[error("SET_MEM_TABLE names {found} regions, at most {TABLE_REGIONS_MAX}; ADD_MEM_REG takes more")]
    Regions {
        /// How many.
        found: u32,
    },
    /// A request that this backend does not know or leaves out.
    #[error("{code} is not supported{why}")]
    Unsupported {
        /// What it is about.
        code: Code,
        /// Which feature would have to be negotiated, and is not offered.
        why: &'static str,
    },
}

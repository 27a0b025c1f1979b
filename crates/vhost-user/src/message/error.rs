//! Errors of a message.

use super::code::{PAYLOAD_BYTES_MAX, RequestCode, TABLE_REGIONS_MAX};

/// An invalid request of the frontend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Another protocol.
    #[error("{code} has version {found}, expected 1; is the frontend one of vhost-user?")]
    Version {
        /// The request.
        code: RequestCode,
        /// The version in its flags.
        found: u32,
    },
    /// A reply instead of a request.
    #[error("{code} came as a reply, expected a request; are two backends connected to each other?")]
    ReplyAsRequest {
        /// The request.
        code: RequestCode,
    },
    /// A payload that exceeds the limit.
    #[error("{code} has {found} bytes of payload, at most {PAYLOAD_BYTES_MAX} are accepted")]
    TooLong {
        /// The request.
        code: RequestCode,
        /// Length in its header.
        found: usize,
    },
    /// A payload of the wrong length.
    #[error("{code} has {found} bytes of payload, expected {expected}")]
    Length {
        /// The request.
        code: RequestCode,
        /// Length of the payload.
        found: usize,
        /// Length for this request.
        expected: usize,
    },
    /// A wrong number of descriptors.
    #[error("{code} came with {found} descriptors, expected {expected}")]
    Descriptors {
        /// The request.
        code: RequestCode,
        /// Number of descriptors.
        found: usize,
        /// Number for this request.
        expected: usize,
    },
    /// A socket among the descriptors.
    #[error("{code} came with a socket, expected memory, an eventfd or a pipe")]
    Socket {
        /// The request.
        code: RequestCode,
    },
    /// An invalid number in the payload.
    #[error("{code}: {what} is {found}, expected {expected}")]
    Value {
        /// The request.
        code: RequestCode,
        /// Name of the number.
        what: &'static str,
        /// The number.
        found: u64,
        /// The valid numbers.
        expected: &'static str,
    },
    /// Too many regions for one table.
    #[error(
        "SET_MEM_TABLE has {found} regions, at most {TABLE_REGIONS_MAX} are accepted; add others by ADD_MEM_REG"
    )]
    Regions {
        /// Number of regions.
        found: u32,
    },
    /// A request that this backend does not support.
    #[error("{code} is not supported{why}")]
    Unsupported {
        /// The request.
        code: RequestCode,
        /// The feature that the request belongs to, in parentheses.
        why: &'static str,
    },
}

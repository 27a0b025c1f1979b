//! Error of a frontend or driver.

/// Error of a frontend or driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The backend hung up.
    #[error("the backend disconnected after {request}")]
    Disconnected {
        /// The request.
        request: &'static str,
    },
    /// The backend answered something else, or with an error.
    #[error("the backend replies to {request} with {found}, expected {expected}")]
    Reply {
        /// The request.
        request: &'static str,
        /// The reply.
        found: String,
        /// The expected reply.
        expected: String,
    },
    /// A feature that this driver cannot do without.
    #[error("the backend lacks {missing:#x} of the {what} {wanted:#x} (it offers {offered:#x})")]
    Features {
        /// The kind of features.
        what: &'static str,
        /// The required features.
        wanted: u64,
        /// The missing ones.
        missing: u64,
        /// The offered ones.
        offered: u64,
    },
    /// An invalid used ring.
    #[error("ring {ring}: {what}")]
    Used {
        /// The ring.
        ring: u32,
        /// The fault.
        what: String,
    },
    /// Nothing happened for too long.
    #[error("{what} did not come within {seconds} s")]
    Timeout {
        /// The event.
        what: &'static str,
        /// The time waited.
        seconds: u64,
    },
}

/// Result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn system<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> Error + Copy {
    move |error| Error::System { what, source: error.into() }
}

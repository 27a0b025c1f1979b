//! Error of a device.

use std::error::Error;
use std::fmt;

/// A request that a device refuses or cannot fulfil. The text names the subject, the value and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendError {
    reason: String,
    persistence: Persistence,
}

/// Conditions under which a failure ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Persistence {
    /// Until the device or the request changes.
    Permanent,
    /// Until other processes release descriptors or memory.
    Exhausted,
    /// The device recovers on its own.
    Temporary,
}

impl BackendError {
    /// An error that a repetition does not change.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), persistence: Persistence::Permanent }
    }

    /// An error of [`Device::worker`](crate::Device::worker) that is temporary: the connection is closed, and
    /// the next one may be served. An only connection is retried every second instead.
    pub fn temporary(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), persistence: Persistence::Temporary }
    }

    /// Returns true if the kernel was out of descriptors or memory.
    pub(crate) fn is_out_of_resources(&self) -> bool {
        self.persistence == Persistence::Exhausted
    }

    /// Returns true for an error of [`BackendError::temporary`].
    pub(crate) fn is_temporary(&self) -> bool {
        self.persistence == Persistence::Temporary
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for BackendError {}

impl From<std::io::Error> for BackendError {
    fn from(error: std::io::Error) -> Self {
        let persistence =
            if is_out_of_resources(&error) { Persistence::Exhausted } else { Persistence::Permanent };
        Self { reason: error.to_string(), persistence }
    }
}

/// Returns true if the kernel is out of descriptors or memory.
pub(crate) fn is_out_of_resources(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn errors_are_exhausted_temporary_or_permanent() {
        let states = |error: &BackendError| (error.is_out_of_resources(), error.is_temporary());
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let error = BackendError::from(io::Error::from_raw_os_error(errno));
            assert_eq!(states(&error), (true, false), "{error}");
        }
        let refused = BackendError::from(io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(states(&refused), (false, false), "{refused}");
        assert_eq!(states(&BackendError::new("it has no state")), (false, false));
        assert_eq!(states(&BackendError::temporary("a card still reads")), (false, true));
    }
}

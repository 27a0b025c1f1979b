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
pub(crate) enum Persistence {
    /// Until the device or the request changes.
    Permanent,
    /// Until other processes release descriptors or memory.
    Exhausted,
    /// The device recovers on its own.
    Temporary,
}

impl Persistence {
    /// That of an error of a system call.
    pub(crate) fn of(error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => Self::Exhausted,
            _ => Self::Permanent,
        }
    }
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

    pub(crate) fn persistence(&self) -> Persistence {
        self.persistence
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
        Self { reason: error.to_string(), persistence: Persistence::of(&error) }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn errors_are_exhausted_temporary_or_permanent() {
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let error = BackendError::from(io::Error::from_raw_os_error(errno));
            assert_eq!(error.persistence(), Persistence::Exhausted, "{error}");
        }
        let refused = BackendError::from(io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(refused.persistence(), Persistence::Permanent, "{refused}");
        assert_eq!(BackendError::new("it has no state").persistence(), Persistence::Permanent);
        let temporary = BackendError::temporary("a card still reads");
        assert_eq!(temporary.persistence(), Persistence::Temporary);
    }
}

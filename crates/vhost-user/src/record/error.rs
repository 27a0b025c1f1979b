//! Errors of an in-flight record.

/// Error of an in-flight record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The file could not be read, created or mapped.
    #[error("the record of descriptors in flight {name}: {source}")]
    Io {
        /// Name of the record.
        name: String,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The file system has no space for it.
    #[error(
        "the record of descriptors in flight {name} needs {bytes} bytes: {source}; free them, or name a file on another tmpfs"
    )]
    Space {
        /// Name of the record.
        name: String,
        /// Length of the record in bytes.
        bytes: u64,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// Another process writes to it.
    #[error(
        "the record of descriptors in flight {name} is in use by another process; each device needs its own"
    )]
    InUse {
        /// Name of the record.
        name: String,
    },
    /// The file is not a record.
    #[error("{name} is not a record of descriptors in flight; name another file, or remove it")]
    NotARecord {
        /// Name of the record.
        name: String,
    },
    /// A record of another version.
    #[error(
        "the record of descriptors in flight {name} has version {found}, expected {expected}; start the version that \
         wrote it, or remove it while the guest is off",
        expected = super::layout::VERSION
    )]
    Version {
        /// Name of the record.
        name: String,
        /// Version of the record.
        found: u64,
    },
    /// A record for another number of queues.
    #[error(
        "the record of descriptors in flight {name} has {found} queues, expected {expected}; use as many as before, or \
         remove it while the guest is off"
    )]
    Queues {
        /// Name of the record.
        name: String,
        /// Number of queues in the record.
        found: usize,
        /// The device's number of queues.
        expected: usize,
    },
    /// A record that is too short or too long.
    #[error(
        "the record of descriptors in flight {name} has {found} bytes, expected {expected}; remove it while the guest is off"
    )]
    Length {
        /// Name of the record.
        name: String,
        /// Length of the record in bytes.
        found: u64,
        /// Length according to its header.
        expected: u64,
    },
    /// A record with impossible contents.
    #[error(
        "the record of descriptors in flight {name} is damaged: queue {index}: {what}; remove it while the guest is off"
    )]
    Damaged {
        /// Name of the record.
        name: String,
        /// Number of the queue.
        index: usize,
        /// The damage, with the value.
        what: String,
    },
}

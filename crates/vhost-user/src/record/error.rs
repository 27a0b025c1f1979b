//! Why a record is not taken.

/// Why a record is not taken.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file could not be read, made or mapped.
    #[error("the record of descriptors in flight {name}: {source}")]
    Io {
        /// What it is called.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another process writes it.
    #[error(
        "the record of descriptors in flight {name} is in use by another process; each device needs one of its own"
    )]
    InUse {
        /// What it is called.
        name: String,
    },
    /// Something else.
    #[error("{name} is no record of descriptors in flight; name another file, or remove it")]
    NoRecord {
        /// What it is called.
        name: String,
    },
    /// One of another version.
    #[error(
        "the record of descriptors in flight {name} has version {found}, expected {expected}; start the version that \
         wrote it, or remove it while the guest is off",
        expected = super::VERSION
    )]
    Version {
        /// What it is called.
        name: String,
        /// Its version.
        found: u64,
    },
    /// One of another device.
    #[error(
        "the record of descriptors in flight {name} is of {found} queues, expected {expected}; give as many as before, or \
         remove it while the guest is off"
    )]
    Queues {
        /// What it is called.
        name: String,
        /// Of how many queues it is.
        found: usize,
        /// How many the device has.
        expected: usize,
    },
    /// One that is too short or too long.
    #[error(
        "the record of descriptors in flight {name} has {found} bytes, expected {expected}; remove it while the guest is off"
    )]
    Length {
        /// What it is called.
        name: String,
        /// Its length in bytes.
        found: u64,
        /// What its header says.
        expected: u64,
    },
    /// What nobody writes.
    #[error(
        "the record of descriptors in flight {name} is damaged: queue {index}: {what}; remove it while the guest is off"
    )]
    Damaged {
        /// What it is called.
        name: String,
        /// Which queue.
        index: usize,
        /// What is wrong, with the value.
        what: String,
    },
}

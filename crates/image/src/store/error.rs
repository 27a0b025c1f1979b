//! Errors of stores and of the images in them.

use std::io;

use crate::index;

/// Failure to store an image or to read it from a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The location is invalid.
    #[error("{text}")]
    Location {
        /// The location and the expected form.
        text: String,
    },
    /// The location may contain a secret, so it is not repeated.
    #[error(
        "{scheme}: an address has no user, password or query (@, ?, #); credentials come from the environment or the usual files (docs/store.md)"
    )]
    Secret {
        /// Its scheme.
        scheme: &'static str,
    },
    /// The store is unreachable or refused a request.
    #[error("{object}: {op}: {error}{}", advice(error))]
    Store {
        /// The failed operation.
        op: &'static str,
        /// The object or the store.
        object: String,
        /// The store's error. Not a `source`, since the text already contains it.
        error: Box<object_store::Error>,
    },
    /// The image does not exist.
    #[error("{image}: there is no such image: the store has no {object:?}")]
    NoImage {
        /// The image.
        image: String,
        /// Its index object.
        object: String,
    },
    /// The image already exists.
    #[error("{image}: it exists already; give another name, or --overwrite")]
    Exists {
        /// The image.
        image: String,
    },
    /// The index is invalid.
    #[error("{image}: {why}")]
    Index {
        /// The image.
        image: String,
        /// The error.
        why: index::Error,
    },
    /// A chunk that the index references is missing.
    #[error("{image}: {position}: chunk {chunk} is missing in the store: {absence}; take another image, or store the guest again", position = position_text(position))]
    Missing {
        /// The image.
        image: String,
        /// Position of the chunk in the guest.
        position: ChunkPosition,
        /// Object of the chunk.
        chunk: String,
        /// Possible reason.
        absence: Absence,
    },
    /// A chunk's content does not match its name.
    #[error("{image}: {position}: chunk {chunk} is damaged in the store: {why}; remove that object and store the guest again, or take another image", position = position_text(position))]
    Damaged {
        /// The image.
        image: String,
        /// Position of the chunk in the guest.
        position: ChunkPosition,
        /// Object of the chunk.
        chunk: String,
        /// The difference.
        why: String,
    },
    /// The device state does not match its hash.
    #[error("{image}: the device state: {why}; store the guest again")]
    DeviceState {
        /// The image.
        image: String,
        /// The difference.
        why: String,
    },
    /// The object is longer than allowed.
    #[error("{object}: it has more than {limit} bytes, too many for an object of towline; correct the name")]
    TooLong {
        /// The object.
        object: String,
        /// The limit.
        limit: u64,
    },
    /// Another process is collecting garbage.
    #[error(
        "{store}: garbage is being removed there by {owner}: try again when it has finished, or after an hour if it was interrupted"
    )]
    Collecting {
        /// The prefix.
        store: String,
        /// The other process and its lease.
        owner: String,
    },
    /// Another process is storing an image.
    #[error(
        "{store}: {count} upload(s) are active there, or were interrupted within the last hour, one of them of {owner}: try again when they have finished; nothing was removed"
    )]
    Uploading {
        /// The prefix.
        store: String,
        /// Number of uploads.
        count: usize,
        /// One of the processes and its lease.
        owner: String,
    },
    /// There was a time without a lease, in which needed chunks may have been collected.
    #[error(
        "{store}: the lease of this process was lost: {why}; another process may have removed chunks that it needs; repeat the command, existing chunks are not sent again"
    )]
    Lost {
        /// The prefix.
        store: String,
        /// Reason for the loss.
        why: String,
    },
    /// The image is being read.
    #[error(
        "{image}: it is being read by {readers}: try again when they have finished, or after an hour if they were interrupted; nothing was removed",
        readers = readers.join(", ")
    )]
    InUse {
        /// The image.
        image: String,
        /// The processes and their leases.
        readers: Vec<String>,
    },
    /// Other processes keep replacing the object.
    #[error("{object}: other processes keep replacing it; repeat the command when they have finished")]
    Changed {
        /// The object.
        object: String,
    },
    /// An index that cannot be read prevents garbage collection.
    #[error(
        "{image}: {why}; as long as it exists, garbage cannot be determined, so nothing was removed: remove it, or use a newer towline"
    )]
    KeepsGarbage {
        /// The image.
        image: String,
        /// The error.
        why: index::Error,
    },
    /// The spool cannot be created or written.
    #[error(
        "{path}: {why}: pages are stored there until they are sent; set TMPDIR to a directory with enough space for the guest's memory"
    )]
    Spool {
        /// The directory.
        path: String,
        /// The kernel's error.
        why: io::Error,
    },
    /// The stream's items arrived in an unexpected order.
    #[error("{image}: {what}")]
    Order {
        /// The image to be stored.
        image: String,
        /// The missing item.
        what: &'static str,
    },
    /// This host lacks memory, threads or descriptors.
    #[error("{what}: {why}")]
    Host {
        /// The resource.
        what: &'static str,
        /// The kernel's error.
        why: io::Error,
    },
    /// A file with credentials cannot be used.
    #[error("{path}: {why}")]
    Credentials {
        /// The file.
        path: String,
        /// The error; never the file's content.
        why: String,
    },
    /// The image to be stored cannot be read.
    #[error(transparent)]
    Image(Box<crate::Error>),
    /// The operation was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Result of the operations on stores.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Position of a chunk in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPosition {
    /// Name of the block; `None` for the device state.
    pub block: Option<String>,
    /// Offset of the chunk.
    pub offset: u64,
}

/// Possible reason for which a referenced chunk is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absence {
    /// The reader had a lease all the time.
    #[error(
        "another program removed it, since this reader's lease protects it from towline's garbage collection"
    )]
    Leased,
    /// The reader's lease was not renewed in time.
    #[error("garbage collection may have removed it while this reader's lease was lost ({why})")]
    LeaseLost {
        /// Reason for the loss.
        why: String,
    },
    /// The reader has no write permission and thus no lease.
    #[error(
        "this reader has no lease ({why}), so garbage collection may have removed it after the image was replaced or removed"
    )]
    Unleased {
        /// Reason for which it cannot write.
        why: String,
    },
}

impl Error {
    pub(super) fn store(
        op: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(object_store::Error) -> Self {
        let object = object.into();
        move |error| Self::Store { op, object, error: Box::new(error) }
    }

    /// The same error as one of the engine.
    pub(super) fn into_migration(self) -> towline_migration::Error {
        match self {
            Self::Cancelled => towline_migration::Error::Cancelled,
            error => towline_migration::Error::guest(crate::Error::from(error)),
        }
    }

    /// Returns true if the request had and will have no effect. After other failures it may still arrive.
    pub(super) fn is_final(&self) -> bool {
        use object_store::Error as Cause;

        match self {
            Self::Store { error, .. } => matches!(
                **error,
                Cause::PermissionDenied { .. }
                    | Cause::Unauthenticated { .. }
                    | Cause::NotSupported { .. }
                    | Cause::NotImplemented { .. }
                    | Cause::InvalidPath { .. }
                    | Cause::UnknownConfigurationKey { .. }
            ),
            Self::Lost { .. } | Self::Exists { .. } | Self::Changed { .. } => true,
            _ => false,
        }
    }

    /// Returns true if the store does not support this kind of request.
    pub(super) fn is_unsupported(&self) -> bool {
        use object_store::Error as Cause;

        let Self::Store { error, .. } = self else { return false };
        matches!(**error, Cause::NotSupported { .. } | Cause::NotImplemented { .. })
    }

    /// Returns true if the store is read-only for this process.
    pub(super) fn is_read_only(&self) -> bool {
        use object_store::Error as Cause;

        let Self::Store { error, .. } = self else { return false };
        if let Cause::PermissionDenied { .. } | Cause::Unauthenticated { .. } = **error {
            return true;
        }
        // The error of a directory contains the kernel's.
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
        while let Some(error) = cause {
            let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
            if let Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) = kind {
                return true;
            }
            cause = error.source();
        }
        self.is_unsupported()
    }
}

fn position_text(position: &ChunkPosition) -> String {
    match &position.block {
        Some(block) => format!("block {block:?}, from byte {:#x}", position.offset),
        None => format!("the device state, from byte {:#x}", position.offset),
    }
}

/// Remedy, where there is one.
fn advice(error: &object_store::Error) -> &'static str {
    match error {
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            "; credentials come from the environment or the usual files (docs/store.md)"
        }
        object_store::Error::Generic { .. } => {
            "; check the endpoint, the network and the credentials (docs/store.md)"
        }
        _ => "",
    }
}

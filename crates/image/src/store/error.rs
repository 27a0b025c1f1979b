//! What can be wrong with a store, and with what is in it.

use std::io;

use crate::index;

/// Why an image cannot be stored in or read from a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The location is not one.
    #[error("{text}")]
    Location {
        /// What it is, and what is expected.
        text: String,
    },
    /// The location may have a secret in it, so nothing of it is repeated.
    #[error(
        "{scheme}: an address has no user, password or query (@, ?, #); credentials come from the environment or the usual files (docs/store.md)"
    )]
    Secret {
        /// How it begins.
        scheme: &'static str,
    },
    /// The store refuses or cannot be reached.
    #[error("{object}: {op}: {answer}{}", advice(answer))]
    Store {
        /// What was being done.
        op: &'static str,
        /// The object, or the store.
        object: String,
        /// Its answer, which is in the text: whoever walks causes would say it twice.
        answer: Box<object_store::Error>,
    },
    /// There is no such image.
    #[error("{image}: there is no such image: the store has no {object:?}")]
    NoImage {
        /// The image.
        image: String,
        /// Its index.
        object: String,
    },
    /// There is one already.
    #[error("{image}: it exists already; give another name, or --overwrite")]
    Exists {
        /// The image.
        image: String,
    },
    /// The index cannot be used.
    #[error("{image}: {why}")]
    Index {
        /// The image.
        image: String,
        /// Why not.
        why: index::Error,
    },
    /// A chunk is named by the index and not there.
    #[error("{image}: {place}: chunk {chunk} is missing in the store: {absence}; take another image, or store the guest again", place = shown(place))]
    Missing {
        /// The image.
        image: String,
        /// Block and offset.
        place: Place,
        /// Its object.
        chunk: String,
        /// Why that can be.
        absence: Absence,
    },
    /// A chunk's bytes are not those of its name.
    #[error("{image}: {place}: chunk {chunk} is damaged in the store: {why}; remove that object and store the guest again, or take another image", place = shown(place))]
    Damaged {
        /// The image.
        image: String,
        /// Block and offset.
        place: Place,
        /// Its object.
        chunk: String,
        /// How that is known.
        why: String,
    },
    /// The device state is not the one that was stored.
    #[error("{image}: the device state: {why}; store the guest again")]
    DeviceState {
        /// The image.
        image: String,
        /// What is wrong.
        why: String,
    },
    /// Larger than what belongs there.
    #[error("{object}: it has more than {limit} bytes, which is no object of towline's; correct the name")]
    TooLong {
        /// Which.
        object: String,
        /// The limit.
        limit: u64,
    },
    /// Another process removes garbage.
    #[error(
        "{store}: garbage is being removed there by {owner}: try again when that has ended, or in an hour if it was broken off"
    )]
    Collecting {
        /// The prefix.
        store: String,
        /// The other process and its lease.
        owner: String,
    },
    /// Another process stores an image.
    #[error(
        "{store}: {count} upload(s) go on there, or were broken off within the last hour, one of them of {owner}: try again when they have ended; nothing was removed"
    )]
    Uploading {
        /// The prefix.
        store: String,
        /// How many.
        count: usize,
        /// One of the processes and its lease.
        owner: String,
    },
    /// The lease was not held all the time, so chunks may have been taken for garbage.
    #[error(
        "{store}: the lease of this process was lost: {why}; others may have taken what it counts on for garbage; run the command again, chunks that are there are not sent again"
    )]
    Lost {
        /// The prefix.
        store: String,
        /// How.
        why: String,
    },
    /// An image that is read is not to be removed.
    #[error(
        "{image}: it is being read by {readers}: try again when they have ended, or in an hour if they were broken off; nothing was removed",
        readers = readers.join(", ")
    )]
    InUse {
        /// The image.
        image: String,
        /// The processes and their leases.
        readers: Vec<String>,
    },
    /// Others replace the same object all the time.
    #[error("{object}: other processes replace it again and again; run the command when they have ended")]
    Changed {
        /// Which.
        object: String,
    },
    /// An image that cannot be read keeps all chunks.
    #[error(
        "{image}: {why}; while it is there, nobody can say which chunks are garbage, so nothing was removed: remove it, or use a newer towline"
    )]
    KeepsGarbage {
        /// The image.
        image: String,
        /// What is wrong.
        why: index::Error,
    },
    /// Room for pages on this host.
    #[error(
        "{path}: {why}: pages wait there until they are sent; have TMPDIR name a directory with room for the guest's memory"
    )]
    Spool {
        /// The directory.
        path: String,
        /// Why.
        why: io::Error,
    },
    /// A stream came in another order than the engine's.
    #[error("{image}: {what}")]
    Order {
        /// The image that was to be stored.
        image: String,
        /// What was missing.
        what: &'static str,
    },
    /// This host lacks memory, threads or descriptors.
    #[error("{what}: {why}")]
    Host {
        /// For what.
        what: &'static str,
        /// Why.
        why: io::Error,
    },
    /// A file with credentials cannot be used.
    #[error("{path}: {why}")]
    Credentials {
        /// Which.
        path: String,
        /// What is wrong; never what is in it.
        why: String,
    },
    /// The image that is stored cannot be read.
    #[error(transparent)]
    Image(Box<crate::Error>),
    /// Somebody asked for the end.
    #[error("cancelled")]
    Cancelled,
}

/// The result of every operation on a store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where in a guest a chunk belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The block's name; `None` for the device state.
    pub block: Option<String>,
    /// The chunk's first byte in it.
    pub offset: u64,
}

/// Why a chunk that an index names may be missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Absence {
    /// The reader has had a lease all along.
    #[error(
        "another program removed it, for this reader's lease keeps it from towline's collections of garbage"
    )]
    Leased,
    /// The reader's lease was not renewed in time.
    #[error("a collection of garbage may have removed it while this reader's lease was lost ({why})")]
    LeaseLost {
        /// How it was lost.
        why: String,
    },
    /// The reader may not write, so it has no lease.
    #[error(
        "this reader has no lease ({why}), so a collection of garbage may have removed it after the image was replaced or removed"
    )]
    Unleased {
        /// Why it may not.
        why: String,
    },
}

impl Error {
    pub(super) fn store(
        op: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(object_store::Error) -> Self {
        let object = object.into();
        move |answer| Self::Store { op, object, answer: Box::new(answer) }
    }

    /// Whether the request certainly did nothing, and will not. Of one that failed in another way it may still arrive.
    pub(super) fn is_final(&self) -> bool {
        use object_store::Error as Answer;

        match self {
            Self::Store { answer, .. } => matches!(
                **answer,
                Answer::PermissionDenied { .. }
                    | Answer::Unauthenticated { .. }
                    | Answer::NotSupported { .. }
                    | Answer::NotImplemented { .. }
                    | Answer::InvalidPath { .. }
                    | Answer::UnknownConfigurationKey { .. }
            ),
            Self::Lost { .. } | Self::Exists { .. } | Self::Changed { .. } => true,
            _ => false,
        }
    }

    /// Whether the store does not know this kind of request.
    pub(super) fn is_unsupported(&self) -> bool {
        use object_store::Error as Answer;

        let Self::Store { answer, .. } = self else { return false };
        matches!(**answer, Answer::NotSupported { .. } | Answer::NotImplemented { .. })
    }

    /// Whether the store lets this process only read.
    pub(super) fn is_read_only(&self) -> bool {
        use object_store::Error as Answer;

        let Self::Store { answer, .. } = self else { return false };
        if let Answer::PermissionDenied { .. } | Answer::Unauthenticated { .. } = **answer {
            return true;
        }
        // A directory answers with what the kernel said.
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**answer);
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

fn shown(place: &Place) -> String {
    match &place.block {
        Some(block) => format!("block {block:?}, from byte {:#x}", place.offset),
        None => format!("the device state, from byte {:#x}", place.offset),
    }
}

/// The way out, where there is one.
fn advice(error: &object_store::Error) -> &'static str {
    match error {
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            "; credentials come from the environment or the usual files (docs/store.md)"
        }
        object_store::Error::Generic { .. } => {
            "; is the endpoint right and reachable, and are there credentials (docs/store.md)?"
        }
        _ => "",
    }
}

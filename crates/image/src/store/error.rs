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
    #[error("{image}: {place}: chunk {chunk} is missing in the store: somebody removed it; take another image, or store the guest again", place = shown(place))]
    Missing {
        /// The image.
        image: String,
        /// Block and offset.
        place: Place,
        /// Its object.
        chunk: String,
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
    /// Somebody removes garbage.
    #[error(
        "{store}: somebody removes garbage there ({object}); try again when that is done, or in an hour if it was broken off"
    )]
    Collecting {
        /// The prefix.
        store: String,
        /// The object that says so.
        object: String,
    },
    /// Somebody stores an image.
    #[error(
        "{store}: {count} upload(s) go on there, or were broken off within the last hour ({object}): wait for them; nothing was removed"
    )]
    Uploading {
        /// The prefix.
        store: String,
        /// How many.
        count: usize,
        /// One of the objects that say so.
        object: String,
    },
    /// The upload's own sign was not kept alive, so chunks may have been taken for garbage.
    #[error(
        "{store}: the store did not answer for {seconds} s, so chunks may have been taken for garbage meanwhile; store the guest again, what is there is not sent again"
    )]
    Absent {
        /// The prefix.
        store: String,
        /// For how long.
        seconds: u64,
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

impl Error {
    pub(super) fn store(
        op: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(object_store::Error) -> Self {
        let object = object.into();
        move |answer| Self::Store { op, object, answer: Box::new(answer) }
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

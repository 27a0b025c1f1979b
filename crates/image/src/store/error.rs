//! Errors of stores and of the images in them.

use std::io;
use std::time::Duration;

use crate::index;
use crate::location::LocationError;

/// S3's code of a missing bucket.
const NO_BUCKET: &str = "NoSuchBucket";

/// S3's code of a request whose time is not the server's.
const SKEWED: &str = "RequestTimeTooSkewed";
/// `object_store`'s name of a directory.
const DIRECTORY: &str = "LocalFileSystem";

/// Error of a listing that ends although there are more objects, or may.
#[derive(Debug, thiserror::Error)]
#[error("the listing is truncated")]
pub(super) struct CutListing;

/// Failure to store an image or to read it from a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The location is invalid.
    #[error("{text}")]
    Location { text: String },
    /// The location cannot be parsed.
    #[error("{0}")]
    Parse(#[from] LocationError),
    /// The store is unreachable or refused a request.
    #[error("{object}: {op}: {}{}", cause_text(error), advice(error))]
    Store {
        op: &'static str,
        object: String,
        /// The store's error. Not a `source`, since the text already contains it.
        error: Box<object_store::Error>,
    },
    /// The store's address is unencrypted, which must be permitted.
    #[error(
        "{prefix}: {variable} is an http:// address, where credentials and memory are not encrypted: use https://, or set {permission}=true to permit it"
    )]
    Unencrypted { prefix: String, variable: &'static str, permission: &'static str },
    /// The image does not exist.
    #[error("{image}: there is no such image: the store has no {object:?}")]
    NoImage { image: String, object: String },
    /// The image already exists.
    #[error("{image}: it exists already")]
    Exists { image: String },
    /// The store makes an object that exists already, against the condition of the request.
    #[error(
        "{object}: the store ignores conditional writes (If-None-Match), so it cannot decide; use another one"
    )]
    Unconditional { object: String },
    /// The store does not answer.
    #[error("{store}: no answer within {} s", waited.as_secs())]
    Late { store: String, waited: Duration },
    /// The index is invalid.
    #[error("{image}: {why}")]
    Index { image: String, why: index::Error },
    /// A chunk that the index references is missing.
    #[error("{image}: {position}: chunk {chunk} is missing in the store: {absence}; take another image, or store the guest again", position = position_text(position))]
    Missing {
        image: String,
        /// Position of the chunk in the guest.
        position: ChunkPosition,
        chunk: String,
        absence: MissingChunkCause,
    },
    /// A chunk's content does not match its name.
    #[error("{image}: {position}: chunk {chunk} is damaged in the store: {why}; remove that object and store the guest again, or take another image", position = position_text(position))]
    Damaged {
        image: String,
        /// Position of the chunk in the guest.
        position: ChunkPosition,
        chunk: String,
        why: String,
    },
    /// The device state does not match its hash.
    #[error("{image}: the device state: {why}; store the guest again")]
    DeviceState { image: String, why: String },
    /// The object is longer than allowed.
    #[error("{object}: it has more than {limit} bytes, too many for an object of towline; correct the name")]
    TooLong { object: String, limit: u64 },
    /// The store lists only a part of its objects.
    #[error(
        "{object}: the store's list of objects is truncated: it has more, or does not say that it has none, and no token to ask for them, so that images, readers and uploads could be overlooked; nothing was removed; use a store with ListObjectsV2"
    )]
    CutListing {
        /// The prefix or the directory in it.
        object: String,
    },
    /// Other requests for the object keep preceding this one.
    #[error("{object}: the store reports a conflict with another request each time; repeat the command")]
    Conflict { object: String },
    /// Another process is collecting garbage.
    #[error(
        "{store}: garbage is being removed there by {owner}: try again when it has finished, or after an hour if it was interrupted"
    )]
    Collecting {
        store: String,
        /// The other process and its lease.
        owner: String,
    },
    /// Another process is storing an image.
    #[error(
        "{store}: {count} upload(s) are active there, or were interrupted within the last hour, one of them of {owner}: try again when they have finished; nothing was removed"
    )]
    Uploading {
        store: String,
        count: usize,
        /// One of the processes and its lease.
        owner: String,
    },
    /// There was a time without a lease, in which needed chunks may have been collected.
    #[error(
        "{store}: the lease of this process was lost: {why}; another process may have removed chunks that it needs; repeat the command, existing chunks are not sent again"
    )]
    Lost { store: String, why: String },
    /// The image is being read.
    #[error(
        "{image}: it is being read by {readers}: try again when they have finished; a reader that was killed counts until `towline store gc` removes its lease, an hour after its last renewal; nothing was removed",
        readers = readers.join(", ")
    )]
    InUse {
        image: String,
        /// The processes and their leases.
        readers: Vec<String>,
    },
    /// Other processes keep replacing the object.
    #[error("{object}: other processes keep replacing it; repeat the command when they have finished")]
    Changed { object: String },
    /// An index that cannot be read prevents garbage collection.
    #[error(
        "{image}: {why}; as long as it exists, garbage cannot be determined, so nothing was removed: remove it, or use a newer towline"
    )]
    KeepsGarbage { image: String, why: index::Error },
    /// The spool cannot be created or written.
    #[error(
        "{path}: {why}: the guest is stored there before it is uploaded; set TMPDIR to a directory on a disk with space for the guest's memory"
    )]
    Spool { path: String, why: io::Error },
    /// The host lacks memory, threads or descriptors.
    #[error("{what}: {why}")]
    Host { what: &'static str, why: io::Error },
    /// A file with credentials cannot be used.
    #[error("{path}: {why}")]
    Credentials {
        path: String,
        /// The error; never the file's content.
        why: String,
    },
    /// The image to be stored cannot be read.
    #[error("{0}")]
    Image(#[source] Box<crate::Error>),
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
#[non_exhaustive]
pub enum MissingChunkCause {
    /// The reader had a lease all the time.
    #[error(
        "another program removed it, since this reader's lease protects it from towline's garbage collection"
    )]
    Leased,
    /// The reader's lease was not renewed in time.
    #[error("garbage collection may have removed it while this reader's lease was lost ({why})")]
    LeaseLost { why: String },
    /// The reader has no write permission and thus no lease.
    #[error(
        "this reader has no lease ({why}), so garbage collection may have removed it after the image was replaced or removed"
    )]
    Unleased { why: String },
}

impl From<Error> for crate::Error {
    fn from(error: Error) -> Self {
        Self::Store(Box::new(error))
    }
}

impl From<Error> for towline_migration::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Cancelled => Self::Cancelled,
            error => crate::Error::from(error).into(),
        }
    }
}

impl crate::Error {
    /// Returns true if the same read may succeed later: a store is unreachable, overloaded, or refuses
    /// credentials that expired.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        let Self::Store(error) = self else { return false };
        matches!(error.downcast_ref(), Some(Error::Store { .. }))
    }
}

impl Error {
    pub(super) fn store(
        op: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(object_store::Error) -> Self {
        let object = object.into();
        move |error| {
            if has_cause::<CutListing>(&error, |_| true) {
                return Self::CutListing { object };
            }
            Self::Store { op, object, error: Box::new(error) }
        }
    }

    /// An error of a sink of this crate.
    pub(super) fn from_migration(error: towline_migration::Error) -> Self {
        match error {
            towline_migration::Error::Guest(error) => match error.downcast::<crate::Error>() {
                Ok(error) => Self::Image(error),
                Err(error) => Self::Host { what: "the image file", why: io::Error::other(error) },
            },
            _ => Self::Cancelled,
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
            Self::Lost { .. } | Self::Exists { .. } | Self::Changed { .. } | Self::Conflict { .. } => true,
            _ => false,
        }
    }

    /// Returns true if the error concerns one object: others of the store may be readable.
    pub(super) fn is_of_object(&self) -> bool {
        matches!(self, Self::TooLong { .. }) || self.is_read_only()
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
        let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem];
        has_cause::<io::Error>(&**error, |found| kinds.contains(&found.kind())) || self.is_unsupported()
    }
}

/// Returns true if the error or one of its causes is such an error.
fn has_cause<E: std::error::Error + 'static>(
    error: &(dyn std::error::Error + 'static),
    is: impl Fn(&E) -> bool,
) -> bool {
    std::iter::successors(Some(error), |error| error.source())
        .any(|error| error.downcast_ref::<E>().is_some_and(&is))
}

fn position_text(position: &ChunkPosition) -> String {
    match &position.block {
        Some(block) => format!("block {block:?}, from byte {:#x}", position.offset),
        None => format!("the device state, from byte {:#x}", position.offset),
    }
}

/// The cause in words. A server's response contains XML.
fn cause_text(error: &object_store::Error) -> String {
    use object_store::Error as Cause;

    let text = error.to_string();
    if !text.contains("Server returned") {
        return text;
    }
    match (error, xml_field(&text, "Code")) {
        (_, Some(NO_BUCKET)) => "there is no such bucket; create it, or correct the name".into(),
        (Cause::NotFound { .. }, _) => "it does not exist; correct the name".into(),
        (_, Some(SKEWED)) => {
            format!("this host's clock differs too much from the store's ({SKEWED}); set it")
        }
        (Cause::PermissionDenied { .. }, code) => format!("access is refused ({})", code.unwrap_or("403")),
        (Cause::Unauthenticated { .. }, code) => {
            format!("the credentials are not accepted ({})", code.unwrap_or("401"))
        }
        (_, Some(code)) => {
            let message =
                xml_field(&text, "Message").map(|message| format!(", {message}")).unwrap_or_default();
            format!("the store responds with {code}{message}")
        }
        (_, None) => text,
    }
}

/// The text of the first element of this name in a response, unless it is empty.
pub(super) fn xml_field<'a>(response: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = response.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(value, _)| value.trim()).filter(|value| !value.is_empty())
}

/// Returns true if the bucket is missing, not only the object.
pub(super) fn names_no_bucket(error: &object_store::Error) -> bool {
    error.to_string().contains(&format!("<Code>{NO_BUCKET}</Code>"))
}

/// Remedy, where there is one.
fn advice(error: &object_store::Error) -> &'static str {
    let is_full =
        |found: &io::Error| matches!(found.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    match error {
        _ if error.to_string().contains(&format!("<Code>{SKEWED}</Code>")) => "",
        object_store::Error::Generic { .. } if has_cause::<io::Error>(error, is_full) => {
            "; free some space there, or choose another directory"
        }
        object_store::Error::Generic { store: DIRECTORY, .. } => "",
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            "; credentials come from the environment or the usual files (docs/store.md)"
        }
        object_store::Error::Generic { .. } if !names_no_bucket(error) => {
            "; check the endpoint, the network and the credentials (docs/store.md)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Response(String);

    fn not_found(code: &str) -> object_store::Error {
        let text = format!(
            "Error performing GET http://127.0.0.1:9/b/a in 5ms - Server returned non-2xx status code: 404 Not Found: \
             <?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>The specified bucket does not exist</Message></Error>"
        );
        object_store::Error::NotFound { path: "a".into(), source: Box::new(Response(text)) }
    }

    #[test]
    fn responses_are_in_words_and_without_xml() {
        let shown = |error| Error::store("cannot be listed", "s3://b/vm")(error).to_string();
        let skewed = object_store::Error::PermissionDenied {
            path: "a".into(),
            source: Box::new(Response(
                "Server returned non-2xx status code: 403: <Error><Code>RequestTimeTooSkewed</Code></Error>"
                    .into(),
            )),
        };
        assert_eq!(
            shown(skewed),
            "s3://b/vm: cannot be listed: this host's clock differs too much from the store's (RequestTimeTooSkewed); set it"
        );
        let full = object_store::Error::Generic {
            store: DIRECTORY,
            source: Box::new(io::Error::from_raw_os_error(28)),
        };
        assert_eq!(
            shown(full),
            "s3://b/vm: cannot be listed: Generic LocalFileSystem error: No space left on device (os error 28); free some space there, or choose another directory"
        );
        let cut = object_store::Error::Generic { store: "S3", source: Box::new(CutListing) };
        assert!(matches!(Error::store("cannot be listed", "s3://b")(cut), Error::CutListing { .. }));
        assert_eq!(
            shown(not_found("NoSuchBucket")),
            "s3://b/vm: cannot be listed: there is no such bucket; create it, or correct the name"
        );
        assert!(names_no_bucket(&not_found("NoSuchBucket")) && !names_no_bucket(&not_found("NoSuchKey")));
        assert_eq!(
            shown(not_found("NoSuchKey")),
            "s3://b/vm: cannot be listed: it does not exist; correct the name"
        );
        let response =
            "Server returned error response: <Error><Code>SlowDown</Code><Message>Wait.</Message></Error>";
        let error = object_store::Error::Generic { store: "S3", source: Box::new(Response(response.into())) };
        assert!(
            shown(error).starts_with("s3://b/vm: cannot be listed: the store responds with SlowDown, Wait.")
        );
    }
}

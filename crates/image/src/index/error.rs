//! Errors of indexes.

/// Failure to read or write an index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The object is not an index.
    #[error("not the index of an image, which begins with \"towline-index\"; correct the name")]
    NotAnIndex,
    /// The index is newer than this program.
    #[error(
        "the index has version {found}, this towline reads 1 to {known}; use a towline that is as new as the one that made it"
    )]
    Version { found: u32, known: u32 },
    /// The index ends too early.
    #[error("the index is truncated: it ends after {found} bytes; store the guest again")]
    Truncated {
        /// Length of the index in bytes.
        found: u64,
    },
    /// The index exceeds the size limit.
    #[error(
        "the index has {found} bytes before compression, at most {limit} are allowed; check the size of the guest"
    )]
    TooLarge {
        /// Length of the index in bytes.
        found: u64,
        limit: u64,
    },
    /// The compressed content is damaged.
    #[error("the index is damaged or truncated: {why}; store the guest again")]
    Content { why: String },
    /// The head is malformed.
    #[error("the index's head cannot be read: {why}; store the guest again")]
    Head {
        /// The field or position, and the error there.
        why: String,
    },
    /// A number exceeds a limit.
    #[error("the index is inconsistent: {field} is {found}, expected {expected}; store the guest again")]
    Field { field: String, found: u64, expected: String },
    /// The number of names differs from that of the chunks.
    #[error(
        "the index is inconsistent: it names {found} chunks, its blocks have {expected}; store the guest again"
    )]
    Names { found: u64, expected: u64 },
}

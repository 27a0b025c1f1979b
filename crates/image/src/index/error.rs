//! What can be wrong with an index.

/// Why an index cannot be used or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is some other object.
    #[error("this is no index of an image, which begins with \"towline-index\"; correct the name")]
    NoIndex,
    /// It is newer than this program.
    #[error(
        "the index has version {found}, this towline reads 1 to {known}; use a towline that is as new as the one that made it"
    )]
    Version {
        /// Its version.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// It ends too early.
    #[error("the index is truncated: it ends behind {found} bytes; store the guest again")]
    Truncated {
        /// Its bytes.
        found: u64,
    },
    /// It is larger than any.
    #[error(
        "the index has {found} bytes before compression, at most {limit} are taken: is the guest really that large?"
    )]
    TooLarge {
        /// Its bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Its compressed part is not what was written.
    #[error("the index is damaged or truncated: {why}; store the guest again")]
    Content {
        /// What is wrong.
        why: String,
    },
    /// Its head is not what was written.
    #[error("the index's head cannot be read: {why}; store the guest again")]
    Head {
        /// The field or place, and what is wrong there.
        why: String,
    },
    /// A number contradicts a limit.
    #[error("the index is inconsistent: {field} is {found}, expected {expected}; store the guest again")]
    Field {
        /// Which.
        field: String,
        /// What it says.
        found: u64,
        /// What it may say.
        expected: String,
    },
    /// It has not a name for each chunk.
    #[error(
        "the index is inconsistent: it names {found} chunks, its blocks have {expected}; store the guest again"
    )]
    Names {
        /// How many it has.
        found: u64,
        /// How many the lengths call for.
        expected: u64,
    },
}

//! Error of invalid facts.

use super::format::{FORMAT, VERSION};
use crate::limits;

/// Invalid facts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Too long to be read.
    #[error("facts of {found} bytes, at most {} are read", limits::FACTS_BYTES_MAX)]
    TooLong { found: usize },
    /// Not JSON, or with keys of another type.
    #[error("not facts ({0}): expected what `towline check --facts-out` writes, or a QEMU's -dump-vmstate")]
    Json(#[from] serde_json::Error),
    /// Other JSON.
    #[error("its format is {found:?}, expected {FORMAT:?}, as `towline check --facts-out` writes it")]
    Format { found: String },
    /// From a later towline.
    #[error(
        "facts of version {found}, this towline knows {VERSION}: use a newer one, or write them again with this one"
    )]
    Version { found: u32 },
    /// A list is longer than any real one.
    #[error("{found} {what}, at most {limit} are read")]
    TooMany { what: &'static str, found: usize, limit: usize },
}

pub(super) fn at_most(what: &'static str, found: usize, limit: usize) -> Result<(), Error> {
    if found > limit { Err(Error::TooMany { what, found, limit }) } else { Ok(()) }
}

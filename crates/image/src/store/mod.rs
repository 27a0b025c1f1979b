//! Images in object stores (S3, Google Cloud Storage, Azure, HTTP, or a directory).
//!
//! ```text
//!   PREFIX/NAME.towline          an image's index, written last                     `crate::index`
//!   PREFIX/chunks/ab/abcd….zst   a chunk: zstd of the bytes whose BLAKE3 is its name, shared by all images of the prefix
//!   PREFIX/uploads/ID            somebody stores an image now, or was broken off     `presence`
//!   PREFIX/collection            somebody removes garbage now
//! ```
//!
//! - [`Location`]: `s3://BUCKET/PREFIX/NAME` and the like.
//! - [`StoreWriter`]: a [`towline_migration::Sink`]. Pages gather in a spool; a chunk whose pages are all there is
//!   hashed, compressed and sent in the background, unless the store has it.
//! - [`StoredImage`]: a [`towline_migration::Guest`]. Chunks are fetched when their pages are asked for, some ahead, and compared
//!   with their names before any of their bytes leaves.
//! - [`Garbage`]: chunks that no index names.
//!
//! What it is not: a filesystem, or a cache that outlives its process. Limits: no proxies; one HTTP/1.1 connection for each request
//! under way; the S3, Google and Azure credentials that `object_store` knows, and profiles of AWS's files with static keys.
//!
//! `object_store` is asynchronous. Its runtime is one thread of its own (`runtime`); everything else here blocks.

mod access;
mod cache;
mod chunk;
mod connector;
mod credentials;
mod error;
mod garbage;
mod location;
mod presence;
mod reader;
mod runtime;
mod spool;
mod upload;
mod writer;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use error::{Error, Place, Result};
pub use garbage::{Garbage, Object};
pub use location::{Location, Scheme};
pub use reader::StoredImage;
pub use upload::store_image;
pub use writer::StoreWriter;

use runtime::Runtime;
#[cfg(doc)]
use spool::Spool;

/// How many bytes of memory a chunk covers. Measured: docs/store.md.
pub const CHUNK_BYTES: u64 = 256 << 10;
/// Requests that send chunks at the same time, and that fetch them ahead.
const REQUESTS_MAX: usize = 32;
/// How long a request is tried again before it fails.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is.
const RETRIES_MAX: usize = 10;
/// Decompressed chunks that are kept for pages that have not been asked for yet.
const CACHE_BYTES: u64 = 128 << 20;
/// Memory that chunks cover which were fetched, or are being fetched, before they are asked for.
const AHEAD_BYTES: u64 = 32 << 20;
/// How often an upload says that it goes on.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// After how long without a word it is taken for broken off.
const PRESENCE_AGE_MAX: Duration = Duration::from_secs(60 * 60);

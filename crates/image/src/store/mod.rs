//! Images in object stores (S3, Google Cloud Storage, Azure, HTTP, or a directory).
//!
//! ```text
//!   PREFIX/NAME.towline          an image's index, written last                     `crate::index`
//!   PREFIX/chunks/ab/abcd….zst   a chunk: zstd of the bytes whose BLAKE3 is its name, shared by all images of the prefix
//!   PREFIX/retired/BLAKE3        a copy of an index that was replaced or removed while somebody read it
//!   PREFIX/uploads/ID            a lease: somebody stores an image now, or was killed     `lease`
//!   PREFIX/readers/ID            a lease: somebody reads an image now
//!   PREFIX/collections/ID        a lease: somebody removes garbage now
//! ```
//!
//! - [`Location`]: `s3://BUCKET/PREFIX/NAME` and the like.
//! - [`StoreWriter`]: a [`towline_migration::Sink`]. Pages gather in a spool; a chunk whose pages are all there is
//!   hashed, compressed and sent in the background, unless the store has it.
//! - [`StoredImage`]: a [`towline_migration::Guest`]. Chunks are fetched when their pages are asked for, some ahead, and compared
//!   with their names before any of their bytes leaves.
//! - [`Garbage`]: chunks that no index names.
//! - [`remove_image`], [`readers`]: an image and who uses it.
//!
//! What it is not: a filesystem, or a cache that outlives its process. Limits: no proxies; one HTTP/1.1 connection for each request
//! under way; the S3, Google and Azure credentials that `object_store` knows, and profiles of AWS's files with static keys.
//!
//! `object_store` is asynchronous. Its runtime is one thread of its own (`runtime`); everything else here blocks.

mod access;
mod cache;
mod chunk;
mod clock;
mod connector;
mod credentials;
mod error;
mod fault;
mod garbage;
mod hold;
mod images;
mod lease;
mod location;
mod objects;
mod reader;
mod runtime;
mod service;
mod spool;
mod upload;
mod writer;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use error::{Absence, Error, Place, Result};
pub use garbage::{Garbage, Object};
pub use images::{InUse, Reader, readers, remove_image};
pub use lease::ConditionalWrites;
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
/// How often a lease is renewed.
const LEASE_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// How soon that is tried again after it failed.
const LEASE_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// After how long without a renewal everybody takes a lease's owner for dead.
const LEASE_AGE_MAX: Duration = Duration::from_secs(60 * 60);
/// After how long without a renewal the owner itself does. What it sent before has the rest of [`LEASE_AGE_MAX`] to arrive.
const LEASE_GAP_MAX: Duration = Duration::from_secs(30 * 60);

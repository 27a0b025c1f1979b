//! Images in object stores (S3, Google Cloud Storage, Azure, HTTP, or a directory).
//!
//! ```text
//!   PREFIX/NAME.towline          an image's index, written last                     `crate::index`
//!   PREFIX/chunks/ab/abcd….zst   a chunk: zstd of the bytes whose BLAKE3 is its name, shared by all images of the prefix
//!   PREFIX/retired/BLAKE3        a copy of an index that was replaced or removed while it was being read
//!   PREFIX/uploads/ID            a lease: an image is being stored                `lease`
//!   PREFIX/readers/ID            a lease: an image is being read
//!   PREFIX/collections/ID        a lease: garbage is being collected
//! ```
//!
//! - [`Location`]: `s3://BUCKET/PREFIX/NAME` and the like.
//! - [`StoreWriter`]: a [`towline_migration::Sink`]. The guest becomes an image file on this host, whose
//!   chunks are hashed, compressed and sent, unless the store already has them.
//! - [`StoredImage`]: a [`towline_migration::Guest`]. Chunks are fetched on request and ahead, and compared
//!   with their names before any byte is used.
//! - [`Garbage`]: chunks that no index references.
//! - [`Catalog`]: the images of a prefix, with the chunks that they share.
//! - [`remove_image`], [`readers`]: removing an image, and listing its readers.
//!
//! Out of scope: caching between processes. Limits: no proxies; one HTTP/1.1 connection per concurrent
//! request; the S3, Google and Azure credentials that `object_store` supports, and static keys in AWS
//! profiles.
//!
//! `object_store` is asynchronous: its runtime has its own thread (`runtime`), everything else blocks.

mod access;
mod cache;
mod catalog;
mod chunk;
mod claims;
mod connector;
mod credentials;
mod error;
mod fault;
mod garbage;
mod images;
mod lease;
mod lease_state;
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

pub use crate::location::{Location, LocationError, Scheme};
pub use catalog::{Catalog, CatalogEntry, StoredImageSummary, image_names};
pub use claims::{claim, claims};
pub use error::{ChunkPosition, Error, MissingChunkCause, Result};
pub use garbage::{ChunkTotals, Garbage};
pub use images::{IfInUse, ImageReader, UnopenedImage, is_image, readers, remove_image};
pub use lease::ConditionalWrites;
pub use objects::Object;
pub use reader::{StoredImage, VerifiedChunks};
pub use spool::remove_unsent;
pub use upload::store_image;
pub use writer::StoreWriter;

use runtime::Runtime;

/// Bytes of memory per chunk. Measured: docs/store.md.
pub const CHUNK_BYTES: u64 = 256 << 10;
/// Maximum number of concurrent requests that send chunks, and of those that prefetch them.
const REQUESTS_MAX: usize = 32;
/// Time for which a request is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of retries.
const RETRIES_MAX: usize = 10;
/// Capacity of the cache of decompressed chunks.
const CACHE_BYTES: u64 = 128 << 20;
/// Maximum memory of chunks that are prefetched, in the cache or being fetched.
const PREFETCH_BYTES: u64 = 32 << 20;
/// Interval at which a lease is renewed.
const LEASE_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// Interval at which a failed renewal is retried.
const LEASE_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Age of the last renewal after which other processes consider a lease's owner dead.
const LEASE_AGE_MAX: Duration = Duration::from_secs(60 * 60);
/// Time without a renewal after which the owner considers its lease lost. Requests sent before have the rest
/// of [`LEASE_AGE_MAX`] to arrive.
const LEASE_GAP_MAX: Duration = Duration::from_secs(30 * 60);

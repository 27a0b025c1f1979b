//! Stored guests: a QEMU mapped-ram file, which stock QEMU loads without help, and a manifest beside it.
//!
//! ```text
//!   towline_migration::Incoming ─► ImageWriter ─► IMAGE                 and IMAGE.manifest.json
//!   towline_migration::Outgoing ◄─ Image ◄─────── IMAGE (ours or QEMU's)
//! ```
//!
//! An image may be incremental: it contains only the chunks that differ from its base image, and is read
//! together with it.
//!
//! Saving a guest is an incoming migration into an [`ImageWriter`], restoring it an outgoing migration of an
//! [`Image`].
//!
//! - [`checksum`]: BLAKE3 of each 2 MiB of memory, computed while pages arrive in any order.
//! - [`manifest`]: the JSON sidecar that holds the checksums and binds itself to its image.
//! - [`working_set`]: pages that earlier restores of an image requested.
//! - [`index`]: an image's entry in an object store, where its memory is stored as chunks named by their
//!   hashes.
//! - `store` (a feature): images in object stores.
//! - [`atomic_file`]: files that appear under their final name only when they are complete.
//! - [`directory`]: the images in a directory, and their removal.
//! - [`leftover`]: partial files of writers that were killed.
//!
//! Out of scope: QMP. Threads are only started to hash and to access stores. Limits: Linux.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod atomic_file;
mod base_image;
mod bitmap;
mod chain;
pub mod checksum;
#[cfg(test)]
mod crash_tests;
mod delivered;
pub mod directory;
mod error;
#[cfg(test)]
mod flip_tests;
mod frame;
pub mod index;
mod journal;
mod layer;
pub mod leftover;
mod location;
mod lock_holder;
pub mod manifest;
mod page_runs;
mod reader;
mod regular_file;
mod seal;
mod sidecar;
#[cfg(feature = "store")]
pub mod store;
mod stored;
#[allow(unsafe_code, reason = "mapping a file has no safe form")]
mod sys;
#[cfg(test)]
mod testing;
mod verified;
pub mod working_set;
mod write_back;
mod writer;

pub use atomic_file::Existing;
pub use base_image::Increment;
pub use chain::{LAYERS_MAX, Needed, base_paths, has_manifest, needed_by};
pub use checksum::ChunkHash;
pub use error::{Error, Result};
pub use location::{Location, LocationError, Scheme};
pub use lock_holder::lock_holder;
pub use manifest::{Manifest, Origin, QemuProcess, StoredDisk};
pub use reader::{Image, LayerInfo, PageCount};
pub use stored::{StoredGuest, Uploaded};
pub use working_set::WorkingSet;
pub use write_back::SYNC_TIME;
pub use writer::ImageWriter;

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

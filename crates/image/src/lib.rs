//! Stored guests: a QEMU mapped-ram file, which stock QEMU loads by itself, and a manifest beside it.
//!
//! ```text
//!   towline_migration::Incoming ─► ImageWriter ─► IMAGE                 and IMAGE.manifest.json
//!   towline_migration::Outgoing ◄─ Image ◄─────── IMAGE (ours or QEMU's)
//! ```
//!
//! An image may be incremental: it holds the chunks that are not its base's, and is read through it.
//!
//! Saving a guest is an incoming migration into an [`ImageWriter`], restoring one an outgoing migration of an [`Image`].
//!
//! - [`checksum`]: BLAKE3 of each 2 MiB of memory, computed while pages arrive in any order.
//! - [`manifest`]: the JSON sidecar that holds the checksums and binds itself to its image.
//! - [`working_set`]: what earlier restores of an image needed at once.
//! - [`index`]: what stands for an image in an object store, where its memory is chunks named by their hashes.
//! - `store` (a feature): images in object stores.
//! - [`atomic_file`]: files that appear under their final name complete or not at all.
//! - [`leftover`]: what writers that were killed left of such files.
//!
//! What it is not: it knows no QMP and starts no threads but to hash and to reach stores. Limits: Linux.

#![deny(unsafe_code)]

pub mod atomic_file;
mod began;
mod beside;
mod chain;
pub mod checksum;
#[cfg(test)]
mod crash_tests;
mod delivered;
mod error;
#[cfg(test)]
mod flip_tests;
mod frame;
mod holders;
mod increment;
pub mod index;
mod journal;
mod layer;
pub mod leftover;
pub mod manifest;
mod reader;
mod seal;
#[cfg(feature = "store")]
pub mod store;
mod stored;
#[allow(unsafe_code, reason = "mapping a file has no safe form")]
mod sys;
#[cfg(test)]
mod testing;
mod verified;
pub mod working_set;
mod writer;

pub use atomic_file::Existing;
pub use chain::{LAYERS_MAX, base_paths};
pub use checksum::ChunkHash;
pub use error::{Error, Result};
pub use increment::Increment;
pub use manifest::{Manifest, Origin};
pub use reader::{Image, LayerInfo, PageCount};
pub use stored::{StoredGuest, Uploaded};
pub use working_set::WorkingSet;
pub use writer::ImageWriter;

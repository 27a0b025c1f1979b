//! What stored guests have in common, wherever their bytes are.

use std::path::Path;

use towline_migration::Guest;
use towline_protocol::device_state::DeviceState;

use crate::{Image, Result};

/// A stored guest that can be restored.
pub trait StoredGuest: Guest {
    /// How it was named, for people.
    fn name(&self) -> String;

    /// Its device state, which is here.
    fn devices(&self) -> &DeviceState;

    /// Where it is, if it is a file of this host.
    fn local_path(&self) -> Option<&Path> {
        None
    }

    /// The file, if it is one that QEMU can load.
    fn file_image(&self) -> Option<&Image> {
        None
    }

    /// The image, if it is one of files: with its layers, if it is incremental.
    fn image(&self) -> Option<&Image> {
        None
    }

    /// Whether nothing of it went away since it was opened.
    ///
    /// # Errors
    /// A file was cut short: what was sent of it since may be zeros.
    fn check_intact(&self) -> Result<()> {
        Ok(())
    }
}

/// What an upload into a store did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Uploaded {
    /// Chunks that were sent.
    pub sent_chunks: u64,
    /// Bytes of their objects.
    pub sent_bytes: u64,
    /// Bytes of memory in them.
    pub sent_memory_bytes: u64,
    /// Chunks that the store, or another part of this guest, had already.
    pub known_chunks: u64,
    /// Chunks of zeros, which are not stored.
    pub zero_chunks: u64,
}

impl StoredGuest for Image {
    fn name(&self) -> String {
        self.path().display().to_string()
    }

    fn devices(&self) -> &DeviceState {
        Self::devices(self)
    }

    fn local_path(&self) -> Option<&Path> {
        Some(self.path())
    }

    fn file_image(&self) -> Option<&Image> {
        (!self.is_incremental()).then_some(self)
    }

    fn image(&self) -> Option<&Image> {
        Some(self)
    }

    fn check_intact(&self) -> Result<()> {
        Self::check_intact(self)
    }
}

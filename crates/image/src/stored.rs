//! Common interface of stored guests, in files and in stores.

use schemars::JsonSchema;
use serde::Serialize;
use towline_migration::Guest;
use towline_protocol::device_state::DeviceState;

use crate::{Image, Origin, Result};

/// A stored guest that can be restored.
pub trait StoredGuest: Guest {
    /// Name of the guest as given, for messages.
    fn name(&self) -> String;

    /// The guest as the source of a copy, for people.
    fn described(&self) -> String {
        format!("image {}", self.name())
    }

    /// Device state, which is loaded already.
    fn devices(&self) -> &DeviceState;

    /// Origin of the guest, if it was recorded.
    fn origin(&self) -> Option<&Origin> {
        None
    }

    /// The image if it is a file of this host, or a chain of files.
    fn image(&self) -> Option<&Image> {
        None
    }

    /// The image that a destination may have mapped: the guest is that image, but for [`Guest::difference`].
    fn base(&self) -> Option<&Image> {
        self.image().map(Image::whole)
    }

    /// Checks that no file was truncated since it was opened.
    ///
    /// # Errors
    /// A file was truncated: pages sent since then may be zeros.
    fn check_not_truncated(&self) -> Result<()> {
        self.image().map_or(Ok(()), Image::check_not_truncated)
    }
}

/// Statistics of an upload into a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Uploaded {
    /// Chunks that were sent.
    pub sent_chunks: u64,
    /// Bytes of their objects.
    pub sent_bytes: u64,
    /// Bytes of memory in them.
    pub sent_memory_bytes: u64,
    /// Chunks that the store, or another part of this guest, already contained.
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

    fn origin(&self) -> Option<&Origin> {
        self.manifest().map(|manifest| &manifest.origin)
    }

    fn image(&self) -> Option<&Image> {
        Some(self)
    }
}

//! A stored guest.

use serde::{Deserialize, Serialize};

use super::BlockFacts;
use super::error::{Error, at_most};
use crate::limits;

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ImageFacts {
    /// The guest's machine type.
    pub machine: String,
    /// Memory of the guest; with a page size of 0, since any fits.
    pub blocks: Vec<BlockFacts>,
    /// Device state of the guest.
    pub sections: Vec<Section>,
    /// The QEMU that ran it, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qemu: Option<String>,
}

/// The state of one device in a stream.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Section {
    /// QEMU's idstr: `0000:00:02.0/virtio-net`.
    pub name: String,
    /// Distinguishes devices of one name.
    pub instance: u32,
    /// The version of the state.
    pub version: u32,
}

impl Section {
    /// Name of the state's description: the last part of the name.
    pub fn state(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }
}

impl ImageFacts {
    pub(super) fn check(&self) -> Result<(), Error> {
        at_most("RAM blocks", self.blocks.len(), limits::ENTRIES_MAX)?;
        at_most("sections", self.sections.len(), limits::SECTIONS_MAX)
    }
}

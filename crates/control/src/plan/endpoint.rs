//! What is copied from where to where.

use std::path::PathBuf;

use towline_channel::Address;
use towline_migration::synthetic;

/// Where a guest comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A running QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// Somebody's QEMU runs `migrate` to us, who listen there.
    Stream(Address),
    /// An image.
    Image(PathBuf),
    /// An image in an object store.
    #[cfg(feature = "store")]
    Store(towline_image::store::Location),
    /// A synthetic guest of this process.
    Memory(synthetic::Shape),
}

/// Where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A QEMU that waits with `-incoming defer`, by its QMP socket.
    Qmp(PathBuf),
    /// A QEMU or towline that listens there.
    Stream(Address),
    /// An image to be made.
    Image(PathBuf),
    /// An image to be made in an object store.
    #[cfg(feature = "store")]
    Store(towline_image::store::Location),
    /// Memory of this process, where it is verified (or hashed) and then dropped.
    Memory(MemoryRoom),
    /// Nowhere: counts and drops. The source is told that it failed, so its guest runs on.
    Null,
}

impl Source {
    /// Whether it is a stored guest.
    pub fn is_image(&self) -> bool {
        match self {
            Self::Image(_) => true,
            #[cfg(feature = "store")]
            Self::Store(_) => true,
            Self::Qmp(_) | Self::Stream(_) | Self::Memory(_) => false,
        }
    }
}

impl Destination {
    /// Whether it becomes a stored guest.
    pub fn is_image(&self) -> bool {
        match self {
            Self::Image(_) => true,
            #[cfg(feature = "store")]
            Self::Store(_) => true,
            Self::Qmp(_) | Self::Stream(_) | Self::Memory(_) | Self::Null => false,
        }
    }
}

/// Memory of this process as a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryRoom {
    /// Bytes that are made, and touched, before the source is asked for anything; `None`: as many as the guest has, when it
    /// says so.
    pub length: Option<u64>,
    /// In reserved huge pages; needs a length.
    pub is_huge: bool,
}

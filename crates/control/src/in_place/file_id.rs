//! Files in lists of mappings.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

use rustix::fs::{major, minor};

/// A file, as the kernel identifies it in a list of mappings, and stat(2), which on some filesystems has other numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileId {
    /// Major number of its device.
    pub major: u32,
    /// Minor number of its device.
    pub minor: u32,
    /// Inode; 0 for memory without a file.
    pub inode: u64,
}

impl FileId {
    /// The file that stat(2) describes.
    pub(super) fn of(file: &Metadata) -> Self {
        let device = file.dev();
        Self { major: major(device), minor: minor(device), inode: file.ino() }
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}:{:x} inode {}", self.major, self.minor, self.inode)
    }
}

//! Files in lists of mappings.

use std::fmt;

/// A file, as the kernel identifies it in a list of mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileId {
    /// Major number of its device.
    pub major: u32,
    /// Minor number of its device.
    pub minor: u32,
    /// Inode; 0 for memory without a file.
    pub inode: u64,
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}:{:x} inode {}", self.major, self.minor, self.inode)
    }
}

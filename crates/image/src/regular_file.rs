//! Files by names where another program may have put anything: which file it is, and how it is opened.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{self, OFlags, Stat};

/// Identity of a file, whatever its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }

    /// Identity of an open file.
    pub(crate) fn of_file(file: impl AsFd) -> Option<Self> {
        fs::fstat(file).ok().as_ref().map(Self::of)
    }

    /// Identity of the file that is found at `path`.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        fs::stat(path).ok().as_ref().map(Self::of)
    }

    /// Identity of what has the name `path`, perhaps a symbolic link.
    pub(crate) fn named(path: &Path) -> Option<Self> {
        fs::lstat(path).ok().as_ref().map(Self::of)
    }
}

/// Disk space of a file in bytes.
pub(crate) fn allocated(metadata: &Metadata) -> u64 {
    /// Unit of a file's block count in `stat`.
    const BLOCK_BYTES: u64 = 512;
    metadata.blocks() * BLOCK_BYTES
}

/// Opens a file to read it; `None` if it is not a regular one.
pub(crate) fn open_regular(path: &Path, flags: OFlags) -> io::Result<Option<File>> {
    // Without NONBLOCK, opening a FIFO of that name would block.
    let flags = (flags | OFlags::NONBLOCK).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

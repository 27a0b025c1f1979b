//! Mapping files. All `unsafe` of this crate is here.

use std::fs::File;
use std::io;

use memmap2::{Mmap, MmapOptions};

/// Maps the whole of `file` for reading.
///
/// What the map promises of an image: nobody writes an image that is complete. Whoever truncates one under a running
/// restore ends the restore with SIGBUS, as with every reader that maps files.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: images are written under a temporary name and never changed under their own, so the bytes behind the slice
    // stay what they are; `Image::open` refuses a file that is shorter than its block list says before it reads pages.
    unsafe { MmapOptions::new().map(file) }
}

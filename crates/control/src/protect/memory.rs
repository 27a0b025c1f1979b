//! Memory of a standby's guest: a file that this process writes, and the QEMU that waits for the guest maps.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_compat::facts::BlockFacts;
use towline_launch::{AllowedCommandLine, MappedBlock, MappedMemory, MemoryFileError, QemuVersion, Sharing};
use towline_migration::Memory;

use crate::run::main_memory;

/// Memory that is in a file of no name, block after block.
#[derive(Debug)]
pub(crate) struct StandbyMemory {
    file: OwnedFd,
    length: u64,
    /// Blocks that the QEMU maps.
    mapped: Vec<MappedBlock>,
}

/// Reason for which there is no such memory.
#[derive(Debug, thiserror::Error)]
pub enum StandbyMemoryError {
    #[error("memory of {length} bytes for the guest: {source}")]
    File { length: u64, source: std::io::Error },
    #[error("{0}")]
    NoMain(String),
    #[error("{0}")]
    NotMapped(#[from] MemoryFileError),
    #[error(
        "the guest has block {name} at {found:?} of its memory, expected {expected}: its QEMU orders them otherwise"
    )]
    Moved { name: String, found: Option<u64>, expected: u64 },
}

impl StandbyMemory {
    /// Memory for a guest with these blocks, in the order of its stream, whose QEMU is started with this command line: that maps the guest's
    /// RAM from it.
    pub(crate) fn new(
        blocks: &[BlockFacts],
        guest: &mut AllowedCommandLine,
        version: QemuVersion,
    ) -> Result<Self, StandbyMemoryError> {
        let length = blocks.iter().map(|block| block.used_bytes).sum();
        let failed = |errno: rustix::io::Errno| StandbyMemoryError::File { length, source: errno.into() };
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, length).map_err(failed)?;
        let names = blocks.iter().map(|block| (block.name.as_str(), block.used_bytes));
        let main = main_memory(names, &guest.whole()).map_err(StandbyMemoryError::NoMain)?;
        // The QEMU opens it once, when it is started.
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
        let (mut offset, mut mapped) = (0, Vec::new());
        for block in blocks {
            if main.contains(&block.name) {
                let (id, path) = (block.name.clone(), path.clone());
                mapped.push(MappedBlock { id, path, offset, length: block.used_bytes });
            }
            offset += block.used_bytes;
        }
        MappedMemory { blocks: mapped.clone(), sharing: Sharing::Shared }.apply(guest, version)?;
        Ok(Self { file, length, mapped })
    }

    /// The memory, as a sink for the guest.
    pub(super) fn sink(&self) -> Result<Memory, StandbyMemoryError> {
        let file = self.file.try_clone();
        let file = file.map_err(|source| StandbyMemoryError::File { length: self.length, source })?;
        Ok(Memory::adopting_into(file, self.length))
    }

    /// Checks that the guest's blocks are where the QEMU maps them.
    pub(super) fn check(&self, memory: &Memory) -> Result<(), StandbyMemoryError> {
        let (mut offset, mut offsets) = (0, Vec::new());
        for block in memory.blocks() {
            offsets.push((block.name.as_str(), offset));
            offset += block.length;
        }
        let is_elsewhere = |mapped: &&MappedBlock| !offsets.contains(&(mapped.id.as_str(), mapped.offset));
        let Some(moved) = self.mapped.iter().find(is_elsewhere) else { return Ok(()) };
        let found = offsets.iter().find(|(name, _)| *name == moved.id).map(|(_, offset)| *offset);
        Err(StandbyMemoryError::Moved { name: moved.id.clone(), found, expected: moved.offset })
    }

    /// Names of the blocks that the QEMU has.
    pub(super) fn present(&self) -> impl Iterator<Item = &str> {
        self.mapped.iter().map(|block| block.id.as_str())
    }
}

//! Memory of this process that takes a guest.

use std::num::NonZeroUsize;
use std::thread;

use towline_migration::synthetic::{self, Checked};
use towline_migration::{Memory, MemoryError};

use super::endpoint::MemoryRoom;
use super::error::Error;

/// Makes room for a guest.
pub(super) fn room(room: &MemoryRoom) -> Result<Checked, Error> {
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let memory = match room.length {
        None => Memory::adopting(available_bytes()),
        Some(length) => {
            let failed = |source| {
                let block = synthetic::BLOCK_NAME.to_owned();
                towline_migration::Error::from(MemoryError::Map { block, length, source })
            };
            let file = synthetic::memfd(length, room.is_huge).map_err(failed)?;
            // Its pages stay when this mapping of it goes.
            synthetic::populate(&file, length, threads).map_err(towline_migration::Error::from)?;
            Memory::adopting_into(file, length)
        }
    };
    Ok(Checked::new(memory, threads))
}

/// What the kernel says can be had without others losing theirs.
fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

//! `mem:SIZE[,KEY=VALUE]...`, with options after commas as in QEMU.

use std::fmt;
use std::num::NonZeroUsize;
use std::thread;

use towline_migration::{Memory, MemoryError};

use crate::checked::Checked;
use crate::shape::{Backing, Shape};
use crate::{BLOCK_NAME, MemfdPages, memfd, populate};

/// Maximum number of threads of a load.
const THREADS_MAX: usize = 64;
const KEYS: &str = "dirty=BYTES, zero=PERCENT, seed=N, threads=N, backing=private|memfd|hugetlb";

/// Parses a number of bytes with the suffixes of the command line.
pub type ParseBytes = fn(&str) -> Result<u64, String>;

/// Options of `mem:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemOptions {
    /// Original text.
    text: String,
    length: Option<u64>,
    zero_percent: Option<u8>,
    seed: Option<u64>,
    dirty_rate: Option<u64>,
    threads: Option<NonZeroUsize>,
    backing: Option<Backing>,
}

/// Memory of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// Bytes to allocate and populate before the source is queried; `None` to allocate as many as the guest
    /// has once that is known.
    length: Option<u64>,
    /// In reserved huge pages; needs a length.
    is_huge: bool,
}

impl MemOptions {
    /// Parses what follows `mem:`.
    ///
    /// # Errors
    /// The text for the user, which names the expected form.
    pub fn parse(text: &str, bytes: ParseBytes) -> Result<Self, String> {
        let mut parts = text.split(',');
        let length = match parts.next().unwrap_or_default() {
            "" => None,
            size => Some(bytes(size).map_err(|error| format!("mem:{text}: {error}"))?),
        };
        if let Some(length) = length.filter(|length| !length.is_multiple_of(4096)) {
            return Err(format!(
                "mem:{text}: {length} bytes is not a multiple of the page size: expected a multiple of 4K"
            ));
        }
        let (zero_percent, seed, dirty_rate, threads, backing) = (None, None, None, None, None);
        let mut memory = Self { text: text.into(), length, zero_percent, seed, dirty_rate, threads, backing };
        for part in parts {
            memory.set(part, bytes).map_err(|error| format!("mem:{text}: {error}"))?;
        }
        Ok(memory)
    }

    /// Returns the synthetic guest of a source.
    ///
    /// # Errors
    /// The text for the user: an option is missing.
    pub fn shape(&self) -> Result<Shape, String> {
        let length = self.length.ok_or("mem: as SOURCE needs a size, such as mem:2G")?;
        let default = Shape::of_length(length);
        Ok(Shape {
            length,
            seed: self.seed.unwrap_or(default.seed),
            zero_percent: self.zero_percent.unwrap_or(default.zero_percent),
            dirty_rate: self.dirty_rate.unwrap_or(default.dirty_rate),
            threads: self.threads.unwrap_or(default.threads),
            backing: self.backing.unwrap_or(default.backing),
        })
    }

    /// Returns the memory of a destination.
    ///
    /// # Errors
    /// The text for the user: an option is for a source, or is missing.
    pub fn room(&self) -> Result<Room, String> {
        let source_only = [
            ("dirty", self.dirty_rate.is_some()),
            ("zero", self.zero_percent.is_some()),
            ("seed", self.seed.is_some()),
            ("threads", self.threads.is_some()),
        ];
        if let Some((key, _)) = source_only.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("mem:{}: {key} is for a SOURCE: leave it out", self.text));
        }
        match (self.length, self.backing) {
            (length, None) => Ok(Room { length, is_huge: false }),
            (None, Some(_)) => Err(format!("mem:{}: backing needs a size, such as mem:2G", self.text)),
            (_, Some(Backing::Private)) => Err(format!(
                "mem:{}: a DEST with a size is a memfd: leave the size out for private memory",
                self.text
            )),
            (length, Some(backing)) => Ok(Room { length, is_huge: backing == Backing::HugeTlb }),
        }
    }

    fn set(&mut self, part: &str, bytes: ParseBytes) -> Result<(), String> {
        let unknown = || format!("unknown option {part:?}: expected {KEYS}");
        let (key, value) = part.split_once('=').ok_or_else(unknown)?;
        let number = |max: u64| match value.parse::<u64>() {
            Ok(number) if number <= max => Ok(number),
            _ => Err(format!("{key}={value}: expected a number up to {max}")),
        };
        match key {
            "dirty" if value == "0" => self.dirty_rate = Some(0),
            "dirty" => self.dirty_rate = Some(bytes(value)?),
            "zero" => self.zero_percent = Some(number(100)? as u8),
            "seed" => self.seed = Some(number(u64::MAX)?),
            "threads" => {
                let threads = NonZeroUsize::new(number(THREADS_MAX as u64)? as usize);
                self.threads =
                    Some(threads.ok_or("threads=0: expected at least 1; use dirty=0 for no writes")?);
            }
            "backing" => {
                self.backing = Some(match value {
                    "private" => Backing::Private,
                    "memfd" => Backing::Memfd,
                    "hugetlb" => Backing::HugeTlb,
                    _ => return Err(unknown()),
                });
            }
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

impl Room {
    /// Allocates it.
    ///
    /// # Errors
    /// The kernel has too little memory.
    pub fn allocate(&self) -> towline_migration::Result<Checked> {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let memory = match self.length {
            None => Memory::adopting(available_bytes()),
            Some(length) => {
                let pages = if self.is_huge { MemfdPages::Huge } else { MemfdPages::Base };
                let file = memfd(length, pages).map_err(|source| MemoryError::Map {
                    block: BLOCK_NAME.to_owned(),
                    length,
                    source,
                })?;
                // Its pages outlive this mapping.
                populate(&file, length, threads)?;
                Memory::adopting_into(file, length)
            }
        };
        Ok(Checked::new(memory, threads))
    }
}

/// Memory that the kernel reports as available.
fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

impl fmt::Display for MemOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mem:{}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<u64, String> {
        let (digits, shift) = match text.split_at(text.len() - 1) {
            (digits, "M") => (digits, 20),
            (digits, "G") => (digits, 30),
            _ => (text, 0),
        };
        digits.parse::<u64>().map(|number| number << shift).map_err(|error| error.to_string())
    }

    fn memory(text: &str) -> MemOptions {
        MemOptions::parse(text, bytes).unwrap()
    }

    #[test]
    fn a_guest_is_described_by_its_options() {
        let shape = memory("2G,dirty=20M,zero=10,seed=7,threads=2,backing=memfd").shape().unwrap();
        let threads = NonZeroUsize::new(2).unwrap();
        let (dirty_rate, zero_percent, backing) = (20 << 20, 10, Backing::Memfd);
        assert_eq!(shape, Shape { length: 2 << 30, seed: 7, zero_percent, dirty_rate, threads, backing });
        assert_eq!(memory("64M").shape(), Ok(Shape::of_length(64 << 20)));
        assert_eq!(memory("64M,dirty=0").to_string(), "mem:64M,dirty=0");
        assert!(memory("").shape().unwrap_err().contains("needs a size"));
    }

    #[test]
    fn a_destination_has_a_size_or_adopts_the_sources() {
        assert_eq!(memory("").room(), Ok(Room::default()));
        assert_eq!(memory("1G,backing=hugetlb").room(), Ok(Room { length: Some(1 << 30), is_huge: true }));
        assert!(memory("1G,dirty=1M").room().unwrap_err().contains("dirty is for a SOURCE"));
        assert!(memory(",backing=memfd").room().unwrap_err().contains("backing needs a size"));
    }

    #[test]
    fn errors_name_the_expected_options() {
        let error = |text: &str| MemOptions::parse(text, bytes).unwrap_err();
        assert_eq!(
            error("1000"),
            "mem:1000: 1000 bytes is not a multiple of the page size: expected a multiple of 4K"
        );
        assert!(error("1G,rate=5").contains("unknown option \"rate=5\": expected dirty=BYTES"));
        assert!(error("1G,zero=101").contains("zero=101: expected a number up to 100"));
        assert!(error("1G,threads=0").contains("expected at least 1"));
        assert_eq!(error("many"), "mem:many: invalid digit found in string");
    }
}

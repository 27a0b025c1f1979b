//! `mem:SIZE[,KEY=VALUE]...`, with options after commas as in QEMU.

use std::fmt;
use std::num::NonZeroUsize;
use std::thread;

use towline_migration::{Memory, MemoryError};

use crate::checked::Checked;
use crate::shape::{Backing, Shape};
use crate::{BLOCK_NAME, memfd, populated};

/// Maximum number of threads of a load.
const THREADS_MAX: usize = 64;
/// Options that a destination does not have.
const SOURCE_KEYS: [&str; 4] = ["dirty", "zero", "seed", "threads"];
const KEYS: &str = "dirty=BYTES, zero=PERCENT, seed=N, threads=N, backing=private|memfd|hugetlb";

/// Parses a number of bytes with the suffixes of the command line.
pub type ParseBytes = fn(&str) -> Result<u64, String>;

/// Options of `mem:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemOptions {
    /// Original text.
    text: String,
    length: Option<u64>,
    /// The guest, but for its length.
    shape: Shape,
    /// Keys of the options that were given.
    given: Vec<String>,
}

/// Memory of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes to allocate and populate before the source is queried; `None` to allocate as many as the guest
    /// has once that is known.
    length: Option<u64>,
    backing: Backing,
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
        let shape = Shape::of_length(length.unwrap_or_default());
        let mut memory = Self { text: text.into(), length, shape, given: Vec::new() };
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
        self.length.ok_or("mem: as SOURCE needs a size, such as mem:2G")?;
        Ok(self.shape)
    }

    /// Returns the memory of a destination.
    ///
    /// # Errors
    /// The text for the user: an option is for a source, or is missing.
    pub fn room(&self) -> Result<Room, String> {
        let is_given = |key: &str| self.given.iter().any(|given| given == key);
        if let Some(key) = SOURCE_KEYS.into_iter().find(|key| is_given(key)) {
            return Err(format!("mem:{}: {key} is for a SOURCE: leave it out", self.text));
        }
        match (self.length, is_given("backing").then_some(self.shape.backing)) {
            (length, None) => Ok(Room { length, backing: Backing::Memfd }),
            (None, Some(_)) => Err(format!("mem:{}: backing needs a size, such as mem:2G", self.text)),
            (_, Some(Backing::Private)) => Err(format!(
                "mem:{}: a DEST with a size is a memfd: leave the size out for private memory",
                self.text
            )),
            (length, Some(backing)) => Ok(Room { length, backing }),
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
            "dirty" if value == "0" => self.shape.dirty_rate = 0,
            "dirty" => self.shape.dirty_rate = bytes(value)?,
            "zero" => self.shape.zero_percent = number(100)? as u8,
            "seed" => self.shape.seed = number(u64::MAX)?,
            "threads" => {
                let threads = NonZeroUsize::new(number(THREADS_MAX as u64)? as usize);
                let threads = threads.ok_or("threads=0: expected at least 1; use dirty=0 for no writes")?;
                self.shape.threads = threads;
            }
            "backing" => {
                self.shape.backing = match value {
                    "private" => Backing::Private,
                    "memfd" => Backing::Memfd,
                    "hugetlb" => Backing::HugeTlb,
                    _ => return Err(unknown()),
                };
            }
            _ => return Err(unknown()),
        }
        self.given.push(key.to_owned());
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
                let file = memfd(length, self.backing).map_err(|source| MemoryError::Map {
                    block: BLOCK_NAME.to_owned(),
                    length,
                    source,
                })?;
                // Its pages outlive this mapping.
                drop(populated(&file, length, threads)?);
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
        assert_eq!(memory("").room(), Ok(Room { length: None, backing: Backing::Memfd }));
        let huge = Room { length: Some(1 << 30), backing: Backing::HugeTlb };
        assert_eq!(memory("1G,backing=hugetlb").room(), Ok(huge));
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

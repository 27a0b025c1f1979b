//! `mem:SIZE[,KEY=VALUE]...`, with options after commas as in QEMU.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use towline_control::plan::MemoryOptions;
use towline_migration::synthetic::{Backing, Shape};

use crate::units::bytes;

/// Maximum number of threads of a load.
const THREADS_MAX: usize = 64;
const KEYS: &str = "dirty=BYTES, zero=PERCENT, seed=N, threads=N, backing=private|memfd|hugetlb";

/// Options of `mem:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemOptions {
    /// Original text.
    text: String,
    length: Option<u64>,
    zero_percent: Option<u8>,
    seed: Option<u64>,
    dirty_rate: Option<u64>,
    threads: Option<NonZeroUsize>,
    backing: Option<Backing>,
}

impl FromStr for MemOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
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
            memory.set(part).map_err(|error| format!("mem:{text}: {error}"))?;
        }
        Ok(memory)
    }
}

impl MemOptions {
    /// Returns the synthetic guest of a source.
    pub(crate) fn shape(&self) -> Result<Shape, String> {
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
    pub(crate) fn destination(&self) -> Result<MemoryOptions, String> {
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
            (length, None) => Ok(MemoryOptions { length, is_huge: false }),
            (None, Some(_)) => Err(format!("mem:{}: backing needs a size, such as mem:2G", self.text)),
            (_, Some(Backing::Private)) => Err(format!(
                "mem:{}: a DEST with a size is a memfd: leave the size out for private memory",
                self.text
            )),
            (length, Some(backing)) => Ok(MemoryOptions { length, is_huge: backing == Backing::HugeTlb }),
        }
    }

    fn set(&mut self, part: &str) -> Result<(), String> {
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

impl fmt::Display for MemOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mem:{}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(text: &str) -> MemOptions {
        text.parse().unwrap()
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
        assert_eq!(memory("").destination(), Ok(MemoryOptions::default()));
        assert_eq!(
            memory("1G,backing=hugetlb").destination(),
            Ok(MemoryOptions { length: Some(1 << 30), is_huge: true })
        );
        assert!(memory("1G,dirty=1M").destination().unwrap_err().contains("dirty is for a SOURCE"));
        assert!(memory(",backing=memfd").destination().unwrap_err().contains("backing needs a size"));
    }

    #[test]
    fn errors_name_the_expected_options() {
        let error = |text: &str| text.parse::<MemOptions>().unwrap_err();
        assert_eq!(
            error("1000"),
            "mem:1000: 1000 bytes is not a multiple of the page size: expected a multiple of 4K"
        );
        assert!(error("1G,rate=5").contains("unknown option \"rate=5\": expected dirty=BYTES"));
        assert!(error("1G,zero=101").contains("zero=101: expected a number up to 100"));
        assert!(error("1G,threads=0").contains("expected at least 1"));
        let text = "mem:many: unknown suffix \"many\": expected bytes, or K, M, G or T, or KB, MB, GB or TB";
        assert_eq!(error("many"), text);
    }
}

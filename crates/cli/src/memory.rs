//! `mem:` as it is written: `mem:SIZE[,KEY=VALUE]...`, QEMU's own way to put options behind a path.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use serde_json::{Value, json};
use towline_control::plan::MemoryOptions;
use towline_migration::synthetic::{Backing, BlockHash, Outcome, Shape};

use crate::progress::Reporter;
use crate::units::{bytes, count, size};

/// Most threads of a load.
const THREADS_MAX: usize = 64;
const KEYS: &str = "dirty=BYTES, zero=PERCENT, seed=N, threads=N, backing=private|memfd|hugetlb";

/// What stands behind `mem:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    /// As it was written.
    text: String,
    length: Option<u64>,
    zero_percent: Option<u8>,
    seed: Option<u64>,
    dirty_rate: Option<u64>,
    threads: Option<NonZeroUsize>,
    backing: Option<Backing>,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let length = match parts.next().unwrap_or_default() {
            "" => None,
            size => Some(bytes(size).map_err(|error| format!("mem:{text}: {error}"))?),
        };
        if let Some(length) = length.filter(|length| !length.is_multiple_of(4096)) {
            return Err(format!("mem:{text}: {length} bytes are no whole pages; give a multiple of 4K"));
        }
        let (zero_percent, seed, dirty_rate, threads, backing) = (None, None, None, None, None);
        let mut memory = Self { text: text.into(), length, zero_percent, seed, dirty_rate, threads, backing };
        for part in parts {
            memory.set(part).map_err(|error| format!("mem:{text}: {error}"))?;
        }
        Ok(memory)
    }
}

impl Memory {
    /// A synthetic guest.
    pub(crate) fn shape(&self) -> Result<Shape, String> {
        let length = self.length.ok_or("mem: as SOURCE needs a size, as mem:2G")?;
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

    /// Room for a guest.
    pub(crate) fn room(&self) -> Result<MemoryOptions, String> {
        let of_source = [
            ("dirty", self.dirty_rate.is_some()),
            ("zero", self.zero_percent.is_some()),
            ("seed", self.seed.is_some()),
            ("threads", self.threads.is_some()),
        ];
        if let Some((key, _)) = of_source.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("mem:{}: {key} is for a SOURCE; what arrives says what it is", self.text));
        }
        match (self.length, self.backing) {
            (length, None) => Ok(MemoryOptions { length, is_huge: false }),
            (None, Some(_)) => Err(format!("mem:{}: backing needs a size, as mem:2G", self.text)),
            (_, Some(Backing::Private)) => Err(format!(
                "mem:{}: a DEST with a size is a memfd; leave the size out for private memory",
                self.text
            )),
            (length, Some(backing)) => Ok(MemoryOptions { length, is_huge: backing == Backing::HugeTlb }),
        }
    }

    fn set(&mut self, part: &str) -> Result<(), String> {
        let unknown = || format!("{part:?} is none of {KEYS}");
        let (key, value) = part.split_once('=').ok_or_else(unknown)?;
        let number = |most: u64| match value.parse::<u64>() {
            Ok(number) if number <= most => Ok(number),
            _ => Err(format!("{key}={value}: a number up to {most} is expected")),
        };
        match key {
            "dirty" if value == "0" => self.dirty_rate = Some(0),
            "dirty" => self.dirty_rate = Some(bytes(value)?),
            "zero" => self.zero_percent = Some(number(100)? as u8),
            "seed" => self.seed = Some(number(u64::MAX)?),
            "threads" => {
                let threads = NonZeroUsize::new(number(THREADS_MAX as u64)? as usize);
                self.threads = Some(threads.ok_or("threads=0: at least 1 writes; dirty=0 for none")?);
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

/// What arrived, for machines.
pub(crate) fn json(outcome: &Outcome) -> Value {
    let hash =
        |block: &BlockHash| json!({ "name": block.name, "length": block.length, "blake3": block.blake3 });
    json!({
        "verified-pages": outcome.verified_pages,
        "pages-written-by-load": outcome.verified_pages.map(|_| outcome.writes),
        "transfer-time": outcome.transfer_time.as_millis() as u64,
        "populate-time": outcome.populated.map(|populated| populated.elapsed.as_millis() as u64),
        "check-time": outcome.check_time.as_millis() as u64,
        "blocks": outcome.hashes.iter().map(hash).collect::<Vec<_>>(),
    })
}

/// What arrived, for people.
pub(crate) fn tell(reporter: &Reporter, outcome: &Outcome) {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let populated = outcome.populated.map_or_else(String::new, |populated| {
        format!(", {} of it to make memory ahead", seconds(populated.elapsed))
    });
    reporter.line(&format!("  received     in {}{populated}", seconds(outcome.transfer_time)));
    if let Some(pages) = outcome.verified_pages {
        let (pages, writes) = (count(pages), count(outcome.writes));
        let time = seconds(outcome.check_time);
        reporter.line(&format!(
            "  verified     {pages} pages, all right, {writes} writes of its load in them; {time}"
        ));
    }
    for BlockHash { name, length, blake3 } in &outcome.hashes {
        reporter.line(&format!("  {name:<38} {:>11}  BLAKE3 {blake3}", size(*length)));
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mem:{}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(text: &str) -> Memory {
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
    fn room_is_given_a_size_or_takes_the_guests() {
        assert_eq!(memory("").room(), Ok(MemoryOptions::default()));
        assert_eq!(
            memory("1G,backing=hugetlb").room(),
            Ok(MemoryOptions { length: Some(1 << 30), is_huge: true })
        );
        assert!(memory("1G,dirty=1M").room().unwrap_err().contains("dirty is for a SOURCE"));
        assert!(memory(",backing=memfd").room().unwrap_err().contains("backing needs a size"));
    }

    #[test]
    fn what_is_no_option_says_what_would_be() {
        let error = |text: &str| text.parse::<Memory>().unwrap_err();
        assert_eq!(error("1000"), "mem:1000: 1000 bytes are no whole pages; give a multiple of 4K");
        assert!(error("1G,rate=5").contains("\"rate=5\" is none of dirty=BYTES"));
        assert!(error("1G,zero=101").contains("zero=101: a number up to 100 is expected"));
        assert!(error("1G,threads=0").contains("at least 1 writes"));
        assert_eq!(error("many"), "mem:many: unknown suffix \"MANY\": K, M, G or T");
    }
}

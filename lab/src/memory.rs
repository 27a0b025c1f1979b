//! The guest's memory as QEMU itself reports it.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::qemu::{Qemu, RAM_NAME};

/// Bytes that are dumped at once, and so the size limit of the temporary file.
const CHUNK_SIZE: u64 = 64 << 20;
const CHUNK_WITHIN: Duration = Duration::from_secs(60);

/// A line of `info ramblock`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBlock {
    /// Name in the migration stream.
    pub name: String,
    /// Used length: the bytes that are migrated.
    pub used_length: u64,
}

impl Qemu {
    /// BLAKE3 of all of the guest's RAM in the order of its addresses, below and above 4 GiB. The guest must
    /// be stopped: a hash of changing memory means nothing.
    pub fn memory_hash(&self) -> Result<blake3::Hash> {
        let status = self.qmp().execute("query-status", serde_json::Value::Null)?;
        ensure!(
            status["running"] == false,
            "the guest runs ({status}); `stop` it before its memory is hashed"
        );
        let mut hasher = blake3::Hasher::new();
        let ranges = ram_ranges(&self.qmp().hmp("info mtree -f")?);
        ensure!(!ranges.is_empty(), "`info mtree -f` names no {RAM_NAME}");
        for range in ranges {
            for address in range.clone().step_by(CHUNK_SIZE as usize) {
                hasher.update(&self.read_memory(address, CHUNK_SIZE.min(range.end - address))?);
            }
        }
        Ok(hasher.finalize())
    }

    /// Reads guest-physical memory (QMP `pmemsave`), of a running or a stopped guest.
    pub fn read_memory(&self, address: u64, length: u64) -> Result<Vec<u8>> {
        let file = tempfile::NamedTempFile::new_in(self.directory())?;
        let arguments = json!({ "val": address, "size": length, "filename": file.path() });
        self.qmp().execute_within("pmemsave", arguments, CHUNK_WITHIN)?;
        let bytes = std::fs::read(file.path())?;
        ensure!(bytes.len() as u64 == length, "pmemsave wrote {} bytes, expected {length}", bytes.len());
        Ok(bytes)
    }

    /// Reads eight bytes of guest-physical memory as a number (HMP `xp`), cheap enough for polling.
    pub fn read_u64(&self, address: u64) -> Result<u64> {
        self.qmp().hmp_number(&format!("xp /1gx {address:#x}"))
    }

    /// Returns QEMU's RAM blocks (HMP `info ramblock`).
    pub fn ram_blocks(&self) -> Result<Vec<RamBlock>> {
        let table = self.qmp().hmp("info ramblock")?;
        let blocks: Option<Vec<RamBlock>> = table.lines().skip(1).map(ram_block).collect();
        blocks.with_context(|| format!("`info ramblock` says `{table}`"))
    }
}

/// Parses `  pc.ram    4 KiB  0x0000000000000000 0x0000000008000000 …`: name, page size, offset, used length.
fn ram_block(line: &str) -> Option<RamBlock> {
    let mut words = line.split_whitespace();
    let name = words.next()?.to_owned();
    let mut numbers = words.filter_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    Some(RamBlock { name, used_length: numbers.nth(1)? })
}

/// Guest-physical addresses of the guest's main memory in the flat view of the address space `memory`.
fn ram_ranges(tree: &str) -> Vec<Range<u64>> {
    let view = tree.split("FlatView #").find(|view| view.contains("AS \"memory\"")).unwrap_or_default();
    view.lines().filter_map(ram_range).collect()
}

/// Parses `  0000000000000000-00000000000bffff (prio 0, ram): pc.ram @0000000000000000 KVM`.
fn ram_range(line: &str) -> Option<Range<u64>> {
    let (range, rest) = line.trim().split_once(" (prio ")?;
    let (kind, name) = rest.split_once("): ")?;
    let in_ram = name.split_whitespace().next() == Some(RAM_NAME);
    // Memory that the chipset has made read-only counts as memory.
    if !in_ram || !(kind.ends_with(" ram") || kind.ends_with(" rom")) {
        return None;
    }
    let (first, last) = range.split_once('-')?;
    let (first, last) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
    Some(first..last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_main_memory_in_the_main_view() {
        let tree = "FlatView #0\n AS \"I/O\", root: io\n Root memory region: io\n\
                    \x20 0000000000000000-0000000000000007 (prio 0, i/o): dma-chan\n\nFlatView #1\n\
                    \x20AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n Root memory region: system\n\
                    \x20 0000000000000000-00000000000bffff (prio 0, ram): pc.ram\n\
                    \x20 00000000000c0000-00000000000c3fff (prio 0, rom): pc.ram @00000000000c0000\n\
                    \x20 00000000fed00000-00000000fed003ff (prio 0, i/o): hpet\n\
                    \x20 00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios\n\
                    \x20 0000000100000000-000000013fffffff (prio 0, ram): pc.ram @0000000080000000\n";
        assert_eq!(ram_ranges(tree), [0..0xc_0000, 0xc_0000..0xc_4000, 1 << 32..5 << 30]);
    }

    #[test]
    fn blocks_have_name_and_length() {
        let line =
            "  /rom@etc/acpi/tables    4 KiB  0x0000000008080000 0x0000000000020000 0x0000000000200000";
        let wanted = RamBlock { name: "/rom@etc/acpi/tables".into(), used_length: 0x2_0000 };
        assert_eq!(ram_block(line), Some(wanted));
        assert_eq!(ram_block("nonsense"), None);
    }
}

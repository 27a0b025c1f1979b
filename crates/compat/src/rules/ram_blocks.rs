//! RAM blocks, which a stream carries by name and length.

use std::collections::BTreeMap;

use super::Pair;
use crate::report::Findings;
use crate::size::size_text;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some(destination) = pair.destination_qemu() else { return };
    let there: BTreeMap<_, _> = destination.blocks.iter().map(|block| (&block.name, block)).collect();
    for guest in pair.guest_blocks() {
        let (name, length) = (&guest.name, guest.used_bytes);
        match there.get(name) {
            None => findings.no(
                format!("the destination has no RAM block {name:?} of {}", size_text(length)),
                "a device or memory backend is missing, or has another id or address",
            ),
            // Firmware tables are resizable: there QEMU takes any length up to the block's own maximum.
            Some(block) if block.max_bytes > block.used_bytes && length <= block.max_bytes => {}
            Some(block) if block.used_bytes != length => findings.no(
                format!(
                    "RAM block {name:?} has {} in the guest and {} there",
                    size_text(length),
                    size_text(block.used_bytes)
                ),
                if name.starts_with('/') { "" } else { "memory size, -m, or a device's memory differs" },
            ),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::BlockFacts;

    fn block(name: &str, used_bytes: u64, max_bytes: u64) -> BlockFacts {
        BlockFacts { name: name.into(), page_bytes: 4096, used_bytes, max_bytes }
    }

    #[test]
    fn another_length_or_name_is_a_no() {
        let found = between(run, |source, destination| {
            source.blocks = vec![block("pc.ram", 64, 64), block("vga.vram", 8, 8)];
            destination.blocks = vec![block("pc.ram", 32, 32)];
        });
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "RAM block \"pc.ram\" has 64 bytes in the guest and 32 bytes there (memory size, -m, or a device's memory differs)",
                "the destination has no RAM block \"vga.vram\" of 8 bytes (a device or memory backend is missing, or has another id or address)"
            ]
        );
    }

    #[test]
    fn sizes_of_memory_are_in_mib_too() {
        let found = between(run, |source, destination| {
            source.blocks = vec![block("pc.ram", 512 << 20, 512 << 20)];
            destination.blocks = vec![block("pc.ram", 768 << 20, 768 << 20)];
        });
        assert_eq!(
            found[0].text,
            "RAM block \"pc.ram\" has 512 MiB (536870912 bytes) in the guest and 768 MiB (805306368 bytes) there"
        );
    }

    #[test]
    fn a_resizable_one_may_differ_as_far_as_it_goes() {
        for (there, count) in
            [(block("/rom@etc/acpi/tables", 16, 128), 0), (block("/rom@etc/acpi/tables", 16, 32), 1)]
        {
            let found = between(run, |source, destination| {
                source.blocks = vec![block("/rom@etc/acpi/tables", 64, 128)];
                destination.blocks = vec![there];
            });
            assert_eq!(found.len(), count, "{found:?}");
        }
    }

    #[test]
    fn one_more_there_is_no_harm() {
        let found = between(run, |_, destination| destination.blocks = vec![block("more", 8, 8)]);
        assert_eq!(found, []);
    }
}

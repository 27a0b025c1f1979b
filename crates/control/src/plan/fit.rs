//! Whether a guest fits a QEMU that waits: what QEMU itself would find out only while it loads, and say badly.

use towline_protocol::RamBlock;

use crate::qemu::Facts;

/// What is known of a guest that is to be sent.
#[derive(Debug, Clone)]
pub(super) struct Guest {
    pub(super) machine_type: String,
    /// Names and lengths in bytes.
    pub(super) blocks: Vec<(String, u64)>,
    /// As QMP prints it; lanes carry it, and a QEMU compares it with its own.
    pub(super) uuid: Option<String>,
}

impl Guest {
    pub(super) fn of_blocks(machine_type: &str, blocks: &[RamBlock]) -> Self {
        let blocks = blocks.iter().map(|block| (block.name.clone(), block.length)).collect();
        Self { machine_type: machine_type.into(), blocks, uuid: None }
    }

    pub(super) fn of_qemu(facts: &Facts) -> Self {
        let blocks = facts.migrated_blocks().map(|block| (block.name.clone(), block.used_bytes)).collect();
        Self { machine_type: facts.machine.clone(), blocks, uuid: Some(facts.uuid.clone()) }
    }
}

/// Why `guest` does not fit the waiting QEMU; empty if it does as far as can be told from here.
pub(super) fn misfits(guest: &Guest, waiting: &Facts, lanes: usize) -> Vec<String> {
    let mut reasons = Vec::new();
    if guest.machine_type != waiting.machine {
        reasons.push(format!(
            "the guest's machine type is {}, there it is {} (start it with -machine {})",
            guest.machine_type, waiting.machine, guest.machine_type
        ));
    }
    for (name, length) in &guest.blocks {
        match waiting.migrated_blocks().find(|block| block.name == *name) {
            None => reasons.push(format!(
                "the guest has a RAM block {name:?} of {length} bytes, there is none (a device or memory backend is missing, or has another id or address)"
            )),
            // Firmware tables are resizable: there QEMU takes any length up to the block's own maximum.
            Some(block) if block.max_bytes > block.used_bytes && *length <= block.max_bytes => {}
            Some(block) if block.used_bytes != *length => reasons.push(format!(
                "RAM block {name:?} has {length} bytes in the guest and {} there{}",
                block.used_bytes,
                if name.starts_with('/') { "" } else { " (memory size, -m, or a device's memory differs)" }
            )),
            Some(_) => {}
        }
    }
    if lanes > 0
        && let Some(uuid) = &guest.uuid
        && *uuid != waiting.uuid
    {
        reasons.push(format!(
            "the guest's uuid is {uuid}, there it is {} (start it with -uuid {uuid})",
            waiting.uuid
        ));
    }
    reasons
}

/// The bytes of a uuid as QMP prints it.
pub(super) fn uuid_bytes(text: &str) -> [u8; 16] {
    let digits: Vec<u8> =
        text.bytes().filter_map(|digit| (digit as char).to_digit(16)).map(|digit| digit as u8).collect();
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    bytes
}

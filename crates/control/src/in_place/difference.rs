//! Writes what a guest differs in from its image into the memory of a waiting QEMU that maps the image.

use std::io;

use towline_migration::{Guest, ProcessMemory};
use towline_protocol::{BlockIndex, RamBlock};

use super::Presence;
use crate::qemu::Qemu;

impl Presence {
    /// Writes the difference of `guest`, which is faster than to send it. Returns true if QEMU has all of it now; otherwise it is to be
    /// sent, also where a part was written.
    pub(crate) fn write_difference(&self, qemu: &Qemu, guest: &dyn Guest) -> bool {
        let is_mapped = |name: &str| self.mapped.iter().any(|mapped| mapped.block == name);
        let blocks = (0..).map(BlockIndex).zip(guest.blocks());
        let mut differing =
            blocks.filter(|(index, block)| is_mapped(&block.name) && !guest.difference(*index).is_empty());
        let write = |(index, block): (BlockIndex, &RamBlock)| {
            let (pid, address) = (qemu.process().pid(), qemu.facts().address_of(&block.name));
            let (pid, address) = pid.zip(address).ok_or(io::ErrorKind::NotFound)?;
            ProcessMemory::open(pid)?.write(address, guest, index, guest.difference(index))
        };
        let written = differing.try_for_each(write);
        written.inspect_err(|error| tracing::debug!(%error, "the difference is sent")).is_ok()
    }
}

//! A card and a disk of a primary, which write its memory.
//!
//! ```text
//!   separate network     a client of the guest's echo, TCP ── tap0 ── towline net ── card ┐
//!                                                       disk.raw, ext4 ── virtio-blk ─────┴─ QEMU, guest
//! ```

use std::fs::File;

use towline_lab::counting::make_ext4;
use towline_lab::{Builder, LinuxGuest, Towline, Version};

use crate::network::{BulkClient, Fixture, GUEST, add_tap, card, card_options, guest_address, path, set_up};
use crate::primary::MIB;

const DISK: u64 = 64 * MIB;

pub(crate) struct Busy {
    _card: Towline,
    fixture: Fixture,
    client: Option<BulkClient>,
}

impl Busy {
    /// Starts the card, and makes the disk; `None`: the test `name` is skipped.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let fixture = Fixture::new(name)?;
        let Fixture { network, scratch } = &fixture;
        add_tap(network, 1);
        let disk = path(scratch, "disk.raw");
        File::create(&disk).unwrap().set_len(DISK).unwrap();
        make_ext4(&disk);
        let card = card(network, &path(scratch, "card"), &["--tap", "tap0"]);
        Some(Self { fixture, _card: card, client: None })
    }

    /// Adds both to a QEMU.
    pub(crate) fn added_to(&self, builder: Builder) -> Builder {
        let Fixture { network, scratch } = &self.fixture;
        let card = card_options(Version::Newest, &path(scratch, "card"), 1, 4);
        let drive = format!("file={},format=raw,if=none,id=disk0", path(scratch, "disk.raw").display());
        let disk = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"];
        builder.args(card).args(disk).within(network)
    }

    /// Has both of them busy until the end.
    pub(crate) fn begin(&mut self, guest: &mut LinuxGuest) {
        set_up(guest);
        guest.begin_to_count();
        self.client = Some(BulkClient::begin(&self.fixture.network, guest_address(GUEST)));
    }

    /// Stops both. Returns the number of bytes that were echoed, each of which must be right; the guest must have counted the same in
    /// memory and on its disk.
    pub(crate) fn end(self, guest: &mut LinuxGuest) -> u64 {
        let bytes = self.client.unwrap().end();
        guest.assert_counted("the primary");
        bytes
    }
}

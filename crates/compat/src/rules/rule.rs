//! A rule, and what it compares.

use crate::facts::{BlockFacts, Facts, QemuFacts, Subject};
use crate::report::Findings;

/// A rule.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Name of the rule, which never changes.
    pub id: &'static str,
    pub(super) run: fn(&Pair<'_>, &mut Findings<'_>),
}

/// Both sides, and the way in which the guest would be moved.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// Where the guest is.
    pub source: &'a Facts,
    /// Where it would go.
    pub destination: &'a Facts,
    /// Lanes that towline would use; `None`: not known yet.
    pub lanes: Option<usize>,
    /// True if towline will switch to postcopy, and sets `postcopy-ram` for that.
    pub is_postcopy: bool,
    /// True if the destination's facts are current rather than recorded.
    pub is_live: bool,
    /// True if both sides' facts are from this host, so files can be compared by identity.
    pub is_one_host: bool,
    /// True if towline copies the guest's disks to those of the destination.
    pub copies_disks: bool,
}

impl<'a> Pair<'a> {
    /// Both sides, if both are QEMUs.
    pub(super) fn qemus(&self) -> Option<(&'a QemuFacts, &'a QemuFacts)> {
        self.source.qemu().zip(self.destination.qemu())
    }

    /// The QEMU that would take the guest.
    pub(super) fn destination_qemu(&self) -> Option<&'a QemuFacts> {
        self.destination.qemu()
    }

    /// The guest's machine type, where the source has one.
    pub(super) fn guest_machine(&self) -> Option<&'a str> {
        match &self.source.subject {
            Subject::Qemu(qemu) => Some(&qemu.machine),
            Subject::Image(image) => Some(&image.machine),
            Subject::Binary(binary) => Some(&binary.machine),
            Subject::Device(_) | Subject::Attribute(_) => None,
        }
    }

    /// The guest's memory.
    pub(super) fn guest_blocks(&self) -> &'a [BlockFacts] {
        match &self.source.subject {
            Subject::Qemu(qemu) => &qemu.blocks,
            Subject::Image(image) => &image.blocks,
            Subject::Binary(_) | Subject::Device(_) | Subject::Attribute(_) => &[],
        }
    }
}

//! Wire format that follows from a versioned machine type.
//!
//! QEMU does not send its version: the format of its stream follows from machine type, capabilities and
//! parameters, and both sides must have the same. The table is that of QEMU's `hw_compat_*` arrays
//! (`hw/core/machine.c`).

/// The version suffix of a machine type name: `pc-q35-7.2` is (7, 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MachineVersion {
    /// Before the dot.
    pub major: u16,
    /// After the dot.
    pub minor: u16,
}

impl MachineVersion {
    /// Reads the suffix; `None` for machines that have no version (`microvm`, `none`).
    pub fn of(machine_type: &str) -> Option<Self> {
        let (_, suffix) = machine_type.rsplit_once('-')?;
        let (major, minor) = suffix.split_once('.')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// Where a stream's source and destination put multifd's barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarrierForm {
    /// Machine types ≥ 8.1: a `MULTIFD_FLUSH` record on the main channel, at each wrap of the dirty scan.
    FlushRecord,
    /// Machine types ≤ 8.0 (`multifd-flush-after-each-section`): every end of a `ram` section, without a
    /// record.
    EachSection,
}

impl BarrierForm {
    /// The form that QEMU uses for this machine type. A machine without a version follows its QEMU's newest
    /// form.
    pub fn of(machine_type: &str) -> Self {
        match MachineVersion::of(machine_type) {
            Some(version) if version <= (MachineVersion { major: 8, minor: 0 }) => Self::EachSection,
            _ => Self::FlushRecord,
        }
    }
}

/// True where the machine type's lanes know zero pages (`zero-page-detection=multifd`, machine types ≥ 9.0).
/// Below that a destination ignores them, so zero pages must be records of the main channel.
pub fn lanes_carry_zero_pages(machine_type: &str) -> bool {
    MachineVersion::of(machine_type).is_none_or(|version| version.major >= 9)
}

/// True where the machine type's source ends its lanes in order, with TLS by a close_notify
/// (`multifd-clean-tls-termination`, machine types ≥ 10.0). Below that they may disconnect without it once
/// everything is sent.
pub fn has_clean_tls_termination(machine_type: &str) -> bool {
    MachineVersion::of(machine_type).is_none_or(|version| version.major >= 10)
}

/// True where the machine type's source connects its preempt channel right after the main one, and its
/// destination loads nothing before both are there (`x-preempt-pre-7-2`, machine types ≤ 7.2). Above that it
/// follows the first PONG.
pub fn preempt_connects_at_once(machine_type: &str) -> bool {
    MachineVersion::of(machine_type).is_some_and(|version| version <= MachineVersion { major: 7, minor: 2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_the_suffix() {
        assert_eq!(MachineVersion::of("pc-q35-10.0"), Some(MachineVersion { major: 10, minor: 0 }));
        assert_eq!(MachineVersion::of("pc-i440fx-7.2"), Some(MachineVersion { major: 7, minor: 2 }));
        assert_eq!(MachineVersion::of("microvm"), None);
        assert_eq!(MachineVersion::of("s390-ccw-virtio-8.0"), Some(MachineVersion { major: 8, minor: 0 }));
    }

    #[test]
    fn the_barrier_form_changes_after_8_0() {
        assert_eq!(BarrierForm::of("pc-q35-8.0"), BarrierForm::EachSection);
        assert_eq!(BarrierForm::of("pc-q35-8.1"), BarrierForm::FlushRecord);
        assert_eq!(BarrierForm::of("microvm"), BarrierForm::FlushRecord);
    }

    #[test]
    fn lanes_end_with_close_notify_from_10_0() {
        assert!(!has_clean_tls_termination("pc-q35-9.2"));
        assert!(has_clean_tls_termination("pc-q35-10.0"));
        assert!(has_clean_tls_termination("microvm"));
    }

    #[test]
    fn zero_pages_go_on_lanes_from_9_0() {
        assert!(!lanes_carry_zero_pages("pc-q35-8.2"));
        assert!(lanes_carry_zero_pages("pc-q35-9.0"));
    }
}

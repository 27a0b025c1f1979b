//! Checks that a QEMU can be the primary of COLO, whose checkpoints protect its guest: facts in, a reason out.
//!
//! QEMU reports nothing of this but the capability. A QEMU with one of the faults below takes the first copy, and
//! its guest is lost or stopped for good at the first checkpoint.

use crate::facts::{QemuFacts, version_numbers};

/// Capability of a QEMU that has COLO. Its name begins with `x-`: QEMU may change it.
pub const CAPABILITY: &str = "x-colo";

/// Tracker of the guest's writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirtyLog {
    /// The emulation (TCG).
    Emulation,
    /// KVM's bitmap, its default.
    KvmBitmap,
    /// KVM's dirty ring (`-accel kvm,dirty-ring-size=`).
    KvmRing,
}

/// Reason why a QEMU cannot be a primary.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CannotCheckpoint {
    #[error("this QEMU takes no checkpoints: it was built without COLO (capability x-colo)")]
    NotBuilt,
    #[error("this QEMU takes no checkpoints: its version {version:?} cannot be read")]
    Version { version: String },
    #[error(
        "QEMU {version} takes no checkpoints: it completes the migration instead (fixed in 10.0.7 and 10.2); \
         use one of these"
    )]
    Completes { version: String },
    #[error("QEMU {version} is blocked for good by a checkpoint of an emulated guest; use KVM, or QEMU 11")]
    BlockedByEmulation { version: String },
    #[error(
        "QEMU {version} aborts at a checkpoint with KVM's dirty ring; start it without dirty-ring-size, or use \
         QEMU 11"
    )]
    AbortsWithRing { version: String },
}

/// Checks that this QEMU can be a primary.
///
/// # Errors
/// The reason why it cannot.
pub fn check(qemu: &QemuFacts, log: DirtyLog) -> Result<(), CannotCheckpoint> {
    if !qemu.capabilities.contains_key(CAPABILITY) {
        return Err(CannotCheckpoint::NotBuilt);
    }
    let version = qemu.version.clone();
    let numbers = version_numbers(&qemu.version);
    let [major, minor, micro] = [0, 1, 2].map(|part| numbers.get(part).copied().unwrap_or(0));
    match (major, minor, micro, log) {
        (0, ..) => Err(CannotCheckpoint::Version { version }),
        (10, 0, ..=6, _) | (10, 1, ..) => Err(CannotCheckpoint::Completes { version }),
        (11.., ..) | (.., DirtyLog::KvmBitmap) => Ok(()),
        (.., DirtyLog::Emulation) => Err(CannotCheckpoint::BlockedByEmulation { version }),
        (.., DirtyLog::KvmRing) => Err(CannotCheckpoint::AbortsWithRing { version }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qemu(version: &str) -> QemuFacts {
        let capabilities = [(CAPABILITY.to_owned(), false)].into();
        QemuFacts { version: version.into(), capabilities, ..QemuFacts::default() }
    }

    #[test]
    fn versions_that_lose_the_guest_are_refused() {
        let verdict = |version: &str, log| check(&qemu(version), log);
        for version in ["7.2.22", "9.2.0", "10.0.7", "10.0.13", "10.2.2", "11.1.3", "12.0.0"] {
            assert_eq!(verdict(version, DirtyLog::KvmBitmap), Ok(()), "{version}");
        }
        for version in ["11.0.0", "11.1.3", "12.0.0"] {
            assert_eq!(verdict(version, DirtyLog::Emulation), Ok(()), "{version}");
            assert_eq!(verdict(version, DirtyLog::KvmRing), Ok(()), "{version}");
        }
        for version in ["10.0", "10.0.0", "10.0.2", "10.0.6", "10.1.0", "10.1.5"] {
            for log in [DirtyLog::Emulation, DirtyLog::KvmBitmap, DirtyLog::KvmRing] {
                let expected = CannotCheckpoint::Completes { version: version.into() };
                assert_eq!(verdict(version, log), Err(expected));
            }
        }
        for version in ["7.2.22", "10.0.13", "10.2.2"] {
            let version = version.to_owned();
            let emulated = Err(CannotCheckpoint::BlockedByEmulation { version: version.clone() });
            assert_eq!(verdict(&version, DirtyLog::Emulation), emulated);
            let ring = Err(CannotCheckpoint::AbortsWithRing { version: version.clone() });
            assert_eq!(verdict(&version, DirtyLog::KvmRing), ring);
        }
    }

    #[test]
    fn a_qemu_without_colo_or_version_is_refused() {
        let without = QemuFacts { version: "11.1.3".into(), ..QemuFacts::default() };
        assert_eq!(check(&without, DirtyLog::KvmBitmap), Err(CannotCheckpoint::NotBuilt));
        let version = CannotCheckpoint::Version { version: "devel".into() };
        assert_eq!(check(&qemu("devel"), DirtyLog::KvmBitmap), Err(version));
    }
}

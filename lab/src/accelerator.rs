//! Whether KVM works here. /dev/kvm existing is no proof: some hosts offer it and then fail at the first instruction.

use std::sync::OnceLock;
use std::time::Duration;

use crate::boot_sector::BootSector;
use crate::qemu::{Accelerator, Qemu, Version};

/// How long the trial guest may take until it counts.
const TRIAL_WITHIN: Duration = Duration::from_secs(5);

/// Whether a guest gets going under KVM; found out once, with a small one.
pub(crate) fn kvm_works(version: Version) -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| {
        let trial = || -> anyhow::Result<()> {
            let guest = BootSector { fill_mib: 1, ..BootSector::default() };
            let builder = Qemu::builder(version).accelerator(Accelerator::Kvm).boot_sector(guest);
            builder.start()?.wait_counting(TRIAL_WITHIN)?;
            Ok(())
        };
        std::path::Path::new("/dev/kvm").exists() && trial().is_ok()
    })
}

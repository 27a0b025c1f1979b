//! A trial of KVM. The existence of /dev/kvm is no proof: some hosts offer it and then fail at the first instruction.

use std::sync::OnceLock;
use std::time::Duration;

use super::{Accelerator, BootSector, Qemu, Version};

/// Time limit of the trial guest until it counts.
const TRIAL_WITHIN: Duration = Duration::from_secs(5);

/// Returns true if a guest starts to run under KVM; tried once, with the small guest.
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

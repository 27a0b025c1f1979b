//! Parts of the lab that are Debian 12's, on a machine with Debian 13: the guests' kernel, busybox and QEMU 7.2.
//!
//! The trees have the same shape as those that a Debian 12 machine unpacks from its own release, so that guests and their
//! emulators are the same on both. QEMU 7.2 uses this machine's C library, which is later than the one that it was built for.

use std::path::Path;

use anyhow::{Context, Result};
use towline_lab::{Kernel, paths};

use super::archive::{Archive, Package};
use super::debian_13;
use super::scope::Scope;
use super::sources::CODENAME;
use super::unpack::{self, into_place, scratch};

const BUSYBOX: &str = "busybox-static";
const EMULATOR: &str = "qemu-system-x86";
/// Libraries that a program shares with the dynamic loader of its machine.
const RUNTIME: [&str; 4] = ["libc6", "libgcc-s1", "libstdc++6", "gcc-12-base"];

/// Brings what is missing for this scope; true if there was any.
pub(super) fn bring(lab: &Path, scope: Scope) -> Result<bool> {
    let wants_kernel = paths::kernel(lab, Kernel::Debian12).is_none();
    let (busybox, emulator) = (lab.join("busybox"), lab.join("qemu-7.2"));
    let wants_emulator = scope == Scope::Lab && !emulator.is_dir();
    if !wants_kernel && busybox.is_dir() && !wants_emulator {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let archive = Archive::open(&scratch.path().join("archive"), &[CODENAME])?;
    if wants_kernel {
        into_place(&debian_13::kernel(&archive, &scratch, CODENAME)?, &lab.join("kernel"))?;
    }
    if !busybox.is_dir() {
        let packages = archive.closure(BUSYBOX, CODENAME)?;
        let packages: Vec<Package> = packages.into_iter().filter(|package| package.name == BUSYBOX).collect();
        archive.download(&packages, BUSYBOX)?;
        let tree = scratch.path().join("busybox");
        archive.unpack(&packages, &tree)?;
        into_place(&tree, &busybox)?;
    }
    if wants_emulator {
        let packages = archive.closure(EMULATOR, CODENAME)?;
        let is_shared = |package: &Package| RUNTIME.contains(&package.name.as_str());
        let packages: Vec<Package> = packages.into_iter().filter(|package| !is_shared(package)).collect();
        archive.download(&packages, "QEMU 7.2 with its libraries")?;
        let tree = scratch.path().join("qemu");
        archive.unpack(&packages, &tree)?;
        unpack::check_qemu_7_2(&tree).context("QEMU 7.2 of Debian 12")?;
        into_place(&tree, &emulator)?;
    }
    Ok(true)
}

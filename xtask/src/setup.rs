//! `cargo xtask setup`: installs what the lab needs on a machine with Debian 12 or 13.
//!
//! ```text
//! the machine   QEMU 10.0 (bookworm-backports, or trixie), iperf3, socat, ip, ethtool, tcpdump, xz, g++, venv,
//!               mkfs.xfs, mkfs.btrfs: apt, as root
//! target/lab    qemu-7.2/   QEMU 7.2 of bookworm, unpacked                 never installed
//!               qemu-stable/ QEMU 10.0 of Debian 13 (trixie), with its own C library      never installed
//!               qemu-newest/ QEMU 11.1 of Debian 13's backports, likewise                 never installed
//!               kernel/     Debian's cloud kernel and its modules          never installed
//!               kernel-newest/ that of Debian 13's backports, 7.x          never installed
//!               busybox/    busybox-static                                 never installed
//!               openssh-server/ sshd, for guests                           never installed
//!               initramfs   the agent, busybox, modules: one newc archive; initramfs-newest: with those of kernel-newest
//!               python/     Python's websockets, if they can be had        never installed
//!               python-s3/  Python's moto, an S3 server, likewise          never installed
//!               python-qmp/ QEMU's own qmp-shell, likewise                 never installed
//!               vsock-tests/ the kernel's own, only for their soak           never installed
//! ```
//! Each part is built in a temporary directory and renamed into place at the end, so a part that exists is complete. If all
//! parts exist, nothing is fetched.

pub(crate) mod apt;
mod archive;
mod debian_12;
mod debian_13;
mod host;
mod initramfs;
mod modules;
pub(crate) mod peers;
mod python;
mod scope;
mod sources;
mod unpack;
pub(crate) mod vsock_tests;

pub(crate) use scope::Scope;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use towline_lab::paths;

use host::Host;
use sources::{BACKPORTS, CODENAME, STABLE};

/// Version that QEMU from the backports begins with, epoch included.
const QEMU_VERSION: &str = "1:10.0";
/// The emulator with its firmware and its tools for disks, all of one source and suite.
const QEMU_PACKAGES: [&str; 3] = ["qemu-system-x86", "ipxe-qemu", "qemu-utils"];
/// Debian 12 and 13.
pub(crate) const RELEASES: [&str; 2] = [CODENAME, STABLE];
/// From the release.
const TOOLS: [&str; 14] = [
    "iperf3",
    "socat",
    "iproute2",
    "ethtool",
    "tcpdump",
    "xz-utils",
    "g++",
    "python3-venv",
    "procps",
    "openssh-client",
    "mount",
    // Filesystems without reflinks, and with them.
    "e2fsprogs",
    "xfsprogs",
    "btrfs-progs",
];

/// Library of the OpenSSH server that is unpacked for guests, which has it from this machine.
const SSHD_LIBRARY_OF_DEBIAN_13: &str = "libwtmpdb0";

/// For the network of the demonstration.
const DEMO_TOOLS: [&str; 1] = ["iproute2"];

/// Brings what is missing.
pub(crate) fn run(scope: Scope) -> Result<()> {
    let started = Instant::now();
    let changed = match scope {
        Scope::Demo => system(&DEMO_TOOLS)?,
        Scope::System | Scope::Lab => {
            let is_debian_13 = matches!(Host::detect(&[]), Ok(Host::Debian13));
            let library = is_debian_13.then_some(SSHD_LIBRARY_OF_DEBIAN_13);
            system(&TOOLS.into_iter().chain(library).collect::<Vec<_>>())?
        }
    };
    if scope == Scope::System {
        return Ok(());
    }
    let lab = paths::lab_directory();
    std::fs::create_dir_all(&lab)?;
    let mut changed = changed;
    changed |= match Host::detect(&["the lab's guests"])? {
        Host::Debian12 => {
            let guests = unpack::kernel(&lab)? | unpack::busybox(&lab)?;
            guests | (scope == Scope::Lab && unpack::qemu_7_2(&lab)?)
        }
        Host::Debian13 => debian_12::bring(&lab, scope)?,
    };
    if scope == Scope::Lab {
        changed |= unpack::openssh_server(&lab)?;
        changed |= debian_13::bring(&lab)?;
        changed |= python::websockets(&lab)?;
        changed |= python::s3(&lab)?;
        changed |= python::qmp(&lab)?;
    }
    let changed = initramfs::make(&lab)? | changed;
    if changed {
        println!("setup: ready in {:.1} s ({})", started.elapsed().as_secs_f64(), lab.display());
    }
    Ok(())
}

/// A file for apt that names a release, in `directory`.
pub(crate) fn sources_of(release: &str, directory: &Path) -> Result<PathBuf> {
    archive::sources_of(directory, &[release])
}

/// Says whether Debian has newer QEMUs than those of the lab and those that towline is tested with.
pub(crate) fn newer() -> Result<()> {
    let lab = paths::lab_directory();
    std::fs::create_dir_all(&lab)?;
    debian_13::newer(&lab)
}

/// Installs QEMU and those of the tools that are missing; true if there were any.
fn system(wanted: &[&'static str]) -> Result<bool> {
    let qemu = apt::installed(&QEMU_PACKAGES)?;
    let qemu_here = qemu[0].as_ref().is_some_and(|version| version.starts_with(QEMU_VERSION))
        && qemu.iter().all(Option::is_some);
    let tools = apt::installed(wanted)?;
    let tools: Vec<&str> =
        wanted.iter().zip(&tools).filter(|(_, version)| version.is_none()).map(|(name, _)| *name).collect();
    if qemu_here && tools.is_empty() {
        return Ok(false);
    }
    let mut missing = tools.clone();
    if !qemu_here {
        missing.push("qemu-system-x86 (10.0), ipxe-qemu or qemu-utils");
    }
    let host = Host::detect(&missing)?;
    apt::require_root(&missing)?;
    let added = match host {
        Host::Debian12 if !qemu_here => apt::add_backports()?,
        Host::Debian12 | Host::Debian13 => false,
    };
    let unknown = |packages: &[&str]| -> Result<bool> {
        for package in packages {
            if apt::versions(package)?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let qemu_known = || -> Result<bool> {
        Ok(apt::versions(QEMU_PACKAGES[0])?.iter().any(|version| version.starts_with(QEMU_VERSION)))
    };
    if added || unknown(&tools)? || (!qemu_here && !qemu_known()?) {
        apt::update()?;
    }
    if !tools.is_empty() {
        apt::install(&tools, None)?;
    }
    if !qemu_here {
        let suite = match host {
            Host::Debian12 => BACKPORTS,
            Host::Debian13 => STABLE,
        };
        ensure!(
            qemu_known()?,
            "{suite} brings no qemu-system-x86 {QEMU_VERSION}*, apt knows {:?}; see that the mirror in \
             /etc/apt carries {suite}, then run `cargo xtask setup` again",
            apt::versions(QEMU_PACKAGES[0])?
        );
        apt::install(&QEMU_PACKAGES, Some(suite))?;
    }
    Ok(true)
}

/// Fails on a machine with another release than Debian 12, of which these are.
fn require_debian_12(wanted: &[&str]) -> Result<()> {
    ensure!(
        Host::detect(wanted)? == Host::Debian12,
        "{}: the set-up knows those of Debian 12 ({CODENAME}) alone; use such a machine or container",
        wanted.join(", ")
    );
    Ok(())
}

//! `cargo xtask peers`: programs that the benches compare with, below target/peers. One test of the lab uses testpmd where
//! it is there; nothing else needs them.
//!
//! ```text
//! target/peers/bin/vhost-device-vsock   built from crates.io
//! target/peers/bin/dpdk-testpmd         Debian's, unpacked into target/peers/dpdk, with its libraries
//! target/peers/bin/passt                Debian 13's, unpacked into target/peers/passt, with its own C library
//! ```
//! Cloud Hypervisor's vhost_user_net is in no registry: build it from its sources and say `--peer vhost_user_net=PATH`.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::archive::Archive;
use super::sources::STABLE;
use super::unpack::{into_place, scratch, unpack, versioned};
use super::{apt, require_debian_12};
use crate::command::{cargo, run as run_command, target_directory};

const VSOCK: &str = "vhost-device-vsock";
const VSOCK_VERSION: &str = "0.3.0";
const TESTPMD: &str = "dpdk-testpmd";
/// Its packages, with those of the drivers that it loads on request.
const DPDK: [&str; 4] = ["dpdk-dev", "librte-net-vhost23", "librte-net-tap23", "librte-net-virtio23"];
const LAST_DRIVER: &str = "usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_net_virtio.so.23";
/// Of what it depends on: libraries of its own and those that not every machine has.
const LIBRARIES: [&str; 9] = [
    "librte-",
    "libfdt",
    "libjansson",
    "libnuma",
    "libpcap",
    "libbsd",
    "libibverbs",
    "ibverbs-providers",
    "libelf",
];
/// DPDK takes plugins from no directory that lies below one that all may write, but by name alone from the library path.
const WRAPPER: &str = r#"#!/bin/sh
# Made by `cargo xtask peers`: Debian's dpdk-testpmd, not installed.
here=$(dirname "$(readlink -f "$0")")/../dpdk/usr
lib=$here/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$lib:$lib/dpdk/pmds-23.0 exec "$here/bin/dpdk-testpmd" -d librte_net_vhost.so.23 -d librte_net_tap.so.23 \
    -d librte_net_virtio.so.23 -d librte_mempool_ring.so.23 "$@"
"#;
/// Debian 12's has no vhost-user.
const PASST: &str = "passt";
/// It is the program itself, not its loader, that would execute the build for AVX2.
const PASST_WRAPPER: &str = r#"#!/bin/sh
# Made by `cargo xtask peers`: Debian 13's passt, not installed.
here=$(dirname "$(readlink -f "$0")")/../passt/usr
lib=$here/lib/x86_64-linux-gnu
program=$here/bin/passt
grep -qw avx2 /proc/cpuinfo && program=$here/bin/passt.avx2
exec "$lib/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$lib" "$program" "$@"
"#;

/// Brings what is missing.
pub(crate) fn run() -> Result<()> {
    let peers = target_directory()?.join("peers");
    std::fs::create_dir_all(peers.join("bin"))?;
    vsock(&peers)?;
    passt(&peers)?;
    testpmd(&peers)
}

fn vsock(peers: &Path) -> Result<()> {
    if peers.join("bin").join(VSOCK).is_file() {
        return Ok(());
    }
    println!("peers: building {VSOCK} {VSOCK_VERSION}");
    let mut command = cargo(["install", "--quiet", "--locked", VSOCK, "--version", VSOCK_VERSION]);
    command.arg("--root").arg(peers).arg("--target-dir").arg(peers.join("build"));
    run_command(&mut command)
}

fn passt(peers: &Path) -> Result<()> {
    let place = peers.join(PASST);
    if !place.is_dir() {
        let scratch = scratch(peers)?;
        let archive = Archive::open(&scratch.path().join("archive"), &[STABLE])?;
        let packages = archive.closure(PASST, STABLE)?;
        archive.download(&packages, "passt with its libraries")?;
        let tree = scratch.path().join("tree");
        archive.unpack(&packages, &tree)?;
        into_place(&tree, &place)?;
    }
    wrapper(peers, PASST, PASST_WRAPPER)
}

fn testpmd(peers: &Path) -> Result<()> {
    let place = peers.join("dpdk");
    // An installation without the last driver is older than this list, and is replaced.
    if !place.join(LAST_DRIVER).exists() {
        if place.is_dir() {
            std::fs::remove_dir_all(&place).with_context(|| place.display().to_string())?;
        }
        require_debian_12(&[TESTPMD])?;
        let mut wanted =
            DPDK.map(|name| versioned(name, |_| true)).into_iter().collect::<Result<Vec<_>>>()?;
        let needed = apt::depends(&wanted[0])?;
        let libraries = needed.iter().filter(|name| LIBRARIES.iter().any(|prefix| name.starts_with(prefix)));
        for library in libraries {
            wanted.push(versioned(library, |_| true)?);
        }
        let scratch = scratch(peers)?;
        let tree = scratch.path().join("tree");
        unpack(&wanted, scratch.path(), &tree)?;
        into_place(&tree, &place)?;
    }
    wrapper(peers, TESTPMD, WRAPPER)
}

/// Writes the script that starts an unpacked program.
fn wrapper(peers: &Path, name: &str, content: &str) -> Result<()> {
    let path = peers.join("bin").join(name);
    std::fs::write(&path, content).with_context(|| path.display().to_string())?;
    Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?)
}

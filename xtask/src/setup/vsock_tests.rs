//! The kernel's own tests of vsock, built out of Debian's kernel sources: `cargo xtask soak vsock-kernel` needs them, nothing else.
//!
//! ```text
//! target/lab/vsock-tests/vsock_test   its cases, a client and a server
//! target/lab/vsock-tests/vsock_perf   a sender and a receiver
//! ```

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use towline_lab::paths;

use super::require_debian_12;
use super::unpack::{into_place, scratch, unpack, versioned};
use crate::command::output;

/// Newer than the guests' kernel: there are more cases, and each says from which kernel on it can be.
const SOURCE: &str = "linux-source-6.12";
const PROGRAMS: [&str; 2] = ["vsock_test", "vsock_perf"];

/// Brings what is missing.
pub(crate) fn run() -> Result<()> {
    let lab = paths::lab_directory();
    let place = paths::vsock_tests(&lab);
    if place.is_dir() {
        return Ok(());
    }
    require_debian_12(&PROGRAMS)?;
    std::fs::create_dir_all(&lab)?;
    println!("setup: building the kernel's tests of vsock");
    let scratch = scratch(&lab)?;
    let tree = scratch.path().join("tree");
    unpack(&[versioned(SOURCE, |_| true)?], scratch.path(), &tree)?;
    let directory = build(&tree.join("usr/src").join(format!("{SOURCE}.tar.xz")), scratch.path())?;
    let made = scratch.path().join("made");
    std::fs::create_dir(&made)?;
    for program in PROGRAMS {
        let from = directory.join(program);
        std::fs::copy(&from, made.join(program)).with_context(|| from.display().to_string())?;
    }
    into_place(&made, &place)
}

/// Unpacks the tests and what they include, and makes them. Returns where they are.
fn build(archive: &Path, scratch: &Path) -> Result<std::path::PathBuf> {
    let tests = format!("{SOURCE}/tools/testing/vsock");
    let mut tar = Command::new("tar");
    tar.arg("-xJf").arg(archive).arg("-C").arg(scratch).args([&tests, &format!("{SOURCE}/tools/include")]);
    output(&mut tar).context("the kernel's sources cannot be unpacked")?;
    let directory = scratch.join(tests);
    let mut make = Command::new("make");
    make.arg("-C").arg(&directory).args(PROGRAMS);
    output(&mut make).context("the kernel's tests of vsock do not build; they need make and gcc")?;
    if !PROGRAMS.iter().all(|program| directory.join(program).is_file()) {
        bail!("the kernel's tests of vsock were not made in {}", directory.display());
    }
    Ok(directory)
}

//! Packages of Debian 13 that Debian 12 lacks: later QEMUs, each with its own C library, and a later kernel for guests.
//!
//! ```text
//! target/lab/qemu-stable/     trixie             qemu-system-x86_64 (a script), version, usr/…
//! target/lab/qemu-newest/     trixie-backports   likewise
//! target/lab/kernel-newest/   trixie-backports   boot/vmlinuz-…, lib/modules/…
//! ```
//! The versions are found, not fixed. If the machine's mirror or keys do not have them, the reason is printed, and the tests
//! that need them are skipped.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use towline_lab::paths::{self, UnpackedQemu};

use super::archive::{Archive, Package};
use super::sources::{STABLE, STABLE_BACKPORTS};
use super::unpack::{into_place, scratch};
use crate::command::output;

const EMULATOR: &str = "qemu-system-x86";
const KERNEL: &str = "linux-image-cloud-amd64";
/// Where newer ones come from.
const UNSTABLE: &str = "sid";
/// The last series that towline is tested with, as the rule `qemu-version` of `towline check` has it.
const TESTED_TO: [u32; 2] = [11, 1];
/// A program of another C library is started by its own loader, which looks for libraries nowhere else.
const WRAPPER: &str = r#"#!/bin/sh
# Made by `cargo xtask setup`: a QEMU of another Debian, not installed.
here=${0%/*}/usr
lib=$here/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$lib" "$here/bin/qemu-system-x86_64" \
    -L "$here/share/qemu" -L "$here/share/seabios" "$@"
"#;

/// The parts, and the suite that brings each.
const QEMUS: [(UnpackedQemu, &str); 2] =
    [(UnpackedQemu::Stable, STABLE), (UnpackedQemu::Newest, STABLE_BACKPORTS)];

/// Brings what is missing; true if there was any. The reason for what is unavailable is printed.
pub(super) fn bring(lab: &Path) -> Result<bool> {
    let qemus: Vec<_> = QEMUS.into_iter().filter(|(qemu, _)| !qemu.directory(lab).is_dir()).collect();
    let wants_kernel = !paths::newest_kernel_directory(lab).is_dir();
    if qemus.is_empty() && !wants_kernel {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let archive = match Archive::open(&scratch.path().join("archive"), &[STABLE, STABLE_BACKPORTS]) {
        Ok(archive) => archive,
        Err(error) => {
            println!("setup: nothing of Debian 13, and the tests that want it are skipped: {error:#}");
            return Ok(false);
        }
    };
    let mut changed = false;
    for (qemu, suite) in qemus {
        match self::qemu(&archive, &scratch, suite) {
            Ok(tree) => {
                into_place(&tree, &qemu.directory(lab))?;
                changed = true;
            }
            Err(error) => println!("setup: no QEMU of {suite}, whose tests are skipped: {error:#}"),
        }
    }
    if wants_kernel {
        match kernel(&archive, &scratch, STABLE_BACKPORTS) {
            Ok(tree) => {
                into_place(&tree, &paths::newest_kernel_directory(lab))?;
                changed = true;
            }
            Err(error) => {
                println!("setup: no kernel of {STABLE_BACKPORTS}, whose tests are skipped: {error:#}");
            }
        }
    }
    Ok(changed)
}

/// Says of each suite which QEMU it has, and whether that is newer than the lab's or than those that towline is tested with.
pub(super) fn newer(lab: &Path) -> Result<()> {
    let scratch = scratch(lab)?;
    let suites = [STABLE, STABLE_BACKPORTS, UNSTABLE];
    let archive = Archive::open(&scratch.path().join("archive"), &suites)?;
    let known = archive.versions(EMULATOR)?;
    for suite in suites {
        let there = known.iter().find(|(_, of)| of == suite).map(|(version, _)| upstream(version));
        let here = QEMUS.iter().find(|(_, of)| *of == suite);
        let here = here.and_then(|(qemu, _)| Some((qemu.version(lab)?, qemu.directory(lab))));
        println!(
            "{suite}: {}",
            compared(there, here.as_ref().map(|(version, place)| (version.as_str(), place.as_path())))
        );
    }
    Ok(())
}

/// Comparison of the QEMU of a suite with the one in the lab that came from there.
fn compared(there: Option<&str>, here: Option<(&str, &Path)>) -> String {
    let Some(there) = there else { return format!("no {EMULATOR}") };
    let mut text = format!("QEMU {there}");
    if let Some((here, place)) = here {
        text += &if numbers(there) > numbers(here) {
            let place = place.display();
            format!(", NEWER than {here} in the lab; remove {place} and run `cargo xtask setup` to test it")
        } else {
            ", as in the lab".to_owned()
        };
    }
    if numbers(there).get(..2) > Some(&TESTED_TO) {
        let [major, minor] = TESTED_TO;
        text += &format!(
            ", NEWER than the QEMUs that towline is tested with, of which {major}.{minor} is the last"
        );
    }
    text
}

/// `1:11.1.3+ds-1~bpo13+1` is 11.1.3.
fn upstream(version: &str) -> &str {
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    version.split(['+', '-', '~']).next().unwrap_or(version)
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|number| number.parse().ok()).collect()
}

/// Unpacks the suite's QEMU, and starts it once.
fn qemu(archive: &Archive, scratch: &TempDir, suite: &str) -> Result<PathBuf> {
    let in_suite = archive.versions(EMULATOR)?.into_iter().find(|(_, of)| of == suite);
    let (wanted, _) = in_suite.with_context(|| format!("{suite} has no {EMULATOR}"))?;
    let packages = archive.closure(EMULATOR, suite)?;
    let found = packages.iter().find(|package| package.name == EMULATOR);
    ensure!(
        found.is_some_and(|package| package.version == wanted),
        "apt chooses {EMULATOR} {:?} instead of {wanted}",
        found.map(|package| &package.version)
    );
    let what = format!("QEMU {} of {suite} with its libraries", upstream(&wanted));
    archive.download(&packages, &what)?;
    let tree = scratch.path().join(suite);
    archive.unpack(&packages, &tree)?;
    let script = UnpackedQemu::program(&tree);
    std::fs::write(&script, WRAPPER)?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let said = output(Command::new(&script).arg("--version")).context("it does not start")?;
    let version = said.split(' ').skip_while(|word| *word != "version").nth(1).map(str::trim);
    let Some(version) = version.filter(|version| upstream(&wanted) == *version) else {
        bail!("it calls itself `{}`, expected version {}", said.trim(), upstream(&wanted));
    };
    std::fs::write(tree.join("version"), version)?;
    Ok(tree)
}

/// Unpacks the suite's kernel and its modules, and gives the tree the shape of Debian 12's package.
pub(super) fn kernel(archive: &Archive, scratch: &TempDir, suite: &str) -> Result<PathBuf> {
    let packages = archive.closure(KERNEL, suite)?;
    let release = packages.iter().find_map(|package| {
        package.name.strip_prefix("linux-image-").filter(|release| *release != "cloud-amd64")
    });
    let Some(release) = release.map(str::to_owned) else {
        bail!("{KERNEL} depends on no linux-image-*");
    };
    // One package, or several for the kernel, its modules and its configuration.
    let of_it = |package: &&Package| package.name.starts_with("linux-") && package.name.ends_with(&release);
    let packages: Vec<Package> = packages.iter().filter(of_it).cloned().collect();
    archive.download(&packages, &format!("kernel {release}"))?;
    let tree = scratch.path().join("kernel");
    archive.unpack(&packages, &tree)?;
    let (place, usr) = (tree.join("lib/modules"), tree.join("usr/lib/modules"));
    if usr.is_dir() {
        std::fs::create_dir_all(tree.join("lib"))?;
        std::fs::rename(&usr, &place)?;
    }
    let (boot, beside) = (tree.join("boot"), place.join(&release).join("vmlinuz"));
    if beside.is_file() {
        std::fs::create_dir_all(&boot)?;
        std::fs::rename(&beside, boot.join(format!("vmlinuz-{release}")))?;
    }
    ensure!(
        boot.join(format!("vmlinuz-{release}")).is_file() && place.join(&release).is_dir(),
        "the packages {packages:?} hold no kernel {release} with its modules"
    );
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_as_numbers() {
        assert_eq!(upstream("1:11.1.3+ds-1~bpo13+1"), "11.1.3");
        assert_eq!(upstream("1:11.2.0~rc1+ds-1"), "11.2.0");
        assert!(numbers("10.0.13") > numbers("10.0.2"));
        assert!(numbers("11.0.0") < numbers("11.1"));
    }

    #[test]
    fn a_newer_qemu_is_reported() {
        let place = Path::new("/lab/qemu-newest");
        assert_eq!(compared(None, None), "no qemu-system-x86");
        assert_eq!(compared(Some("11.1.9"), None), "QEMU 11.1.9");
        assert_eq!(compared(Some("11.1.3"), Some(("11.1.3", place))), "QEMU 11.1.3, as in the lab");
        let said = compared(Some("12.0.0"), Some(("11.1.3", place)));
        let wanted = "QEMU 12.0.0, NEWER than 11.1.3 in the lab; remove /lab/qemu-newest and run `cargo xtask setup` to test it, \
                      NEWER than the QEMUs that towline is tested with, of which 11.1 is the last";
        assert_eq!(said, wanted);
    }

    #[test]
    fn the_last_series_is_the_same_as_in_check() {
        let rule = include_str!("../../../crates/compat/src/rules/qemu_version.rs");
        let [major, minor] = TESTED_TO;
        assert!(rule.contains(&format!("TESTED_TO: (u32, u32) = ({major}, {minor});")), "{rule}");
    }
}

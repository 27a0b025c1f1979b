//! Debian packages unpacked below target/lab: fetched with apt's trust, never installed.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::apt;
use crate::command::{output, run};

/// Version that bookworm's QEMU begins with, epoch included.
const QEMU_7_2_VERSION: &str = "1:7.2";
/// Rounds of "which library is missing, which package brings it": a library's library's library.
const LIBRARY_ROUNDS: usize = 4;

/// QEMU 7.2 with its firmware and the libraries that this machine lacks. True if it was made now.
pub(crate) fn qemu_7_2(lab: &Path) -> Result<bool> {
    let place = lab.join("qemu-7.2");
    if place.is_dir() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let emulator = versioned("qemu-system-x86", |version| version.starts_with(QEMU_7_2_VERSION))?;
    let mut wanted = vec![emulator.clone()];
    for package in ["qemu-system-common", "qemu-system-data"] {
        wanted.push(versioned(package, |version| version.starts_with(QEMU_7_2_VERSION))?);
    }
    // The release's firmware, not that of the backports: what users of 7.2 have.
    for package in ["seabios", "ipxe-qemu"] {
        wanted.push(versioned(package, |version| !version.contains("~bpo"))?);
    }
    let tree = scratch.path().join("tree");
    unpack(&wanted, scratch.path(), &tree)?;
    libraries(&emulator, scratch.path(), &tree)?;
    check_qemu_7_2(&tree)?;
    into_place(&tree, &place)?;
    Ok(true)
}

/// Starts the unpacked QEMU once.
pub(super) fn check_qemu_7_2(tree: &Path) -> Result<()> {
    let said = output(&mut with_libraries(tree, &tree.join("usr/bin/qemu-system-x86_64"), &["--version"]))
        .context("the unpacked qemu-system-x86 7.2 does not start")?;
    if !said.contains("version 7.2") {
        bail!("the unpacked qemu-system-x86 calls itself `{}`, expected version 7.2", said.trim());
    }
    Ok(())
}

/// Debian's cloud kernel and its modules. True if it was made now.
pub(crate) fn kernel(lab: &Path) -> Result<bool> {
    let place = lab.join("kernel");
    if place.is_dir() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let meta = versioned("linux-image-cloud-amd64", |_| true)?;
    let image = apt::depends(&meta)?.into_iter().find(|name| name.starts_with("linux-image-"));
    let Some(image) = image else {
        bail!("linux-image-cloud-amd64 depends on no linux-image-*; way out: `apt-get update`, then again");
    };
    let tree = scratch.path().join("tree");
    unpack(&[versioned(&image, |_| true)?], scratch.path(), &tree)?;
    into_place(&tree, &place)?;
    Ok(true)
}

/// The static busybox. True if it was made now.
pub(crate) fn busybox(lab: &Path) -> Result<bool> {
    let place = lab.join("busybox");
    if place.is_dir() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let tree = scratch.path().join("tree");
    unpack(&[versioned("busybox-static", |_| true)?], scratch.path(), &tree)?;
    into_place(&tree, &place)?;
    Ok(true)
}

/// The server of OpenSSH, for guests. True if it was made now.
pub(crate) fn openssh_server(lab: &Path) -> Result<bool> {
    let place = lab.join("openssh-server");
    if place.is_dir() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let tree = scratch.path().join("tree");
    unpack(&[versioned("openssh-server", |version| !version.contains("~bpo"))?], scratch.path(), &tree)?;
    into_place(&tree, &place)?;
    Ok(true)
}

/// `package=version` of the newest version that fits; the lists are fetched if apt knows none.
pub(super) fn versioned(package: &str, fits: impl Fn(&str) -> bool) -> Result<String> {
    let find = || -> Result<Option<String>> {
        // What apt itself would choose comes first, so that backports stay out unless asked for.
        let candidate = apt::candidate(package)?.into_iter();
        Ok(candidate.chain(apt::versions(package)?).find(|version| fits(version)))
    };
    if let Some(version) = find()? {
        return Ok(format!("{package}={version}"));
    }
    apt::update()?;
    match find()? {
        Some(version) => Ok(format!("{package}={version}")),
        None => bail!(
            "apt knows no fitting version of {package}, only {:?}; see that /etc/apt has Debian 12's main and \
             that `apt-get update` succeeds, then run `cargo xtask setup` again",
            apt::versions(package)?
        ),
    }
}

/// Downloads and unpacks into `tree`. Lists that name what the mirror no longer has are fetched again once.
pub(super) fn unpack(packages: &[String], scratch: &Path, tree: &Path) -> Result<()> {
    let archives = tempfile::tempdir_in(scratch)?;
    if apt::download(packages, archives.path()).is_err() {
        apt::update()?;
        let renewed: Result<Vec<String>> = packages.iter().map(|package| renewed(package)).collect();
        apt::download(&renewed?, archives.path())?;
    }
    for archive in std::fs::read_dir(archives.path())? {
        let archive = archive?.path();
        run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(tree))
            .with_context(|| format!("{} cannot be unpacked", archive.display()))?;
    }
    Ok(())
}

/// The version that a package has after its lists were fetched again: the same up to its last Debian revision.
fn renewed(package: &str) -> Result<String> {
    let (name, version) = package.split_once('=').context("package without version")?;
    let upstream = version.split(['-', '+']).next().unwrap_or(version);
    versioned(name, |known| known.starts_with(upstream))
}

/// Unpacks into `tree` whatever libraries of `emulator` the machine lacks.
fn libraries(emulator: &str, scratch: &Path, tree: &Path) -> Result<()> {
    let binary = tree.join("usr/bin/qemu-system-x86_64");
    let mut packages = BTreeSet::from([emulator.to_owned()]);
    let mut unpacked = BTreeSet::new();
    for _ in 0..LIBRARY_ROUNDS {
        let missing = missing_libraries(tree, &binary)?;
        if missing.is_empty() {
            return Ok(());
        }
        let mut wanted = Vec::new();
        for package in std::mem::take(&mut packages) {
            wanted.extend(apt::depends(&package)?.into_iter().filter(|name| name.starts_with("lib")));
        }
        wanted.sort();
        wanted.dedup();
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        for (name, here) in wanted.iter().zip(apt::installed(&names)?) {
            if here.is_none() && unpacked.insert(name.clone()) {
                packages.insert(versioned(name, |version| !version.contains("~bpo"))?);
            }
        }
        if packages.is_empty() {
            bail!("QEMU 7.2 lacks {}, and no package that it depends on brings them", missing.join(", "));
        }
        unpack(&packages.iter().cloned().collect::<Vec<_>>(), scratch, tree)?;
    }
    match missing_libraries(tree, &binary)? {
        missing if missing.is_empty() => Ok(()),
        missing => bail!("QEMU 7.2 still lacks {} after {LIBRARY_ROUNDS} rounds", missing.join(", ")),
    }
}

fn missing_libraries(tree: &Path, binary: &Path) -> Result<Vec<String>> {
    let said = output(&mut with_libraries(tree, Path::new("ldd"), &[&binary.to_string_lossy()]))?;
    let missing = said.lines().filter(|line| line.contains("not found"));
    Ok(missing.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

fn with_libraries(tree: &Path, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", towline_lab::paths::library_path(tree));
    command
}

pub(super) fn scratch(lab: &Path) -> Result<TempDir> {
    let scratch = tempfile::Builder::new().prefix(".making-").tempdir_in(lab);
    scratch.with_context(|| format!("no scratch directory can be made in {}", lab.display()))
}

/// Moves a finished tree; another set-up that was faster has made the same one.
pub(super) fn into_place(tree: &Path, place: &Path) -> Result<()> {
    match std::fs::rename(tree, place) {
        Err(_) if place.is_dir() => Ok(()),
        outcome => outcome.with_context(|| format!("{} cannot be put into place", place.display())),
    }
}

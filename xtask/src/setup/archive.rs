//! Another release of Debian beside this machine's own: lists, keys and packages in the lab's directory.
//!
//! ```text
//! DIRECTORY/etc/       the machine's own entry for its Debian, with other suites     keyring: the machine's, or unpacked here
//! DIRECTORY/lists/     lists of packages
//! DIRECTORY/status     what is installed: nothing, so that apt's resolver names all that a package needs, the C library included
//! DIRECTORY/packages/  what was downloaded
//! ```
//! The machine's apt configuration stays: its sources, lists and packages are neither read nor changed. It needs no root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::apt::{self, apt_get};
use super::sources;
use super::unpack::{self, versioned};
use crate::command::{output, run};

/// Where Debian has its keys, and the file among them that only a keyring with those of Debian 13 has.
const KEYRINGS: &str = "usr/share/keyrings";
const KEYRING: &str = "debian-archive-keyring.gpg";
const STABLE_KEYS: &str = "debian-archive-trixie-stable.gpg";
const KEYRING_PACKAGE: &str = "debian-archive-keyring";

/// An archive whose lists were fetched.
pub(super) struct Archive {
    directory: PathBuf,
    options: Vec<String>,
}

/// A package of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    /// The name that its archive has when it was downloaded.
    file: String,
}

impl Archive {
    /// Fetches the lists of these suites, from the mirror that this machine's Debian comes from, into `directory`.
    pub(super) fn open(directory: &Path, suites: &[&str]) -> Result<Self> {
        for below in ["etc", "lists/partial", "cache/archives/partial", "packages"] {
            std::fs::create_dir_all(directory.join(below))?;
        }
        std::fs::write(directory.join("status"), "")?;
        sources_of(directory, suites)?;
        let archive = Self { directory: directory.to_owned(), options: options(directory) };
        println!("setup: fetching the lists of packages of {}", suites.join(" and "));
        archive.apt_get(&["update"])?;
        Ok(archive)
    }

    /// The versions of `package`, newest first, each with the suite that has it.
    pub(super) fn versions(&self, package: &str) -> Result<Vec<(String, String)>> {
        let table = output(Command::new("apt-cache").args(&self.options).args(["madison", package]))?;
        Ok(apt::madison(&table, package))
    }

    /// `package` of `suite` with all that it depends on, as apt's resolver has it.
    pub(super) fn closure(&self, package: &str, suite: &str) -> Result<Vec<Package>> {
        let install = ["install", "--print-uris", "--no-install-recommends", "-t", suite, package];
        let said = self.apt_get(&install).with_context(|| format!("{suite} has no {package}"))?;
        let packages: Vec<Package> = said.lines().filter_map(printed).collect();
        if !packages.iter().any(|found| found.name == package) {
            bail!("apt names no archive for {package} of {suite}, only {} others", packages.len());
        }
        Ok(packages)
    }

    /// Downloads those of `packages` that are missing; `what` names them in messages.
    pub(super) fn download(&self, packages: &[Package], what: &str) -> Result<()> {
        let place = self.directory.join("packages");
        let missing = packages.iter().filter(|package| !place.join(&package.file).is_file());
        let mut missing: Vec<String> =
            missing.map(|package| format!("{}={}", package.name, package.version)).collect();
        missing.sort();
        missing.dedup();
        if missing.is_empty() {
            return Ok(());
        }
        println!("setup: downloading {what}, {} packages", missing.len());
        let mut arguments: Vec<&str> = self.options.iter().map(String::as_str).collect();
        arguments.push("download");
        arguments.extend(missing.iter().map(String::as_str));
        apt_get(&arguments, Some(&place)).map(drop)
    }

    /// Unpacks downloaded packages into `tree`.
    pub(super) fn unpack(&self, packages: &[Package], tree: &Path) -> Result<()> {
        for package in packages {
            let archive = self.directory.join("packages").join(&package.file);
            run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(tree))
                .with_context(|| format!("{} cannot be unpacked", archive.display()))?;
        }
        Ok(())
    }

    fn apt_get(&self, arguments: &[&str]) -> Result<String> {
        let all: Vec<&str> =
            self.options.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        apt_get(&all, None)
    }
}

/// Options that restrict apt to these directories.
fn options(directory: &Path) -> Vec<String> {
    let at = |name: &str| directory.join(name).display().to_string();
    let nothing = "/dev/null".to_owned();
    let values = [
        ("Dir::Etc::SourceList", nothing.clone()),
        ("Dir::Etc::SourceParts", at("etc")),
        ("Dir::Etc::Preferences", nothing.clone()),
        ("Dir::Etc::PreferencesParts", nothing),
        ("Dir::State", at("")),
        ("Dir::State::Lists", at("lists")),
        ("Dir::State::Status", at("status")),
        ("Dir::State::Extended_States", at("extended_states")),
        ("Dir::Cache", at("cache")),
        ("Acquire::Languages", "none".into()),
    ];
    values.into_iter().flat_map(|(name, value)| ["-o".to_owned(), format!("{name}={value}")]).collect()
}

/// `'URI' FILE BYTES HASH` of `apt-get --print-uris`; FILE is NAME_VERSION_ARCHITECTURE.deb, its version escaped.
fn printed(line: &str) -> Option<Package> {
    let (_, rest) = line.strip_prefix('\'')?.split_once("' ")?;
    let file = rest.split(' ').next()?;
    let mut parts = file.strip_suffix(".deb")?.split('_');
    let (name, version) = (parts.next()?.to_owned(), parts.next()?.replace("%3a", ":"));
    Some(Package { name, version, file: file.to_owned() })
}

/// A file in `directory/etc` for apt that names these suites, from the mirror that this machine's Debian comes from.
pub(super) fn sources_of(directory: &Path, suites: &[&str]) -> Result<PathBuf> {
    let etc = directory.join("etc");
    std::fs::create_dir_all(&etc)?;
    let keyring = keyring(directory)?;
    let made = apt::source_files()
        .iter()
        .find_map(|(content, format)| sources::beside(content, *format, suites, &keyring));
    let Some(made) = made else {
        bail!(
            "no source of this machine's apt brings Debian 12's or 13's main, of whose mirror the others would be fetched"
        );
    };
    let path = etc.join(made.name);
    std::fs::write(&path, made.content)?;
    Ok(path)
}

/// A keyring with Debian 13's keys: the machine's, or that of the package that its own archive has now.
fn keyring(directory: &Path) -> Result<PathBuf> {
    let here = Path::new("/").join(KEYRINGS);
    if here.join(STABLE_KEYS).is_file() {
        return Ok(here.join(KEYRING));
    }
    let tree = directory.join("keys");
    unpack::unpack(&[versioned(KEYRING_PACKAGE, |_| true)?], directory, &tree)?;
    let there = tree.join(KEYRINGS);
    if !there.join(STABLE_KEYS).is_file() {
        bail!(
            "neither this machine's {KEYRING_PACKAGE} nor the newest that apt knows has {STABLE_KEYS}; run `apt-get update`, and \
             see that /etc/apt has bookworm-updates"
        );
    }
    Ok(there.join(KEYRING))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_read_from_what_apt_prints() {
        let line = "'http://m.example/pool/main/q/qemu/qemu-system-x86_11.1.3%2bds-1_amd64.deb' \
                    qemu-system-x86_1%3a11.1.3+ds-1~bpo13+1_amd64.deb 10377056 SHA256:00";
        let package = Package {
            name: "qemu-system-x86".into(),
            version: "1:11.1.3+ds-1~bpo13+1".into(),
            file: "qemu-system-x86_1%3a11.1.3+ds-1~bpo13+1_amd64.deb".into(),
        };
        assert_eq!(printed(line), Some(package));
        for other in
            ["Reading package lists...", "  libc6 libgcc-s1", "'http://m.example/x' x_1_amd64.udeb 1"]
        {
            assert_eq!(printed(other), None, "{other}");
        }
    }
}

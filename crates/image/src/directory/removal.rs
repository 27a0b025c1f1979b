//! Removal of an image.
//!
//! ```text
//!   open · flock · name unchanged? ─► increments? · users? ─► name unchanged? ─► unlink the image, then its manifest
//! ```
//! A writer locks the base of an increment, and an image that it replaces, in the same way, and has the lock
//! until its file has its final name. So either the removal finds the increment, or the writer finds its base
//! locked or missing.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::{canonical, image_paths, is_image, is_partial_name, open, paths_in};
use crate::atomic_file::{self, DirectoryEntry};
use crate::chain::{has_manifest, named_bases};
use crate::lock_holder::{lock_holder, process_text};
use crate::manifest::sidecar_path;
use crate::regular_file::{FileId, allocated};
use crate::sidecar::staged_path;
use crate::working_set::path_beside;
use crate::{Error, Image, Result};

/// Flag of a process that has not executed a program since it was forked (`PF_FORKNOEXEC` of Linux's `sched.h`).
const FORKED_WITHOUT_EXECUTION: u32 = 0x40;

/// Removes an image with its manifest and its working set. Returns the freed disk space in bytes.
///
/// # Errors
/// [`Error::NeededBy`], [`Error::UnknownBases`], [`Error::InUse`]; the path is not an image, or cannot be
/// removed. [`Error::PartRemains`] if the image was removed and a part of it was not.
pub fn remove(path: &Path) -> Result<u64> {
    remove_unless(path, &check_increments)
}

/// As [`remove`], of an image on which none is based, as the caller knows who has stored all images of its directory.
///
/// # Errors
/// As [`remove`].
pub fn remove_leaf(path: &Path) -> Result<u64> {
    remove_unless(path, &|_| Ok(()))
}

/// Returns true if another process has this file open or mapped, where `/proc` shows it.
///
/// # Errors
/// The file cannot be opened.
pub fn is_in_use(path: &Path) -> Result<bool> {
    Ok(!users(&open(path)?).is_empty())
}

/// As [`remove`], with the check whether other images need it.
fn remove_unless(path: &Path, check: &dyn Fn(&Path) -> Result<()>) -> Result<u64> {
    let failed = |source| Error::Read { path: path.into(), source };
    if fs::symlink_metadata(path).map_err(failed)?.is_symlink() {
        return Err(Error::SymbolicLink { path: path.into() });
    }
    let mut file = open(path)?;
    if !is_image(&mut file) {
        return Err(Error::NotAnImage { path: path.into(), found: "it is another kind of file".into() });
    }
    // A filesystem without locks is not an error.
    let _locked = DirectoryEntry::open(path)?.lock_final(None).map_err(|error| match error {
        atomic_file::Error::InUse { path, .. } | atomic_file::Error::Busy { path, .. } => {
            Error::InUse { path, users: vec![lock_holder(&file)] }
        }
        error => error.into(),
    })?;
    let own = path.canonicalize().map_err(failed)?;
    check(&own)?;
    let users = users(&file);
    if !users.is_empty() {
        return Err(Error::InUse { path: path.into(), users });
    }
    let parts = [sidecar_path(&own), staged_path(&own), path_beside(&own)];
    // The name is free as soon as the image is removed, and a new image may have parts at once.
    let parts = parts.map(|part| (FileId::named(&part), part));
    if FileId::named(&own) != FileId::of_file(&file) {
        let users = vec!["another process, which has just replaced it".into()];
        return Err(Error::InUse { path: path.into(), users });
    }
    let space_of = |path: &Path| path.symlink_metadata().as_ref().map_or(0, allocated);
    let mut freed = space_of(&own);
    fs::remove_file(&own).map_err(|source| Error::Write { path: own.clone(), source })?;
    for (known, part) in parts.iter().filter(|(known, _)| known.is_some()) {
        if FileId::named(part) != *known {
            continue;
        }
        let space = space_of(part);
        match fs::remove_file(part) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(Error::PartRemains { path: path.into(), part: part.clone(), source });
            }
            removed => freed += removed.map_or(0, |()| space),
        }
    }
    Ok(freed)
}

/// Refuses the removal of an image on which another one of its directory is based, or may be.
fn check_increments(own: &Path) -> Result<()> {
    let directory = own.parent().unwrap_or(Path::new("/"));
    let mut increments = Vec::new();
    for other in images_with_manifests(directory)?.into_iter().filter(|other| other != own) {
        let bases = named_bases(&other);
        if canonical(&bases.paths).iter().any(|base| base == own) {
            increments.push(other);
        } else if let Some(error) = bases.unread {
            return Err(Error::UnknownBases { path: own.into(), other, why: error.to_string() });
        }
    }
    if !increments.is_empty() {
        return Err(Error::NeededBy { path: own.into(), increments });
    }
    for other in image_paths(directory)?.into_iter().filter(|other| other != own && !has_manifest(other)) {
        if let Err(error @ Error::NoBase { .. }) = Image::open(&other) {
            return Err(Error::UnknownBases { path: own.into(), other, why: error.to_string() });
        }
    }
    Ok(())
}

/// Existing files of a directory that have a manifest, sorted: only those can name a base. They need not be
/// readable.
fn images_with_manifests(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut images = Vec::new();
    for path in paths_in(directory)? {
        let Some(name) = path.file_name().and_then(OsStr::to_str).filter(|_| !is_partial_name(&path)) else {
            continue;
        };
        let name = name.strip_suffix(".new").unwrap_or(name);
        let Some(image) = name.strip_suffix(".manifest.json") else { continue };
        let image = directory.join(image);
        if image.symlink_metadata().is_ok() {
            images.push(image);
        }
    }
    images.sort();
    images.dedup();
    Ok(images)
}

/// Processes that have the file open or mapped, except for this one and those that it is starting, where `/proc` shows them.
fn users(file: &File) -> Vec<String> {
    let Some(wanted) = FileId::of_file(file) else { return Vec::new() };
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let uses = |pid: &u32| {
        // `map_files` has mappings whose descriptor was closed; it needs more rights than `fd` and `maps`.
        let is_linked = ["fd", "map_files"].iter().any(|directory| {
            let links = fs::read_dir(format!("/proc/{pid}/{directory}")).into_iter().flatten().flatten();
            links.filter_map(|link| FileId::at(&link.path())).any(|found| found == wanted)
        });
        is_linked
            || fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| is_mapped(&maps, wanted))
    };
    let is_ours = |pid: u32| {
        let status = || fs::read_to_string(format!("/proc/{pid}/stat"));
        pid == own || status().is_ok_and(|status| is_being_started(&status, own))
    };
    // In this order: it closes them as it executes.
    pids.filter(|pid| !is_ours(*pid) && uses(pid)).map(process_text).collect()
}

/// Returns true if `/proc/PID/stat` is of a child that has not executed its program yet: it has a copy of each descriptor until then.
fn is_being_started(status: &str, own: u32) -> bool {
    // After its name, which may contain anything.
    let mut fields = status.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().skip(1);
    let parent = fields.next().and_then(|text| text.parse().ok());
    let flags: u32 = fields.nth(4).and_then(|text| text.parse().ok()).unwrap_or(0);
    parent == Some(own) && flags & FORKED_WITHOUT_EXECUTION != 0
}

/// Returns true if `/proc/PID/maps` contains the file: `7f00-7f10 r--s 00000000 fe:01 131073 /srv/a.img`.
fn is_mapped(maps: &str, FileId { device, inode }: FileId) -> bool {
    let device = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    maps.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(3);
        fields.next() == Some(&*device) && fields.next().and_then(|text| text.parse().ok()) == Some(inode)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::process::{Command, Stdio};

    use rustix::fs::{FlockOperation, flock};
    use rustix::io::Errno;
    use towline_protocol::configuration::MAGIC;

    use super::*;
    use crate::atomic_file::{AtomicFile, Existing};

    /// Writes the beginning of an image, with this text as its manifest.
    fn put(path: &Path, manifest: Option<&str>) {
        fs::write(path, [&MAGIC.to_be_bytes()[..], &[0; 100]].concat()).unwrap();
        manifest.iter().for_each(|text| fs::write(sidecar_path(path), text).unwrap());
    }

    /// A directory with an image `monday.img`.
    fn with_image() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("monday.img");
        put(&path, None);
        (directory, path)
    }

    fn manifest_on(base: &str) -> String {
        format!(r#"{{"base": {{"path": "{base}", "content": "{}"}}}}"#, "0".repeat(64))
    }

    #[test]
    fn an_image_that_a_process_has_open_is_not_removed() {
        let (_directory, path) = with_image();
        // A process that has it as standard input, and lives as long as its standard output is read.
        let input = File::open(&path).unwrap();
        let spawned =
            Command::new("cat").args(["-", "/dev/zero"]).stdin(input).stdout(Stdio::piped()).spawn();
        let mut reader = spawned.unwrap();
        let error = remove(&path).unwrap_err();
        reader.kill().unwrap();
        reader.wait().unwrap();
        let Error::InUse { users, .. } = &error else { panic!("{error}") };
        assert!(users[0].starts_with(&format!("process {}", reader.id())), "{users:?}");
        assert!(path.exists());
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_process_that_is_being_started_is_no_user() {
        let status = "71 (a) 1 9 (b)) R 9 71 9 0 -1 64 0 0\n";
        assert!(is_being_started(status, 9) && !is_being_started(status, 1));
        assert!(!is_being_started(&status.replace("-1 64", "-1 4194304"), 9), "it has executed its program");
        assert!(!is_being_started("", 9));
    }

    #[test]
    fn mappings_are_found_by_device_and_inode() {
        let maps = "7f00-7f10 r--s 00000000 fe:01 131073 /srv/a b.img\n7f20-7f30 rw-p 00000000 00:00 0\n";
        let device = rustix::fs::makedev(0xfe, 1);
        assert!(is_mapped(maps, FileId { device, inode: 131_073 }));
        assert!(
            !is_mapped(maps, FileId { device, inode: 131_074 })
                && !is_mapped(maps, FileId { device: device + 1, inode: 131_073 })
        );
    }

    /// A writer of an increment locks the base and a writer that replaces it does too: neither succeeds while
    /// the directory is searched for increments.
    #[test]
    fn an_image_is_locked_while_its_increments_are_searched() {
        let (_directory, path) = with_image();
        let check = |own: &Path| {
            let base = File::open(own).unwrap();
            assert_eq!(flock(&base, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK));
            let replacement = AtomicFile::open(own, Existing::Replace).unwrap_err();
            assert!(matches!(replacement, atomic_file::Error::Busy { .. }), "{replacement}");
            Ok(())
        };
        remove_unless(&path, &check).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn an_image_that_replaces_the_checked_one_is_not_removed() {
        let (directory, path) = with_image();
        let new = directory.path().join("new");
        put(&new, None);
        let check = |own: &Path| {
            fs::rename(&new, own).unwrap();
            fs::write(sidecar_path(own), "of the new one").unwrap();
            Ok(())
        };
        let error = remove_unless(&path, &check).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
        assert!(path.exists() && sidecar_path(&path).exists());
    }

    #[test]
    fn a_symbolic_link_is_not_followed() {
        let (directory, path) = with_image();
        let link = directory.path().join("link.img");
        symlink(&path, &link).unwrap();
        let error = remove(&link).unwrap_err();
        assert!(matches!(error, Error::SymbolicLink { .. }), "{error}");
        assert!(path.exists() && link.is_symlink());
        let listed: Vec<_> = image_paths(directory.path()).unwrap();
        assert_eq!(listed, [path]);
    }

    #[test]
    fn an_image_whose_bases_are_unknown_may_need_any() {
        let (directory, path) = with_image();
        let other = directory.path().join("tuesday.img");
        put(&other, Some("{ damaged"));
        let error = remove(&path).unwrap_err();
        assert!(matches!(&error, Error::UnknownBases { other: found, .. } if *found == other), "{error}");
        fs::write(sidecar_path(&other), "{}").unwrap();
        assert!(path.exists());
        remove(&path).unwrap();
    }

    #[test]
    fn hidden_and_unreadable_increments_are_found() {
        for name in [".tuesday.img", "tuesday.img"] {
            let (directory, path) = with_image();
            let increment = directory.path().join(name);
            put(&increment, Some(&manifest_on("monday.img")));
            fs::set_permissions(&increment, fs::Permissions::from_mode(0o000)).unwrap();
            let error = remove(&path).unwrap_err();
            assert!(
                matches!(&error, Error::NeededBy { increments, .. } if *increments == [increment]),
                "{error}"
            );
            assert!(path.exists());
        }
    }

    #[test]
    fn the_manifest_of_a_removed_image_goes_with_it() {
        let (_directory, path) = with_image();
        fs::write(sidecar_path(&path), "{}").unwrap();
        assert!(remove(&path).unwrap() > 0);
        assert!(!path.exists() && !sidecar_path(&path).exists());
        fs::write(&path, [&MAGIC.to_be_bytes()[..], &[0; 100]].concat()).unwrap();
        fs::create_dir(sidecar_path(&path)).unwrap();
        let error = remove(&path).unwrap_err();
        assert!(matches!(&error, Error::PartRemains { part, .. } if *part == sidecar_path(&path)), "{error}");
        assert!(!path.exists());
    }
}

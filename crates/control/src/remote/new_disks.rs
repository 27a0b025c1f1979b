//! Disks that are made on another host for a guest that brings their content.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, XattrFlags, fcntl_lock, fgetxattr, fsetxattr, open};
use serde::{Deserialize, Serialize};
use towline_launch::{CommandLine, CreatedDisk, HostArguments, NewDisk, Overlay, OverlayError};

use super::disks::{CopiedDisk, DiskToken};

/// Formats of disks that are made.
const MADE: [&str; 2] = ["raw", "qcow2"];
/// Attribute of a file that is a copy for a protected guest: the protection's id, and the disk's name. It outlives a crash of this host.
const COPY: &str = "user.towline.copy";

impl CopiedDisk {
    /// Its file, for a guest with these disks in its command line; `None`: a block device, which is there already.
    fn make(
        &self,
        there: &[Overlay],
        host: &HostArguments,
        protection: Option<&str>,
    ) -> Result<Option<CreatedDisk>, String> {
        let Self { token: DiskToken { drive, .. }, format, bytes, setting, .. } = self;
        let disk = there.iter().find(|disk| Some(&disk.setting) == setting.as_ref());
        let disk = disk.ok_or_else(|| format!("disk {drive} is not in the guest's command line"))?;
        if disk.format != *format {
            let (setting, found) = (&disk.setting, &disk.format);
            return Err(format!("{setting}.format is {found} there, expected {format}"));
        }
        let (path, setting) = (Path::new(&disk.base), &disk.setting);
        let is_named = || host.settings.iter().any(|given| given.key.starts_with(&format!("{setting}.file")));
        match fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() && is_named() => return Ok(None),
            Ok(found) if found.file_type().is_block_device() => {
                let path = path.display();
                return Err(format!(
                    "disk {drive} is a block device there, too ({path}), and may be the same one: name it by {setting}.file"
                ));
            }
            Err(_) if path.starts_with("/dev") || !path.is_absolute() => {
                return Err(format!(
                    "disk {drive} ({}) is missing there: name a file by {setting}.file",
                    disk.base
                ));
            }
            _ if !MADE.contains(&format.as_str()) => {
                return Err(format!(
                    "disk {drive} has format {format}, and only raw and qcow2 are made: start a QEMU there that waits"
                ));
            }
            _ => {}
        }
        let new = NewDisk { path, format, bytes: *bytes };
        let made = match protection {
            Some(protection) => create_copy(&new, host, &format!("{protection} {drive}")),
            None => new.create(host),
        };
        made.map(Some).map_err(|error| {
            format!("disk {drive}: {error}; remove it if a former move or protection has left it, or name another by {setting}.file")
        })
    }
}

/// Makes the file of a copy, also in the place of one that was the same copy and that no process has in use. Its guest never ran there: it
/// would be protected no more.
fn create_copy(new: &NewDisk<'_>, host: &HostArguments, copy: &str) -> Result<CreatedDisk, OverlayError> {
    if is_left(new.path, copy) {
        let removed = fs::remove_file(new.path);
        tracing::info!(path = %new.path.display(), ?removed, "the copy of a former standby");
    }
    let made = new.create(host)?;
    if let Err(error) = fsetxattr(&made, COPY, copy.as_bytes(), XattrFlags::empty()) {
        tracing::info!(path = %new.path.display(), %error, "a crash of this host would leave a copy that is not known as one");
    }
    Ok(made)
}

/// Returns true for a file that is that copy, and that no QEMU has locked.
fn is_left(path: &Path, copy: &str) -> bool {
    let mut found = vec![0; copy.len() + 1];
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).is_ok_and(|file| {
        fgetxattr(&file, COPY, &mut found).is_ok_and(|length| found[..length] == *copy.as_bytes())
            && fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
    })
}

/// A file that was made, in the list of those of a guest.
#[derive(Debug, Serialize, Deserialize)]
struct MadeFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl MadeFile {
    fn of(disk: &CreatedDisk) -> Option<Self> {
        let path = disk.path()?.to_owned();
        let found = fs::symlink_metadata(&path).ok()?;
        Some(Self { path, device: found.dev(), inode: found.ino() })
    }

    /// Removes it, unless another file has its name now.
    fn remove(&self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode)) {
            let removed = fs::remove_file(&self.path);
            tracing::info!(path = %self.path.display(), ?removed, "a disk without its guest");
        }
    }
}

/// Disks that were made for a guest, and are removed with this value unless they are kept.
#[derive(Debug, Default)]
pub(super) struct NewDisks(Vec<CreatedDisk>);

impl NewDisks {
    /// File with the names of the disks that were made for a guest, in its directory: those of one that never arrived are removed by
    /// another agent if this one was killed.
    pub(super) const FILE: &str = "new-disks.json";

    /// Makes the files of these disks for a guest with this command line, and keeps `list` of them. They replace those that were made for the
    /// same `protection`.
    ///
    /// # Errors
    /// The reason, with the name of the disk.
    pub(super) fn make(
        disks: &[CopiedDisk],
        line: &CommandLine,
        host: &HostArguments,
        protection: Option<&str>,
        list: &Path,
    ) -> Result<Self, String> {
        let directory = host.working_directory.as_deref().unwrap_or(Path::new("/"));
        let there = line.written_disks(directory, None);
        let mut made = Self::default();
        for disk in disks {
            made.0.extend(disk.make(&there, host, protection)?);
            let files: Vec<_> = made.0.iter().filter_map(MadeFile::of).collect();
            let written = serde_json::to_vec(&files).map_err(io::Error::from);
            let written = written.and_then(|files| fs::write(list, files));
            written.map_err(|error| format!("{}: {error}", list.display()))?;
        }
        Ok(made)
    }

    /// Reads such a file, whose guest never arrived. Returns the removal of its disks.
    pub(super) fn removal(list: &Path) -> impl FnOnce() + use<> {
        let files: Option<Vec<MadeFile>> =
            fs::read(list).ok().and_then(|files| serde_json::from_slice(&files).ok());
        move || files.iter().flatten().for_each(MadeFile::remove)
    }

    /// Number of files.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Has them outlive this value.
    pub(super) fn keep(&mut self) {
        self.0.drain(..).for_each(CreatedDisk::keep);
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn only_the_same_copy_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let [copy, link, other] = ["copy", "link", "other"].map(|name| directory.path().join(name));
        let file = fs::File::create_new(&copy).unwrap();
        match fsetxattr(&file, COPY, b"1 disk0", XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => return eprintln!("SKIPPED: no extended attributes in {directory:?}"),
            set => set.unwrap(),
        }
        std::os::unix::fs::symlink(&copy, &link).unwrap();
        fs::write(&other, "").unwrap();
        assert!(is_left(&copy, "1 disk0"));
        for (path, id) in [
            (&copy, "1 disk"),
            (&copy, "1 disk00"),
            (&copy, "2 disk0"),
            (&copy, ""),
            (&link, "1 disk0"),
            (&other, "1 disk0"),
            (&directory.path().join("none"), "1 disk0"),
        ] {
            assert!(!is_left(path, id), "{} {id}", path.display());
        }
    }
}

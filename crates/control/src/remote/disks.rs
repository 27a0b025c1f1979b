//! The disks of a guest on two hosts: proven to be on storage that both have, or made at the other one.
//!
//! The proof of a disk is a file that one host makes beside each file of it, and that the other one sees. The name of a disk proves nothing,
//! as both hosts may have a file of that name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_launch::Overlay;

use super::error::Error;
use super::room::{self, NeededRoom, allocated};
use crate::qemu::{self, Qemu};

/// Beginning of the names of these files.
const PREFIX: &str = ".towline-";

/// Age from which such a file was left: a preparation takes minutes.
const ABANDONED_AGE: Duration = Duration::from_secs(3600);
/// The first QEMU whose copies leave zeros out of a new raw file; others allocate all of it.
const HOLES_SINCE: (u32, u32) = (10, 1);

/// A disk that a guest may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WrittenDisk {
    drive: String,
    /// The file that is written, its backing file, and so on.
    files: Vec<PathBuf>,
    format: String,
    bytes: u64,
    /// Bytes that its files have on their filesystems.
    allocated_bytes: u64,
    /// True if a copy by its QEMU leaves zeros out of a raw file.
    keeps_holes: bool,
    /// Properties that a copy of its content would lose.
    extras: Option<&'static str>,
    /// Key of its setting in the command line of a guest whose QEMU is started elsewhere; `None` if that does not have it.
    setting: Option<String>,
}

/// Disks of a guest that goes to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskPolicy {
    /// They stay where they are, on storage that is proven to be that of both hosts.
    Proven,
    /// As that, by the word of the user.
    VouchedFor,
    /// They are copied.
    Copied,
}

/// Disks of a guest, for the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DisksToJudge {
    VouchedFor,
    Proven(Vec<DiskToken>),
    Copied(Vec<CopiedDisk>),
}

/// A disk that is copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CopiedDisk {
    /// With which a disk that both hosts have is found out.
    pub(super) token: DiskToken,
    pub(super) format: String,
    pub(super) bytes: u64,
    allocated_bytes: u64,
    keeps_holes: bool,
    /// As in [`WrittenDisk`].
    pub(super) setting: Option<String>,
}

/// Description of such a disk for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskToken {
    pub(super) drive: String,
    files: Vec<FileToken>,
}

/// A file of a disk, at the guest's host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct FileToken {
    path: PathBuf,
    /// Its name in its directory, without links.
    name: Option<PathBuf>,
    /// Name of the file that was made beside it; `None` if none could be made.
    token: Option<String>,
}

/// Files beside those of a guest's disks, which are removed with this value.
#[derive(Debug, Default)]
pub(super) struct DiskTokens {
    pub(super) disks: Vec<DiskToken>,
    made: BTreeMap<PathBuf, String>,
}

impl WrittenDisk {
    /// The disks of a QEMU.
    ///
    /// # Errors
    /// It does not reply.
    pub(super) fn of(qemu: &mut Qemu) -> Result<Vec<Self>, qemu::Error> {
        let directory = qemu.working_directory().unwrap_or_else(|| "/".into());
        let version = &qemu.facts().version.qemu;
        let keeps_holes = (version.major, version.minor) >= HOLES_SINCE;
        let disk = |drive: qemu::Drive| {
            let files: Vec<_> = drive.files.chain.iter().map(|file| directory.join(file)).collect();
            let allocated: Option<u64> = files.iter().map(|file| allocated(file)).sum();
            Self {
                drive: drive.name,
                files,
                format: drive.files.format,
                bytes: drive.bytes,
                allocated_bytes: allocated.unwrap_or(drive.bytes).min(drive.bytes),
                keeps_holes,
                extras: drive.extras,
                setting: None,
            }
        };
        Ok(qemu.written_drives()?.into_iter().map(disk).collect())
    }

    /// Refuses a disk that is more than its content.
    pub(super) fn check_copy(&self) -> Result<(), Error> {
        let Self { drive, extras, .. } = self;
        extras.map_or(Ok(()), |what| Err(Error::DiskExtras { drive: drive.clone(), what }))
    }

    /// Finds it among the disks of the guest's command line, with which a QEMU is started elsewhere.
    pub(super) fn find_setting(&mut self, of_line: &[Overlay]) -> Result<(), Error> {
        let file = self.files.first();
        let disk = of_line.iter().find(|disk| file.is_some_and(|file| file == Path::new(&disk.base)));
        let disk = disk.ok_or_else(|| Error::DiskOfNoOption { drive: self.drive.clone() })?;
        self.setting = Some(disk.setting.clone());
        Ok(())
    }

    /// Notice about a disk that stays behind after a copy of it has gone on.
    pub(super) fn left(&self) -> Option<String> {
        let (drive, file) = (&self.drive, self.files.first()?.display());
        Some(format!(
            "disk {drive} ({file}) is left on this host, unchanged since the guest was stopped; remove it when you no longer need it"
        ))
    }

    /// Its description for a host to which it is copied.
    fn copied(&self, token: DiskToken) -> CopiedDisk {
        let Self { format, bytes, allocated_bytes, keeps_holes, setting, .. } = self.clone();
        CopiedDisk { token, format, bytes, allocated_bytes, keeps_holes, setting }
    }
}

impl DiskTokens {
    /// Makes a file beside each file of these disks.
    pub(super) fn make(disks: &[WrittenDisk]) -> Self {
        let mut tokens = Self::default();
        for disk in disks {
            let files = disk.files.iter().map(|path| tokens.token(path)).collect();
            tokens.disks.push(DiskToken { drive: disk.drive.clone(), files });
        }
        tokens
    }

    /// Description of these disks for the other host.
    pub(super) fn to_judge(&self, disks: &[WrittenDisk], policy: DiskPolicy) -> DisksToJudge {
        match policy {
            DiskPolicy::VouchedFor => DisksToJudge::VouchedFor,
            DiskPolicy::Proven => DisksToJudge::Proven(self.disks.clone()),
            DiskPolicy::Copied => {
                let copied = disks.iter().zip(&self.disks);
                DisksToJudge::Copied(copied.map(|(disk, token)| disk.copied(token.clone())).collect())
            }
        }
    }

    fn token(&mut self, path: &Path) -> FileToken {
        let real = path.canonicalize().ok().filter(|path| path.is_file());
        let token = real.as_deref().and_then(Path::parent).and_then(|directory| self.in_directory(directory));
        let name = real.and_then(|path| Some(PathBuf::from(path.file_name()?)));
        FileToken { path: path.to_owned(), name, token }
    }

    fn in_directory(&mut self, directory: &Path) -> Option<String> {
        if let Some(token) = self.made.get(directory) {
            return Some(token.clone());
        }
        remove_abandoned(directory);
        let token = format!("{PREFIX}{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let path = directory.join(&token);
        // Other hosts see it once it is closed.
        match File::create_new(&path).and_then(|file| file.sync_all()) {
            Ok(()) => {
                self.made.insert(directory.to_owned(), token.clone());
                Some(token)
            }
            Err(error) => {
                tracing::info!(path = %path.display(), %error, "no proof of a disk");
                None
            }
        }
    }
}

impl Drop for DiskTokens {
    fn drop(&mut self) {
        for (directory, token) in &self.made {
            if let Err(error) = fs::remove_file(directory.join(token)) {
                tracing::warn!(path = %directory.join(token).display(), %error, "cannot be removed");
            }
        }
    }
}

impl DisksToJudge {
    /// The disks that are copied.
    pub(super) fn copied(&self) -> &[CopiedDisk] {
        match self {
            Self::Copied(disks) => disks,
            Self::VouchedFor | Self::Proven(_) => &[],
        }
    }

    /// The reasons for which a QEMU with these disks cannot have the guest.
    pub(super) fn refusals(&self, there: &[WrittenDisk]) -> Vec<String> {
        match self {
            Self::VouchedFor => Vec::new(),
            Self::Proven(disks) => disks.iter().filter_map(|disk| disk.refusal(there)).collect(),
            Self::Copied(disks) => {
                let refused = disks.iter().filter_map(|disk| disk.refusal(there));
                refused.chain(room::refusals(disks.iter().filter_map(|disk| disk.room(there)))).collect()
            }
        }
    }
}

impl CopiedDisk {
    /// The room that it needs in its file there.
    fn room<'a>(&'a self, there: &'a [WrittenDisk]) -> Option<NeededRoom<'a>> {
        let drive = &self.token.drive;
        let there = there.iter().find(|disk| disk.drive == *drive)?;
        let is_whole = there.format == "raw" && !self.keeps_holes;
        let bytes = if is_whole { self.bytes } else { self.allocated_bytes };
        Some(NeededRoom { drive, file: there.files.first()?, bytes })
    }

    fn refusal(&self, there: &[WrittenDisk]) -> Option<String> {
        let (drive, expected) = (&self.token.drive, self.bytes);
        let Some(disk) = there.iter().find(|disk| disk.drive == *drive) else {
            return Some(format!("disk {drive} is missing there, or cannot be written"));
        };
        if disk.bytes != expected {
            return Some(format!("disk {drive} has {} bytes there, expected {expected}", disk.bytes));
        }
        // It would be written by both, and also a backing file of the guest's.
        let there = disk.files.first()?;
        let path = there.display();
        self.token.files.iter().find_map(|file| match &file.token {
            Some(_) if file.refusal(drive, there).is_none() => {
                Some(format!("disk {drive} ({path}) is the same file there, and needs no copy"))
            }
            None if file.path == *there => {
                Some(format!("disk {drive} ({path}) may be the same there: give it another name there"))
            }
            _ => None,
        })
    }
}

impl DiskToken {
    /// The reason for which this disk of the guest is not among these; `None` if it is.
    pub(super) fn refusal(&self, there: &[WrittenDisk]) -> Option<String> {
        let drive = &self.drive;
        let Some(disk) = there.iter().find(|disk| disk.drive == *drive) else {
            return Some(format!("disk {drive} is missing there, or cannot be written"));
        };
        if self.files.len() != disk.files.len() {
            let (here, there) = (self.files.len(), disk.files.len());
            return Some(format!(
                "disk {drive} has {there} files there, expected {here}, with its backing files"
            ));
        }
        let pairs = self.files.iter().zip(&disk.files);
        pairs.into_iter().find_map(|(file, other)| file.refusal(drive, other))
    }
}

impl FileToken {
    fn refusal(&self, drive: &str, other: &Path) -> Option<String> {
        let Self { path, name, token } = self;
        let why = match token {
            Some(token) if is_beside(other, name.as_deref(), token) => return None,
            Some(_) => "is another file there",
            None => "cannot be proven to be the same file there",
        };
        Some(format!("disk {drive} ({}) {why} ({})", path.display(), other.display()))
    }
}

/// Removes files that towlines which were killed have left.
fn remove_abandoned(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let found = entry.metadata().ok().filter(|found| found.is_file() && found.len() == 0);
        let age = found.and_then(|found| found.modified().ok()?.elapsed().ok());
        if age > Some(ABANDONED_AGE) && entry.file_name().to_str().is_some_and(is_token) {
            let removed = fs::remove_file(entry.path());
            tracing::info!(path = %entry.path().display(), ?removed, "left by a towline that was killed");
        }
    }
}

fn is_token(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns true if the file has this name without links, and the token is beside it. Both come from the other host.
fn is_beside(file: &Path, name: Option<&Path>, token: &str) -> bool {
    let Some(real) = file.canonicalize().ok().filter(|_| is_token(token)) else { return false };
    let beside = real.with_file_name(token);
    real.file_name().map(Path::new) == name && fs::symlink_metadata(beside).is_ok_and(|found| found.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(files: &[&Path]) -> WrittenDisk {
        WrittenDisk {
            drive: "disk0".into(),
            files: files.iter().map(|file| (*file).to_owned()).collect(),
            format: "raw".into(),
            bytes: 4,
            allocated_bytes: 4,
            keeps_holes: false,
            extras: None,
            setting: None,
        }
    }

    #[test]
    fn a_disk_is_the_same_only_where_the_files_beside_it_are_seen() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |path: PathBuf| {
            fs::write(&path, "disk").unwrap();
            path
        };
        let (file, other) = (write(here.path().join("a")), write(here.path().join("b")));
        let copy = write(there.path().join("a"));
        let link = |to: &Path, name: &str| {
            let path = there.path().join(name);
            std::os::unix::fs::symlink(to, &path).unwrap();
            path
        };
        let [left, fresh] = ["01", "02"].map(|name| here.path().join(format!("{PREFIX}{name}")));
        let left_at = std::time::SystemTime::now() - 2 * ABANDONED_AGE;
        File::create_new(&left).unwrap().set_modified(left_at).unwrap();
        File::create_new(&fresh).unwrap();
        let tokens = DiskTokens::make(&[disk(&[&file, &other])]);
        assert!(!left.exists() && fresh.exists());
        fs::remove_file(fresh).unwrap();
        let [token] = &tokens.disks[..] else { panic!("{tokens:?}") };
        assert_eq!(token.refusal(&[disk(&[&file, &other])]), None);
        assert_eq!(token.refusal(&[disk(&[&link(&file, "link"), &other])]), None);
        let text = |files: &[&Path]| token.refusal(&[disk(files)]).unwrap();
        // By the name that this one has here, a link there to its neighbour.
        for files in [[&other, &other], [&copy, &other], [&link(&other, "other"), &other], [&file, &copy]] {
            assert!(text(&files.map(PathBuf::as_path)).contains("is another file there"), "{files:?}");
        }
        assert!(text(&[&file]).contains("has 1 files there, expected 2"));
        assert!(token.refusal(&[]).unwrap().contains("is missing"));
        drop(tokens);
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 2, "they are removed");
        let device = disk(&[Path::new("/dev/null")]);
        let tokens = DiskTokens::make(std::slice::from_ref(&device));
        assert!(tokens.disks[0].refusal(&[device]).unwrap().contains("cannot be proven"));
        assert!(!is_beside(&file, Some(Path::new("a")), "../a"));
        assert!(!is_beside(&file, Some(Path::new("a")), ".towline-/../a"));
    }
}

//! The disks of a guest on two hosts: proven to be on storage that both have, or made at the other one.
//!
//! The proof of a disk is a file that one host makes beside each file of it, and that the other one sees. The name of a disk proves nothing,
//! as both hosts may have a file of that name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use towline_launch::{CommandLine, CreatedDisk, HostArguments, NewDisk, Overlay};

use super::error::Error;
use crate::qemu::{self, Qemu};

/// Beginning of the names of these files.
const PREFIX: &str = ".towline-";

/// A disk that a guest may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WrittenDisk {
    drive: String,
    /// The file that is written, its backing file, and so on.
    files: Vec<PathBuf>,
    format: String,
    bytes: u64,
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
    token: DiskToken,
    format: String,
    bytes: u64,
    /// As in [`WrittenDisk`].
    setting: Option<String>,
}

/// Description of such a disk for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskToken {
    drive: String,
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
        let written = qemu.drives()?.into_iter().filter(|drive| drive.is_written);
        let disk = |drive: qemu::Drive| Self {
            files: drive.files.chain.iter().map(|file| directory.join(file)).collect(),
            drive: drive.name,
            format: drive.files.format,
            bytes: drive.bytes,
            extras: drive.extras,
            setting: None,
        };
        Ok(written.map(disk).collect())
    }

    /// Refuses a disk that is more than its content.
    pub(super) fn check_copy(&self) -> Result<(), Error> {
        let Self { drive, extras, .. } = self;
        extras.map_or(Ok(()), |what| Err(Error::DiskExtras { drive: drive.clone(), what }))
    }

    /// Finds it among the disks of the guest's command line.
    pub(super) fn find_setting(&mut self, of_line: &[Overlay]) {
        let file = self.files.first();
        let disk = of_line.iter().find(|disk| file.is_some_and(|file| file == Path::new(&disk.base)));
        self.setting = disk.map(|disk| disk.setting.clone());
    }

    /// Its description for a host to which it is copied.
    fn copied(&self, token: DiskToken) -> CopiedDisk {
        let Self { format, bytes, setting, .. } = self.clone();
        CopiedDisk { token, format, bytes, setting }
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
            Self::Copied(disks) => disks.iter().filter_map(|disk| disk.refusal(there)).collect(),
        }
    }
}

impl CopiedDisk {
    fn refusal(&self, there: &[WrittenDisk]) -> Option<String> {
        let (drive, expected) = (&self.token.drive, self.bytes);
        let Some(disk) = there.iter().find(|disk| disk.drive == *drive) else {
            return Some(format!("disk {drive} is missing there, or cannot be written"));
        };
        if disk.bytes != expected {
            return Some(format!("disk {drive} has {} bytes there, expected {expected}", disk.bytes));
        }
        let is_one = !disk.files.is_empty() && self.token.refusal(there).is_none();
        is_one.then(|| format!("disk {drive} is the same file there, and needs no copy"))
    }

    /// Its file, for a guest with these disks in its command line; `None`: a block device, which is there already.
    fn make(&self, there: &[Overlay], host: &HostArguments) -> Result<Option<CreatedDisk>, String> {
        let Self { token: DiskToken { drive, .. }, format, bytes, setting } = self;
        let disk = there.iter().find(|disk| Some(&disk.setting) == setting.as_ref());
        let disk = disk.ok_or_else(|| format!("disk {drive} is not in the guest's command line"))?;
        if disk.format != *format {
            let (setting, found) = (&disk.setting, &disk.format);
            return Err(format!("{setting}.format is {found} there, expected {format}"));
        }
        let path = Path::new(&disk.base);
        if !path.is_absolute() {
            return Err(format!("disk {drive} is no file there ({})", disk.base));
        }
        if fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device()) {
            return Ok(None);
        }
        let new = NewDisk { path, format, bytes: *bytes };
        new.create(host).map(Some).map_err(|error| format!("disk {drive}: {error}"))
    }
}

/// Disks that were made for a guest, and are removed with this value unless they are kept.
#[derive(Debug, Default)]
pub(super) struct NewDisks(Vec<CreatedDisk>);

impl NewDisks {
    /// File with the names of the disks that were made for a guest, in its directory: those of one that never arrived are removed by
    /// another agent if this one was killed.
    pub(super) const FILE: &str = "new-disks.json";

    /// Makes the files of these disks for a guest with this command line, and keeps `list` of them.
    ///
    /// # Errors
    /// The reason, with the name of the disk.
    pub(super) fn make(
        disks: &[CopiedDisk],
        line: &CommandLine,
        host: &HostArguments,
        list: &Path,
    ) -> Result<Self, String> {
        let directory = host.working_directory.as_deref().unwrap_or(Path::new("/"));
        let there = line.written_disks(directory, None);
        let mut made = Self::default();
        for disk in disks {
            made.0.extend(disk.make(&there, host)?);
            let paths: Vec<_> = made.0.iter().filter_map(CreatedDisk::path).collect();
            let written = serde_json::to_vec(&paths).map_err(io::Error::from);
            let written = written.and_then(|paths| fs::write(list, paths));
            written.map_err(|error| format!("{}: {error}", list.display()))?;
        }
        Ok(made)
    }

    /// The disks in such a file.
    pub(super) fn listed(list: &Path) -> Vec<PathBuf> {
        fs::read(list).ok().and_then(|paths| serde_json::from_slice(&paths).ok()).unwrap_or_default()
    }

    /// Has them outlive this value.
    pub(super) fn keep(&mut self) {
        self.0.drain(..).for_each(CreatedDisk::keep);
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

/// Returns true if the file has this name without links, and the token is beside it. Both come from the other host.
fn is_beside(file: &Path, name: Option<&Path>, token: &str) -> bool {
    let is_name =
        token.strip_prefix(PREFIX).is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let Some(real) = file.canonicalize().ok().filter(|_| is_name) else { return false };
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
        let tokens = DiskTokens::make(&[disk(&[&file, &other])]);
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

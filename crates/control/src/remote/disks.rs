//! Proof that the disks of a guest are on storage that two hosts have: a file that one of them makes beside each file of a disk is seen by
//! the other. The name of a disk proves nothing, as both hosts may have a file of that name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::qemu::{self, Qemu};

/// Beginning of the names of these files.
const PREFIX: &str = ".towline-";

/// A disk that a guest may write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WrittenDisk {
    drive: String,
    /// The file that is written, its backing file, and so on.
    files: Vec<PathBuf>,
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
        };
        Ok(written.map(disk).collect())
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
        WrittenDisk { drive: "disk0".into(), files: files.iter().map(|file| (*file).to_owned()).collect() }
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

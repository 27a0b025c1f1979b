//! Proof that the disks of a guest are on storage that two hosts have: a file that one of them makes beside each disk is seen by the other.
//! The name of a disk proves nothing, as both hosts may have a file of that name.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use towline_compat::Facts;
use towline_compat::facts::{Drive, Subject};

/// Beginning of the names of these files.
const PREFIX: &str = ".towline-";
/// Bytes of such a file that are read.
const TOKEN_BYTES_MAX: u64 = 64;

/// A writable disk of a guest, and the file beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskToken {
    device: String,
    /// The disk at the guest's host.
    file: PathBuf,
    /// Name and content of the file in its directory; `None` if it could not be made there.
    token: Option<String>,
}

/// Files beside the disks of a guest, which are removed with this value.
#[derive(Debug, Default)]
pub(super) struct DiskTokens {
    pub(super) disks: Vec<DiskToken>,
    made: BTreeMap<PathBuf, String>,
}

impl DiskTokens {
    /// Makes a file beside each disk that this guest may write to.
    pub(super) fn make(guest: &Facts, working_directory: Option<&Path>) -> Self {
        let mut tokens = Self::default();
        for drive in drives(guest).filter(|drive| !drive.read_only && !drive.file.is_empty()) {
            let file = working_directory.unwrap_or(Path::new("/")).join(&drive.file);
            let token = file.is_file().then(|| tokens.beside(&file)).flatten();
            tokens.disks.push(DiskToken { device: drive.device.clone(), file, token });
        }
        tokens
    }

    /// The file in the directory of this disk.
    fn beside(&mut self, file: &Path) -> Option<String> {
        // Of the disk itself, if its name is a link.
        let directory = file.canonicalize().ok()?.parent()?.to_owned();
        if let Some(token) = self.made.get(&directory) {
            return Some(token.clone());
        }
        let token = format!("{PREFIX}{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let path = directory.join(&token);
        let made = File::create_new(&path).and_then(|mut file| {
            file.write_all(token.as_bytes())?;
            // Other hosts see it once it is closed.
            file.sync_all()
        });
        match made {
            Ok(()) => {
                self.made.insert(directory, token.clone());
                Some(token)
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "no proof of a disk");
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
    /// The reason for which this disk of the guest is not that of the QEMU with these facts; `None` if it is.
    pub(super) fn refusal(&self, there: &Facts, working_directory: Option<&Path>) -> Option<String> {
        let Self { device, file, token } = self;
        let shown = file.display();
        let Some(drive) = drives(there).find(|drive| drive.device == *device && !drive.file.is_empty())
        else {
            return Some(format!("disk {device} ({shown}) is missing there"));
        };
        let other = working_directory.unwrap_or(Path::new("/")).join(&drive.file);
        let is_proven = token.as_ref().is_some_and(|token| is_beside(&other, token));
        if is_proven
            && other.canonicalize().ok()?.file_name()
                == file.canonicalize().unwrap_or(file.clone()).file_name()
        {
            return None;
        }
        let why = match token {
            Some(_) => "is another file there",
            None => "cannot be proven to be the same file there",
        };
        Some(format!("disk {device} ({shown}) {why} ({})", other.display()))
    }
}

/// Returns true if this token is in the directory of the file. Anyone may have named it, so it is nothing but a name.
fn is_beside(file: &Path, token: &str) -> bool {
    let is_name =
        token.strip_prefix(PREFIX).is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let directory = file.canonicalize().ok().and_then(|file| Some(file.parent()?.to_owned()));
    let Some(path) = directory.filter(|_| is_name).map(|directory| directory.join(token)) else {
        return false;
    };
    let is_small =
        fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() <= TOKEN_BYTES_MAX);
    is_small && fs::read(path).is_ok_and(|content| content == token.as_bytes())
}

fn drives(facts: &Facts) -> impl Iterator<Item = &Drive> {
    let drives = match &facts.subject {
        Subject::Qemu(qemu) => qemu.drives.as_deref(),
        _ => None,
    };
    drives.unwrap_or_default().iter()
}

#[cfg(test)]
mod tests {
    use towline_compat::facts::QemuFacts;

    use super::*;

    fn facts(file: &Path) -> Facts {
        let drive = Drive { device: "disk0".into(), file: file.display().to_string(), ..Drive::default() };
        Subject::Qemu(Box::new(QemuFacts { drives: Some(vec![drive]), ..QemuFacts::default() })).into()
    }

    #[test]
    fn a_disk_is_the_same_only_where_the_file_beside_it_is_seen() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [disk, other, copy] =
            [here.path().join("a"), here.path().join("b"), there.path().join("a")].map(|path| {
                fs::write(&path, "disk").unwrap();
                path
            });
        let tokens = DiskTokens::make(&facts(&disk), None);
        let [token] = &tokens.disks[..] else { panic!("{tokens:?}") };
        assert_eq!(token.refusal(&facts(&disk), None), None);
        let linked = there.path().join("link");
        std::os::unix::fs::symlink(&disk, &linked).unwrap();
        assert_eq!(token.refusal(&facts(&linked), None), None);
        for file in [&other, &copy] {
            assert!(token.refusal(&facts(file), None).unwrap().contains("is another file there"), "{file:?}");
        }
        assert!(
            token.refusal(&Facts::from(Subject::Qemu(Box::default())), None).unwrap().contains("is missing")
        );
        drop(tokens);
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 2, "it is removed");
        let device = DiskTokens::make(&facts(Path::new("/dev/null")), None);
        assert!(
            device.disks[0]
                .refusal(&facts(Path::new("/dev/null")), None)
                .unwrap()
                .contains("cannot be proven")
        );
        assert!(!is_beside(&disk, "../a") && !is_beside(&disk, ".towline-/../a"));
    }
}

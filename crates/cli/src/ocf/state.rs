//! The states of a guest on shared storage, and the newest one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use towline_control::generations::{self, saved_image};
use towline_control::run::recorded_command_line;
use towline_image::Image;
use towline_launch::command_line::{Conflict, QemuOption, Rewrite};
use towline_launch::{AllowedCommandLine, CommandLine, GuestIdentity, HostArguments};

use super::parameters::Parameters;
use super::refusal::{Code, Refusal};

/// Kind of a stored state, from the older to the newer one of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stored {
    /// Of a move that was interrupted, at its destination.
    Arrived,
    /// At the end of the generation.
    Saved,
}

/// Origin of a guest that is started.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Image(PathBuf),
    /// Its disks, for this reason.
    Boot(String),
}

/// The command line of a guest for this host.
#[derive(Debug)]
pub(super) struct GuestLine {
    pub(super) allowed: AllowedCommandLine,
    pub(super) host: HostArguments,
}

/// Disks that a guest writes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenDisks {
    /// Files of those that are known.
    files: Vec<PathBuf>,
    /// There are these, or others.
    pub(super) exist: bool,
}

/// Arguments of this host for a guest.
pub(super) fn host_arguments(parameters: &Parameters) -> HostArguments {
    HostArguments {
        binary: parameters.qemu.clone(),
        working_directory: Some("/".into()),
        settings: parameters.settings.clone(),
        ..HostArguments::default()
    }
}

impl GuestLine {
    /// The command line that is recorded in the guest's first image.
    pub(super) fn of(parameters: &Parameters) -> Result<Self, Refusal> {
        let image = Image::open(&parameters.image).map_err(|error| Refusal::of(Code::Installed, &error))?;
        let recorded = image.manifest().map(|manifest| recorded_command_line(&manifest.origin));
        let recorded = recorded.transpose().map_err(|error| Refusal::of(Code::Configured, &error))?.flatten();
        let recorded = recorded.ok_or_else(|| {
            Refusal::new(Code::Configured, format!("{} has no command line", parameters.image.display()))
        })?;
        let refused = |error: &dyn std::error::Error| Refusal::new(Code::Configured, error.to_string());
        let identity = GuestIdentity { n: 0, name: parameters.name.as_str() };
        let host = host_arguments(parameters).for_guest(identity).map_err(|error| refused(&error))?;
        let allowed = if parameters.is_trusted { recorded.trust(&host) } else { recorded.allow(&host) };
        Ok(Self { allowed: allowed.map_err(|error| refused(&error))?, host })
    }

    pub(super) fn disks(&self) -> WrittenDisks {
        WrittenDisks::of(&self.allowed.whole())
    }
}

impl WrittenDisks {
    fn of(line: &CommandLine) -> Self {
        let written = line.written_disks(Path::new("/"), None);
        let files: Vec<_> = written.into_iter().map(|disk| PathBuf::from(disk.base)).collect();
        let exist = !files.is_empty() || line.options().iter().any(is_written);
        Self { files, exist }
    }

    /// The first one that was written after the image was.
    fn newer_than(&self, image: &Path) -> Result<Option<&Path>, Refusal> {
        let written = |path: &Path| {
            let modified =
                fs::metadata(path).and_then(|found| found.is_file().then(|| found.modified()).transpose());
            modified.map_err(|error| unreadable(path, &error))
        };
        let stored = written(image)?;
        for disk in &self.files {
            if written(disk)? > stored {
                return Ok(Some(disk));
            }
        }
        Ok(None)
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Refusal {
    Refusal::failed(format!("{} cannot be read: {error}; check the shared storage", path.display()))
}

/// Returns true if the guest may keep something there: on a disk, or by a device of the host or of another process.
fn is_written(option: &QemuOption) -> bool {
    match option.rewrite() {
        Rewrite::Disk | Rewrite::Refuse(Conflict::HostDevice) => true,
        Rewrite::Drive => option.properties().is_none_or(|properties| {
            let is_cdrom = properties.value("media").as_deref() == Some("cdrom");
            !is_cdrom && !properties.is_on("readonly") && !properties.is_on("read-only")
        }),
        _ => false,
    }
}

/// The directory of one guest on shared storage.
#[derive(Debug)]
pub(super) struct SharedState(pub(super) PathBuf);

impl SharedState {
    /// Makes the directory of the guest. Its parent must be there: below an empty mount point nothing is known.
    pub(super) fn create(&self) -> Result<(), Refusal> {
        match fs::create_dir(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                let path = self.0.display();
                let text = format!("{path} cannot be made: {error}; mount the shared storage");
                Err(Refusal::new(Code::Installed, text))
            }
            _ => Ok(()),
        }
    }

    /// Number of the highest generation; 0 if there is none.
    pub(super) fn newest(&self) -> Result<u64, generations::Error> {
        Ok(generations::newest(&self.0)?.map_or(0, |newest| newest.number))
    }

    pub(super) fn saved(&self, number: u64) -> PathBuf {
        saved_image(&self.0, number)
    }

    pub(super) fn arrived(&self, number: u64) -> PathBuf {
        self.0.join(format!("arrived.{number}.img"))
    }

    /// The stored states, the newest one last.
    fn stored(&self) -> io::Result<Vec<(u64, Stored, PathBuf)>> {
        let state = |entry: &fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (kind, number) = name.strip_suffix(".img")?.split_once('.')?;
            let kind = match kind {
                "saved" => Stored::Saved,
                "arrived" => Stored::Arrived,
                _ => return None,
            };
            Some((number.parse().ok()?, kind, entry.path()))
        };
        let mut stored = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            stored.extend(state(&entry?));
        }
        stored.sort();
        Ok(stored)
    }

    /// Origin of a guest whose highest generation is `newest`: the newest memory, but none that is older than its disks.
    ///
    /// # Errors
    /// The directory or the files cannot be read: a newer state may be there.
    pub(super) fn origin(&self, newest: u64, first: &Path, disks: &WrittenDisks) -> Result<Origin, Refusal> {
        let stored = self.stored().map_err(|error| unreadable(&self.0, &error))?.pop();
        if !disks.exist {
            return Ok(Origin::Image(stored.map_or_else(|| first.to_owned(), |(.., path)| path)));
        }
        let image = match stored {
            Some((number, Stored::Saved, path)) if number == newest => path,
            _ if newest == 0 => first.to_owned(),
            _ => {
                return Ok(Origin::Boot(format!(
                    "its host ended in generation {newest}, and no memory of that was saved"
                )));
            }
        };
        Ok(match disks.newer_than(&image)? {
            Some(disk) => Origin::Boot(format!(
                "disk {} was written after {} was saved",
                disk.display(),
                image.display()
            )),
            None => Origin::Image(image),
        })
    }

    /// Removes states that are older than the one of which the guest runs now.
    pub(super) fn prune(&self, current: &Path) {
        let Ok(stored) = self.stored() else { return };
        let older = stored.iter().position(|(.., path)| path == current).unwrap_or_default();
        for (.., path) in &stored[..older] {
            if let Err(error) = towline_image::directory::remove(path) {
                tracing::info!(path = %path.display(), %error, "an older state of the guest is not removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks(words: &[&str]) -> WrittenDisks {
        WrittenDisks::of(&CommandLine::parse(words).unwrap())
    }

    #[test]
    fn the_newest_memory_is_run_if_no_disk_is_newer() {
        let place = tempfile::tempdir().unwrap();
        let (state, first) = (SharedState(place.path().join("g")), place.path().join("first.img"));
        state.create().unwrap();
        let disk = place.path().join("disk.raw");
        for file in [&disk, &first] {
            fs::write(file, "").unwrap();
        }
        let drive = format!("file={},format=raw,if=none,id=d", disk.display());
        let (none, some) = (WrittenDisks::default(), disks(&["-drive", &drive]));
        let boots = |origin| matches!(origin, Origin::Boot(_));
        let image = |path: &Path| Origin::Image(path.to_owned());
        let origin = |newest, first: &Path, disks: &WrittenDisks| state.origin(newest, first, disks).unwrap();
        for disks in [&none, &some] {
            assert_eq!(origin(0, &first, disks), image(&first));
        }
        // A host that has ended.
        assert_eq!(origin(1, &first, &none), image(&first));
        assert!(boots(origin(1, &first, &some)));
        for path in [state.saved(9), state.saved(10), state.arrived(10)] {
            fs::write(path, "").unwrap();
        }
        for disks in [&none, &some] {
            assert_eq!(origin(10, &first, disks), image(&state.saved(10)));
        }
        assert_eq!(origin(12, &first, &none), image(&state.saved(10)));
        assert!(boots(origin(12, &first, &some)));
        fs::write(state.arrived(11), "").unwrap();
        assert_eq!(origin(11, &first, &none), image(&state.arrived(11)));
        assert!(boots(origin(11, &first, &some)));
        fs::remove_file(state.arrived(11)).unwrap();
        // The disk was used by something else since.
        let later =
            fs::metadata(state.saved(10)).unwrap().modified().unwrap() + std::time::Duration::from_secs(1);
        fs::File::options().write(true).open(&disk).unwrap().set_modified(later).unwrap();
        assert!(boots(origin(10, &first, &some)));
        assert_eq!(origin(10, &first, &none), image(&state.saved(10)));
        // A disk or a directory that cannot be read is not an old one.
        fs::remove_file(&disk).unwrap();
        assert!(state.origin(10, &first, &some).is_err());
        fs::remove_dir_all(&state.0).unwrap();
        assert!(state.origin(0, &first, &none).is_err());
    }

    #[test]
    fn a_disk_that_is_not_known_is_a_disk() {
        assert!(
            !disks(&[
                "-m",
                "64",
                "-device",
                "virtio-net-pci",
                "-drive",
                "file=/a.iso,format=raw,media=cdrom"
            ])
            .exist
        );
        assert!(!disks(&["-drive", "file=/a,format=raw,readonly=on"]).exist);
        for words in [
            &["-hda", "/a"][..],
            &["-fdb", "/a"],
            &["-device", "vhost-user-blk-pci,chardev=c"],
            &["-device", "nvdimm,memdev=m"],
            &["-drive", "file=nbd://h/a,if=virtio"],
            &["-blockdev", "driver=nbd,node-name=d,server.type=inet,server.host=h,server.port=1"],
        ] {
            assert!(disks(words).exist, "{words:?}");
        }
    }
}

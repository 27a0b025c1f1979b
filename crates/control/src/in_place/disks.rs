//! The disks of a guest that is taken: they stay as they are at its instant, and the guest continues in overlays of them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use towline_image::StoredDisk;
use towline_launch::{CreatedDisk, HostArguments, Overlay};
use towline_qmp as qmp;

use super::Error;
use crate::generations::ManagedGuest;
use crate::lock::lock;
use crate::qemu::{self, Drive, Qemu};

/// Files of a disk's chain, each of which costs QEMU memory and a descriptor; replies about a chain twice as long cannot be read.
const CHAIN_MAX: usize = 64;

/// The drives that a guest writes to, and the overlays in which it continues if its disks are kept.
#[derive(Debug, Default)]
pub(crate) struct GuestDisks {
    /// The drives as they were when the overlays were planned.
    drives: Vec<Drive>,
    /// One for each of them, in their order, once they were planned.
    snapshots: Vec<Snapshot>,
}

/// The overlay in which the guest continues.
#[derive(Debug)]
struct Snapshot {
    overlay: Overlay,
    created: Option<CreatedDisk>,
}

/// Overlays in which a running guest continues when it is stored, so that its disks stay as they are at that instant. They are removed with
/// the last of these values unless the guest continues in them.
#[derive(Debug, Clone)]
pub struct PreparedDisks(Arc<Mutex<GuestDisks>>);

/// Notice for the user.
pub(crate) fn continues_in(overlay: &Path) -> String {
    format!("the guest continues in overlay {}", overlay.display())
}

impl PreparedDisks {
    pub(crate) fn new(disks: GuestDisks) -> Self {
        Self(Arc::new(Mutex::new(disks)))
    }

    /// Files in which the guest continues once it was taken.
    pub fn overlays(&self) -> Vec<PathBuf> {
        self.disks().overlays()
    }

    pub(crate) fn disks(&self) -> MutexGuard<'_, GuestDisks> {
        lock(&self.0)
    }
}

impl GuestDisks {
    /// The drives that the guest has now, without overlays.
    ///
    /// # Errors
    /// [`qemu::Error::Qmp`].
    pub(crate) fn of(qemu: &mut Qemu) -> Result<Self, qemu::Error> {
        Ok(Self { drives: qemu.written_drives()?, snapshots: Vec::new() })
    }

    /// Returns true if no disk is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.snapshots.is_empty()
    }

    /// Returns true if the guest writes to any.
    pub(crate) fn has_drives(&self) -> bool {
        !self.drives.is_empty()
    }

    /// Plans overlays of all of them: those of `overlays`, which are of the disks in the guest's command line.
    ///
    /// # Errors
    /// [`Error::Managed`]; [`Error::LongChain`]; [`Error::NoOverlay`]: a drive has another file; [`Error::Overlay`].
    pub(crate) fn plan(&mut self, qemu: &Qemu, overlays: &[Overlay]) -> Result<(), Error> {
        if let (true, Some(guest)) = (self.has_drives(), ManagedGuest::of_qemu(qemu)?) {
            let (name, directory) = (guest.guest.name.clone(), guest.directory().to_owned());
            return Err(Error::Managed { name, directory });
        }
        let directory = qemu.working_directory();
        let directory = directory.as_deref().unwrap_or(Path::new("/"));
        for drive in &self.drives {
            let found = drive.files.chain.len();
            if found > CHAIN_MAX {
                // Deeper than that is the file that QEMU's command line names.
                let base = drive.files.chain[found - CHAIN_MAX / 2].clone();
                let (socket, node) = (qemu.socket().to_owned(), drive.node.clone());
                let (drive, expected) = (drive.name.clone(), CHAIN_MAX);
                return Err(Error::LongChain { socket, drive, node, base, found, expected });
            }
            let file = drive.files.written_file(directory);
            // A filter's snapshot would not be the disk's.
            let is_it = |overlay: &&Overlay| {
                file.as_ref() == Some(&overlay.base) && drive.files.format == overlay.format
            };
            let overlay = overlays.iter().find(is_it).ok_or_else(|| Error::NoOverlay {
                socket: qemu.socket().to_owned(),
                drive: drive.name.clone(),
                file: file.clone().unwrap_or_default(),
            })?;
            self.snapshots.push(Snapshot { overlay: overlay.clone(), created: None });
        }
        let planned: Vec<_> = self.snapshots.iter().map(|snapshot| snapshot.overlay.clone()).collect();
        Ok(Overlay::check(&planned)?)
    }

    /// Makes the overlays, which are removed with this value unless the guest continues in them. They belong to the user of its QEMU if
    /// its disks do.
    ///
    /// # Errors
    /// [`Error::Overlay`]; [`Error::Owner`].
    pub(crate) fn make_overlays(&mut self, qemu: &Qemu, host: &HostArguments) -> Result<(), Error> {
        for snapshot in &mut self.snapshots {
            let created = snapshot.created.insert(snapshot.overlay.create(host)?);
            // Not in a directory in which that user has no disk: the names come from QEMU.
            let disk = fs::metadata(&snapshot.overlay.base).map(|disk| disk.uid());
            let owner = qemu.process().file_owner().filter(|owner| disk.is_ok_and(|uid| uid == owner.uid));
            let given = owner.map_or(Ok(()), |owner| created.give_to(owner.uid, owner.gid));
            given.map_err(|source| Error::Owner { path: snapshot.overlay.path.clone(), source })?;
        }
        Ok(())
    }

    /// The disks that the guest wrote until it was taken, as they are now.
    pub(crate) fn stored(&self) -> Vec<StoredDisk> {
        self.snapshots.iter().map(|snapshot| StoredDisk::of(&snapshot.overlay.base)).collect()
    }

    /// Files in which the guest continues.
    pub(crate) fn overlays(&self) -> Vec<PathBuf> {
        self.snapshots.iter().map(|snapshot| snapshot.overlay.path.clone()).collect()
    }

    /// Those of them in which it does, or may if QEMU's answer was lost.
    pub(crate) fn used_overlays(&self) -> impl Iterator<Item = &Path> {
        let used = self.snapshots.iter().filter(|snapshot| snapshot.created.is_none());
        used.map(|snapshot| &*snapshot.overlay.path)
    }

    /// Takes them while the guest is stopped.
    ///
    /// # Errors
    /// None was taken.
    pub(super) fn take(&mut self, qemu: &mut Qemu) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        // Of another command, or of a third party at the monitor.
        let Self { drives: found, .. } = Self::of(qemu)?;
        let overlays = self.overlays();
        let Self { drives, snapshots } = self;
        let gone = drives.iter().find(|drive| !found.contains(drive));
        if let Some(drive) = gone.or_else(|| found.iter().find(|drive| !drives.contains(drive))) {
            let (socket, drive) = (qemu.socket().to_owned(), drive.name.clone());
            return Err(Error::DriveChanged { socket, drive });
        }
        let taken = qemu.take_snapshots(drives.iter().map(|drive| drive.node.as_str()), &overlays);
        // Only what QEMU has refused was certainly not done.
        if !matches!(&taken, Err(qemu::Error::Qmp(qmp::Error::Refusal { .. }))) {
            snapshots.iter_mut().filter_map(|snapshot| snapshot.created.take()).for_each(CreatedDisk::keep);
        }
        Ok(taken?)
    }
}

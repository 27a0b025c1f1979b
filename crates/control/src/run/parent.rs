//! The running guest that is forked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::Cancel;
use towline_image::{Image, Origin};
use towline_launch::{CreatedOverlay, HostArguments, Overlay, QemuVersion};
use towline_qmp as qmp;
use towline_qmp::commands::VersionTriple;

use super::options::Error;
use crate::in_place::{self, Capture, CapturedGuest, Disks, PreparedCapture};
use crate::plan;
use crate::qemu::{self, Drive, DriveSnapshot, Qemu};

/// Program of forks whose guest's program does not exist any more.
const DEFAULT_PROGRAM: &str = "qemu-system-x86_64";

/// Files of a disk's chain, each of which costs QEMU memory and a descriptor; replies about a chain twice as long cannot be read.
const CHAIN_MAX: usize = 64;

/// The guest, and the disks that it and its forks continue with.
#[derive(Debug)]
pub(super) struct Parent {
    qemu: Qemu,
    disks: ParentDisks,
    prepared: Option<PreparedCapture>,
}

/// The guest's disks.
#[derive(Debug)]
struct ParentDisks {
    /// The drives as the forks' disks were planned.
    drives: Vec<Drive>,
    snapshots: Vec<Snapshot>,
}

/// A drive, and the overlay in which the guest continues.
#[derive(Debug)]
struct Snapshot {
    drive: Drive,
    overlay: Overlay,
    created: Option<CreatedOverlay>,
}

/// A guest that was taken to be forked.
#[derive(Debug)]
pub(super) struct TakenGuest {
    pub(super) guest: CapturedGuest,
    pub(super) parted: Parted,
}

/// The guest from which its forks have parted.
#[derive(Debug)]
pub(super) struct Parted {
    /// Time for which it was stopped.
    pub(super) standstill: Duration,
    /// Files in which it continues.
    pub(super) overlays: Vec<PathBuf>,
}

impl Parent {
    /// Connects to the guest.
    pub(super) fn connect(socket: &Path, cancel: &Cancel) -> Result<Self, Error> {
        let options = qmp::Options { interrupt: Some(cancel.descriptor()), ..qmp::Options::default() };
        let mut qemu = Qemu::connect(socket, &options)?;
        let drives = qemu.drives()?;
        Ok(Self { qemu, disks: ParentDisks { drives, snapshots: Vec::new() }, prepared: None })
    }

    /// The monitor's socket.
    pub(super) fn socket(&self) -> &str {
        self.qemu.socket()
    }

    /// The image that the guest maps.
    pub(super) fn image(&mut self) -> Result<PathBuf, Error> {
        let path = in_place::mapped_image(&mut self.qemu)?;
        path.ok_or_else(|| Error::NoBase { socket: self.qemu.socket().to_owned() })
    }

    /// The guest, as an image of it would name it.
    pub(super) fn origin(&mut self) -> Result<Origin, Error> {
        let process = Some(plan::record_command_line(&mut self.qemu)?);
        let source = format!("qmp:{}", self.qemu.socket());
        Ok(Origin { source, qemu: Some(self.qemu.version_text()), process, ..Origin::default() })
    }

    /// Program of its QEMU, or the name of any if it was replaced.
    pub(super) fn program(&self) -> PathBuf {
        let path = self.qemu.process().pid().and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
        path.filter(|path| path.is_file()).unwrap_or_else(|| DEFAULT_PROGRAM.into())
    }

    /// Version of its QEMU.
    pub(super) fn version(&self) -> QemuVersion {
        let VersionTriple { major, minor, .. } = self.qemu.facts().version.qemu;
        QemuVersion { major, minor }
    }

    /// Directory to which its files are relative.
    pub(super) fn working_directory(&self) -> Option<PathBuf> {
        self.qemu.working_directory()
    }

    /// Plans overlays in which the guest continues, since its disks become backing files of the forks' `overlays`.
    pub(super) fn plan_snapshots(&mut self, overlays: &[Overlay]) -> Result<(), Error> {
        let directory = self.working_directory();
        let directory = directory.as_deref().unwrap_or(Path::new("/"));
        for drive in self.disks.drives.iter().filter(|drive| drive.is_written) {
            let found = drive.files.chain.len();
            if found > CHAIN_MAX {
                // Deeper than that is the file that QEMU's command line names.
                let base = drive.files.chain[found - CHAIN_MAX / 2].clone();
                let (socket, node) = (self.qemu.socket().to_owned(), drive.node.clone());
                let (drive, expected) = (drive.name.clone(), CHAIN_MAX);
                return Err(Error::LongChain { socket, drive, node, base, found, expected });
            }
            let file = drive.files.written_file(directory);
            // A filter's snapshot would not be the disk's.
            let is_it = |overlay: &&Overlay| {
                file.as_ref() == Some(&overlay.base) && drive.files.format == overlay.format
            };
            let overlay = overlays.iter().find(is_it).and_then(Overlay::of_present_guest);
            let overlay = overlay.ok_or_else(|| Error::ParentWrites {
                socket: self.qemu.socket().to_owned(),
                drive: drive.name.clone(),
                file: file.unwrap_or_default(),
            })?;
            self.disks.snapshots.push(Snapshot { drive: drive.clone(), overlay, created: None });
        }
        let planned: Vec<_> = self.disks.snapshots.iter().map(|snapshot| snapshot.overlay.clone()).collect();
        Ok(Overlay::check(&planned)?)
    }

    /// Makes the overlays, which are removed with this value unless the guest continues in them.
    pub(super) fn make_overlays(&mut self, host: &HostArguments) -> Result<(), Error> {
        for snapshot in &mut self.disks.snapshots {
            snapshot.created = Some(snapshot.overlay.create(host)?);
        }
        Ok(())
    }

    /// Prepares the guest, which runs on `image`, to be taken. Returns the bytes that it has written.
    pub(super) fn prepare(&mut self, image: &Arc<Image>) -> Result<u64, Error> {
        let prepared = match self.prepared.take() {
            Some(prepared) => prepared,
            None => PreparedCapture::of(&mut self.qemu, image)?,
        };
        Ok(self.prepared.insert(prepared).written_bytes())
    }

    /// Takes the guest, which was prepared, with its disks of the same instant.
    pub(super) fn take(&mut self, origin: Origin) -> Result<TakenGuest, in_place::Error> {
        let prepared =
            self.prepared.take().expect("prepared before its forks' QEMUs were started, and taken once");
        let Capture { guest, standstill } = prepared.take(&mut self.qemu, &mut self.disks)?;
        tracing::info!(
            socket = self.socket(),
            written = guest.written_bytes(),
            standstill_us = standstill.as_micros(),
            "guest taken"
        );
        let parted = Parted { standstill, overlays: self.disks.overlays() };
        Ok(TakenGuest { guest: guest.with_origin(origin), parted })
    }
}

impl Disks for ParentDisks {
    fn overlays(&self) -> Vec<PathBuf> {
        self.snapshots.iter().map(|snapshot| snapshot.overlay.path.clone()).collect()
    }

    fn take(&mut self, qemu: &mut Qemu) -> Result<(), in_place::Error> {
        let Self { drives, snapshots } = self;
        if snapshots.is_empty() {
            return Ok(());
        }
        // Of another fork, or of a third party at the monitor.
        let found = qemu.drives()?;
        if let Some(drive) = drives.iter().find(|drive| drive.is_written && !found.contains(drive)) {
            let (socket, drive) = (qemu.socket().to_owned(), drive.name.clone());
            return Err(in_place::Error::DriveChanged { socket, drive });
        }
        let taken: Vec<_> = snapshots
            .iter()
            .map(|Snapshot { drive, overlay, .. }| DriveSnapshot { drive, overlay: &overlay.path })
            .collect();
        let taken = qemu.take_snapshots(&taken);
        // Only what QEMU has refused was certainly not done.
        if !matches!(&taken, Err(qemu::Error::Qmp(qmp::Error::Refusal { .. }))) {
            snapshots
                .iter_mut()
                .filter_map(|snapshot| snapshot.created.take())
                .for_each(CreatedOverlay::keep);
        }
        Ok(taken?)
    }
}

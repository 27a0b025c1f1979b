//! The running guest that is forked.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use towline_channel::Cancel;
use towline_image::{Image, Origin};
use towline_launch::{HostArguments, Overlay, QemuVersion};
use towline_qmp as qmp;
use towline_qmp::commands::VersionTriple;

use super::options::Error;
use crate::in_place::{self, CapturedGuest, GuestDisks, PreparedCapture};
use crate::plan;
use crate::qemu::Qemu;

/// The guest, and the disks that it and its forks continue with.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) qemu: Qemu,
    pub(super) disks: GuestDisks,
    prepared: Option<PreparedCapture>,
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
        let disks = GuestDisks::of(&mut qemu)?;
        Ok(Self { qemu, disks, prepared: None })
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

    /// Version of its QEMU.
    pub(super) fn version(&self) -> QemuVersion {
        let VersionTriple { major, minor, .. } = self.qemu.facts().version.qemu;
        QemuVersion { major, minor }
    }

    /// Plans overlays in which the guest continues, since its disks become backing files of the forks' `overlays`.
    pub(super) fn plan_snapshots(&mut self, overlays: &[Overlay]) -> Result<(), Error> {
        Ok(self.disks.plan(&self.qemu, &Overlay::of_present_guest(overlays))?)
    }

    /// Makes the overlays, which are removed with this value unless the guest continues in them.
    pub(super) fn make_overlays(&mut self, host: &HostArguments) -> Result<(), Error> {
        Ok(self.disks.make_overlays(&self.qemu, host)?)
    }

    /// Prepares the guest, which runs on `image`, to be taken.
    pub(super) fn prepare(&mut self, image: &Arc<Image>) -> Result<&PreparedCapture, Error> {
        let prepared = match self.prepared.take() {
            Some(prepared) => prepared,
            None => PreparedCapture::of(&mut self.qemu, image)?,
        };
        Ok(self.prepared.insert(prepared))
    }

    /// Reads the guest, which was prepared, once more after its forks' QEMUs were started.
    pub(super) fn read_again(&mut self) -> Result<(), in_place::Error> {
        self.prepared.as_mut().map_or(Ok(()), |prepared| prepared.read_again(&self.qemu))
    }

    /// Takes the guest, which was prepared, with its disks of the same instant.
    pub(super) fn take(&mut self, origin: Origin) -> Result<CapturedGuest, in_place::Error> {
        let prepared =
            self.prepared.take().expect("prepared before its forks' QEMUs were started, and taken once");
        prepared.take(&mut self.qemu, &mut self.disks, origin)
    }

    /// State in which the guest is left.
    pub(super) fn parted(&self, taken: &CapturedGuest) -> Parted {
        Parted { standstill: taken.standstill, overlays: self.disks.overlays() }
    }
}

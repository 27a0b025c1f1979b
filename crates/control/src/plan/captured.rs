//! Storing a guest that runs on: its disks, and its memory by what it has written, so that it is stopped only until that is copied.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::geteuid;
use towline_image::{Image, Origin};
use towline_launch::{HostArguments, Overlay};
use towline_qmp as qmp;
use towline_qmp::commands::RunState;

use super::command_line::recorded;
use super::context::Context;
use super::endpoint::{self, GuestDescription, query_failed, record_process};
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::progress::Observer;
use super::request::WritableDisks;
use crate::in_place::{self, CapturedGuest, GuestDisks, PreparedCapture, PreparedDisks};
use crate::qemu::{self, Qemu};

/// Makes an overlay of each disk that the guest of the QEMU at `socket` writes to: in `directory`, or beside the disk. `interrupt` ends the
/// wait for the monitor; `observer` learns of what a killed towline had left in the QEMU.
///
/// # Errors
/// The command line is not known, a disk is not in it, or an overlay cannot be made. Nothing is left.
pub fn prepare_disks(
    socket: &Path,
    directory: Option<&Path>,
    interrupt: &Arc<OwnedFd>,
    observer: &dyn Observer,
) -> Result<PreparedDisks, Failure> {
    let interrupt = Some(Arc::clone(interrupt));
    let connected = Qemu::connect(socket, &qmp::Options { interrupt, ..qmp::Options::default() });
    let mut qemu = connected.map_err(|error| query_failed(error.into()))?;
    qemu.repaired().iter().for_each(|repaired| observer.notice(&repaired.to_string()));
    overlaid(&mut qemu, directory).map(PreparedDisks::new).map_err(Failure::untouched)
}

fn overlaid(qemu: &mut Qemu, directory: Option<&Path>) -> Result<GuestDisks, Error> {
    let mut disks = GuestDisks::of(qemu)?;
    if disks.has_drives() && in_place::mapped_image(qemu)?.is_none() {
        return Err(Error::DisksNotKept { socket: qemu.socket().to_owned() });
    }
    let recorded = recorded(qemu)?;
    let working_directory = qemu.working_directory().unwrap_or_else(|| "/".into());
    let directory = directory.map(std::path::absolute).transpose().map_err(Error::Directory)?;
    let written = recorded.command_line().written_disks(&working_directory, directory.as_deref());
    let overlays = Overlay::of_present_guest(&written);
    let is_file = |overlay: &&Overlay| Path::new(&overlay.base).is_file();
    if let (None, Some(overlay)) = (directory, overlays.iter().find(|overlay| !is_file(overlay))) {
        let Overlay { setting, base: file, .. } = overlay.clone();
        return Err(Error::NoOverlayDirectory { setting, file });
    }
    disks.plan(qemu, &overlays)?;
    // A program of another user is not executed.
    let is_own = qemu.process().file_owner().is_some_and(|owner| owner.uid == geteuid().as_raw());
    let binary = if is_own { qemu.program() } else { PathBuf::new() };
    disks.make_overlays(qemu, &HostArguments { binary, ..HostArguments::default() })?;
    Ok(disks)
}

/// Takes the guest of `source` if it is to run on while it is stored, and runs on an image. `None`: its memory is sent.
///
/// # Errors
/// It writes to disks that the request does not mention, or cannot be taken with them. The guest runs on.
pub(super) fn take(
    source: &Source,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<Option<CapturedGuest>, Failure> {
    let options = context.options;
    let runs_on = destination.is_image() && (options.resumes() || options.is_snapshot());
    let Some(path) = source.monitor().filter(|_| runs_on) else { return Ok(None) };
    let mut qemu = context.connect_qemu(path).map_err(|error| query_failed(error.into()))?;
    let mut no_disks = GuestDisks::default();
    let mut prepared_disks = match &options.disks {
        WritableDisks::Refused => {
            refuse_disks(&mut qemu).map_err(Failure::untouched)?;
            None
        }
        WritableDisks::LeftOut | WritableDisks::Mirrored { .. } | WritableDisks::Exported { .. } => None,
        WritableDisks::Kept(disks) => Some(disks.disks()),
    };
    let disks = prepared_disks.as_deref_mut().unwrap_or(&mut no_disks);
    let taken = if options.is_snapshot() { Ok(None) } else { taken(&mut qemu, disks, destination, context) };
    let may_send = !options.requires_mapped_memory;
    match taken {
        Err(error) if may_send && disks.is_empty() && is_sent_instead(&error) => {
            tracing::debug!(%error, "the guest is sent");
            Ok(None)
        }
        Ok(None) if !may_send || !disks.is_empty() => {
            Err(Failure::untouched(Error::DisksNotKept { socket: qemu.socket().to_owned() }))
        }
        taken => taken.map_err(Failure::untouched),
    }
}

/// Returns true if the guest's memory can be sent all the same.
fn is_sent_instead(error: &Error) -> bool {
    // The last is a device that cannot be saved.
    matches!(
        error,
        Error::InPlace(
            in_place::Error::NotBased { .. }
                | in_place::Error::OtherState { .. }
                | in_place::Error::Qemu(qemu::Error::Qmp(qmp::Error::Refusal { .. })),
        )
    )
}

/// Opens the destination, and closes it again: a guest whose disks are kept has other disks once it was taken.
///
/// # Errors
/// The image could not be stored there.
fn check_destination(destination: &Destination, image: &Image, context: &Context<'_>) -> Result<(), Error> {
    if let Destination::Image(path) = destination {
        context.image_writer(path, Origin::default())?.expect_difference(image, |_| &[])?;
        return Ok(());
    }
    let description = GuestDescription { guest: None, origin: Origin::default(), file: None, base: None };
    endpoint::destination(destination, description, context).map(drop)
}

/// Refuses a guest that writes to a disk and runs, or will.
fn refuse_disks(qemu: &mut Qemu) -> Result<(), Error> {
    let status = qemu.status()?;
    if !status.running && status.status != RunState::POSTMIGRATE {
        return Ok(());
    }
    let written = qemu.written_drives()?;
    written.into_iter().next().map_or(Ok(()), |drive| {
        let file = drive.files.chain.into_iter().next().unwrap_or_default();
        Err(Error::WritesDisk { socket: qemu.socket().to_owned(), drive: drive.name, file })
    })
}

/// Takes the guest with these disks; `None` if it does not run on an image.
fn taken(
    qemu: &mut Qemu,
    disks: &mut GuestDisks,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<Option<CapturedGuest>, Error> {
    let image = match based_image(qemu) {
        Ok(Some(image)) => Arc::new(image),
        Ok(None) => return Ok(None),
        Err(error) if disks.is_empty() => {
            tracing::debug!(%error, "the guest is sent");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    if !disks.is_empty() {
        check_destination(destination, &image, context)?;
    }
    let prepared = PreparedCapture::of(qemu, &image)?;
    // Its drives have other files afterwards.
    let process = record_process(qemu, context);
    let source = format!("qmp:{}", qemu.socket());
    let origin = Origin { source, qemu: Some(qemu.version_text()), process, ..Origin::default() };
    let taken = prepared.take(qemu, disks, origin);
    for overlay in disks.used_overlays() {
        context.observer.notice(&in_place::continues_in(overlay));
    }
    taken.map(Some).map_err(Error::from)
}

/// The image that a guest maps.
fn based_image(qemu: &mut Qemu) -> Result<Option<Image>, Error> {
    let Some(path) = in_place::mapped_image(qemu)? else { return Ok(None) };
    Ok(Some(Image::open(&path)?))
}

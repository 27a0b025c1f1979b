//! Storing a guest that runs on: its disks, and its memory by what it has written, so that it is stopped only until that is copied.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use towline_image::{Image, Origin};
use towline_launch::{HostArguments, Recorded};
use towline_qmp as qmp;
use towline_qmp::commands::RunState;

use super::command_line::record_command_line;
use super::context::Context;
use super::endpoint::{query_failed, record_process};
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::request::WritableDisks;
use crate::in_place::{self, Capture, GuestDisks, PreparedCapture, PreparedDisks};
use crate::qemu::{self, Qemu};

/// Makes an overlay of each disk that the guest of the QEMU at `socket` writes: in `directory`, or beside the disk. `interrupt` ends the
/// wait for the monitor.
///
/// # Errors
/// The command line is not known, a disk is not in it, or an overlay cannot be made. Nothing is left.
pub fn prepare_disks(
    socket: &Path,
    directory: Option<&Path>,
    interrupt: &Arc<OwnedFd>,
) -> Result<PreparedDisks, Failure> {
    let interrupt = Some(Arc::clone(interrupt));
    let connected = Qemu::connect(socket, &qmp::Options { interrupt, ..qmp::Options::default() });
    let mut qemu = connected.map_err(|error| query_failed(error.into()))?;
    overlaid(&mut qemu, directory).map(PreparedDisks::new).map_err(Failure::untouched)
}

fn overlaid(qemu: &mut Qemu, directory: Option<&Path>) -> Result<GuestDisks, Error> {
    let mut disks = GuestDisks::of(qemu)?;
    let recorded = record_command_line(qemu)?;
    let recorded = Recorded::from_json(recorded.command_line.as_bytes())?;
    let working_directory = qemu.working_directory().unwrap_or_else(|| "/".into());
    let directory = directory.map(std::path::absolute).transpose().map_err(Error::Directory)?;
    let overlays = recorded.command_line().further_overlays(&working_directory, directory.as_deref());
    disks.plan(qemu, &overlays)?;
    disks.make_overlays(qemu, &HostArguments { binary: qemu.program(), ..HostArguments::default() })?;
    Ok(disks)
}

/// Takes the guest of `source` if it is to run on while it is stored, and runs on an image. `None`: its memory is sent.
///
/// # Errors
/// It writes disks that the request does not mention, or cannot be taken with them. The guest runs on.
pub(super) fn take(
    source: &Source,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<Option<Capture>, Failure> {
    let options = context.options;
    let runs_on = destination.is_image() && (options.resumes() || options.is_snapshot());
    let Some(path) = source.monitor().filter(|_| runs_on) else { return Ok(None) };
    let mut qemu = Qemu::connect(path, &context.monitor()).map_err(|error| query_failed(error.into()))?;
    context.report_repair(&qemu);
    let mut no_disks = GuestDisks::default();
    let mut prepared_disks = match &options.disks {
        WritableDisks::Refused => {
            refuse_disks(&mut qemu).map_err(Failure::untouched)?;
            None
        }
        WritableDisks::LeftOut => None,
        WritableDisks::Kept(disks) => Some(disks.disks()),
    };
    let disks = prepared_disks.as_deref_mut().unwrap_or(&mut no_disks);
    let taken = if options.is_snapshot() { Ok(None) } else { taken(&mut qemu, disks, context) };
    match taken {
        Err(error) if disks.is_empty() && is_sent_instead(&error) => {
            tracing::debug!(%error, "the guest is sent");
            Ok(None)
        }
        Ok(None) if !disks.is_empty() => {
            Err(Failure::untouched(Error::DisksNotKept { socket: qemu.socket().to_owned() }))
        }
        taken => taken.map_err(Failure::untouched),
    }
}

/// Returns true if the guest's memory can be sent all the same.
fn is_sent_instead(error: &Error) -> bool {
    match error {
        // The latter is a device that cannot be saved.
        Error::InPlace(
            in_place::Error::NotBased { .. }
            | in_place::Error::OtherState { .. }
            | in_place::Error::Qemu(qemu::Error::Qmp(qmp::Error::Refusal { .. })),
        ) => true,
        _ => false,
    }
}

/// Refuses a guest that writes a disk.
fn refuse_disks(qemu: &mut Qemu) -> Result<(), Error> {
    // A QEMU without a guest is reported by the other way.
    if qemu.status()?.status == RunState::INMIGRATE {
        return Ok(());
    }
    let written = qemu.drives()?.into_iter().find(|drive| drive.is_written);
    written.map_or(Ok(()), |drive| {
        let file = drive.files.chain.into_iter().next().unwrap_or_default();
        Err(Error::WritesDisk { socket: qemu.socket().to_owned(), drive: drive.name, file })
    })
}

/// Takes the guest with these disks; `None` if it does not run on an image.
fn taken(qemu: &mut Qemu, disks: &mut GuestDisks, context: &Context<'_>) -> Result<Option<Capture>, Error> {
    let image = match based_image(qemu) {
        Ok(Some(image)) => Arc::new(image),
        Ok(None) => return Ok(None),
        Err(error) => {
            tracing::debug!(%error, "the guest is sent");
            return Ok(None);
        }
    };
    let prepared = PreparedCapture::of(qemu, &image)?;
    // Its drives have other files afterwards.
    let mut process = record_process(qemu, context);
    let Capture { guest, standstill } = prepared.take(qemu, disks)?;
    tracing::info!(
        written = guest.written_bytes(),
        standstill_us = standstill.as_micros(),
        image = %image.path().display(),
        "guest taken"
    );
    for overlay in disks.overlays() {
        context.observer.notice(&format!("the guest continues in overlay {}", overlay.display()));
    }
    process.iter_mut().for_each(|process| process.disks = disks.stored());
    let source = format!("qmp:{}", qemu.socket());
    let origin = Origin { source, qemu: Some(qemu.version_text()), process, ..Origin::default() };
    Ok(Some(Capture { guest: guest.with_origin(origin), standstill }))
}

/// The image that a guest maps.
fn based_image(qemu: &mut Qemu) -> Result<Option<Image>, Error> {
    let Some(path) = in_place::mapped_image(qemu)? else { return Ok(None) };
    Ok(Some(Image::open(&path)?))
}

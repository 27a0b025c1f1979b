//! Storing a guest that runs on, by what it has written: it is stopped only until that is copied.

use std::path::PathBuf;
use std::sync::Arc;

use towline_image::{Image, Origin};
use towline_qmp as qmp;
use towline_qmp::commands::RunState;

use super::context::Context;
use super::endpoint::record_process;
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use crate::in_place::{self, Capture, Disks};
use crate::qemu::{self, Qemu};

/// The disks of a guest of which only memory is stored.
struct NoDisks;

impl Disks for NoDisks {
    fn overlays(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn take(&mut self, _: &mut Qemu) -> Result<(), in_place::Error> {
        Ok(())
    }
}

/// Takes the guest of `source` if it is to run on while it is stored, and runs on an image. `None`: its memory is sent.
///
/// # Errors
/// The guest runs on.
pub(super) fn take(
    source: &Source,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<Option<Capture>, Failure> {
    let is_stored = destination.is_image() && context.options.resumes();
    let Some(path) = source.monitor().filter(|_| is_stored) else { return Ok(None) };
    let interrupt = Some(context.cancel.descriptor());
    let connected = Qemu::connect(path, &qmp::Options { interrupt, ..qmp::Options::default() });
    // Whatever is wrong with it is reported by the other way.
    let Ok(mut qemu) = connected else { return Ok(None) };
    context.report_repair(&qemu);
    let image = match based_image(&mut qemu) {
        Ok(Some(image)) => Arc::new(image),
        Ok(None) => return Ok(None),
        Err(error) => {
            tracing::debug!(%error, "the guest is sent");
            return Ok(None);
        }
    };
    let prepared = in_place::PreparedCapture::of(&mut qemu, &image);
    match prepared.and_then(|prepared| prepared.take(&mut qemu, &mut NoDisks)) {
        Ok(Capture { guest, standstill }) => {
            tracing::info!(written = guest.written_bytes(), standstill_us = standstill.as_micros(), image = %image.path().display(), "guest taken");
            let process = record_process(&mut qemu, context);
            let qemu = Some(qemu.version_text());
            let origin =
                Origin { source: format!("qmp:{}", path.display()), qemu, process, ..Origin::default() };
            Ok(Some(Capture { guest: guest.with_origin(origin), standstill }))
        }
        // The latter is a device that cannot be saved.
        Err(
            error @ (in_place::Error::NotBased { .. }
            | in_place::Error::Qemu(qemu::Error::Qmp(qmp::Error::Refusal { .. }))),
        ) => {
            tracing::debug!(%error, "the guest is sent");
            Ok(None)
        }
        Err(error) => Err(Failure::untouched(error)),
    }
}

/// The image that a running or paused guest maps.
fn based_image(qemu: &mut Qemu) -> Result<Option<Image>, Error> {
    let status = qemu.status()?.status;
    if status != RunState::RUNNING && status != RunState::PAUSED {
        return Ok(None);
    }
    let Some(path) = in_place::mapped_image(qemu)? else { return Ok(None) };
    Ok(Some(Image::open(&path)?))
}

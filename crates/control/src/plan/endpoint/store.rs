//! An image in an object store.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use towline_channel::Cancel;
use towline_image::Image;
use towline_image::store::{self, Location, StoreWriter, StoredImage};
use towline_migration::incoming::Publication;
use towline_migration::{Guest as _, Sink, Snapshot};
use towline_protocol::ram::PAGE_SIZE;

use super::super::context::Context;
use super::super::engine;
use super::super::error::Error;
use super::super::progress::{CopyPhase, Observer, Progress};
use super::super::request::CopyRequest;
use super::super::shared_switchover::TransferContext;
use super::driven::{GuestDescription, LocalGuest};
use super::image;
use super::traits::{DestinationEndpoint, Rollback};

/// Opens the image at `location`, which any number of copies may read. The observer gets a notice if its
/// chunks are not protected during that time.
pub(in super::super) fn open(
    location: &Location,
    options: &CopyRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<StoredImage, Error> {
    let image = StoredImage::open(location, Some(cancel.clone())).map_err(failed)?;
    Ok(prepared(image, options, observer))
}

/// An image that was opened, for a copy with these options.
pub(in super::super) fn prepared(
    image: StoredImage,
    options: &CopyRequest,
    observer: &dyn Observer,
) -> StoredImage {
    image.notice().iter().for_each(|text| observer.notice(text));
    // Once its guest runs it cannot be cancelled: the guest needs its memory.
    if options.is_postcopy() { image.retained_until_release() } else { image }
}

/// An image to be written to a store.
pub(in super::super) enum StoreDestination {
    /// From a stream.
    Writer {
        /// The image.
        writer: Box<StoreWriter>,
        /// The phase of its upload was reported.
        phase: Once,
    },
    /// From the mapping of a file.
    File(Location),
}

impl StoreDestination {
    pub(in super::super) fn new(
        location: &Location,
        description: GuestDescription<'_>,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        if description.file.is_some() {
            return Ok(Self::File(location.clone()));
        }
        let writer = StoreWriter::create(location, context.existing(), description.origin, context.cancel);
        Ok(Self::Writer { writer: Box::new(writer.map_err(failed)?), phase: Once::new() })
    }
}

impl DestinationEndpoint for StoreDestination {
    fn sink(&self) -> &dyn Sink {
        match self {
            Self::Writer { writer, .. } => writer.as_ref(),
            Self::File(_) => unreachable!("a file is uploaded from its mapping"),
        }
    }

    fn receive_guest(&mut self, local: &LocalGuest<'_>, run: TransferContext<'_>) -> Result<Snapshot, Error> {
        match (self, local.file) {
            (Self::File(location), Some(file)) => upload(file, location, run.context),
            (this, _) => engine::copy_in_process(local.guest, this.sink(), local.lanes(run.context), run),
        }
    }

    fn finalize(&mut self, context: &Context<'_>) -> Result<Vec<String>, Error> {
        if let Self::Writer { writer, .. } = self {
            if !writer.is_published() {
                context.check_cancelled()?;
                context.observer.phase(CopyPhase::Upload);
                let total = writer.memory_bytes();
                writer.publish_with(&report_upload(total, context)).map_err(failed)?;
            }
            context.set_uploaded(writer.uploaded());
        }
        Ok(Vec::new())
    }

    fn defer_publication(&self) -> Publication {
        if let Self::Writer { writer, .. } = self {
            writer.defer_upload();
        }
        Publication::ByCaller
    }

    fn upload_progress(&self, context: &Context<'_>) -> Option<Progress> {
        let Self::Writer { writer, phase } = self else { return None };
        let remaining = Some(writer.upload_remaining()?);
        phase.call_once(|| context.observer.phase(CopyPhase::Upload));
        Some(Progress { remaining, ..Progress::default() })
    }

    fn roll_back(&mut self, error: Error, _: &Context<'_>, _: Rollback) -> (Error, Vec<String>) {
        let notice = match self {
            Self::Writer { writer, .. } if writer.is_published() => Some(image::kept(&writer.image())),
            Self::Writer { writer, .. } => writer.kept_file().map(|file| {
                let (file, image) = (file.display(), writer.image());
                format!(
                    "{file} is complete: it has the guest as it was when it was stopped; store it with `towline copy {file} {image}`, or remove it"
                )
            }),
            Self::File(_) => None,
        };
        (error, notice.into_iter().collect())
    }
}

/// Uploads a file to a store from its mapping.
fn upload(image: &Image, location: &Location, context: &Context<'_>) -> Result<Snapshot, Error> {
    context.check_cancelled()?;
    context.observer.phase(CopyPhase::Transfer);
    let total = image.blocks().iter().map(|block| block.length).sum();
    let progress = report_upload(total, context);
    let stored = store::store_image(image, location, context.existing(), context.cancel, &progress);
    let (moved, uploaded) = stored.map_err(failed)?;
    context.set_uploaded(uploaded);
    Ok(moved)
}

/// Reports the bytes of `total` that are uploaded.
fn report_upload<'a>(total: u64, context: &'a Context<'_>) -> impl Fn(u64) + Sync + use<'a> {
    let (observer, done) = (context.observer, AtomicU64::new(0));
    move |bytes| {
        let uploaded = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let normal = uploaded / PAGE_SIZE;
        let moved = Snapshot { total, normal, transferred: uploaded, ..Snapshot::default() };
        observer.progress(&Progress { moved, ..Progress::default() });
    }
}

pub(in super::super) fn failed(error: store::Error) -> Error {
    match error {
        store::Error::Cancelled => Error::Cancelled,
        error => Error::Image(error.into()),
    }
}

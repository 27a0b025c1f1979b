//! Images in object stores, as a source and as a destination.

use std::sync::atomic::{AtomicU64, Ordering};

use towline_channel::Cancel;
use towline_image::store::{self, Location, StoreWriter, StoredImage};
use towline_image::{Existing, Image, Origin, StoredGuest};
use towline_migration::{Guest as _, Snapshot};
use towline_protocol::ram::PAGE_SIZE;

use super::context::Run;
use super::error::Error;
use super::local;
use super::options::Options;
use super::progress::{Observer, Phase, Progress};
use super::report::{DestinationState, Report, SourceState};

/// Opens the image at `location`, to be read by any number of copies. `observer` hears if nothing keeps its chunks meanwhile.
pub(super) fn open(
    location: &Location,
    options: &Options,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<StoredImage, Error> {
    let image = match options.postcopy {
        None => StoredImage::open(location, Some(cancel.clone())).map_err(failed)?,
        // Once its guest runs, nobody can cancel: it needs its memory.
        Some(_) => StoredImage::open(location, None).map_err(failed)?.given_back(),
    };
    image.notice().iter().for_each(|text| observer.notice(text));
    Ok(image)
}

/// Begins an image in a store.
pub(super) fn writer(location: &Location, origin: Origin, run: &Run<'_>) -> Result<StoreWriter, Error> {
    StoreWriter::create(location, existing(run), origin, run.cancel).map_err(failed)
}

/// Copies a file into a store, from its mapping.
pub(super) fn from_image(image: &Image, location: &Location, run: &Run<'_>) -> Result<Report, Error> {
    run.check_cancelled()?;
    run.observer.phase(Phase::Transfer);
    let total = image.blocks().iter().map(|block| block.length).sum();
    let done = AtomicU64::new(0);
    let progress = |bytes: u64| {
        let pages = (done.fetch_add(bytes, Ordering::Relaxed) + bytes) / PAGE_SIZE;
        let moved = Snapshot { total, normal: pages, ..Snapshot::default() };
        run.observer.progress(&Progress { moved, ..Progress::default() });
    };
    let stored = store::store_image(image, location, existing(run), run.cancel, &progress);
    let (moved, uploaded) = stored.map_err(failed)?;
    run.set_uploaded(uploaded);
    Ok(run.done(moved, SourceState::Unchanged, DestinationState::Stored))
}

/// Copies any other stored guest into a store.
pub(super) fn from_stored(
    image: &dyn StoredGuest,
    location: &Location,
    run: &Run<'_>,
) -> Result<Report, Error> {
    let origin = Origin { source: format!("image {}", image.name()), ..Origin::default() };
    let writer = writer(location, origin, run)?;
    let moved = local::copy(image, &writer, 0, run)?;
    run.set_uploaded(writer.tally());
    Ok(run.done(moved, SourceState::Unchanged, DestinationState::Stored))
}

fn existing(run: &Run<'_>) -> Existing {
    if run.options.overwrite { Existing::Replace } else { Existing::Refuse }
}

fn failed(error: store::Error) -> Error {
    match error {
        store::Error::Cancelled => Error::Cancelled,
        error => Error::Image(error.into()),
    }
}

//! An image in an object store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use towline_channel::Cancel;
use towline_image::store::{self, Location, StoreWriter, StoredImage};
use towline_image::{Existing, Image};
use towline_migration::{Guest as _, Sink, Snapshot};
use towline_protocol::ram::PAGE_SIZE;

use super::super::context::Run;
use super::super::error::Error;
use super::super::local;
use super::super::progress::{Observer, Phase, Progress};
use super::super::report::DestinationState;
use super::super::request::Request;
use super::super::switch::Switch;
use super::contract::{Departure, DestinationEndpoint, Local};

/// Opens the image at `location`, to be read by any number of copies. The observer gets a notice if nothing keeps its chunks
/// meanwhile.
pub(in super::super) fn open(
    location: &Location,
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<StoredImage, Error> {
    let image = match options.postcopy() {
        None => StoredImage::open(location, Some(cancel.clone())).map_err(failed)?,
        // Once its guest runs, nobody can cancel: it needs its memory.
        Some(_) => StoredImage::open(location, None).map_err(failed)?.retained_until_release(),
    };
    image.notice().iter().for_each(|text| observer.notice(text));
    Ok(image)
}

/// An image to be made in a store.
pub(in super::super) enum StoreDestination {
    /// What comes in as a stream.
    Writer(Box<StoreWriter>),
    /// What is in a file, from its mapping.
    File(Location),
}

impl StoreDestination {
    pub(in super::super) fn new(
        location: &Location,
        departure: Departure<'_>,
        run: &Run<'_>,
    ) -> Result<Self, Error> {
        if departure.file.is_some() {
            return Ok(Self::File(location.clone()));
        }
        let writer = StoreWriter::create(location, existing(run), departure.origin, run.cancel);
        Ok(Self::Writer(Box::new(writer.map_err(failed)?)))
    }
}

impl DestinationEndpoint for StoreDestination {
    fn sink(&self) -> &dyn Sink {
        match self {
            Self::Writer(writer) => writer.as_ref(),
            Self::File(_) => unreachable!("what is in a file does not come in as a stream"),
        }
    }

    fn take(&mut self, local: &Local<'_>, switch: &Arc<Switch>, run: &Run<'_>) -> Result<Snapshot, Error> {
        match (self, local.file) {
            (Self::File(location), Some(file)) => upload(file, location, run),
            (this, _) => local::copy(local.guest, this.sink(), local.lanes(run), switch, run),
        }
    }

    fn settle(&mut self, run: &Run<'_>) -> Result<Vec<String>, Error> {
        if let Self::Writer(writer) = self {
            run.set_uploaded(writer.uploaded());
        }
        Ok(Vec::new())
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Stored
    }
}

/// Copies a file into a store, from its mapping.
fn upload(image: &Image, location: &Location, run: &Run<'_>) -> Result<Snapshot, Error> {
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
    Ok(moved)
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

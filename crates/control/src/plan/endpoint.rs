//! The ends of a copy as values: each is built here from what was asked for, and nowhere else is it asked which one it is.

mod image;
mod memory;
mod null;
mod qemu;
#[cfg(feature = "store")]
mod store;
mod stream;
mod traits;

use towline_channel::Cancel;
use towline_image::StoredGuest;

use super::context::Context;
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::progress::Observer;
use super::request::Request;

pub(super) use image::{StoredSource, explain_truncation};
pub(super) use qemu::{QemuDestination, query_failed};
pub(super) use stream::listen;
pub(super) use traits::{DestinationEndpoint, GuestDescription, Rollback, SourceControl, SourceEndpoint};

/// The source, which has been asked, but not changed.
pub(super) fn source(source: &Source, context: &Context<'_>) -> Result<Box<dyn SourceEndpoint>, Failure> {
    Ok(match source {
        Source::Qmp(path) => Box::new(qemu::QemuSource::new(path, context)?),
        Source::Stream(address) => Box::new(stream::StreamSource::new(address)),
        Source::Memory(shape) => Box::new(memory::MemorySource::new(shape).map_err(Failure::untouched)?),
        stored => {
            let image = open(stored, context.options, context.cancel, context.observer);
            Box::new(StoredSource::new(image.map_err(Failure::untouched)?))
        }
    })
}

/// The destination of what departs. It has been asked whether it would take it, but not changed.
pub(super) fn destination(
    destination: &Destination,
    description: GuestDescription<'_>,
    context: &Context<'_>,
) -> Result<Box<dyn DestinationEndpoint>, Error> {
    Ok(match destination {
        Destination::Qmp(path) => Box::new(QemuDestination::new(path, &description, context)?),
        Destination::Stream(address) => Box::new(stream::StreamDestination::new(address, &description)),
        Destination::Image(path) => {
            Box::new(image::ImageDestination::new(path, description.origin, context)?)
        }
        #[cfg(feature = "store")]
        Destination::Store(location) => {
            Box::new(store::StoreDestination::new(location, description, context)?)
        }
        Destination::Memory(room) => Box::new(memory::MemoryDestination::new(room)?),
        Destination::Null => Box::new(null::NullDestination::default()),
    })
}

/// A stored guest, to be read by any number of copies.
pub(super) fn open(
    source: &Source,
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Box<dyn StoredGuest>, Error> {
    match source {
        Source::Image(path) => Ok(Box::new(image::open(path, options, observer)?)),
        #[cfg(feature = "store")]
        Source::Store(location) => Ok(Box::new(store::open(location, options, cancel, observer)?)),
        Source::Qmp(_) | Source::Stream(_) | Source::Memory(_) => {
            // Without object stores nothing is read that could be cancelled.
            let _ = cancel;
            Err(Error::Usage("only an image can be read several times".into()))
        }
    }
}

//! The ends of a copy as values. The kind of an end is evaluated only here, where its value is built.

mod driven;
mod image;
mod process;
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
use super::invalid::Invalid;
use super::progress::Observer;
use super::request::CopyRequest;

pub(super) use driven::{GuestDescription, QemuDestination};
pub(super) use image::{StoredSource, explain_truncation, notice_missing_manifest};
pub use process::{DiscardSink, StreamSummary};
pub(super) use qemu::{QemuSource, query_failed, record_process};
#[cfg(feature = "store")]
pub(super) use store::{failed as store_failed, prepared};
pub(super) use stream::{StreamDestination, listen};
pub(super) use traits::{DestinationEndpoint, Rollback, SourceControl, SourceEndpoint};

/// Opens the source: it is queried, and not changed.
pub(super) fn source(source: &Source, context: &Context<'_>) -> Result<Box<dyn SourceEndpoint>, Failure> {
    Ok(match source {
        Source::Qmp(path) => Box::new(qemu::QemuSource::new(path, context)?),
        Source::Stream(address) => {
            Box::new(stream::StreamSource::new(address, context.options.peer_name.as_deref()))
        }
        Source::Process(process) => {
            Box::new(process::LocalSource::new(process.as_ref()).map_err(Failure::untouched)?)
        }
        stored => {
            let image = open(stored, context.options, context.cancel, context.observer);
            Box::new(StoredSource::new(image.map_err(Failure::unopened)?))
        }
    })
}

/// Opens the destination of this guest: it is queried whether it would take it, and not changed.
pub(super) fn destination(
    destination: &Destination,
    description: GuestDescription<'_>,
    context: &Context<'_>,
) -> Result<Box<dyn DestinationEndpoint>, Error> {
    Ok(match destination {
        Destination::Qmp(path) => Box::new(QemuDestination::new(path, &description, context)?),
        Destination::Stream(address) => {
            let GuestDescription { guest, base, .. } = description;
            let name = context.options.peer_name.as_deref();
            Box::new(StreamDestination::new(address, name, guest.as_ref(), base))
        }
        Destination::Image(path) => Box::new(context.image_writer(path, description.origin)?),
        #[cfg(feature = "store")]
        Destination::Store(location) => {
            Box::new(store::StoreDestination::new(location, description, context)?)
        }
        #[cfg(not(feature = "store"))]
        Destination::Store(location) => return Err(without_stores(location)),
        Destination::Process(process) => Box::new(process.create()?),
        Destination::Null => Box::new(DiscardSink::default()),
    })
}

/// Opens a stored guest, which any number of copies may read.
pub(super) fn open(
    source: &Source,
    options: &CopyRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Box<dyn StoredGuest>, Error> {
    match source {
        Source::Image(path) => Ok(Box::new(image::open(path, options, observer)?)),
        #[cfg(feature = "store")]
        Source::Store(location) => Ok(Box::new(store::open(location, options, cancel, observer)?)),
        #[cfg(not(feature = "store"))]
        Source::Store(location) => Err(without_stores(location)),
        Source::Qmp(_) | Source::Stream(_) | Source::Process(_) => {
            // Without object stores there is no read to cancel.
            let _ = cancel;
            Err(Invalid::SeveralDestinations.into())
        }
    }
}

#[cfg(not(feature = "store"))]
fn without_stores(location: &towline_image::Location) -> Error {
    Invalid::WithoutStores { location: location.clone() }.into()
}

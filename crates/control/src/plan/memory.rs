//! `mem:`: a synthetic guest of this process as source, memory of this process as destination.
//!
//! ```text
//!   mem:SIZE ─► fill ─► load runs ─► tcp:, unix:, fd:, exec:          the other end verifies
//!                                └─► image · mem:                     within this process
//!   anything ─► mem:    populated ahead, verified (or hashed) before the source hears that its guest has arrived
//! ```

use std::path::Path;

use towline_channel::Address;
use towline_image::Origin;
use towline_migration::synthetic::{Shape, Synthetic};
use towline_migration::{Guest, Snapshot};

use super::context::Run;
use super::endpoint::Destination;
use super::endpoint::MemoryRoom;
use super::error::{Error, Failure};
use super::local;
use super::report::{DestinationState, Report, SourceState};
use super::{room, send_out};

/// Sends a synthetic guest, which ends with this.
pub(super) fn from_memory(
    shape: &Shape,
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    if matches!(destination, Destination::Qmp(_) | Destination::Null) {
        return Err(Failure::untouched(refused(destination)));
    }
    match destination {
        Destination::Stream(address) => to_stream(shape, address, run),
        _ => copy(shape, destination, run).map_err(Failure::untouched),
    }
}

fn to_stream(shape: &Shape, address: &Address, run: &Run<'_>) -> Result<Report, Failure> {
    let engine = towline_migration::Error::from;
    let source = Synthetic::new(*shape).map_err(|error| Failure::untouched(engine(error)))?;
    run.check_cancelled().map_err(Failure::untouched)?;
    let sent = source.run(|guest| send_out::to_stream(guest, address, run));
    sent.map_err(Failure::untouched)?
}

/// Before anything is made.
fn refused(destination: &Destination) -> Error {
    let text = match destination {
        Destination::Null => "null: takes a stream; mem: receives a synthetic guest and verifies it",
        _ => {
            "a synthetic guest (mem:) has no devices, so no QEMU can load it: copy it to mem:, an image or a stream"
        }
    };
    Error::Usage(text.into())
}

fn copy(shape: &Shape, destination: &Destination, run: &Run<'_>) -> Result<Report, Error> {
    let source = Synthetic::new(*shape).map_err(towline_migration::Error::from)?;
    run.check_cancelled()?;
    let within = |sink| within(&source, sink, run);
    let (moved, state) = match destination {
        Destination::Image(path) => (to_image(&source, path, run)?, DestinationState::Stored),
        #[cfg(feature = "store")]
        Destination::Store(location) => {
            let writer =
                super::store::writer(location, Origin { source: "mem".into(), ..Origin::default() }, run)?;
            let moved = within(&writer)?;
            run.set_uploaded(writer.tally());
            (moved, DestinationState::Stored)
        }
        Destination::Memory(room) => {
            let memory = room::room(room)?;
            let moved = within(&memory)?;
            run.set_memory(memory.outcome());
            (moved, DestinationState::Received)
        }
        Destination::Qmp(_) | Destination::Stream(_) | Destination::Null => return Err(refused(destination)),
    };
    Ok(run.done(moved, SourceState::Unchanged, state))
}

fn within(source: &Synthetic, sink: &dyn towline_migration::Sink, run: &Run<'_>) -> Result<Snapshot, Error> {
    source.run(|guest| local::copy(guest, sink, run.lanes, run))?
}

fn to_image(source: &Synthetic, path: &Path, run: &Run<'_>) -> Result<Snapshot, Error> {
    let writer = run.image_writer(path, Origin { source: "mem".into(), ..Origin::default() })?;
    let moved = within(source, &writer, run)?;
    run.set_increment(&writer);
    Ok(moved)
}

/// Copies an image into memory.
pub(super) fn from_image(image: &dyn Guest, room: &MemoryRoom, run: &Run<'_>) -> Result<Report, Error> {
    let memory = room::room(room)?;
    let moved = local::copy(image, &memory, run.lanes, run)?;
    run.set_memory(memory.outcome());
    Ok(run.done(moved, SourceState::Unchanged, DestinationState::Received))
}

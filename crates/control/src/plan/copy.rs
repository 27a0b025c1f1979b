//! Entry points, a copy and the inspection of a stream; and the phases of a copy between any two ends, with
//! failures handled in one place below them.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_image::StoredGuest;
use towline_migration::Snapshot;
use towline_migration::incoming::Publication;
use towline_protocol::session::ReceiverMode;

use super::captured;
use super::context::Context;
use super::direct;
use super::endpoint::{self, DestinationEndpoint, DiscardSink, SourceEndpoint, StoredSource};
use super::ends::{Destination, Source};
use super::engine::IncomingStream;
use super::error::{Error, Failure, check_cancelled};
use super::executor::Executor;
use super::invalid::Invalid;
use super::postcopy;
use super::preflight::{self, FactsExtent};
use super::progress::{CopyPhase, CopyReport, DestinationState, Observer, Progress};
use super::recorder::RecordedEnds;
use super::request::CopyRequest;
use super::shared_switchover::{SharedSwitchover, TransferContext};
use super::validate::validate;
use crate::switchover::{DestinationKind, Directive, MemorySharing, SourceKind};

/// Interval of checks for a socket that does not exist yet.
const SOCKET_INTERVAL: Duration = Duration::from_millis(10);

/// Copies a guest; returns when it is safe at its destination.
///
/// # Errors
/// The reason and the location of the guest; see [`Failure`].
pub fn copy(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<CopyReport, Failure> {
    let lanes = validate(source, destination, options).map_err(Failure::untouched)?;
    let context = Context::new(options, lanes, cancel, observer);
    tracing::debug!(
        lanes,
        compression = options.compression.method().name(),
        postcopy = options.is_postcopy(),
        snapshot = options.is_snapshot(),
        return_path = options.return_path,
        encrypted = options.tls.is_some(),
        downtime_limit = ?options.downtime_limit,
        "options of the copy, with defaults"
    );
    observer.phase(CopyPhase::Prepare);
    for socket in [source.monitor(), destination.monitor()].into_iter().flatten() {
        // No QEMU has been asked for its guest yet.
        let failed = |error| match source.monitor() {
            Some(_) => Failure::not_reached(error),
            None => Failure::untouched(error),
        };
        wait_for_socket(socket, options.connect_timeout, cancel, &|text| observer.notice(text))
            .map_err(failed)?;
    }
    preflight::check_devices(options.devices(), observer).map_err(Failure::untouched)?;
    if let Some(how) = &options.direct {
        return direct::copy(source, destination, how, &context);
    }
    if let Some(how) = options.postcopy() {
        return postcopy::copy(source, destination, how, &context);
    }
    let mut from = match captured::take(source, destination, &context)? {
        Some(guest) => Box::new(StoredSource::of_captured(guest)),
        None => endpoint::source(source, &context)?,
    };
    transfer(from.as_mut(), destination, &context)
}

/// Waits for the socket of a QEMU that is being started. A missing directory is a wrong path, which connecting reports.
///
/// # Errors
/// [`Error::Cancelled`].
pub fn wait_for_socket(
    socket: &Path,
    timeout: Duration,
    cancel: &Cancel,
    notice: &dyn Fn(&str),
) -> Result<(), Error> {
    let parent = socket.parent().filter(|parent| !parent.as_os_str().is_empty());
    if socket.exists() || !parent.unwrap_or(Path::new(".")).is_dir() {
        return Ok(());
    }
    notice(&format!(
        "no QMP socket at {} yet: waiting for up to {:.1} s",
        socket.display(),
        timeout.as_secs_f64()
    ));
    let deadline = Instant::now() + timeout;
    while !socket.exists() && Instant::now() < deadline {
        check_cancelled(cancel)?;
        thread::park_timeout(SOCKET_INTERVAL);
    }
    Ok(())
}

/// Copies an open image, which other copies may read at the same time.
pub(super) fn copy_stored(
    image: &(dyn StoredGuest + 'static),
    destination: &Destination,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    match context.options.postcopy() {
        None => transfer(&mut StoredSource::new(image), destination, context),
        Some(how) => postcopy::restore(image, destination, how, context),
    }
}

/// Receives the stream that `source` names and keeps nothing: the guest stays at its source.
///
/// # Errors
/// The stream failed before its end.
pub fn inspect_stream(
    source: &Source,
    sink: &DiscardSink,
    options: &CopyRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Snapshot, Failure> {
    let Some(address) = source.stream() else {
        return Err(Failure::untouched(Invalid::InspectedWithoutStream));
    };
    let lanes = validate(source, &Destination::Null, options).map_err(Failure::untouched)?;
    let context = Context::new(options, lanes, cancel, observer);
    let switchover =
        SharedSwitchover::new(SourceKind::Stream, DestinationKind::Stored, MemorySharing::Copied, options);
    observer.phase(CopyPhase::Connect);
    let mut incoming = IncomingStream::default();
    incoming.connected(
        switchover.new_gated_session(),
        endpoint::listen(address, &context).map_err(Failure::untouched)?,
    );
    let run = TransferContext { switchover: &switchover, context: &context };
    let (receiver, publication) = (ReceiverMode::Stores, Publication::default());
    match incoming.receive(sink, receiver, publication, run, &mut || Ok(Progress::default())) {
        Err(error) if !sink.is_complete() => Err(Failure::untouched(error)),
        _ => Ok(incoming.moved()),
    }
}

/// Transfers the guest of `source` to `destination`.
fn transfer(
    source: &mut dyn SourceEndpoint,
    destination: &Destination,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let description = source.describe_guest(FactsExtent::of(destination), context)?;
    let mut to = endpoint::destination(destination, description, context).map_err(Failure::untouched)?;
    transfer_to(source, to.as_mut(), context)
}

/// Transfers the guest of `source`, which is prepared, to an open destination.
pub(super) fn transfer_to(
    source: &mut dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let memory = to.qemu().map_or(MemorySharing::Copied, |to| to.memory);
    let switchover = SharedSwitchover::new(source.kind(), to.kind(), memory, context.options);
    let run = TransferContext { switchover: &switchover, context };
    let moved = source.start(to, run).and_then(|()| {
        record(source, to, &switchover, context)?;
        source.transfer(to, run)
    });
    if moved.is_err() && to.has_discarded() {
        return dropped(source, to, &switchover, context);
    }
    let ended = match moved {
        Ok(()) => {
            context.observer.phase(CopyPhase::Release);
            Ok(source.delivered(to, &switchover))
        }
        Err(error) => {
            if switchover.failed(&error) != Directive::AcknowledgeUnconfirmed {
                source.disconnect(to);
            }
            Err(error)
        }
    };
    let concluded = Executor::new(&switchover, source.control(), to, context).conclude(ended);
    let report = source.close(concluded)?;
    Ok(with_counters(report, source, to))
}

/// Starts to record the decisions of the switchover.
fn record(
    source: &dyn SourceEndpoint,
    to: &dyn DestinationEndpoint,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) -> Result<(), Error> {
    if let Some(source) = source.recorded() {
        switchover.keep_record(RecordedEnds { source, destination: to.move_end() }, context)?;
    }
    if let Some(link) = source.incoming().and_then(IncomingStream::main_channel) {
        switchover.connected(link);
    }
    Ok(())
}

fn with_counters(
    report: CopyReport,
    source: &dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
) -> CopyReport {
    let loaded_by_qemu = to.qemu().is_some_and(|to| to.is_loaded_by_qemu);
    CopyReport { moved: source.moved(), loaded_by_qemu, ..report }
}

/// The destination has counted and discarded the guest: the source's stream fails, and its guest runs on.
fn dropped(
    source: &mut dyn SourceEndpoint,
    to: &mut dyn DestinationEndpoint,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    source.disconnect(to);
    let concluded = Executor::new(switchover, source.control(), to, context).conclude(Err(Error::Cancelled));
    let failure = match concluded {
        Ok(report) => return Ok(with_counters(report, source, to)),
        Err(failure) if !failure.guest.is_safe() => return Err(failure),
        Err(failure) => failure,
    };
    failure.notes.iter().for_each(|note| context.observer.notice(note));
    let report = context.build_report(source.state_after_discard(), DestinationState::Dropped);
    Ok(CopyReport { moved: source.moved(), ..report })
}

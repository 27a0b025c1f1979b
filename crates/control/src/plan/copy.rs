//! Which plan it is, and what can be refused before anything is touched.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use towline_channel::{Address, Cancel};
use towline_image::{Existing, ImageWriter, Increment, Origin, Uploaded};
use towline_migration::{Session, Snapshot, Statistics, outgoing, synthetic};

#[cfg(feature = "store")]
use super::store;
use super::{
    Destination, Error, Failure, Observer, Options, Phase, Progress, Source, Survey, blame, compression, fit,
    memory, postcopy, receive, restore, tls, zero_copy,
};

/// Lanes where both ends can be told: enough to fill a fast link, few enough for a small host.
const LANES_DEFAULT: usize = 4;
/// More than QEMU's parameter takes.
const LANES_MAX: usize = towline_protocol::limits::LANES_MAX;

/// Copies a guest; returns when it is safe at its destination.
///
/// # Errors
/// Why not, and where the guest is; see [`Failure`].
pub fn copy(
    source: &Source,
    destination: &Destination,
    options: &Options,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<super::Report, Failure> {
    let (options, lanes) = checked(source, destination, options).map_err(Failure::untouched)?;
    let run = Run::new(&options, lanes, cancel, observer);
    observer.phase(Phase::Prepare);
    fit::devices(&options.devices, observer).map_err(Failure::untouched)?;
    match source {
        Source::Image(path) => restore::restore(path, destination, &run),
        #[cfg(feature = "store")]
        Source::Store(location) => store::restore(location, destination, &run),
        Source::Qmp(path) => receive::from_qemu(path, destination, &run),
        Source::Stream(address) => receive::from_stream(address, destination, &run),
        Source::Memory(shape) => memory::from_memory(shape, destination, &run),
    }
}

/// Refuses what can be refused before anything is touched. Returns the options as they are meant for these two, and the lanes.
pub(super) fn checked(
    source: &Source,
    destination: &Destination,
    options: &Options,
) -> Result<(Options, usize), Error> {
    let lanes = lanes(source, destination, options)?;
    compression::check(source, destination, options, lanes)?;
    tls::check(source, destination, options)?;
    zero_copy::check(source, destination, options, lanes)?;
    check_return_path(source, destination, options)?;
    check_throttle(source, options)?;
    check_end(source, destination, options)?;
    check_vsock(source, destination, options)?;
    check_base(destination, options)?;
    check_live(source, destination, options)?;
    Ok((one_guest(source, destination, options)?, lanes))
}

/// Receives the stream that `source` names into `survey` and keeps nothing: the guest stays where it is.
///
/// # Errors
/// The stream did not come to its end.
pub fn survey(
    source: &Source,
    survey: &Survey,
    options: &Options,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Snapshot, Failure> {
    let Source::Stream(address) = source else {
        return Err(Failure::untouched(Error::Usage("only a stream can be surveyed".into())));
    };
    let lanes = lanes(source, &Destination::Null, options).map_err(Failure::untouched)?;
    compression::check(source, &Destination::Null, options, lanes).map_err(Failure::untouched)?;
    tls::check(source, &Destination::Null, options).map_err(Failure::untouched)?;
    receive::survey(address, survey, &Run::new(options, lanes, cancel, observer))
}

/// What every part of a copy needs to know.
pub(super) struct Run<'a> {
    pub(super) options: &'a Options,
    pub(super) lanes: usize,
    pub(super) cancel: &'a Cancel,
    pub(super) observer: &'a dyn Observer,
    begun: Instant,
    memory: OnceLock<synthetic::Outcome>,
    uploaded: OnceLock<Uploaded>,
    sending: OnceLock<Arc<Statistics>>,
    increment: OnceLock<Increment>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        options: &'a Options,
        lanes: usize,
        cancel: &'a Cancel,
        observer: &'a dyn Observer,
    ) -> Self {
        let (memory, uploaded) = (OnceLock::new(), OnceLock::new());
        let (sending, increment) = (OnceLock::new(), OnceLock::new());
        let begun = Instant::now();
        Self { options, lanes, cancel, observer, begun, memory, uploaded, sending, increment }
    }

    /// Begins the image that will be `path`.
    pub(super) fn image_writer(&self, path: &Path, origin: Origin) -> Result<ImageWriter, Error> {
        let existing = if self.options.overwrite { Existing::Replace } else { Existing::Refuse };
        let writer = ImageWriter::create(path, existing, origin)?;
        Ok(match &self.options.base {
            Some(base) => writer.based_on(base)?,
            None => writer,
        })
    }

    /// Notes how much an incremental image holds itself, for the report.
    pub(super) fn set_increment(&self, writer: &ImageWriter) {
        if let Some(increment) = writer.increment() {
            self.increment.get_or_init(|| increment);
        }
    }

    /// Notes who counts how each lane to the destination sends its pages.
    pub(super) fn set_sending(&self, sending: &Arc<Statistics>) {
        self.sending.get_or_init(|| Arc::clone(sending));
    }

    /// Notes what arrived in memory of this process, for the report.
    pub(super) fn set_memory(&self, outcome: synthetic::Outcome) {
        self.memory.get_or_init(|| outcome);
    }

    /// Notes what was sent to an object store, for the report.
    #[cfg(feature = "store")]
    pub(super) fn set_uploaded(&self, uploaded: Uploaded) {
        self.uploaded.get_or_init(|| uploaded);
    }

    /// Connects to a stream's destination.
    pub(super) fn reach(&self, address: &Address, uuid: [u8; 16]) -> Result<outgoing::Connections, Error> {
        let deadline = Instant::now() + self.options.connect_timeout;
        let options = tls::connecting(self.options)?;
        let connected = outgoing::connect(address, self.lanes, uuid, &options, deadline, self.cancel);
        connected.map_err(|error| blame::lanes_lost(error.into(), self))
    }

    /// Since the first question.
    pub(super) fn elapsed(&self) -> std::time::Duration {
        self.begun.elapsed()
    }

    /// Ends here if the user said so.
    pub(super) fn check_cancelled(&self) -> Result<(), Error> {
        match self.cancel.is_cancelled() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// Tells how far the memory is.
    pub(super) fn report(&self, statistics: &Statistics, progress: Progress) {
        self.observer.progress(&Progress { moved: statistics.snapshot(), ..progress });
        if let Some(sending) = self.sending.get() {
            self.observer.lanes(&sending.lane_sends());
        }
    }

    /// Runs the engine under supervision.
    pub(super) fn supervise<T: Send>(
        &self,
        session: &Session,
        look: &mut dyn FnMut() -> Result<(), Error>,
        work: impl FnOnce() -> Result<T, towline_migration::Error> + Send,
    ) -> Result<T, Error> {
        session.follow(&self.options.tuning);
        let mut look = || look().map_err(towline_migration::Error::guest);
        let result = super::supervise::supervise(session, self.cancel, &mut look, work);
        result.map_err(|error| match error {
            towline_migration::Error::Cancelled => Error::Cancelled,
            towline_migration::Error::Guest(error) => match error.downcast::<Error>() {
                Ok(error) => *error,
                Err(error) => Error::Migration(towline_migration::Error::Guest(error)),
            },
            error => Error::Migration(error),
        })
    }

    /// A report of a copy that went well.
    pub(super) fn done(
        &self,
        moved: Snapshot,
        source: super::SourceState,
        destination: super::DestinationState,
    ) -> super::Report {
        super::Report {
            moved,
            total_time: self.begun.elapsed(),
            downtime_ms: None,
            multifd_channels: self.lanes,
            compression: self.options.compression,
            zero_copy_send: self.options.zero_copy_send,
            lane_sends: self.sending.get().map(|sending| sending.lane_sends()).unwrap_or_default(),
            handed_over: false,
            source,
            destination,
            uploaded: self.uploaded.get().copied(),
            memory: self.memory.get().cloned(),
            increment: self.increment.get().copied(),
            postcopy: None,
        }
    }
}

fn lanes(source: &Source, destination: &Destination, options: &Options) -> Result<usize, Error> {
    if options.postcopy.is_some() {
        postcopy::check(source, options)?;
        let lanes = options.multifd_channels.unwrap_or(0);
        return if lanes > LANES_MAX { Err(too_many(lanes)) } else { Ok(lanes) };
    }
    let streams = [stream_address(source), destination_address(destination)];
    let streams = || streams.iter().flatten();
    let default = if streams().next().is_some() || options.live { 0 } else { LANES_DEFAULT };
    let lanes = options.multifd_channels.unwrap_or(default);
    if lanes > LANES_MAX {
        return Err(too_many(lanes));
    }
    if lanes > 0
        && let Some(address) = streams().find(|address| {
            !matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { .. })
        })
    {
        return Err(Error::Usage(format!(
            "--multifd-channels {lanes} with {address}: only tcp:, unix:, ws:// and wss:// have several connections; leave the option out"
        )));
    }
    Ok(lanes)
}

fn too_many(lanes: usize) -> Error {
    Error::Usage(format!("--multifd-channels {lanes}: at most {LANES_MAX}, as in QEMU"))
}

fn stream_address(source: &Source) -> Option<&Address> {
    match source {
        Source::Stream(address) => Some(address),
        _ => None,
    }
}

fn destination_address(destination: &Destination) -> Option<&Address> {
    match destination {
        Destination::Stream(address) => Some(address),
        _ => None,
    }
}

/// Sees to it that a copy does not end with two guests that run.
fn one_guest(source: &Source, destination: &Destination, options: &Options) -> Result<Options, Error> {
    let mut options = options.clone();
    if !options.resume || !matches!(source, Source::Qmp(_)) {
        return Ok(options);
    }
    match destination {
        Destination::Image(_) | Destination::Memory(_) | Destination::Null => {}
        #[cfg(feature = "store")]
        Destination::Store(_) => {}
        Destination::Qmp(_) if options.run == Some(true) => {
            return Err(Error::Usage("--resume with --run: the same guest would run twice".into()));
        }
        Destination::Qmp(_) => options.run = Some(false),
        Destination::Stream(address) => {
            return Err(Error::Usage(format!(
                "--resume with {address}, which may run the guest by itself: the same guest would run twice"
            )));
        }
    }
    Ok(options)
}

fn check_throttle(source: &Source, options: &Options) -> Result<(), Error> {
    match source {
        Source::Qmp(_) | Source::Memory(_) => Ok(()),
        _ if options.throttle => Err(Error::Usage(
            "--throttle is for a qmp: source, whose QEMU slows its guest down: set auto-converge on at the QEMU that sends".into(),
        )),
        _ => Ok(()),
    }
}

/// A source is ended only where its guest goes on, or is kept.
fn check_end(source: &Source, destination: &Destination, options: &Options) -> Result<(), Error> {
    let text = match (source, destination) {
        _ if !options.end_source => return Ok(()),
        (source, _) if !matches!(source, Source::Qmp(_)) => "only a qmp: source can be ended: copy this one",
        (_, Destination::Memory(_)) => {
            "mem: is gone with this process, so its source is not ended: copy to it"
        }
        (_, Destination::Null) => "null: keeps nothing, so its source is not ended: copy to it",
        _ if options.resume => "a source that is ended cannot run on (--resume)",
        _ => return Ok(()),
    };
    Err(Error::Usage(text.into()))
}

/// A device that is taken out has to be put in somewhere.
fn check_vsock(source: &Source, destination: &Destination, options: &Options) -> Result<(), Error> {
    let text = match (source, destination) {
        _ if !options.detach_vsock => return Ok(()),
        (Source::Qmp(_), Destination::Qmp(_)) if !options.end_source => {
            "--detach-vsock is for a move: after a copy both guests would claim one context"
        }
        (Source::Qmp(_), Destination::Qmp(_)) if options.postcopy.is_some() => {
            "--detach-vsock goes with a guest whose memory comes first: leave --postcopy out"
        }
        (Source::Qmp(_), Destination::Qmp(_)) => return Ok(()),
        _ => "--detach-vsock needs a qmp: destination, where the device is put in again",
    };
    Err(Error::Usage(text.into()))
}

fn check_base(destination: &Destination, options: &Options) -> Result<(), Error> {
    match (&options.base, destination) {
        (None, _) | (Some(_), Destination::Image(_)) => Ok(()),
        (Some(_), _) => {
            Err(Error::Usage("--base is for an image that is to be stored: name one as DEST".into()))
        }
    }
}

/// QEMU's background-snapshot goes with little else.
fn check_live(source: &Source, destination: &Destination, options: &Options) -> Result<(), Error> {
    let text = match (source, destination) {
        _ if !options.live => return Ok(()),
        (Source::Qmp(_), Destination::Image(_)) => match options {
            Options { multifd_channels: Some(1..), .. } => {
                "--live with --multifd-channels: QEMU's background-snapshot has a single channel; leave the option out"
            }
            Options { max_bandwidth: Some(_), .. } => {
                "--live with --max-bandwidth: QEMU sends a background snapshot as fast as it is taken; leave the limit out"
            }
            Options { throttle: true, .. } => {
                "--live with --throttle: every page is sent once, whatever the guest writes; leave --throttle out"
            }
            Options { end_source: true, .. } => "--live lets its source run on: use `copy`",
            _ => return Ok(()),
        },
        _ => "--live takes an image of a guest that runs on: from qmp: to an image",
    };
    Err(Error::Usage(text.into()))
}

fn check_return_path(source: &Source, destination: &Destination, options: &Options) -> Result<(), Error> {
    if options.return_path {
        return Ok(());
    }
    let from_stream = matches!(source, Source::Stream(_));
    match (source, destination) {
        (Source::Qmp(_), _) => Err(Error::Usage(
            "--return-path off with a running guest: QEMU would end it though nobody has said that it arrived".into(),
        )),
        // An image is as safe afterwards as before, and so is the file behind a pipe.
        (_, Destination::Stream(_)) if !from_stream => Ok(()),
        (_, Destination::Qmp(_) | Destination::Stream(_)) => Err(only_streams()),
        _ if from_stream => Ok(()),
        _ => Err(only_streams()),
    }
}

fn only_streams() -> Error {
    Error::Usage(
        "--return-path off is for a stream from an image to fd:, exec:, tcp: or unix:, or from one of these to an image".into(),
    )
}

//! State that all parts of one copy share.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use towline_channel::{Address, Cancel, ConnectOptions, ListenOptions, Listener};
use towline_image::{Existing, ImageWriter, Increment, Origin, Uploaded};
use towline_migration::outgoing::{self, LaneOptions};
use towline_migration::{Compression, Relay, Session, Snapshot, Statistics, ZeroCopySend};
use towline_qmp as qmp;
use towline_qmp::commands::MigrationParameters;

use super::error::{Error, check_cancelled};
use super::error_origin;
use super::progress::{ComparedDisks, CopyReport, DestinationState, Observer, Progress, SourceState};
use super::request::{ConnectingEnd, CopyRequest, Tls};
use crate::in_place::Reflink;
use crate::qemu::{self, Qemu, StartedQemu};

/// A destination's QEMU that this process has started for a copy.
#[derive(Clone, Copy)]
pub struct OwnQemu<'a> {
    /// The connection to its monitor.
    pub started: Option<&'a StartedQemu>,
    /// The reflink of the image that it was given as its memory, if it was, until it uses that.
    pub reflink: &'a Mutex<Option<Reflink>>,
    /// Networks whose link is down when the guest begins to run.
    pub links_down: &'a [String],
}

/// Context of one copy.
pub(super) struct Context<'a> {
    pub(super) options: &'a CopyRequest,
    lanes: AtomicUsize,
    pub(super) cancel: &'a Cancel,
    pub(super) observer: &'a dyn Observer,
    /// The destination's QEMU, if this process has started it and may write into its memory.
    pub(super) own: Option<OwnQemu<'a>>,
    /// True if an image takes the chunks of its base into itself, and needs no base afterwards.
    pub(super) takes_base: bool,
    begun: Instant,
    uploaded: OnceLock<Uploaded>,
    sending: OnceLock<Arc<Statistics>>,
    increment: OnceLock<Increment>,
    /// Disks that were compared with their copies.
    pub(super) compared: Arc<OnceLock<ComparedDisks>>,
}

impl<'a> Context<'a> {
    pub(super) fn new(
        options: &'a CopyRequest,
        lanes: usize,
        cancel: &'a Cancel,
        observer: &'a dyn Observer,
    ) -> Self {
        Self {
            options,
            lanes: AtomicUsize::new(lanes),
            cancel,
            observer,
            own: None,
            takes_base: false,
            begun: Instant::now(),
            uploaded: OnceLock::new(),
            sending: OnceLock::new(),
            increment: OnceLock::new(),
            compared: Arc::default(),
        }
    }

    /// Number of lanes.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.load(Ordering::Relaxed)
    }

    /// Disables lanes if this QEMU must be passed its connection: QEMU connects lanes itself, by a path.
    pub(super) fn adapt_lanes(&self, qemu: &Qemu) {
        let passes = qemu.process().has_own_root() && self.options.direct.is_none();
        if passes && self.lanes.swap(0, Ordering::Relaxed) > 0 {
            self.observer.notice(&format!(
                "no lanes: QEMU on {} has another root directory, and is passed one connection",
                qemu.socket()
            ));
        }
    }

    /// Refuses a QEMU that finds no socket of this process, where it has to connect to one by a path.
    pub(super) fn require_paths(&self, qemu: &Qemu) -> Result<(), Error> {
        if !qemu.process().has_own_root() {
            return Ok(());
        }
        let socket = qemu.socket().to_owned();
        Err(Error::OtherRoot { socket })
    }

    /// Connects to a QEMU's monitor: a cancellation ends each wait for it, until the QEMU is changed. Sends a notice if that repaired
    /// changes of an earlier towline.
    pub(super) fn connect_qemu(&self, path: &Path) -> Result<Qemu, qemu::Error> {
        let interrupt = Some(self.cancel.descriptor());
        let out_of_band = self.options.direct.is_some() || self.options.is_postcopy();
        let qemu = Qemu::connect(path, &qmp::Options { interrupt, out_of_band, ..qmp::Options::default() })?;
        qemu.repaired().iter().for_each(|repaired| self.observer.notice(&repaired.to_string()));
        Ok(qemu)
    }

    /// Treatment of an image that exists already.
    pub(super) fn existing(&self) -> Existing {
        if self.options.overwrite { Existing::Replace } else { Existing::Refuse }
    }

    /// Starts to write the image `path`.
    pub(super) fn image_writer(&self, path: &Path, origin: Origin) -> Result<ImageWriter, Error> {
        let writer = ImageWriter::create(path, self.existing(), origin)?;
        Ok(match self.options.base() {
            Some(base) if self.takes_base => writer.based_on(base)?.taking_base(),
            Some(base) => writer.based_on(base)?,
            None => writer,
        })
    }

    /// Records the share of an incremental image that it holds itself, for the report, and passes its notices
    /// on.
    pub(super) fn set_increment(&self, writer: &ImageWriter) {
        writer.notices().iter().for_each(|notice| self.observer.notice(notice));
        if let Some(increment) = writer.increment() {
            self.increment.get_or_init(|| increment);
        }
    }

    /// Sets the statistics of the lanes to the destination.
    pub(super) fn set_sending(&self, sending: &Arc<Statistics>) {
        self.sending.get_or_init(|| Arc::clone(sending));
    }

    /// Records the upload to an object store, for the report.
    #[cfg(feature = "store")]
    pub(super) fn set_uploaded(&self, uploaded: Uploaded) {
        self.uploaded.get_or_init(|| uploaded);
    }

    /// Connects to the destination of a stream, or listens for one that connects.
    pub(super) fn connect(&self, address: &Address, uuid: [u8; 16]) -> Result<outgoing::Connections, Error> {
        if self.options.connects == ConnectingEnd::Destination {
            let listener = Listener::bind_with(address, &listen_options(self.options)?)?;
            self.observer.listening(listener.local_address());
            let deadline = Instant::now() + self.options.accept_timeout;
            let (lanes, timeout) = (self.lanes(), self.options.peer_timeout);
            return Ok(outgoing::accept(&listener, lanes, uuid, deadline, timeout, self.cancel)?);
        }
        let deadline = Instant::now() + self.options.connect_timeout;
        let options = connect_options(self.options)?;
        let connected = outgoing::connect(address, self.lanes(), uuid, &options, deadline, self.cancel);
        connected.map_err(|error| {
            error_origin::explain_lane_loss(error.into(), self.lanes(), self.options.compression)
        })
    }

    /// Returns a relay to these connections. `session` is that of the incoming migration.
    pub(super) fn relay(
        &self,
        session: &Arc<Session>,
        connections: outgoing::Connections,
    ) -> Result<Box<Relay>, Error> {
        let &CopyRequest { compression, zero_copy_send, .. } = self.options;
        let options = LaneOptions { compression, zero_copy_send };
        let relay = Relay::new(Arc::clone(session), connections, options)?;
        self.set_sending(relay.statistics());
        Ok(Box::new(relay))
    }

    /// Time since the context was created.
    pub(super) fn elapsed(&self) -> std::time::Duration {
        self.begun.elapsed()
    }

    /// Returns an error if the command was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<(), Error> {
        check_cancelled(self.cancel)
    }

    /// Reports the progress of the memory to the observer.
    pub(super) fn report_progress(&self, statistics: &Statistics, progress: Progress) {
        self.observer.progress(&Progress { moved: statistics.snapshot(), ..progress });
        if let Some(sending) = self.sending.get() {
            self.observer.lanes(&sending.lane_sends());
        }
    }

    /// Builds the report of a copy that completed, without counters of the transfer.
    pub(super) fn build_report(&self, source: SourceState, destination: DestinationState) -> CopyReport {
        CopyReport {
            moved: Snapshot::default(),
            total_time: self.begun.elapsed(),
            downtime_ms: None,
            multifd_channels: self.lanes(),
            compression: self.options.compression,
            zero_copy_send: self.options.zero_copy_send,
            lane_sends: self.sending.get().map(|sending| sending.lane_sends()).unwrap_or_default(),
            loaded_by_qemu: false,
            source,
            destination,
            uploaded: self.uploaded.get().copied(),
            increment: self.increment.get().copied(),
            compared_disks: self.compared.get().copied(),
            postcopy: None,
        }
    }
}

// Options of streams and their lanes: TLS, limits, zero-copy sends, and compression.

/// Options for a listener.
pub(crate) fn listen_options(options: &CopyRequest) -> Result<ListenOptions, Error> {
    let tls = options.tls.as_ref().map(Tls::server).transpose()?;
    Ok(ListenOptions { tls, peer_timeout: Some(options.peer_timeout), ..ListenOptions::default() })
}

/// Options for a connection.
pub(super) fn connect_options(options: &CopyRequest) -> Result<ConnectOptions, Error> {
    let tls = options.tls.as_ref().map(Tls::client).transpose()?;
    let zero_copy = wants_zero_copy(options);
    let peer_timeout = Some(options.peer_timeout);
    Ok(ConnectOptions { zero_copy, tls, peer_timeout, ..ConnectOptions::default() })
}

/// Returns true if lanes should be connected for zero-copy sends.
pub(super) fn wants_zero_copy(options: &CopyRequest) -> bool {
    let copied = options.compression != Compression::None || options.tls.is_some();
    options.zero_copy_send != ZeroCopySend::Off && !copied
}

/// Migration parameters of these lanes and their connections, which have no TLS of QEMU.
pub(super) fn lane_parameters(compression: Compression, lanes: usize) -> MigrationParameters {
    let (zlib, zstd) = match compression {
        Compression::None => (None, None),
        Compression::Zlib { level } => (Some(level), None),
        Compression::Zstd { level } => (None, Some(level)),
    };
    MigrationParameters {
        multifd_channels: (lanes > 0).then(|| u8::try_from(lanes).unwrap_or(u8::MAX)),
        tls_creds: Some(String::new()),
        multifd_compression: (lanes > 0).then(|| compression.method().name().into()),
        multifd_zlib_level: zlib,
        multifd_zstd_level: zstd,
        ..MigrationParameters::default()
    }
}

//! State that all parts of one copy share.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use towline_channel::{Address, Cancel};
use towline_image::{Existing, ImageWriter, Increment, Origin, Uploaded};
use towline_migration::{Relay, Session, Snapshot, Statistics, outgoing};
use towline_qmp as qmp;

use super::error::Error;
use super::invalid::InvalidPostcopy;
use super::progress::{Observer, Progress};
use super::report::{CopyReport, DestinationState, SourceState};
use super::request::CopyRequest;
use super::{error_origin, tls, zero_copy};
use crate::in_place::UnusedReflink;
use crate::qemu::{Qemu, StartedQemu};

/// Context of one copy.
pub(super) struct Context<'a> {
    pub(super) options: &'a CopyRequest,
    lanes: AtomicUsize,
    pub(super) cancel: &'a Cancel,
    pub(super) observer: &'a dyn Observer,
    /// The destination's QEMU, if this process has started it.
    pub(super) started: Option<&'a StartedQemu>,
    /// The reflink of the image that the destination's QEMU maps, if it was given one.
    pub(super) reflink: Option<&'a UnusedReflink>,
    begun: Instant,
    uploaded: OnceLock<Uploaded>,
    sending: OnceLock<Arc<Statistics>>,
    increment: OnceLock<Increment>,
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
            started: None,
            reflink: None,
            begun: Instant::now(),
            uploaded: OnceLock::new(),
            sending: OnceLock::new(),
            increment: OnceLock::new(),
        }
    }

    /// Number of lanes.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.load(Ordering::Relaxed)
    }

    /// Disables lanes if this QEMU must be passed its connection: QEMU connects lanes itself, by a path.
    pub(super) fn adapt_lanes(&self, qemu: &Qemu) {
        if qemu.process().has_own_root() && self.lanes.swap(0, Ordering::Relaxed) > 0 {
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
        Err(InvalidPostcopy::OtherRoot { socket }.into())
    }

    /// Options of a connection to a monitor: a cancellation ends each wait for it, until a QEMU is changed.
    pub(super) fn monitor(&self) -> qmp::Options {
        qmp::Options { interrupt: Some(self.cancel.descriptor()), ..qmp::Options::default() }
    }

    /// Starts to write the image `path`.
    pub(super) fn image_writer(&self, path: &Path, origin: Origin) -> Result<ImageWriter, Error> {
        let existing = if self.options.overwrite { Existing::Replace } else { Existing::Refuse };
        let writer = ImageWriter::create(path, existing, origin)?;
        Ok(match self.options.base() {
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

    /// Connects to the destination of a stream.
    pub(super) fn connect(&self, address: &Address, uuid: [u8; 16]) -> Result<outgoing::Connections, Error> {
        let deadline = Instant::now() + self.options.connect_timeout;
        let options = tls::connecting(self.options)?;
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
        let options = zero_copy::lane_options(self.options);
        let relay = Relay::with_options(Arc::clone(session), connections, options)?;
        self.set_sending(relay.statistics());
        Ok(Box::new(relay))
    }

    /// Time since the context was created.
    pub(super) fn elapsed(&self) -> std::time::Duration {
        self.begun.elapsed()
    }

    /// Sends a notice if connecting to this QEMU repaired changes of an earlier towline.
    pub(super) fn report_repair(&self, qemu: &Qemu) {
        if let Some(repaired) = qemu.repaired() {
            self.observer.notice(&repaired.to_string());
        }
    }

    /// Returns an error if the command was cancelled.
    pub(super) fn check_cancelled(&self) -> Result<(), Error> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Reports the progress of the memory to the observer.
    pub(super) fn report_progress(&self, statistics: &Statistics, progress: Progress) {
        self.observer.progress(&Progress { moved: statistics.snapshot(), ..progress });
        if let Some(sending) = self.sending.get() {
            self.observer.lanes(&sending.lane_sends());
        }
    }

    /// Builds the report of a copy that completed.
    pub(super) fn build_report(
        &self,
        moved: Snapshot,
        source: SourceState,
        destination: DestinationState,
    ) -> CopyReport {
        CopyReport {
            moved,
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
            postcopy: None,
        }
    }
}

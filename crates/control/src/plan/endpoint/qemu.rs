//! A QEMU that is driven by its monitor, as source and as destination.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Channel;
use towline_image::{Image, Origin as ImageOrigin, QemuProcess};
use towline_migration::incoming::{Connections, Publication};
use towline_migration::{Compression, Guest, Relay, Session, Sink, SinkWithPresentBlocks, Snapshot};

use super::super::context::Context;
use super::super::destination::{QmpDestination, StartFailure};
use super::super::error::{Error, Failure};
use super::super::error_origin;
use super::super::incoming::IncomingStream;
use super::super::outcomes::GuestAfterFailure;
use super::super::preflight::FactsExtent;
use super::super::progress::CopyPhase;
use super::super::recorder::RecordedSource;
use super::super::report::{DestinationState, SourceState};
use super::super::send::send;
use super::super::shared_switchover::{SharedSwitchover, TransferContext};
use super::super::source::{QmpSource, Required};
use super::traits::{
    DestinationEndpoint, DrivenGuest, GuestDescription, LocalGuest, Rollback, SourceControl, SourceEndpoint,
    receiver,
};
use crate::command_line::{self, CommandLineRecordError};
use crate::in_place::{self, IfUnmapped, MappedImage, Presence, UnusedReflink, Verify};
use crate::moves::MoveEnd;
use crate::qemu::{Process, Qemu};
use crate::staging_names;
use crate::switchover::{
    DestinationKind, DestinationStatus, Directive, GuestRunState, MemorySharing, SourceKind, StartResult,
};

/// Threads that compare an image with its manifest while QEMU loads it.
const VERIFY_THREADS: usize = 2;
/// Interval of queries to a QEMU that loads by itself.
const LOAD_INTERVAL: Duration = Duration::from_millis(2);
/// Interval of queries to a QEMU that is sent a guest of this process.
const SEND_INTERVAL: Duration = Duration::from_millis(250);

/// Failure of a query; QEMU was not changed.
pub(in super::super) fn query_failed(error: Error) -> Failure {
    if error_origin::is_monitor_unreachable(&error) {
        return Failure { guest: GuestAfterFailure::NOT_REACHED, ..Failure::untouched(error) };
    }
    Failure::untouched(error)
}

/// A QEMU that runs a guest.
pub(in super::super) struct QemuSource {
    qemu: QmpSource,
    incoming: IncomingStream,
}

impl QemuSource {
    /// Connects to it, and checks that its guest can be copied.
    pub(in super::super) fn new(path: &Path, context: &Context<'_>) -> Result<Self, Failure> {
        let qemu = QmpSource::prepare(path, context).map_err(query_failed)?;
        context.report_repair(qemu.qemu());
        Ok(Self { qemu, incoming: IncomingStream::default() })
    }

    /// The QEMU, for queries.
    pub(in super::super) fn qemu_mut(&mut self) -> &mut Qemu {
        self.qemu.qemu_mut()
    }

    /// Requires that the cards of these chardevs are connected, now and before the guest runs elsewhere, and that its drives have the
    /// files then that they have now.
    pub(in super::super) fn require_unchanged(&mut self, card_chardevs: Vec<String>) -> Result<(), Error> {
        let blocks = self.qemu.qemu_mut().block_inventory()?;
        self.qemu.required = Some(Required { card_chardevs, blocks });
        self.qemu.check_unchanged()
    }

    /// Detaches devices that cannot be migrated, and connects both ends: the source last, because a destination
    /// that was set to load and is not needed can be started again.
    fn connect(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        session: &Arc<Session>,
        context: &Context<'_>,
    ) -> Result<Connections, Error> {
        to.qemu().map_or(Ok(()), |to| to.qmp.check_vsocks(&self.qemu.vsocks))?;
        self.qemu.detach_unmigratable_devices(context.cancel)?;
        context.observer.phase(CopyPhase::Connect);
        to.connect(session, context)?;
        self.qemu.start(context.lanes(), context.options, context.cancel)
    }
}

impl SourceEndpoint for QemuSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Qemu
    }

    fn describe_guest(
        &mut self,
        extent: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        // Before a device is detached nothing has changed, so that nothing has to be restored.
        let guest = self.qemu.guest(extent).map_err(query_failed)?;
        let guest = if context.options.detaches_vsock() { guest.without_vsocks() } else { guest };
        let how = if context.options.is_snapshot() { "qmp (background-snapshot)" } else { "qmp" };
        let qemu = Some(self.qemu.version_text());
        let origin = ImageOrigin { source: how.into(), qemu, ..ImageOrigin::default() };
        Ok(GuestDescription { guest: Some(guest), origin, file: None })
    }

    fn record_process(&self, context: &Context<'_>) -> Option<QemuProcess> {
        let recorded = command_line::record(self.qemu.qemu());
        let notice = |reason: &CommandLineRecordError| {
            context.observer.notice(&format!(
                "the image has no command line, so `towline run` needs all arguments of QEMU: {reason}"
            ));
        };
        recorded.inspect_err(notice).ok()
    }

    fn start(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let TransferContext { switchover, context } = run;
        let session = switchover.new_gated_session();
        // A relay's destination waits for its first bytes.
        let connections = self.connect(to, &session, context).inspect_err(|_| {
            session.fail(towline_migration::Error::Cancelled);
        })?;
        self.incoming.connected(session, connections);
        Ok(())
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let Self { qemu, incoming } = self;
        let resumes = run.context.options.resumes() && !run.context.options.is_snapshot();
        let publication = if resumes { to.defer_publication() } else { Publication::default() };
        let end: &dyn DestinationEndpoint = to;
        let poll = &mut || {
            let progress = qemu.poll(run.context.cancel)?;
            Ok(end.upload_progress(run.context).unwrap_or(progress))
        };
        let received = incoming.receive(end.sink(), receiver(end.kind()), publication, run, poll);
        // Queried before anything is closed, while the failed end still has the best reason.
        received.map_err(|error| match to.qemu() {
            Some(to) if to.qmp.is_error_origin(&error) => error,
            _ => self.qemu.explain(error),
        })
    }

    fn moved(&self) -> Snapshot {
        self.incoming.moved()
    }

    fn recorded(&self) -> Option<RecordedSource> {
        Some(self.qemu.recorded())
    }

    fn main_channel(&self) -> Option<Arc<dyn Channel>> {
        self.incoming.main_channel()
    }

    /// A source whose connections break before it completes fails.
    fn disconnect(&mut self, to: &mut dyn DestinationEndpoint) {
        self.incoming.disconnect();
        to.disconnect();
    }

    fn control(&mut self) -> SourceControl<'_> {
        SourceControl::Qemu(&mut self.qemu)
    }

    fn state_after_discard(&self) -> SourceState {
        if self.qemu.was_running { SourceState::Running } else { SourceState::Paused }
    }

    fn close_after_switchover(&mut self) {
        self.incoming.disconnect();
    }
}

/// A QEMU that waits for a guest.
pub(in super::super) struct QemuDestination {
    /// The QEMU.
    pub(in super::super) qmp: QmpDestination,
    /// Set once it is connected for an incoming stream.
    relay: Option<RelaySink>,
    /// It has loaded an image by itself.
    pub(in super::super) is_loaded_by_qemu: bool,
    /// Memory that it maps, whose image is locked.
    presence: Option<Presence>,
    /// It replaces the source's QEMU on this host.
    memory: MemorySharing,
}

/// A relay to a QEMU, which may have a part of the guest's memory.
enum RelaySink {
    /// It is sent everything.
    Whole(Box<Relay>),
    /// Pages of memory that it has are dropped.
    Present(SinkWithPresentBlocks<Box<Relay>>),
}

impl RelaySink {
    fn sink(&self) -> &dyn Sink {
        match self {
            Self::Whole(relay) => relay.as_ref(),
            Self::Present(sink) => sink,
        }
    }
}

impl QemuDestination {
    /// Connects to it, and checks that the guest would run there.
    pub(in super::super) fn new(
        path: &Path,
        description: &GuestDescription<'_>,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        let mut qemu = QmpDestination::prepare(path, context)?;
        context.report_repair(qemu.qemu());
        if let Some(guest) = &description.guest {
            qemu.check(guest, context)?;
        }
        Ok(Self::of(qemu))
    }

    /// A destination that was checked before.
    pub(in super::super) fn of(qemu: QmpDestination) -> Self {
        Self {
            qmp: qemu,
            relay: None,
            is_loaded_by_qemu: false,
            presence: None,
            memory: MemorySharing::Copied,
        }
    }

    /// The QEMU, for queries.
    pub(in super::super) fn qemu_mut(&mut self) -> &mut Qemu {
        self.qmp.qemu_mut()
    }

    /// Memory of the guest, compared with the source's.
    pub(in super::super) fn memory(&self) -> MemorySharing {
        self.memory
    }

    /// Gives the sockets of the new QEMU of an upgrade their final names: the old one has exited.
    pub(in super::super) fn publish_sockets(&self) {
        if let Process::Known { pid, .. } = self.qmp.qemu().process() {
            staging_names::publish_of_process(pid.cast_unsigned());
        }
    }

    /// Has it replace the source's QEMU. Pages of memory that it maps are not sent; with copied memory as well the source's QEMU has the
    /// guest until this one runs it, and gets the locks of the drives back.
    pub(in super::super) fn replace_source(&mut self, presence: Presence) {
        self.presence = Some(presence);
        self.memory = MemorySharing::Shared;
    }

    /// The memory that this QEMU already has, because it maps the image.
    fn presence(&mut self, local: &LocalGuest<'_>, context: &Context<'_>) -> Result<Option<Presence>, Error> {
        let Some(image) = local.file.filter(|_| !context.options.stream) else { return Ok(None) };
        let verify = if context.options.verify { Verify::All } else { Verify::Nothing };
        let if_unmapped =
            if context.options.requires_mapped_memory { IfUnmapped::Refuse } else { IfUnmapped::Send };
        let notice = |text: &str| context.observer.notice(text);
        let reflink = context.reflink.and_then(UnusedReflink::take);
        let mapped = MappedImage { image, reflink, verify, if_unmapped };
        let presence = in_place::find_mapped_memory(self.qmp.qemu_mut(), mapped, context.cancel, &notice)?;
        context.check_cancelled()?;
        Ok(presence)
    }

    /// Number of lanes into memory that may have content, which only the main channel clears; `None`: it is zeros.
    fn lanes_into_old_memory(&mut self, context: &Context<'_>) -> Result<Option<usize>, Error> {
        let old = in_place::old_memory(self.qmp.qemu_mut())?;
        old.iter().for_each(|old| context.observer.notice(&old.to_string()));
        Ok((!old.is_empty()).then_some(0))
    }

    fn stream(
        &mut self,
        guest: &dyn Guest,
        lanes: usize,
        run: TransferContext<'_>,
    ) -> Result<Snapshot, Error> {
        let context = run.context;
        let connections = self.qmp.start(lanes, context.options, context.cancel)?;
        let mut queried_at = Instant::now();
        send(guest, &connections, run, &mut || {
            if queried_at.elapsed() > SEND_INTERVAL {
                queried_at = Instant::now();
                self.qmp.check_not_failed()?;
            }
            Ok(())
        })
    }

    /// Has QEMU load the file itself. With `--verify` it is hashed meanwhile, so that no guest runs from a
    /// damaged image.
    fn load(&mut self, image: &Image, context: &Context<'_>) -> Result<Snapshot, Error> {
        // An open file description of its own: QEMU reads the stream at the file's position, which duplicates
        // share.
        let file = image.reopen()?;
        self.qmp.load(&file, context.lanes())?;
        context.observer.phase(CopyPhase::Transfer);
        thread::scope(|scope| {
            let verify = || image.verify(VERIFY_THREADS, &|_| {});
            let verifier = context.options.verify.then(|| scope.spawn(verify));
            let mut loaded = false;
            while !loaded || verifier.as_ref().is_some_and(|verifier| !verifier.is_finished()) {
                context.check_cancelled()?;
                loaded = loaded || self.qmp.has_loaded_file(context.cancel)?;
                thread::park_timeout(LOAD_INTERVAL);
            }
            match verifier.map(thread::ScopedJoinHandle::join) {
                Some(Ok(result)) => result?,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => {}
            }
            Ok(image.qemu_load_statistics())
        })
    }
}

impl DrivenGuest for QemuDestination {
    fn query_status(&mut self) -> DestinationStatus {
        self.qmp.query_status()
    }

    fn start(&mut self) -> Result<StartResult, StartFailure> {
        self.qmp.start_guest()
    }

    fn end(&mut self) -> Result<(), Error> {
        self.qmp.end()
    }
}

impl DestinationEndpoint for QemuDestination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Qemu
    }

    fn move_end(&self) -> MoveEnd {
        MoveEnd::qemu(self.qmp.qemu().socket(), self.qmp.qemu().process())
    }

    fn qemu(&mut self) -> Option<&mut QemuDestination> {
        Some(self)
    }

    fn driven(&mut self) -> Option<&mut dyn DrivenGuest> {
        Some(self)
    }

    fn connect(&mut self, session: &Arc<Session>, context: &Context<'_>) -> Result<(), Error> {
        let connections = self.qmp.start(context.lanes(), context.options, context.cancel)?;
        let relay = Box::new(context.relay(session, connections)?.arriving_paused());
        self.relay = Some(match self.presence.as_ref().filter(|presence| !presence.is_empty()) {
            Some(presence) => RelaySink::Present(presence.sink(relay)),
            None => RelaySink::Whole(relay),
        });
        Ok(())
    }

    fn sink(&self) -> &dyn Sink {
        self.relay.as_ref().expect("connected by `connect`").sink()
    }

    fn receive_guest(&mut self, local: &LocalGuest<'_>, run: TransferContext<'_>) -> Result<Snapshot, Error> {
        let context = run.context;
        // QEMU reads the file without a rate limit and uncompressed.
        let is_plain = context.options.transfer_options().max_bandwidth.is_none()
            && context.options.compression == Compression::None;
        let loads = !context.options.stream && self.qmp.loads_images() && is_plain;
        let file = local.file.filter(|image| loads && !image.is_incremental());
        let presence = self.presence(local, context)?;
        // Few bytes are left: no lanes.
        let lanes = if presence.is_some() { Some(0) } else { self.lanes_into_old_memory(context)? };
        let file = file.filter(|_| lanes.is_none());
        let lanes = lanes.unwrap_or(context.lanes());
        self.is_loaded_by_qemu = file.is_some();
        let reason = match (&presence, file) {
            (Some(_), _) => "its memory is mapped from the image already: only the rest is sent",
            (None, Some(_)) => "QEMU loads the image file itself (mapped-ram)",
            (None, None) if context.options.stream => "the image is streamed, as --stream requests",
            (None, None) if !is_plain => "the image is streamed, as a bandwidth limit and compression need",
            (None, None) => "the image is streamed: QEMU cannot load it, or has old memory to clear",
        };
        tracing::debug!(lanes, reason, "way of the image into QEMU");
        context.observer.phase(CopyPhase::Connect);
        let moved = match (&presence, file) {
            (Some(presence), _) => self.stream(&presence.guest(local.guest)?, lanes, run)?,
            (None, Some(file)) => self.load(file, context)?,
            (None, None) => self.stream(local.guest, lanes, run)?,
        };
        self.qmp.wait_loaded()?;
        // The guest is loaded and does not run yet.
        presence.as_ref().map_or(Ok(()), Presence::check_unchanged)?;
        // Held until the guest is in its final state.
        self.presence = presence;
        Ok(moved)
    }

    fn delivered(&self, run_state: Option<&str>, switchover: &SharedSwitchover) -> Directive {
        switchover.loaded(GuestRunState::from_state(run_state))
    }

    fn disconnect(&mut self) {
        self.relay = None;
    }

    fn finalize(&mut self, _: &Context<'_>) -> Result<Vec<String>, Error> {
        self.qmp.wait_loaded()?;
        self.qmp.restore_settings()
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Stored
    }

    fn roll_back(&mut self, error: Error, context: &Context<'_>, undo: Rollback) -> (Error, Vec<String>) {
        let error = if undo.is_cut_over { error } else { self.qmp.explain(error) };
        let notes = self.qmp.roll_back(undo.held);
        // A new QEMU that holds nothing is ended by the one who started it.
        (error, if context.options.is_upgrade() { Vec::new() } else { notes })
    }
}

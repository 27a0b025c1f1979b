//! A QEMU that is driven by its monitor, as source and as destination.

use std::path::Path;
use std::sync::Arc;

use towline_image::{Image, Origin as ImageOrigin, QemuProcess};
use towline_migration::incoming::{Connections, Publication};
use towline_migration::{Compression, Session, Sink, Snapshot};
use towline_qmp::commands::SetLink;

use super::super::command_line::{CommandLineRecordError, record_command_line};
use super::super::context::Context;
use super::super::destination::StartFailure;
use super::super::engine::IncomingStream;
use super::super::error::{Error, Failure};
use super::super::error_origin;
use super::super::preflight::{FactsExtent, GuestFacts};
use super::super::progress::{CopyPhase, CopyReport, SourceState};
use super::super::recorder::RecordedSource;
use super::super::shared_switchover::TransferContext;
use super::super::source::{QmpSource, Required};
use super::driven::{GuestDescription, LocalGuest, QemuDestination, RelaySink};
use super::traits::{DestinationEndpoint, Rollback, SourceControl, SourceEndpoint, receiver};
use crate::in_place::{self, OldMemory, Presence};
use crate::moves::MoveEnd;
use crate::qemu::Qemu;
use crate::switchover::{DestinationKind, DestinationStatus, SourceKind, StartResult};

/// Failure of a query; QEMU was not changed.
pub(in super::super) fn query_failed(error: Error) -> Failure {
    if error_origin::is_monitor_unreachable(&error) {
        return Failure::not_reached(error);
    }
    Failure::untouched(error)
}

/// As [`record_command_line`]; `None` with a notice if it is not recorded.
pub(in super::super) fn record_process(qemu: &mut Qemu, context: &Context<'_>) -> Option<QemuProcess> {
    let notice = |reason: &CommandLineRecordError| {
        context.observer.notice(&format!(
            "the image has no command line, so `towline run` needs all arguments of QEMU: {reason}"
        ));
    };
    record_command_line(qemu).inspect_err(notice).ok()
}

/// A QEMU that runs a guest.
pub(in super::super) struct QemuSource {
    pub(in super::super) qmp: QmpSource,
    incoming: IncomingStream,
}

impl QemuSource {
    /// Connects to it, and checks that its guest can be copied.
    pub(in super::super) fn new(path: &Path, context: &Context<'_>) -> Result<Self, Failure> {
        let qmp = QmpSource::prepare(path, context).map_err(query_failed)?;
        Ok(Self { qmp, incoming: IncomingStream::default() })
    }

    /// Requires that the cards of these chardevs are connected, now and before the guest runs elsewhere, and that its drives have the
    /// files then that they have now.
    pub(in super::super) fn require_unchanged(&mut self, card_chardevs: Vec<String>) -> Result<(), Error> {
        let blocks = self.qmp.qemu.block_inventory()?;
        self.qmp.required = Some(Required { card_chardevs, blocks });
        self.qmp.check_unchanged()
    }

    /// Detaches devices that cannot be migrated, and connects both ends: the source last, because a destination
    /// that was set to load and is not needed can be started again.
    fn connect(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        session: &Arc<Session>,
        context: &Context<'_>,
    ) -> Result<Connections, Error> {
        to.qemu().map_or(Ok(()), |to| self.qmp.vsocks.check(&mut to.qmp.qemu))?;
        self.qmp.mirror_disks(context)?;
        self.qmp.vsocks.detach(&mut self.qmp.qemu, context.cancel)?;
        context.observer.phase(CopyPhase::Connect);
        to.connect(session, context)?;
        self.qmp.start(context)
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
        let guest = GuestFacts::of_qemu(&mut self.qmp.qemu, extent).map_err(query_failed)?;
        let guest = if context.options.detaches_vsock() { guest.without_vsocks() } else { guest };
        let how = if context.options.is_snapshot() { "qmp (background-snapshot)" } else { "qmp" };
        let qemu = Some(self.qmp.qemu.version_text());
        let process =
            (extent == FactsExtent::Stored).then(|| record_process(&mut self.qmp.qemu, context)).flatten();
        let origin = ImageOrigin { source: how.into(), qemu, process, ..ImageOrigin::default() };
        let image = (extent == FactsExtent::Identity).then(|| in_place::mapped_image(&mut self.qmp.qemu));
        let base = image.and_then(|image| Image::open(&image.ok()??).ok()).map(Arc::new);
        Ok(GuestDescription { guest: Some(guest), origin, file: None, base })
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
        let Self { qmp, incoming } = self;
        let publication =
            if run.context.options.resumes() { to.defer_publication() } else { Publication::default() };
        let end: &dyn DestinationEndpoint = to;
        let poll = &mut || {
            let progress = qmp.poll(run.context)?;
            Ok(end.upload_progress(run.context).unwrap_or(progress))
        };
        let received = incoming.receive(end.sink(), receiver(end.kind()), publication, run, poll);
        // Queried before anything is closed, while the failed end still has the best reason.
        received.map_err(|error| match to.qemu() {
            Some(to) if to.qmp.is_error_origin(&error) => error,
            _ => self.qmp.explain(error),
        })
    }

    fn recorded(&self) -> Option<RecordedSource> {
        Some(self.qmp.recorded())
    }

    fn incoming(&self) -> Option<&IncomingStream> {
        Some(&self.incoming)
    }

    /// A source whose connections break before it completes fails.
    fn disconnect(&mut self, to: &mut dyn DestinationEndpoint) {
        self.incoming.disconnect();
        to.disconnect();
    }

    fn control(&mut self) -> SourceControl<'_> {
        SourceControl::Qemu(&mut self.qmp)
    }

    fn state_after_discard(&self) -> SourceState {
        if self.qmp.was_running { SourceState::Running } else { SourceState::Paused }
    }

    fn close(&mut self, concluded: Result<CopyReport, Failure>) -> Result<CopyReport, Failure> {
        self.incoming.disconnect();
        concluded
    }
}

impl DestinationEndpoint for QemuDestination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Qemu
    }

    fn move_end(&self) -> MoveEnd {
        MoveEnd::qemu(&self.qmp.qemu)
    }

    fn qemu(&mut self) -> Option<&mut QemuDestination> {
        Some(self)
    }

    fn connect(&mut self, session: &Arc<Session>, context: &Context<'_>) -> Result<(), Error> {
        if self.presence.is_none() {
            let notice = |text: &str| context.observer.notice(text);
            self.presence = Some(in_place::of_arriving(&mut self.qmp.qemu, &notice)?);
        }
        // QEMU does not reply while it waits for lanes.
        let old = if context.lanes() > 0 { in_place::old_memory(&mut self.qmp.qemu)? } else { Vec::new() };
        let connections = self.qmp.start(context.lanes(), context)?;
        let relay = Box::new(context.relay(session, connections)?.arriving_paused());
        let presence = self.presence.as_ref().filter(|presence| !presence.is_empty() || !old.is_empty());
        self.relay = Some(match presence {
            Some(presence) => RelaySink::present(presence.sink(relay).over_old(OldMemory::blocks(&old))),
            None => RelaySink::whole(relay),
        });
        Ok(())
    }

    fn sink(&self) -> &dyn Sink {
        &*self.relay.as_ref().expect("connected by `connect`").sink
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
            (Some(presence), _) => {
                let guest = presence.guest(local.guest)?;
                let is_written =
                    context.own.is_some() && presence.write_difference(&self.qmp.qemu, local.guest);
                self.stream(&if is_written { guest.with_difference() } else { guest }, lanes, run)?
            }
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

    fn query_status(&mut self) -> DestinationStatus {
        self.qmp.query_status()
    }

    fn start_guest(&mut self) -> Result<StartResult, StartFailure> {
        if let Err(error) = self.presence.as_ref().map_or(Ok(()), Presence::check_unchanged) {
            return Err(StartFailure { started: StartResult::NotSent, error: Box::new(error.into()) });
        }
        self.qmp.start_guest()
    }

    fn end(&mut self) -> Result<(), Error> {
        self.qmp.end()
    }

    fn disconnect(&mut self) {
        self.relay = None;
    }

    fn finalize(&mut self, context: &Context<'_>) -> Result<Vec<String>, Error> {
        self.qmp.wait_loaded()?;
        for name in context.own.iter().flat_map(|own| own.links_down) {
            let down = SetLink { name: name.clone(), up: false };
            self.qmp.qemu.client().execute(&down)?;
        }
        self.qmp.restore_settings()
    }

    fn roll_back(&mut self, error: Error, context: &Context<'_>, undo: Rollback) -> (Error, Vec<String>) {
        let error = if undo.is_cut_over { error } else { self.qmp.explain(error) };
        let notes = self.qmp.roll_back(undo.held);
        // A new QEMU that holds nothing is ended by the one who started it.
        (error, if context.options.is_upgrade() { Vec::new() } else { notes })
    }
}

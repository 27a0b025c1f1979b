//! Source and destination of a copy, with their steps in the order in which they are called.
//!
//! ```text
//!   source       prepare ─────────► start ─► transfer ─────────► disconnect ─► control ─► close
//!   destination     └─► (opened) ─► connect ─► sink · receive_guest ─► query_status ─► start_guest ─► finalize
//!                                                                       after a failure: roll_back ◄─┘
//! ```

use std::sync::Arc;

use towline_channel::Channel;
use towline_migration::incoming::Publication;
use towline_migration::{Session, Sink, Snapshot};
use towline_protocol::session::ReceiverMode;

use super::super::context::Context;
use super::super::destination::{HeldGuest, StartFailure};
use super::super::engine::{self, IncomingStream};
use super::super::error::{Error, Failure};
use super::super::preflight::FactsExtent;
use super::super::progress::{CopyReport, DestinationState, Progress, SourceState};
use super::super::recorder::RecordedSource;
use super::super::shared_switchover::{SharedSwitchover, TransferContext};
use super::super::source::QmpSource;
use super::driven::{GuestDescription, LocalGuest, QemuDestination};
use crate::moves::MoveEnd;
use crate::switchover::{DestinationKind, DestinationStatus, Directive, Input, SourceKind, StartResult};

/// Source of a guest. The defaults are those of a guest that is stored, or in this process.
pub(in super::super) trait SourceEndpoint {
    /// Kind of the source, for the switchover.
    fn kind(&self) -> SourceKind {
        SourceKind::Stored
    }

    /// Describes the guest; nothing is changed.
    fn describe_guest(
        &mut self,
        extent: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure>;

    /// Connects the destination and starts the migration.
    fn start(&mut self, _to: &mut dyn DestinationEndpoint, _run: TransferContext<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Transfers all of the guest to the destination. The error is the best reason that either end has.
    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error>;

    /// The stream that comes to this process, if one does.
    fn incoming(&self) -> Option<&IncomingStream> {
        None
    }

    /// Counters of the transfer so far.
    fn moved(&self) -> Snapshot {
        self.incoming().map(IncomingStream::moved).unwrap_or_default()
    }

    /// The source in a record of the move; `None` if no record is needed, as for a stored guest.
    fn recorded(&self) -> Option<RecordedSource> {
        None
    }

    /// Reports to the switchover that the stream is complete; returns its directive.
    fn delivered(&self, _to: &dyn DestinationEndpoint, switchover: &SharedSwitchover) -> Directive {
        switchover.handle(Input::Delivered)
    }

    /// Closes a failed stream, at both ends where the source is to see that.
    fn disconnect(&mut self, _to: &mut dyn DestinationEndpoint) {}

    /// Handle by which the switchover's directives are carried out.
    fn control(&mut self) -> SourceControl<'_> {
        SourceControl::Stored
    }

    /// State of the guest if the destination has discarded it.
    fn state_after_discard(&self) -> SourceState {
        SourceState::Unchanged
    }

    /// Closes the stream after the switchover. Replaces the reason of a failure by one that only the source knows.
    fn close(&mut self, concluded: Result<CopyReport, Failure>) -> Result<CopyReport, Failure> {
        concluded
    }
}

/// Means to drive a source after its stream.
pub(in super::super) enum SourceControl<'a> {
    /// A QEMU with its monitor.
    Qemu(&'a mut QmpSource),
    /// A connection to a source that another party drives.
    Stream(Arc<dyn Channel>),
    /// An image, or memory of this process.
    Stored,
}

/// Destination of a guest. The defaults are those of a guest that is kept within this process.
pub(in super::super) trait DestinationEndpoint {
    /// Kind of the destination, for the switchover.
    fn kind(&self) -> DestinationKind {
        DestinationKind::Stored
    }

    /// The destination in a record of the move.
    fn move_end(&self) -> MoveEnd {
        MoveEnd::Stored
    }

    /// The QEMU, if its monitor is connected.
    fn qemu(&mut self) -> Option<&mut QemuDestination> {
        None
    }

    /// Has the destination listen, and connects to it. `session` is that of the incoming migration.
    fn connect(&mut self, _session: &Arc<Session>, _context: &Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Sink for a guest that arrives as a stream.
    ///
    /// # Panics
    /// The destination is a stream and not connected.
    fn sink(&self) -> &dyn Sink;

    /// Transfers a guest of this process.
    fn receive_guest(&mut self, local: &LocalGuest<'_>, run: TransferContext<'_>) -> Result<Snapshot, Error> {
        engine::copy_in_process(local.guest, self.sink(), run.context.lanes(), run)
    }

    /// Leaves the publication of an image to [`Self::finalize`]: the source is resumed before it.
    fn defer_publication(&self) -> Publication {
        Publication::BeforeAcknowledgement
    }

    /// Progress of an upload that the source waits for.
    fn upload_progress(&self, _context: &Context<'_>) -> Option<Progress> {
        None
    }

    /// Returns true if a complete guest was discarded.
    fn has_discarded(&self) -> bool {
        false
    }

    /// Queries the state of a guest that has arrived.
    fn query_status(&mut self) -> DestinationStatus {
        DestinationStatus::Loaded
    }

    /// Starts it, if this end is driven, and checks that it runs.
    fn start_guest(&mut self) -> Result<StartResult, StartFailure> {
        Ok(StartResult::Live)
    }

    /// Ends a destination that maps the source's memory, and does not run it: the source is resumed next.
    ///
    /// # Errors
    /// It has not ended.
    fn end(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Closes a failed stream.
    fn disconnect(&mut self) {}

    /// Main channel of an outgoing stream, whose peer may be another towline.
    fn channel(&self) -> Option<Arc<dyn Channel>> {
        None
    }

    /// Restores the settings of a destination whose guest is in its final state; publishes an image whose
    /// publication was deferred. Returns notices.
    fn finalize(&mut self, _context: &Context<'_>) -> Result<Vec<String>, Error> {
        Ok(Vec::new())
    }

    /// State of a guest that is stored here.
    fn stored_state(&self) -> DestinationState {
        DestinationState::Stored
    }

    /// Rolls back after a failure. Returns the error, or QEMU's own reason if that is better, and notices.
    fn roll_back(&mut self, error: Error, _context: &Context<'_>, _undo: Rollback) -> (Error, Vec<String>) {
        (error, Vec::new())
    }
}

/// Extent of a rollback.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Rollback {
    /// True if the guest should have been started at the destination.
    pub(in super::super) is_cut_over: bool,
    /// Guest at the destination.
    pub(in super::super) held: HeldGuest,
}

/// Use of the guest at such a destination, as reported to a towline at the source.
pub(in super::super) fn receiver(kind: DestinationKind) -> ReceiverMode {
    match kind {
        DestinationKind::Qemu => ReceiverMode::Waits,
        DestinationKind::Stored => ReceiverMode::Stores,
        DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline => {
            ReceiverMode::RunsByItself
        }
    }
}

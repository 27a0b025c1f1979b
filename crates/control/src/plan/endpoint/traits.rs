//! What a source and a destination of a copy do, in the order in which they are asked to.
//!
//! ```text
//!   source       prepare ─────────► start ─► transfer ─────► disconnect ─► origin ─► close
//!   destination     └─► (built) ──► connect ─► sink · take ─► view ─► start_guest ─► settle ─► attach · undo
//! ```

use std::sync::Arc;

use towline_channel::Channel;
use towline_image::{Image, Origin as ImageOrigin};
use towline_migration::{Guest, Session, Sink, Snapshot};
use towline_protocol::session::Receiver;

use super::super::context::Context;
use super::super::destination::StartFailure;
use super::super::error::{Error, Failure};
use super::super::preflight;
use super::super::report::{DestinationState, SourceState};
use super::super::shared_switchover::SharedSwitchover;
use super::super::source::QmpSource;
use super::super::vsock::DetachedVsocks;
use crate::moves::MoveEnd;
use crate::switchover::{DestinationKind, DestinationStatus, Directive, Input, SourceKind, StartResult};

/// Where a guest comes from.
pub(in super::super) trait SourceEndpoint {
    /// What the switchover has to do with.
    fn kind(&self) -> SourceKind;

    /// Asks what its guest is; nothing is changed. `is_compared`: with the QEMU that would take it.
    fn prepare(&mut self, is_compared: bool, context: &Context<'_>) -> Result<GuestDescription<'_>, Failure>;

    /// Reaches the destination, and has the guest begin to come.
    fn start(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switchover: &Arc<SharedSwitchover>,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        let _ = (to, switchover, context);
        Ok(())
    }

    /// Has all of the guest go to the destination. An error is the best reason that either end has.
    fn transfer(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switchover: &Arc<SharedSwitchover>,
        context: &Context<'_>,
    ) -> Result<(), Error>;

    /// What has moved.
    fn moved(&self) -> Snapshot;

    /// What the source is to a record of the move; `None`: no record is needed, as with a guest that is stored.
    fn move_end(&self) -> Option<MoveEnd> {
        None
    }

    /// The connection by which the guest comes, once it is there.
    fn main_channel(&self) -> Option<Arc<dyn Channel>> {
        None
    }

    /// The stream went through: what the switchover directs.
    fn delivered(&self, to: &dyn DestinationEndpoint, switchover: &SharedSwitchover) -> Directive {
        let _ = to;
        switchover.handle(Input::Delivered)
    }

    /// Lets go of a stream that failed, at both ends where the source is to see that.
    fn disconnect(&mut self, to: &mut dyn DestinationEndpoint) {
        let _ = to;
    }

    /// What the switchover's directives are carried out with.
    fn control(&mut self) -> SourceControl<'_> {
        SourceControl::Stored
    }

    /// Its guest where the destination has counted it, and kept nothing.
    fn state_after_discard(&self) -> SourceState {
        SourceState::Unchanged
    }

    /// After the switchover: lets go of a stream that is not needed any more.
    fn close(&mut self) {}

    /// Gives the reason of a failure that only the source knows.
    fn explain(&self, failure: Failure) -> Failure {
        failure
    }
}

/// What a destination is told of a guest before anything moves.
pub(in super::super) struct GuestDescription<'a> {
    /// `None`: nothing is known of it.
    pub(in super::super) guest: Option<preflight::GuestFacts>,
    /// For the manifest of an image that is made of it.
    pub(in super::super) origin: ImageOrigin,
    /// The image that it is, perhaps an incremental one.
    #[cfg_attr(not(feature = "store"), expect(dead_code, reason = "only an object store asks for it"))]
    pub(in super::super) file: Option<&'a Image>,
}

/// What a source is driven by after its stream.
pub(in super::super) enum SourceControl<'a> {
    /// A QEMU with its monitor.
    Qemu(&'a mut QmpSource),
    /// A connection to a source that somebody else drives.
    Stream(Arc<dyn Channel>),
    /// An image, or memory of this process.
    Stored,
}

/// A guest of this process: an image that is open, or a synthetic one.
pub(in super::super) struct LocalGuest<'a> {
    pub(in super::super) guest: &'a dyn Guest,
    /// The image that it is, perhaps an incremental one.
    pub(in super::super) file: Option<&'a Image>,
    /// It is stored, here or elsewhere.
    pub(in super::super) is_stored: bool,
}

impl LocalGuest<'_> {
    /// Lanes by which it goes into an image: from one that is stored there is no stream to it.
    pub(in super::super) fn lanes(&self, context: &Context<'_>) -> usize {
        if self.is_stored { 0 } else { context.lanes }
    }
}

/// Where a guest goes. What its defaults say holds for one that is kept within this process.
pub(in super::super) trait DestinationEndpoint {
    /// What the switchover has to do with.
    fn kind(&self) -> DestinationKind {
        DestinationKind::Stored
    }

    /// What the destination is to a record of the move.
    fn move_end(&self) -> MoveEnd {
        MoveEnd::Stored
    }

    /// Has the destination listen, and reaches it. `session` is that of the incoming migration.
    fn connect(&mut self, session: &Arc<Session>, context: &Context<'_>) -> Result<(), Error> {
        let _ = (session, context);
        Ok(())
    }

    /// What takes a guest that comes in as a stream.
    ///
    /// # Panics
    /// It is a stream, and not connected.
    fn sink(&self) -> &dyn Sink;

    /// Takes a guest of this process.
    fn receive_guest(
        &mut self,
        local: &LocalGuest<'_>,
        switchover: &Arc<SharedSwitchover>,
        context: &Context<'_>,
    ) -> Result<Snapshot, Error>;

    /// A guest of this process, in this state, is here: what the switchover directs.
    fn delivered(&self, run_state: Option<&str>, switchover: &SharedSwitchover) -> Directive {
        let _ = run_state;
        switchover.handle(Input::Delivered)
    }

    /// Whether all of a guest came that nothing keeps.
    fn has_discarded(&self) -> bool {
        false
    }

    /// Whether QEMU has loaded an image by itself.
    fn is_loaded_by_qemu(&self) -> bool {
        false
    }

    /// Lets go of a stream that failed.
    fn disconnect(&mut self) {}

    /// The main channel of a stream that was sent, behind which another towline may be.
    fn channel(&self) -> Option<Arc<dyn Channel>> {
        None
    }

    /// What it does with the guest, where it is driven.
    fn query_status(&mut self) -> DestinationStatus {
        DestinationStatus::Loaded
    }

    /// Runs the guest where it is driven, and sees whether it does.
    fn start_guest(&mut self) -> Result<StartResult, StartFailure> {
        Ok(StartResult::Live)
    }

    /// Whether the error is one of the connection to it.
    fn is_error_origin(&self, error: &Error) -> bool {
        let _ = error;
        false
    }

    /// The guest is here, and runs if it is to: puts everything in order. Returns what to note.
    fn finalize(&mut self, context: &Context<'_>) -> Result<Vec<String>, Error>;

    /// How a guest is kept here that is stored.
    fn stored_state(&self) -> DestinationState;

    /// Refuses if it could not take these again.
    fn check_vsocks(&mut self, vsocks: &DetachedVsocks) -> Result<(), Error> {
        let _ = vsocks;
        Ok(())
    }

    /// Puts in again what was taken out of the guest at its source.
    fn attach_vsocks(&mut self, vsocks: &DetachedVsocks) -> Result<(), Error> {
        let _ = vsocks;
        Ok(())
    }

    /// After a failure: gives QEMU's own reason if it has a better one, and says what is left.
    fn roll_back(&mut self, error: Error, context: &Context<'_>, undo: Rollback) -> (Error, Vec<String>) {
        let _ = (context, undo);
        (error, Vec::new())
    }
}

/// What is known of a guest that is not at its destination in order.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Rollback {
    /// It was to run there.
    pub(in super::super) is_cut_over: bool,
    /// The destination may be the only one that holds it.
    pub(in super::super) holds: bool,
}

/// What a towline at the source is told becomes of its guest at such a destination.
pub(in super::super) fn receiver(kind: DestinationKind) -> Receiver {
    match kind {
        DestinationKind::Qemu => Receiver::Waits,
        DestinationKind::Stored => Receiver::Stores,
        DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline => {
            Receiver::RunsByItself
        }
    }
}

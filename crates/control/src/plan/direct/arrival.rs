//! The end that receives: its QEMU is sent a guest by that of the other host.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use towline_channel::{Address, Channel, Listener};
use towline_migration::SwitchoverGate as _;
use towline_protocol::session::{FromDestination, FromSource};

use super::super::context::{Context, listen_options};
use super::super::destination::QmpDestination;
use super::super::endpoint::{DestinationEndpoint as _, QemuDestination, SourceControl};
use super::super::error::{Error, Failure};
use super::super::executor::Executor;
use super::super::forward::{FarEnds, Forwarder};
use super::super::invalid::Invalid;
use super::super::outcomes::GuestAfterFailure;
use super::super::peer::{ANSWER_TIMEOUT, PeerSession, await_frame};
use super::super::progress::{CopyPhase, CopyReport};
use super::super::recorder::{RecordedEnds, RecordedSource};
use super::super::request::Direct;
use super::super::shared_switchover::SharedSwitchover;
use super::super::validate::check_multifd_with_postcopy;
use super::super::way::{ArrivingWay, Way, recovers};
use crate::moves::MoveEnd;
use crate::switchover::{DestinationKind, Directive, Input, SourceKind};

/// Connections from the other host.
#[derive(Default)]
struct FromOtherHost {
    listener: Option<Arc<Listener>>,
    channel: Option<Arc<dyn Channel>>,
    session: Option<PeerSession>,
    /// The way of an encrypted stream.
    forwarder: Option<Forwarder>,
}

/// Receives a guest into the QEMU at `to`, from a towline that connects to `at`.
pub(super) fn copy(
    at: &Address,
    to: &Path,
    how: &Direct,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let target = QmpDestination::prepare(to, context).map_err(Failure::untouched)?;
    if how.permits_postcopy() && context.lanes() > 0 {
        check_multifd_with_postcopy(&target.qemu).map_err(Failure::untouched)?;
    }
    if how.is_encrypted {
        // Before its disks are offered, which needs the same.
        context.require_paths(&target.qemu).map_err(Failure::untouched)?;
    }
    let mut destination = QemuDestination::of(target);
    let (from, to) = (SourceKind::Towline, DestinationKind::Qemu);
    let switchover = SharedSwitchover::new(from, to, how.memory(), context.options);
    let mut way = FromOtherHost::default();
    let received = receive(at, &mut way, &mut destination, how, &switchover, context);
    let received = received.map_err(|error| {
        // The source only sees that its connections break.
        let reason = destination.qmp.failed_to_load().unwrap_or(error);
        // The source continues then. Otherwise it would go on sending.
        way.forwarder = None;
        if !switchover.state().awaits_source_outcome() {
            destination.qmp.break_connection();
        }
        reason
    });
    let is_reached = way.channel.is_some();
    let recovers = how.permits_postcopy()
        && !context.options.recover_timeout.is_zero()
        && recovers(&destination.qmp.facts().version.qemu);
    let FromOtherHost { listener, channel, session, mut forwarder } = way;
    // Without it the forwarder stays until the guest is there all the same.
    let way = listener.filter(|_| recovers);
    let way = way.map(|listener| ArrivingWay { listener, forwarder: forwarder.take() });
    let source = channel.map_or(SourceControl::Stored, SourceControl::Stream);
    let mut executor = Executor::new(&switchover, source, &mut destination, context);
    executor.source_peer = session.or(executor.source_peer);
    executor.way = way.map(Way::Arrival);
    executor.conclude(received).map_err(|failure| match is_reached {
        false if failure.guest.is_safe() => Failure { guest: GuestAfterFailure::NOT_REACHED, ..failure },
        _ => failure,
    })
}

/// Has the QEMU receive the guest until its source may complete; returns the directive that follows.
fn receive(
    at: &Address,
    way: &mut FromOtherHost,
    destination: &mut QemuDestination,
    how: &Direct,
    switchover: &Arc<SharedSwitchover>,
    context: &Context<'_>,
) -> Result<Directive, Error> {
    context.observer.phase(CopyPhase::Connect);
    let listener = Arc::new(Listener::bind_with(at, &listen_options(context.options)?)?);
    way.listener = Some(Arc::clone(&listener));
    context.observer.listening(listener.local_address());
    let deadline = Instant::now() + context.options.accept_timeout;
    let channel: Arc<dyn Channel> = Arc::from(listener.accept(deadline, context.cancel)?);
    way.channel = Some(Arc::clone(&channel));
    let end = MoveEnd::Peer { address: channel.peer().to_owned() };
    let source = RecordedSource::elsewhere(end);
    switchover.keep_record(RecordedEnds { source, destination: destination.move_end() }, context)?;
    let peer = way.session.insert(PeerSession::new(channel));
    let hello =
        await_frame(context.cancel, peer, Some(ANSWER_TIMEOUT), context, PeerSession::receive_from_source)?;
    let FromSource::Hello(id) = hello else { return Err(peer.unexpected(&hello)) };
    switchover.source_reports(id);
    peer.beat_until_report();
    let port = if how.is_encrypted {
        let Address::Tcp { port, .. } = *listener.local_address() else {
            return Err(Invalid::DirectEnds.into());
        };
        let near = destination.qmp.start_forwarded(how, context)?;
        way.forwarder = Some(Forwarder::start(listener, FarEnds::to(near), None)?);
        port
    } else {
        destination.qmp.start_direct(at, how, context)?
    };
    peer.send_report(&FromDestination::Listens(port))?;
    peer.beat_until_report();
    context.observer.phase(CopyPhase::Transfer);
    let guest = match await_frame(context.cancel, peer, None, context, PeerSession::receive_from_source)? {
        FromSource::Stopped(guest) => guest,
        FromSource::Aborted => return Err(Error::PeerGaveUp),
        other => return Err(peer.unexpected(&other)),
    };
    context.observer.phase(CopyPhase::Switchover);
    if !switchover.may_acknowledge(guest) {
        return Err(Error::Cancelled);
    }
    peer.send_report(&FromDestination::Awaits)?;
    Ok(switchover.handle(Input::Delivered))
}

//! The end that sends: its QEMU migrates to that of the other host.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use towline_channel::{Address, connect_with};
use towline_migration::Sink;
use towline_protocol::session::{FromDestination, FromSource};

use super::super::context::{Context, connect_options};
use super::super::endpoint::{DestinationEndpoint, SourceControl, query_failed};
use super::super::error::{Error, Failure};
use super::super::executor::Executor;
use super::super::forward::{FarEnds, Forwarder, at_port};
use super::super::peer::{ANSWER_TIMEOUT, PeerSession, await_frame, received};
use super::super::progress::{CopyPhase, CopyReport, DestinationState};
use super::super::recorder::{RecordedEnds, RecordedSource};
use super::super::request::{Direct, Tls};
use super::super::shared_switchover::SharedSwitchover;
use super::super::source::QmpSource;
use super::super::way::{DepartingWay, Way};
use crate::moves::{InterruptedPostcopy, MoveEnd, RecordedWay};
use crate::switchover::{DestinationKind, Directive, GuestRunState, Input, SourceKind};

/// The other host's towline, and by it the QEMU there.
struct OtherHost {
    /// Its name in records.
    name: String,
    session: Option<PeerSession>,
    /// The way of an encrypted stream.
    forwarder: Option<Forwarder>,
}

impl OtherHost {
    fn new(to: &Address, context: &Context<'_>) -> Self {
        let name = context.options.peer_name.clone().unwrap_or_else(|| to.to_string());
        Self { name, session: None, forwarder: None }
    }
}

impl DestinationEndpoint for OtherHost {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Towline
    }

    fn sink(&self) -> &dyn Sink {
        unreachable!("its QEMU receives the stream")
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Loaded
    }
}

/// Sends the guest of the QEMU at `from` to that which the towline at `to` drives.
pub(super) fn copy(
    from: &Path,
    to: &Address,
    how: &Direct,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let mut source = QmpSource::prepare(from, context).map_err(query_failed)?;
    if how.permits_postcopy() {
        source.prepare_switch(context).map_err(Failure::untouched)?;
    }
    if how.is_encrypted {
        context.require_paths(&source.qemu).map_err(Failure::untouched)?;
    }
    let mut there = OtherHost::new(to, context);
    let switchover = SharedSwitchover::new(SourceKind::Qemu, there.kind(), how.memory(), context.options);
    let sent = send(&mut source, &mut there, to, how, &switchover, context);
    match &sent {
        Ok(_) => context.observer.phase(CopyPhase::Release),
        Err(_) => {
            there.forwarder = None;
            if let Err(error) = source.cancel_migration() {
                tracing::debug!(%error, "the migration is cancelled later");
            }
        }
    }
    let recovers = how.permits_postcopy() && !context.options.recover_timeout.is_zero();
    let session = there.session.take();
    // Without it the forwarder stays until the guest is there all the same.
    let way = recovers.then(|| DepartingWay { to, forwarder: there.forwarder.take(), is_own: true });
    let control = SourceControl::Qemu(&mut source);
    let mut executor = Executor::new(&switchover, control, &mut there, context);
    executor.destination_peer = session;
    executor.way = way.map(Way::Departure);
    let report = executor.conclude(sent)?;
    source.report_missed_zero_copy(context);
    Ok(CopyReport { moved: source.counted(), ..report })
}

/// Sends the rest of a guest whose source an earlier towline has switched to postcopy, to the host of which the towline waits for it.
pub(super) fn go_on(
    InterruptedPostcopy { file, socket, .. }: InterruptedPostcopy,
    to: &Address,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    let mut source = QmpSource::following(&socket, context).map_err(query_failed)?;
    let record = file.record();
    let recorded = RecordedSource { way: record.way.clone(), ..source.recorded() };
    let ends = RecordedEnds { source: recorded, destination: record.destination.clone() };
    let mut there = OtherHost::new(to, context);
    let switchover = SharedSwitchover::going_on(file, ends, context.options);
    let control = SourceControl::Qemu(&mut source);
    let mut executor = Executor::new(&switchover, control, &mut there, context);
    executor.way = Some(Way::Departure(DepartingWay { to, forwarder: None, is_own: false }));
    let report = executor.conclude(Ok(Directive::Recover))?;
    Ok(CopyReport { moved: source.counted(), ..report })
}

/// Has the source send its guest until it may complete; returns the directive that follows.
fn send(
    source: &mut QmpSource,
    there: &mut OtherHost,
    to: &Address,
    how: &Direct,
    switchover: &SharedSwitchover,
    context: &Context<'_>,
) -> Result<Directive, Error> {
    source.mirror_disks(context)?;
    source.vsocks.detach(&mut source.qemu, context.cancel)?;
    context.observer.phase(CopyPhase::Connect);
    let deadline = Instant::now() + context.options.connect_timeout;
    let channel = connect_with(to, deadline, context.cancel, &connect_options(context.options)?)?;
    let peer = there.session.insert(PeerSession::new(Arc::from(channel)));
    let way = match &context.options.tls {
        Some(Tls::OneTime(credentials)) if how.permits_postcopy() => Some(RecordedWay::new(to, credentials)),
        _ => None,
    };
    let recorded = RecordedSource { way, ..source.recorded() };
    let destination = MoveEnd::Peer { address: there.name.clone() };
    switchover.keep_record(RecordedEnds { source: recorded, destination }, context)?;
    peer.send_outcome(FromSource::Hello(switchover.id()))?;
    peer.beat_until_outcome();
    let receive = PeerSession::receive_from_destination;
    let listens = await_frame(context.cancel, peer, Some(ANSWER_TIMEOUT), context, receive)?;
    let FromDestination::Listens(port) = listens else { return Err(peer.unexpected(&listens)) };
    let address = at_port(to, port);
    if how.is_encrypted {
        let far = FarEnds::At { address: address.clone(), options: connect_options(context.options)? };
        let (listener, near) = source.listen()?;
        there.forwarder = Some(Forwarder::start(Arc::new(listener), far, None)?);
        source.start_direct(&near, how, context)?;
    } else {
        source.start_direct(&address, how, context)?;
    }
    context.observer.phase(CopyPhase::Transfer);
    let guest = follow(source, &address, peer, context)?;
    context.observer.phase(CopyPhase::Switchover);
    peer.send_outcome(FromSource::Stopped(guest))?;
    // It awaits the outcome from its answer on, and the record and QEMU take their time.
    peer.beat_until_outcome();
    let awaits = await_frame(context.cancel, peer, Some(ANSWER_TIMEOUT), context, receive)?;
    if awaits != FromDestination::Awaits {
        return Err(peer.unexpected(&awaits));
    }
    if !switchover.may_acknowledge(guest) {
        return Err(Error::Cancelled);
    }
    source.complete_direct()?;
    Ok(switchover.handle(Input::Delivered))
}

/// Follows the migration until the guest is stopped; returns the run state that it had.
fn follow(
    source: &mut QmpSource,
    address: &Address,
    peer: &mut PeerSession,
    context: &Context<'_>,
) -> Result<GuestRunState, Error> {
    let begun = Instant::now();
    let mut guest = if source.was_running { GuestRunState::Running } else { GuestRunState::Stopped };
    loop {
        guest = source.guest_state()?.unwrap_or(guest);
        let progress = source.poll(context)?;
        context.observer.progress(&progress);
        if source.is_at_switchover()? {
            return Ok(guest);
        }
        if begun.elapsed() >= context.options.connect_timeout && source.is_connecting() {
            return Err(Error::NotConnected { address: address.to_string(), waited: begun.elapsed() });
        }
        context.check_cancelled()?;
        if let Some(frame) = received(peer, context, PeerSession::glance_at_destination)? {
            return Err(peer.unexpected(&frame));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use towline_channel::{Cancel, Listener};
    use towline_migration::HEARTBEAT_INTERVAL;

    use super::super::super::fake_qemu::FakeQemu;
    use super::super::super::request::CopyRequest;
    use super::*;

    /// The destination would take a silent source for lost, which completes nevertheless.
    #[test]
    fn a_source_is_heard_while_its_qemu_is_slow_to_complete() {
        let (fake, cancel) = (FakeQemu::start("running"), Cancel::new().unwrap());
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let how = Direct { is_encrypted: false, capabilities: Vec::new() };
        let options = CopyRequest { direct: Some(how.clone()), ..CopyRequest::default() };
        let context = Context::new(&options, 0, &cancel, &());
        let (moved, longest) = thread::scope(|scope| {
            let moves = scope.spawn(|| copy(&fake.path(), listener.local_address(), &how, &context));
            let channel = listener.accept(Instant::now() + ANSWER_TIMEOUT, &cancel).unwrap();
            let mut peer = PeerSession::new(Arc::from(channel));
            let await_source = |peer: &mut _| {
                await_frame(context.cancel, peer, None, &context, PeerSession::receive_from_source).unwrap()
            };
            assert!(matches!(await_source(&mut peer), FromSource::Hello(_)));
            fake.script().migration = Some("pre-switchover");
            fake.script().delayed = Some(("migrate-continue", HEARTBEAT_INTERVAL * 5 / 2));
            peer.send_report(&FromDestination::Listens(1)).unwrap();
            assert!(matches!(await_source(&mut peer), FromSource::Stopped(_)));
            peer.send_report(&FromDestination::Awaits).unwrap();
            let (begun, mut longest) = (Instant::now(), Duration::ZERO);
            while begun.elapsed() < HEARTBEAT_INTERVAL * 4 {
                assert!(matches!(peer.receive_outcome(), Ok(None)));
                longest = longest.max(peer.silence());
            }
            fake.script().delayed = None;
            peer.close();
            (moves.join().unwrap(), longest)
        });
        assert!(moved.unwrap_err().guest.is_safe());
        assert!(longest < HEARTBEAT_INTERVAL * 3, "{longest:?}");
    }
}

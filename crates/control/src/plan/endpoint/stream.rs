//! A stream: a QEMU or towline that another party drives, which connects to us or listens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, Listener};
use towline_image::{Image, Origin as ImageOrigin};
use towline_migration::incoming::{self, Publication, gather};
use towline_migration::{BasePresence, Session, Sink, SinkWithPresentBlocks, Snapshot, outgoing};

use super::super::context::{Context, connect_options, listen_options};
use super::super::engine::{IncomingStream, send};
use super::super::error::{Error, Failure};
use super::super::error_origin;
use super::super::outcomes::GuestAfterFailure;
use super::super::preflight::{FactsExtent, GuestFacts, uuid_bytes};
use super::super::progress::{CopyPhase, CopyReport, DestinationState};
use super::super::recorder::RecordedSource;
use super::super::request::ConnectingEnd;
use super::super::shared_switchover::TransferContext;
use super::driven::{GuestDescription, LocalGuest, RelaySink};
use super::traits::{DestinationEndpoint, Rollback, SourceControl, SourceEndpoint, receiver};
use crate::in_place;
use crate::moves::MoveEnd;
use crate::switchover::{DestinationKind, SourceKind};

/// No block is at the destination in whole.
const NO_NAMES: [&str; 0] = [];
/// Timeout for an acknowledged source to close its connections.
const LINGER: Duration = Duration::from_secs(1);

/// Waits for a source that connects to `address`, or connects to one that listens there.
pub(in super::super) fn listen(
    address: &Address,
    context: &Context<'_>,
) -> Result<incoming::Connections, Error> {
    // Also of the lanes, which follow the main channel.
    let within = context.options.connect_timeout;
    if context.options.connects == ConnectingEnd::Destination {
        let deadline = Instant::now() + within;
        let (options, lanes) = (connect_options(context.options)?, context.lanes());
        return Ok(incoming::connect(address, lanes, &options, deadline, within, context.cancel)?);
    }
    let listener = Listener::bind_with(address, &listen_options(context.options)?)?;
    let verb = if is_listened_on(address) { "listening on" } else { "reading from" };
    context.observer.notice(&format!("{verb} {}", listener.local_address()));
    context.observer.listening(listener.local_address());
    let deadline = Instant::now() + context.options.accept_timeout;
    Ok(gather(listener, context.lanes(), deadline, within, context.cancel)?)
}

fn is_listened_on(address: &Address) -> bool {
    matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { .. })
}

/// A source that connects to an address on which towline listens.
pub(in super::super) struct StreamSource {
    address: Address,
    /// Its name in records.
    name: Option<String>,
    incoming: IncomingStream,
}

impl StreamSource {
    pub(in super::super) fn new(address: &Address, name: Option<&str>) -> Self {
        let name = name.map(str::to_owned);
        Self { address: address.clone(), name, incoming: IncomingStream::default() }
    }

    /// Returns true for a file: it keeps its guest, and no sender awaits the outcome.
    fn is_file(&self) -> bool {
        matches!(self.address, Address::File { .. })
    }
}

impl SourceEndpoint for StreamSource {
    fn kind(&self) -> SourceKind {
        if self.is_file() { SourceKind::Stored } else { SourceKind::Stream }
    }

    fn describe_guest(
        &mut self,
        _: FactsExtent,
        _run: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        let source = self.name.clone().unwrap_or_else(|| format!("stream to {}", self.address));
        let origin = ImageOrigin { source, ..ImageOrigin::default() };
        Ok(GuestDescription { guest: None, origin, file: None, base: None })
    }

    fn start(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let TransferContext { switchover, context } = run;
        let session = switchover.new_gated_session();
        context.observer.phase(CopyPhase::Connect);
        // The destination is unchanged until a source connects.
        let connections = listen(&self.address, context)?;
        if let Err(error) = to.connect(&session, context) {
            connections.refuse();
            return Err(error);
        }
        self.incoming.connected(session, connections);
        Ok(())
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let to: &dyn DestinationEndpoint = to;
        let look = &mut || Ok(to.upload_progress(run.context).unwrap_or_default());
        self.incoming.receive(to.sink(), receiver(to.kind()), Publication::default(), run, look)
    }

    fn recorded(&self) -> Option<RecordedSource> {
        let peer = self.incoming.main_channel()?.peer().to_owned();
        let end = MoveEnd::Peer { address: self.name.clone().unwrap_or(peer) };
        Some(RecordedSource::elsewhere(end))
    }

    fn incoming(&self) -> Option<&IncomingStream> {
        Some(&self.incoming)
    }

    fn control(&mut self) -> SourceControl<'_> {
        match self.incoming.main_channel() {
            Some(channel) if !self.is_file() => SourceControl::Stream(channel),
            Some(_) | None => SourceControl::Stored,
        }
    }

    fn close(&mut self, concluded: Result<CopyReport, Failure>) -> Result<CopyReport, Failure> {
        if let Some(connections) = self.incoming.disconnect() {
            connections.linger(LINGER);
            return concluded;
        }
        concluded.map_err(|failure| match failure.guest.is_safe() && is_listened_on(&self.address) {
            true => Failure { guest: GuestAfterFailure::NOT_REACHED, ..failure },
            false => failure,
        })
    }
}

/// A QEMU that runs the guest by itself, or another towline, listening at an address.
pub(in super::super) struct StreamDestination {
    address: Address,
    /// Its name in records.
    name: String,
    uuid: [u8; 16],
    /// The image that the source's guest maps, which a towline at the other end may have.
    base: Option<Arc<Image>>,
    /// Set once it is connected for an incoming stream.
    relay: Option<RelaySink>,
    /// Set once it is connected for a guest of this process.
    sent: Option<outgoing::Connections>,
}

impl StreamDestination {
    /// The destination of this guest, of which nothing may be known, and which may map the image `base`. `name`: that in records, if it
    /// is not the address.
    pub(in super::super) fn new(
        address: &Address,
        name: Option<&str>,
        guest: Option<&GuestFacts>,
        base: Option<Arc<Image>>,
    ) -> Self {
        let name = name.map_or_else(|| address.to_string(), str::to_owned);
        let uuid = guest.and_then(|guest| guest.uuid.as_deref()).map_or([0; 16], uuid_bytes);
        Self { address: address.clone(), name, uuid, base, relay: None, sent: None }
    }
}

impl DestinationEndpoint for StreamDestination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Stream
    }

    fn move_end(&self) -> MoveEnd {
        MoveEnd::Peer { address: self.name.clone() }
    }

    fn connect(&mut self, session: &Arc<Session>, context: &Context<'_>) -> Result<(), Error> {
        let relay = context.relay(session, context.connect(&self.address, self.uuid)?)?;
        let base = self.base.as_ref().map(|image| in_place::as_base(image, BasePresence::IfReported));
        self.relay = Some(match base {
            Some(Ok(base)) => RelaySink::present(SinkWithPresentBlocks::new(relay, NO_NAMES).based_on(base)),
            Some(Err(_)) | None => RelaySink::whole(relay),
        });
        Ok(())
    }

    fn sink(&self) -> &dyn Sink {
        &*self.relay.as_ref().expect("connected by `connect`").sink
    }

    fn receive_guest(&mut self, local: &LocalGuest<'_>, run: TransferContext<'_>) -> Result<Snapshot, Error> {
        let context = run.context;
        context.observer.phase(CopyPhase::Connect);
        let connections = self.sent.insert(context.connect(&self.address, self.uuid)?);
        let sent = send(local.guest, connections, run, &mut || Ok(()));
        sent.map_err(|error| {
            error_origin::explain_lane_loss(error, context.lanes(), context.options.compression)
        })
    }

    fn disconnect(&mut self) {
        self.relay = None;
    }

    fn channel(&self) -> Option<Arc<dyn Channel>> {
        let relayed = self.relay.as_ref().map(|relay| &relay.main_channel);
        relayed.or(self.sent.as_ref().map(|sent| &sent.main)).cloned()
    }

    /// A towline at the other end has stored it.
    fn stored_state(&self) -> DestinationState {
        DestinationState::Loaded
    }

    fn roll_back(&mut self, error: Error, context: &Context<'_>, _: Rollback) -> (Error, Vec<String>) {
        if !error_origin::is_from_peer(&error, &self.address.to_string()) {
            return (error, Vec::new());
        }
        (error_origin::explain_lane_loss(error, context.lanes(), context.options.compression), Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use towline_channel::{Cancel, ChannelExt as _, ConnectOptions, IoBuf, SendFlags, connect_with};

    use super::super::super::request::CopyRequest;
    use super::*;

    /// A busy host connects them late.
    #[test]
    fn lanes_may_take_the_time_that_connections_have() {
        let (place, cancel) = (tempfile::tempdir().unwrap(), Cancel::new().unwrap());
        let connect_timeout = Duration::from_millis(300);
        let options = CopyRequest { connect_timeout, ..CopyRequest::default() };
        let context = Context::new(&options, 1, &cancel, &());
        let address = Address::Unix(place.path().join("stream"));
        let error = std::thread::scope(|scope| {
            let listening = scope.spawn(|| listen(&address, &context).map(drop).unwrap_err());
            let deadline = Instant::now() + Duration::from_secs(10);
            let connecting = ConnectOptions { retry: true, ..ConnectOptions::default() };
            let main = connect_with(&address, deadline, &cancel, &connecting).unwrap();
            main.send_all(&[IoBuf::from(&b"QEVM"[..])], SendFlags::empty()).unwrap();
            listening.join().unwrap()
        });
        let Error::Migration(towline_migration::Error::LanesMissing { waited, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(waited, connect_timeout);
    }
}

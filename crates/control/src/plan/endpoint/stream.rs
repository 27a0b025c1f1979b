//! A stream: somebody's QEMU or towline that connects to us as the source, or that listens as the destination.

use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Channel, Listener};
use towline_image::Origin as ImageOrigin;
use towline_migration::incoming::{self, gather};
use towline_migration::{Relay, Session, Sink, Snapshot, outgoing};

use super::super::context::Run;
use super::super::error::{Error, Failure};
use super::super::fit::uuid_bytes;
use super::super::progress::{Phase, Progress};
use super::super::receive::Arrival;
use super::super::report::DestinationState;
use super::super::send::send;
use super::super::source::LANES_TIMEOUT;
use super::super::switch::Switch;
use super::super::{blame, tls};
use super::contract::{Departure, DestinationEndpoint, Local, Origin, SourceEndpoint, Undo, receiver};
use crate::moves::End;
use crate::switchover::{DestinationKind, SourceKind};

/// A listener without a partner waits this long: until somebody comes or the user ends it.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long a source that has its answer may take to close its connections.
const LINGER: Duration = Duration::from_secs(1);

/// Waits for a source that connects to `address`.
pub(in super::super) fn listen(address: &Address, run: &Run<'_>) -> Result<incoming::Connections, Error> {
    let listener = Listener::bind_with(address, &tls::listening(run.options)?)?;
    run.observer.notice(&format!("listening on {}", listener.local_address()));
    run.observer.listening(listener.local_address());
    let deadline = Instant::now() + LISTEN_TIMEOUT;
    Ok(gather(listener, run.lanes, deadline, LANES_TIMEOUT, run.cancel)?)
}

/// What somebody sends to an address of ours.
pub(in super::super) struct StreamSource {
    address: Address,
    arrival: Arrival,
}

impl StreamSource {
    pub(in super::super) fn new(address: &Address) -> Self {
        Self { address: address.clone(), arrival: Arrival::default() }
    }
}

impl SourceEndpoint for StreamSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Stream
    }

    fn prepare(&mut self, _is_compared: bool, _run: &Run<'_>) -> Result<Departure<'_>, Failure> {
        let origin = ImageOrigin { source: format!("stream to {}", self.address), ..ImageOrigin::default() };
        Ok(Departure { guest: None, origin, file: None })
    }

    fn start(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switch: &Arc<Switch>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let session = switch.session();
        run.observer.phase(Phase::Connect);
        // The destination is as it was until somebody connects.
        let connections = listen(&self.address, run)?;
        if let Err(error) = to.connect(&session, run) {
            connections.refuse();
            return Err(error);
        }
        self.arrival.connected(session, connections);
        Ok(())
    }

    fn transfer(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switch: &Arc<Switch>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let look = &mut || Ok(Progress::default());
        self.arrival.receive(to.sink(), receiver(to.kind()), switch, run, look)
    }

    fn moved(&self) -> Snapshot {
        self.arrival.moved()
    }

    fn end_of_move(&self) -> Option<End> {
        self.link().map(|channel| End::Peer { address: channel.peer().to_owned() })
    }

    fn link(&self) -> Option<Arc<dyn Channel>> {
        self.arrival.main_channel()
    }

    fn origin(&mut self) -> Origin<'_> {
        self.link().map_or(Origin::Stored, Origin::Stream)
    }

    fn close(&mut self) {
        if let Some(connections) = self.arrival.disconnect() {
            connections.linger(LINGER);
        }
    }
}

/// A QEMU that runs a guest by itself, or another towline, which listens at an address.
pub(in super::super) struct StreamDestination {
    address: Address,
    uuid: [u8; 16],
    /// There once it is connected for what comes in as a stream.
    relay: Option<Box<Relay>>,
    /// There once it is connected for a guest of this process.
    sent: Option<outgoing::Connections>,
}

impl StreamDestination {
    pub(in super::super) fn new(address: &Address, departure: &Departure<'_>) -> Self {
        let uuid = departure.guest.as_ref().and_then(|guest| guest.uuid.as_deref());
        Self { address: address.clone(), uuid: uuid.map_or([0; 16], uuid_bytes), relay: None, sent: None }
    }
}

impl DestinationEndpoint for StreamDestination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Stream
    }

    fn end_of_move(&self) -> End {
        End::Peer { address: self.address.to_string() }
    }

    fn connect(&mut self, session: &Arc<Session>, run: &Run<'_>) -> Result<(), Error> {
        self.relay = Some(run.relay(session, run.reach(&self.address, self.uuid)?)?);
        Ok(())
    }

    fn sink(&self) -> &dyn Sink {
        self.relay.as_deref().expect("connected before anything is received")
    }

    fn take(&mut self, local: &Local<'_>, switch: &Arc<Switch>, run: &Run<'_>) -> Result<Snapshot, Error> {
        run.observer.phase(Phase::Connect);
        let connections = self.sent.insert(run.reach(&self.address, self.uuid)?);
        let sent = send(local.guest, connections, switch, run, &mut || Ok(()));
        sent.map_err(|error| blame::lanes_lost(error, run.lanes, run.options.compression))
    }

    fn disconnect(&mut self) {
        self.relay = None;
    }

    fn channel(&self) -> Option<Arc<dyn Channel>> {
        match (&self.relay, &self.sent) {
            (Some(relay), _) => Some(relay.main_channel()),
            (None, Some(connections)) => Some(Arc::clone(&connections.main)),
            (None, None) => None,
        }
    }

    fn settle(&mut self, _: &Run<'_>) -> Result<Vec<String>, Error> {
        Ok(Vec::new())
    }

    /// A towline at the other end has stored it.
    fn stored_state(&self) -> DestinationState {
        DestinationState::Loaded
    }

    fn undo(&mut self, error: Error, run: &Run<'_>, _: Undo) -> (Error, Vec<String>) {
        match blame::peer_is(&error, &self.address.to_string()) {
            true => (blame::lanes_lost(error, run.lanes, run.options.compression), Vec::new()),
            false => (error, Vec::new()),
        }
    }
}

//! Connections between two ends, with faults in them.

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towline_channel::fault::{Cut, Delay, Direction, ShortIo, Throttle};
use towline_channel::{
    Cancel, Channel, ConnectOptions, Listener, TlsChannel, TlsClient, TlsServer, UnixChannel, connect_with,
    pair,
};
use towline_lab::certificates::Authority;
use towline_migration::{ChannelId, outgoing};

use super::UUID;

/// Size of a destination's socket buffer where sends without a copy are tested: less than a packet.
const WINDOW_BYTES: usize = 100_000;

/// Kind of the channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In memory, with this capacity in each direction.
    Memory(usize),
    /// Unix stream sockets.
    Unix,
    /// TCP on the loopback.
    Tcp,
    /// As well; the source can send without a copy, and its data stays long with it, as the window is small.
    TcpZeroCopy,
    /// TLS over Unix stream sockets.
    Tls,
}

/// An end of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// A fault at one end of one channel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) side: Side,
    pub(crate) stream: ChannelId,
    pub(crate) layer: Layer,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Layer {
    Cut(u64, Direction),
    Short(usize, u64),
    Delay(Duration, u64),
    /// Bytes per second.
    Throttle(u64),
}

/// Both ends of a main channel and its lanes.
pub(crate) struct Link {
    pub(crate) source: outgoing::Connections,
    pub(crate) destination: DestinationEnd,
}

pub(crate) struct DestinationEnd {
    pub(crate) main: Arc<dyn Channel>,
    pub(crate) lanes: Vec<Arc<dyn Channel>>,
}

pub(crate) fn link(kind: Kind, lanes: usize) -> Link {
    link_with(kind, lanes, &[])
}

pub(crate) fn link_with(kind: Kind, lanes: usize, faults: &[Fault]) -> Link {
    let maker = Maker::new(kind);
    let end = |stream| {
        let (source, destination) = maker.pair();
        let source = wrap(source, Side::Source, stream, faults);
        (Arc::from(source), Arc::from(wrap(destination, Side::Destination, stream, faults)))
    };
    let (main, arriving) = end(ChannelId::Main);
    let (leaving, lanes) = (0..lanes).map(|lane| end(ChannelId::Lane(lane))).unzip();
    Link {
        source: outgoing::Connections { main, lanes: leaving, uuid: UUID, introduced: false },
        destination: DestinationEnd { main: arriving, lanes },
    }
}

fn wrap(channel: Box<dyn Channel>, side: Side, stream: ChannelId, faults: &[Fault]) -> Box<dyn Channel> {
    let ours = faults.iter().filter(|fault| fault.side == side && fault.stream == stream);
    ours.fold(channel, |channel, fault| match fault.layer {
        Layer::Cut(after, direction) => Box::new(Cut::new(channel, after, direction)),
        Layer::Short(most, seed) => Box::new(ShortIo::new(channel, NonZeroUsize::new(most).unwrap(), seed)),
        Layer::Throttle(rate) => Box::new(Throttle::new(channel, NonZeroU64::new(rate).unwrap())),
        Layer::Delay(longest, seed) => Box::new(Delay::new(channel, Duration::ZERO..=longest, seed)),
    })
}

struct Maker {
    kind: Kind,
    listener: Option<Listener>,
    /// Certificates of both ends.
    certificates: Option<TempDir>,
}

impl Maker {
    fn new(kind: Kind) -> Self {
        let is_tcp = matches!(kind, Kind::Tcp | Kind::TcpZeroCopy);
        let listener = is_tcp.then(|| Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap());
        if let (Kind::TcpZeroCopy, Some(listener)) = (kind, &listener) {
            let fd = listener.as_fd().unwrap();
            rustix::net::sockopt::set_socket_recv_buffer_size(fd, WINDOW_BYTES).unwrap();
        }
        let certificates = (kind == Kind::Tls).then(|| {
            let directory = TempDir::new().unwrap();
            Authority::new("the test's CA").unwrap().furnish(directory.path()).unwrap();
            directory
        });
        Self { kind, listener, certificates }
    }

    /// TLS over this connection.
    fn tls(&self, ends: (UnixChannel, UnixChannel)) -> (Box<dyn Channel>, Box<dyn Channel>) {
        let directory = self.certificates.as_ref().unwrap().path();
        let (client, server) =
            (TlsClient::load(directory, None).unwrap(), TlsServer::load(directory).unwrap());
        let (deadline, cancel) = (Instant::now() + super::WATCHDOG, Cancel::new().unwrap());
        std::thread::scope(|scope| {
            let near =
                scope.spawn(|| TlsChannel::client(Box::new(ends.0), &client, "localhost", deadline, &cancel));
            let far = TlsChannel::server(Box::new(ends.1), &server, deadline, &cancel).unwrap();
            (Box::new(near.join().unwrap().unwrap()) as Box<dyn Channel>, Box::new(far) as Box<dyn Channel>)
        })
    }

    fn pair(&self) -> (Box<dyn Channel>, Box<dyn Channel>) {
        match (self.kind, &self.listener) {
            (Kind::Memory(capacity), _) => {
                let (one, other) = pair(capacity);
                (Box::new(one), Box::new(other))
            }
            (kind, Some(listener)) => {
                let (deadline, cancel) = (Instant::now() + super::WATCHDOG, Cancel::new().unwrap());
                let options = ConnectOptions { zero_copy: kind == Kind::TcpZeroCopy, ..Default::default() };
                let one = connect_with(listener.local_address(), deadline, &cancel, &options).unwrap();
                (one, listener.accept(deadline, &cancel).unwrap())
            }
            (Kind::Tls, _) => self.tls(UnixChannel::pair().unwrap()),
            _ => {
                let (one, other) = UnixChannel::pair().unwrap();
                (Box::new(one), Box::new(other))
            }
        }
    }
}

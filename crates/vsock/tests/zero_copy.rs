//! Zero-copy sends of large packets to TCP: the kernel reads them in guest memory, so they are used only when the peer has
//! acknowledged them. For data that the kernel has not transmitted yet, the loopback behaves like a network card.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt;
use towline_frontend::Frontend;
use towline_frontend::vsock::{PortPair, VsockEvent, VsockGuest};
use towline_frontend::wire::{RegionInfo, RequestCode, encode_u64s, feature};
use towline_lab::{Network, skip, wait_until};
use towline_sandbox::Policy;
use towline_vsock::{ConnectionLimits, Statistics};

use common::{CID, Served, TIMEOUT, bytes, poll_until, read_to_end, send_all, send_until_full};

const PORTS: PortPair = (1080, 80);
/// Length of a packet that is sent without a copy.
const PACKET: usize = 60_000;

/// A guest with a connection to TCP whose peer has a small buffer.
struct ZeroCopyConnection {
    served: Served,
    frontend: Frontend,
    guest: VsockGuest,
    ports: PortPair,
    peer: TcpStream,
}

impl ZeroCopyConnection {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
        let rule = format!("guest:80=tcp:{}", listener.local_addr().unwrap());
        let served = Served::with_rules(ConnectionLimits::default(), CID, &[rule]);
        let (frontend, mut guest) = served.guest();
        guest.request(PORTS);
        poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(PORTS)).then_some(()));
        let peer = listener.accept().unwrap().0;
        peer.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { served, frontend, guest, ports: PORTS, peer }
    }

    /// A confined device, which only accepts TCP connections.
    fn accepted() -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let policy = Policy { resets_tcp: true, ..Policy::default() };
        let served = Served::confined(CID, &[format!("tcp:{address}=guest:80")], policy);
        let (frontend, mut guest) = served.guest();
        let peer = TcpStream::connect(address).unwrap();
        peer.set_read_timeout(Some(TIMEOUT)).unwrap();
        let ports = poll_until(&mut guest, |guest, event| match event {
            VsockEvent::Request(ports) => {
                guest.accept(ports);
                Some(ports)
            }
            _ => None,
        });
        Self { served, frontend, guest, ports, peer }
    }

    /// Returns a connection with as much data in transit as the device accepts for a peer that reads nothing, the content to
    /// send, and the number of bytes sent of it.
    fn full() -> (Self, Vec<u8>, usize) {
        let (mut connection, content) = (Self::new(), bytes(32 << 20));
        let sent = connection.fill(&content);
        let statistics = connection.statistics();
        assert!(sent < content.len() && statistics.totals.bytes_zero_copy > 0, "{sent}: {statistics:?}");
        assert!(statistics.zero_copy_in_flight > 0, "{statistics:?}");
        (connection, content, sent)
    }

    fn statistics(&self) -> Statistics {
        self.served.device.report().statistics
    }

    /// Sends until the device accepts no more, or all of this. Returns the number of bytes sent.
    fn fill(&mut self, content: &[u8]) -> usize {
        send_until_full(&mut self.guest, self.ports, content, PACKET)
    }

    /// Starts to read at the peer.
    fn read(&self) -> JoinHandle<Vec<u8>> {
        read_to_end(self.peer.try_clone().unwrap())
    }

    /// Sends the rest of the content, and ends the connection when no packet is in flight any more.
    fn send_rest(&mut self, rest: &[u8]) {
        send_all(&mut self.guest, PORTS, rest);
        self.wait_for_completions();
        self.shutdown();
    }

    fn shutdown(&mut self) {
        self.guest.shutdown(PORTS, 3);
        self.guest.poll(|_, _| ()).unwrap();
    }

    /// Waits until no packet of the guest is in flight.
    fn wait_for_completions(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        while self.guest.tx().in_flight() > 0 {
            assert!(Instant::now() < deadline, "{:?}", self.statistics());
            self.guest.poll(|_, _| ()).unwrap();
            self.guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
}

#[test]
fn packets_are_used_when_the_peer_has_acknowledged_them() {
    let (mut connection, content, sent) = ZeroCopyConnection::full();
    let statistics = connection.statistics();
    assert!(u64::from(connection.guest.tx().in_flight()) >= statistics.zero_copy_in_flight);
    let reader = connection.read();
    // The guest overwrites each buffer as soon as it is used.
    connection.send_rest(&content[sent..]);
    assert!(reader.join().unwrap() == content, "the peer has received other bytes");
    let statistics = connection.statistics();
    assert_eq!((statistics.zero_copy_in_flight, statistics.zero_copy_resets), (0, 0));
    assert!(statistics.totals.bytes_zero_copy > 1 << 20, "{statistics:?}");
}

#[test]
fn data_in_flight_when_a_connection_ends_is_delivered() {
    let (mut connection, content, sent) = ZeroCopyConnection::full();
    connection.shutdown();
    let mut received = Vec::new();
    connection.peer.read_to_end(&mut received).unwrap();
    assert!(received == content[..sent], "{} of {sent} bytes", received.len());
    connection.wait_for_completions();
    assert_eq!(connection.statistics().zero_copy_resets, 0);
}

#[test]
fn a_reset_of_the_guest_completes_all_packets_at_once() {
    let (mut connection, ..) = ZeroCopyConnection::full();
    connection.guest.reset(PORTS);
    connection.wait_for_completions();
    assert_eq!(connection.statistics().zero_copy_in_flight, 0);
    // The reset follows the data that was transmitted already.
    let error = connection.peer.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// The guest may overwrite its memory when the ring has stopped, and a peer that has not acknowledged its data must not receive
/// the new contents.
#[test]
fn a_ring_that_stops_resets_connections_with_unacknowledged_data() {
    let (mut connection, content, sent) = ZeroCopyConnection::full();
    connection.frontend.stop(1).unwrap();
    connection.guest.poll(|_, _| ()).unwrap();
    assert_eq!(connection.guest.tx().in_flight(), 0);
    let statistics = connection.statistics();
    assert_eq!((statistics.zero_copy_in_flight, statistics.zero_copy_resets), (0, 1), "{statistics:?}");
    let mut received = Vec::new();
    let error = connection.peer.read_to_end(&mut received).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(received.len() < sent && received == content[..received.len()]);
}

/// A client that reads nothing must not keep the guest from connecting again.
#[test]
fn a_confined_device_resets_a_client_that_reads_nothing() {
    let mut connection = ZeroCopyConnection::accepted();
    connection.fill(&bytes(32 << 20));
    let statistics = connection.statistics();
    assert!(statistics.zero_copy_in_flight > 0, "{statistics:?}");
    connection.frontend.stop(1).unwrap();
    let statistics = connection.statistics();
    assert_eq!((statistics.zero_copy_in_flight, statistics.zero_copy_resets), (0, 1), "{statistics:?}");
    drop(connection.frontend);
    let mut frontend = Frontend::connect(&connection.served.path("d"), TIMEOUT).unwrap();
    frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap();
    let error = connection.peer.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Returns the number of mappings of a memfd with this name.
fn mapped(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("memfd:{name} "))).count()
}

/// A region that was unplugged is unmapped, even if a peer acknowledges nothing.
#[test]
fn unplugged_memory_is_unmapped_while_packets_are_in_flight() {
    let other = memfd_create("plugged", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 1 << 20).unwrap();
    let region =
        RegionInfo { guest_address: 0x1_0000_0000, size: 1 << 20, user_address: 0x1000_0000, mmap_offset: 0 };
    let payload = [encode_u64s(&[0]), region.encode()].concat();
    let mut connection = ZeroCopyConnection::new();
    connection.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[other.as_fd()]).unwrap();
    let content = bytes(32 << 20);
    let sent = connection.fill(&content);
    let in_flight = connection.statistics().zero_copy_in_flight;
    assert!(sent < content.len() && in_flight > 0, "{in_flight} packets are in flight");
    assert_eq!(mapped("plugged"), 1);
    connection.frontend.request(RequestCode::REM_MEM_REG, &payload, &[]).unwrap();
    assert_eq!(mapped("plugged"), 0, "{in_flight} packets in flight keep it mapped");
    let statistics = connection.statistics();
    assert_eq!(statistics.zero_copy_in_flight, in_flight, "the peer has acknowledged nothing yet");
    // The connection continues, and all packets complete.
    let reader = connection.read();
    connection.send_rest(&content[sent..]);
    assert!(reader.join().unwrap() == content, "the peer has received other bytes");
}

#[test]
fn a_ring_that_stops_waits_for_a_peer_that_reads() {
    let (mut connection, content, sent) = ZeroCopyConnection::full();
    let reader = connection.read();
    let base = connection.frontend.stop(1).unwrap();
    assert_eq!(connection.statistics().zero_copy_resets, 0);
    connection.guest.poll(|_, _| ()).unwrap();
    connection.frontend.start(connection.guest.tx(), base).unwrap();
    connection.shutdown();
    assert!(reader.join().unwrap() == content[..sent]);
}

/// Returns a network with a veth pair to another one, with addresses.
fn networks() -> Result<(Network, Network), Box<dyn std::error::Error + Send + Sync>> {
    let (near, far) = (Network::new()?, Network::new()?);
    near.connect("out0", &far, "in0")?;
    near.run(&["ip", "address", "add", "10.7.0.1/24", "dev", "out0"])?;
    far.run(&["ip", "address", "add", "10.7.0.2/24", "dev", "in0"])?;
    Ok((near, far))
}

/// Packets wait in a queueing discipline, even after their connection was reset. The next frontend gets the same ring, whose
/// chains must not be completed meanwhile.
#[test]
fn no_session_begins_while_the_kernel_still_sends_data_of_the_former_one() {
    let (near, far) = match networks() {
        Ok(networks) => networks,
        Err(error) => {
            let name = "no_session_begins_while_the_kernel_still_sends_data_of_the_former_one";
            return skip(name, &format!("no network of its own: {error}"));
        }
    };
    let listener = far.enter(|| TcpListener::bind("10.7.0.2:80").unwrap()).unwrap();
    let rules = ["guest:80=tcp:10.7.0.2:80".to_owned()];
    let served = near.enter(|| Served::with_rules(ConnectionLimits::default(), CID, &rules)).unwrap();
    let (mut frontend, mut guest) = served.guest();
    guest.request(PORTS);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(PORTS)).then_some(()));
    let _peer = listener.accept().unwrap().0;
    // A burst of some packets, then a byte each second.
    let queueing = "tc qdisc add dev out0 root tbf rate 8bit burst 5000 limit 10mb";
    near.run(&queueing.split(' ').collect::<Vec<_>>()).unwrap();
    send_until_full(&mut guest, PORTS, &bytes(4 << 20), PACKET);
    let statistics = served.device.report().statistics;
    assert!(statistics.zero_copy_in_flight > 0, "{statistics:?}");
    assert!(frontend.stop(1).is_err(), "the frontend has a reply although packets are in flight");
    let connect = || {
        let mut frontend = Frontend::connect(&served.path("d"), TIMEOUT)?;
        frontend.negotiate(0, feature::EVENT_IDX, 0).map(|_| frontend)
    };
    assert!(connect().is_err(), "the kernel still reads the guest's memory");
    near.run(&"tc qdisc del dev out0 root".split(' ').collect::<Vec<_>>()).unwrap();
    wait_until("the device to serve again", TIMEOUT, || Ok(connect().ok())).unwrap();
}

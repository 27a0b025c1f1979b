//! Forwarding rules: destinations of a guest's connections, and connections to a guest.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

use towline_frontend::vsock::{PortPair, VsockEvent, VsockGuest};
use towline_vsock::ConnectionLimits;

use common::{CID, Served, TIMEOUT, bytes, poll_until, send_all};

/// `VIRTIO_VSOCK_SHUTDOWN_SEND`.
const SHUT_SEND: u32 = 2;

/// Returns an address of the loopback network that is used by this process only.
fn address(host: u8) -> SocketAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, high, low, host], 5222))
}

fn tcp(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn unix(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn connected(guest: &mut VsockGuest, ports: PortPair) {
    poll_until(guest, |_, event| match event {
        VsockEvent::Connected(found) if found == ports => Some(()),
        VsockEvent::Reset(found) if found == ports => panic!("the connection of {ports:?} was refused"),
        _ => None,
    });
}

fn refused(guest: &mut VsockGuest, ports: PortPair) {
    poll_until(guest, |_, event| match event {
        VsockEvent::Reset(found) if found == ports => Some(()),
        VsockEvent::Connected(found) if found == ports => panic!("{ports:?} was connected"),
        _ => None,
    });
}

/// Accepts the next connection to this port of the guest.
fn accepted(guest: &mut VsockGuest, port: u32) -> PortPair {
    poll_until(guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            assert_eq!(ports.0, port);
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    })
}

/// Receives until the host ends the stream.
fn receive_all(guest: &mut VsockGuest, wanted: PortPair) -> Vec<u8> {
    let mut received = Vec::new();
    poll_until(guest, |guest, event| match event {
        VsockEvent::Data { ports, guest: at, len, .. } if ports == wanted => {
            received.extend(guest.memory().bytes(at, len as usize));
            None
        }
        VsockEvent::Shutdown(ports, flags) if ports == wanted && flags & SHUT_SEND != 0 => Some(()),
        VsockEvent::Reset(ports) if ports == wanted => panic!("reset after {} bytes", received.len()),
        _ => None,
    });
    received
}

/// Sends a lot of data from the guest, its end, and as much back.
fn both_ways<S>(guest: &mut VsockGuest, ports: PortPair, mut stream: S, end: fn(&S))
where
    S: Read + Write + Send + 'static,
{
    let there = bytes(1 << 20);
    let back: Vec<u8> = there.iter().rev().copied().collect();
    let (expected, answer) = (there.clone(), back.clone());
    let host = std::thread::spawn(move || {
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == expected, "{} bytes reached the host", received.len());
        stream.write_all(&answer).unwrap();
        end(&stream);
        stream
    });
    send_all(guest, ports, &there);
    guest.shutdown(ports, SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    let received = receive_all(guest, ports);
    assert!(received == back, "{} bytes reached the guest", received.len());
    drop(host.join().unwrap());
}

fn end_tcp(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

fn end_unix(stream: &UnixStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn a_port_of_the_host_is_forwarded_to_an_address() {
    let (destination, empty) = (address(1), address(2));
    let rules = [format!("guest:80=tcp:{destination}"), format!("guest:81=tcp:{empty}")];
    let served = Served::with_rules(ConnectionLimits::default(), CID, &rules);
    let (_frontend, mut guest) = served.guest();
    let listener = TcpListener::bind(destination).unwrap();
    guest.request((1000, 80));
    connected(&mut guest, (1000, 80));
    both_ways(&mut guest, (1000, 80), tcp(listener.accept().unwrap().0), end_tcp);
    // An address without a listener, and a port without a rule.
    for port in [81, 82] {
        guest.request((1001, port));
        refused(&mut guest, (1001, port));
    }
}

#[test]
fn an_address_of_the_host_is_forwarded_to_a_port() {
    let from = address(3);
    let served = Served::with_rules(ConnectionLimits::default(), CID, &[format!("tcp:{from}=guest:22")]);
    let (_frontend, mut guest) = served.guest();
    let stream = tcp(TcpStream::connect(from).unwrap());
    let ports = accepted(&mut guest, 22);
    both_ways(&mut guest, ports, stream, end_tcp);
    // A guest that refuses the connection.
    let mut stream = tcp(TcpStream::connect(from).unwrap());
    poll_until(&mut guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            guest.reset(ports);
            guest.tx().publish();
            Some(())
        }
        _ => None,
    });
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    assert!(received.is_empty());
}

#[test]
fn unix_sockets_are_forwarded_in_both_directions() {
    let directory = tempfile::TempDir::with_prefix("towline-vsock-").unwrap();
    let path = |name: &str| directory.path().join(name);
    let rules = [
        format!("guest:90=unix:{}", path("out").display()),
        format!("unix:{}=guest:23", path("in").display()),
    ];
    let served = Served::with_rules(ConnectionLimits::default(), CID, &rules);
    let (_frontend, mut guest) = served.guest();
    let listener = UnixListener::bind(path("out")).unwrap();
    guest.request((1000, 90));
    connected(&mut guest, (1000, 90));
    both_ways(&mut guest, (1000, 90), unix(listener.accept().unwrap().0), end_unix);
    // Without CONNECT: its first bytes are data for the guest.
    let stream = unix(UnixStream::connect(path("in")).unwrap());
    let ports = accepted(&mut guest, 23);
    both_ways(&mut guest, ports, stream, end_unix);
}

/// AF_VSOCK of the host, if its loopback transport is loaded.
#[test]
fn af_vsock_of_the_host_is_forwarded_in_both_directions() {
    use std::io::Write as _;
    if !std::path::Path::new("/sys/module/vsock_loopback").exists() {
        let reason = "the kernel module vsock_loopback is not loaded";
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED af_vsock_of_the_host_is_forwarded_in_both_directions: {reason}"
        );
        return;
    }
    // Through the loopback, a connection of one guest leads to a port of another guest.
    let port = 1 << 20 | std::process::id();
    let there = Served::with_rules(ConnectionLimits::default(), 34, &[format!("vsock:{port}=guest:23")]);
    let here = Served::with_rules(ConnectionLimits::default(), CID, &[format!("guest:90=vsock:1:{port}")]);
    let ((_one, mut guest), (_other, mut peer)) = (here.guest(), there.guest());
    guest.request((1000, 90));
    guest.poll(|_, _| ()).unwrap();
    let theirs = accepted(&mut peer, 23);
    peer.poll(|_, _| ()).unwrap();
    connected(&mut guest, (1000, 90));
    send_all(&mut guest, (1000, 90), b"by the loopback");
    guest.shutdown((1000, 90), SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(receive_all(&mut peer, theirs), b"by the loopback");
}

/// Guests of two processes: one guest's device sends CONNECT to the other's.
#[test]
fn a_guest_of_another_process_is_reached_through_its_devices_socket() {
    let there = Served::with_rules(ConnectionLimits::default(), 34, &[]);
    let rule = format!("cid:34=uds:{}", there.path("v").display());
    let here = Served::with_rules(ConnectionLimits::default(), CID, &[rule]);
    let ((_one, mut guest), (_other, mut peer)) = (here.guest(), there.guest());
    let ports = (1000, 7);
    guest.request_of(34, ports);
    guest.poll(|_, _| ()).unwrap();
    let theirs = accepted(&mut peer, 7);
    peer.poll(|_, _| ()).unwrap();
    connected(&mut guest, ports);
    let content = bytes(200_000);
    let expected = content.clone();
    let reader = std::thread::spawn(move || {
        let received = receive_all(&mut peer, theirs);
        assert!(received == expected, "{} bytes reached the other guest", received.len());
        send_all(&mut peer, theirs, b"got all of it");
        peer.shutdown(theirs, SHUT_SEND);
        peer.poll(|_, _| ()).unwrap();
        peer
    });
    send_all(&mut guest, ports, &content);
    guest.shutdown(ports, SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(receive_all(&mut guest, ports), b"got all of it");
    drop(reader.join().unwrap());
    // A guest without a rule.
    guest.request_of(35, (1001, 7));
    refused(&mut guest, (1001, 7));
}

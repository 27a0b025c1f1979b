//! Rules: where a guest's connections lead, and what leads to a guest.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};

use towline_frontend::vsock::{Event, Guest, Ports};
use towline_vsock::Limits;

use common::{CID, Served, WITHIN, bytes, send_all, until};

/// The guest's `SHUTDOWN` of what it sends.
const SHUT_SEND: u32 = 2;

/// An address of the loopback network that nobody else uses: by process, and by `host`.
fn address(host: u8) -> SocketAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, high, low, host], 5222))
}

fn tcp(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    stream
}

fn unix(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    stream
}

fn connected(guest: &mut Guest, ports: Ports) {
    until(guest, |_, event| match event {
        Event::Connected(found) if found == ports => Some(()),
        Event::Reset(found) if found == ports => panic!("the connection of {ports:?} was refused"),
        _ => None,
    });
}

fn refused(guest: &mut Guest, ports: Ports) {
    until(guest, |_, event| match event {
        Event::Reset(found) if found == ports => Some(()),
        Event::Connected(found) if found == ports => panic!("{ports:?} was connected"),
        _ => None,
    });
}

/// Whoever asks for this port of the guest's.
fn accepted(guest: &mut Guest, port: u32) -> Ports {
    until(guest, |guest, event| match event {
        Event::Request(ports) => {
            assert_eq!(ports.0, port);
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    })
}

/// All that comes until the host ends it.
fn hear_all(guest: &mut Guest, wanted: Ports) -> Vec<u8> {
    let mut heard = Vec::new();
    until(guest, |guest, event| match event {
        Event::Data { ports, guest: at, len, .. } if ports == wanted => {
            heard.extend(guest.memory().bytes(at, len as usize));
            None
        }
        Event::Shutdown(ports, flags) if ports == wanted && flags & SHUT_SEND != 0 => Some(()),
        Event::Reset(ports) if ports == wanted => panic!("reset after {} bytes", heard.len()),
        _ => None,
    });
    heard
}

/// Much from the guest, its end, and much back.
fn both_ways<S>(guest: &mut Guest, ports: Ports, mut stream: S, end: fn(&S))
where
    S: Read + Write + Send + 'static,
{
    let there = bytes(1 << 20);
    let back: Vec<u8> = there.iter().rev().copied().collect();
    let (expected, answer) = (there.clone(), back.clone());
    let host = std::thread::spawn(move || {
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        assert!(heard == expected, "{} bytes reached the host", heard.len());
        stream.write_all(&answer).unwrap();
        end(&stream);
        stream
    });
    send_all(guest, ports, &there);
    guest.shutdown(ports, SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    let heard = hear_all(guest, ports);
    assert!(heard == back, "{} bytes reached the guest", heard.len());
    drop(host.join().unwrap());
}

fn end_tcp(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

fn end_unix(stream: &UnixStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn a_port_of_the_host_is_an_address() {
    let (place, empty) = (address(1), address(2));
    let rules = [format!("guest:80=tcp:{place}"), format!("guest:81=tcp:{empty}")];
    let served = Served::with(Limits::default(), CID, &rules);
    let (_frontend, mut guest) = served.guest();
    let listener = TcpListener::bind(place).unwrap();
    guest.request((1000, 80));
    connected(&mut guest, (1000, 80));
    both_ways(&mut guest, (1000, 80), tcp(listener.accept().unwrap().0), end_tcp);
    // Nobody listens, and no rule.
    for port in [81, 82] {
        guest.request((1001, port));
        refused(&mut guest, (1001, port));
    }
}

#[test]
fn an_address_of_the_host_is_a_port() {
    let place = address(3);
    let served = Served::with(Limits::default(), CID, &[format!("tcp:{place}=guest:22")]);
    let (_frontend, mut guest) = served.guest();
    let stream = tcp(TcpStream::connect(place).unwrap());
    let ports = accepted(&mut guest, 22);
    both_ways(&mut guest, ports, stream, end_tcp);
    // A guest that does not want it.
    let mut stream = tcp(TcpStream::connect(place).unwrap());
    until(&mut guest, |guest, event| match event {
        Event::Request(ports) => {
            guest.reset(ports);
            guest.tx().publish();
            Some(())
        }
        _ => None,
    });
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    assert!(heard.is_empty());
}

#[test]
fn paths_are_ports_too() {
    let directory = tempfile::TempDir::with_prefix("towline-vsock-").unwrap();
    let path = |name: &str| directory.path().join(name);
    let rules = [
        format!("guest:90=unix:{}", path("out").display()),
        format!("unix:{}=guest:23", path("in").display()),
    ];
    let served = Served::with(Limits::default(), CID, &rules);
    let (_frontend, mut guest) = served.guest();
    let listener = UnixListener::bind(path("out")).unwrap();
    guest.request((1000, 90));
    connected(&mut guest, (1000, 90));
    both_ways(&mut guest, (1000, 90), unix(listener.accept().unwrap().0), end_unix);
    // Without a CONNECT: its first bytes are the guest's.
    let stream = unix(UnixStream::connect(path("in")).unwrap());
    let ports = accepted(&mut guest, 23);
    both_ways(&mut guest, ports, stream, end_unix);
}

/// The host's own vsock, if it can be had without leaving this machine.
#[test]
fn the_hosts_own_vsock_is_a_place() {
    use std::io::Write as _;
    if !std::path::Path::new("/sys/module/vsock_loopback").exists() {
        let reason = "this kernel has no vsock_loopback";
        let _ = writeln!(std::io::stderr(), "SKIPPED the_hosts_own_vsock_is_a_place: {reason}");
        return;
    }
    // By its loopback: what one guest's connection leads to is another guest's port.
    let port = 1 << 20 | std::process::id();
    let there = Served::with(Limits::default(), 34, &[format!("vsock:{port}=guest:23")]);
    let here = Served::with(Limits::default(), CID, &[format!("guest:90=vsock:1:{port}")]);
    let ((_one, mut guest), (_other, mut peer)) = (here.guest(), there.guest());
    guest.request((1000, 90));
    guest.poll(|_, _| ()).unwrap();
    let theirs = accepted(&mut peer, 23);
    peer.poll(|_, _| ()).unwrap();
    connected(&mut guest, (1000, 90));
    send_all(&mut guest, (1000, 90), b"by the loopback");
    guest.shutdown((1000, 90), SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(hear_all(&mut peer, theirs), b"by the loopback");
}

/// Guests of two processes: the one's device says CONNECT to the other's.
#[test]
fn a_guest_elsewhere_is_reached_by_its_socket() {
    let there = Served::with(Limits::default(), 34, &[]);
    let rule = format!("cid:34=uds:{}", there.path("v").display());
    let here = Served::with(Limits::default(), CID, &[rule]);
    let ((_one, mut guest), (_other, mut peer)) = (here.guest(), there.guest());
    let ports = (1000, 7);
    guest.request_of(34, ports);
    guest.poll(|_, _| ()).unwrap();
    let theirs = accepted(&mut peer, 7);
    peer.poll(|_, _| ()).unwrap();
    connected(&mut guest, ports);
    let content = bytes(200_000);
    let expected = content.clone();
    let listening = std::thread::spawn(move || {
        let heard = hear_all(&mut peer, theirs);
        assert!(heard == expected, "{} bytes reached the other guest", heard.len());
        send_all(&mut peer, theirs, b"heard all");
        peer.shutdown(theirs, SHUT_SEND);
        peer.poll(|_, _| ()).unwrap();
        peer
    });
    send_all(&mut guest, ports, &content);
    guest.shutdown(ports, SHUT_SEND);
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(hear_all(&mut guest, ports), b"heard all");
    drop(listening.join().unwrap());
    // One for whom there is no rule.
    guest.request_of(35, (1001, 7));
    refused(&mut guest, (1001, 7));
}

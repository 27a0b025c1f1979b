//! Large packets that go to TCP without a copy: the kernel reads them in the guest's memory, so they may come back only when
//! the other end has them. On the loopback that is as on a network card for all that the kernel has not transmitted yet.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt;
use towline_frontend::Frontend;
use towline_frontend::vsock::{Event, Guest};
use towline_frontend::wire::{Code, RegionInfo, words};
use towline_vsock::{Limits, Statistics};

use common::{CID, Served, WITHIN, bytes, send_all, until};

const PORTS: (u32, u32) = (1080, 80);
/// A packet that is worth being lent.
const PACKET: usize = 60_000;

/// A guest with a connection to TCP whose peer takes little.
struct Lender {
    served: Served,
    frontend: Frontend,
    guest: Guest,
    peer: TcpStream,
}

impl Lender {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
        let rule = format!("guest:80=tcp:{}", listener.local_addr().unwrap());
        let served = Served::with(Limits::default(), CID, &[rule]);
        let (frontend, mut guest) = served.guest();
        guest.request(PORTS);
        until(&mut guest, |_, event| (event == Event::Connected(PORTS)).then_some(()));
        let peer = listener.accept().unwrap().0;
        peer.set_read_timeout(Some(WITHIN)).unwrap();
        Self { served, frontend, guest, peer }
    }

    /// One with as much under way as the device takes for a peer that reads nothing; what was to be sent, and how much
    /// of it was.
    fn full() -> (Self, Vec<u8>, usize) {
        let (mut lender, content) = (Self::new(), bytes(32 << 20));
        let sent = lender.fill(&content);
        let statistics = lender.statistics();
        assert!(sent < content.len() && statistics.totals.bytes_zero_copy > 0, "{sent}: {statistics:?}");
        assert!(statistics.zero_copy_in_flight > 0, "{statistics:?}");
        (lender, content, sent)
    }

    fn statistics(&self) -> Statistics {
        self.served.device.report().statistics
    }

    /// Sends until the device takes no more, or all of this. Returns how much it took.
    fn fill(&mut self, content: &[u8]) -> usize {
        let (mut sent, mut idle) = (0, 0);
        while sent < content.len() && idle < 20 {
            let piece = &content[sent..(sent + PACKET).min(content.len())];
            if self.guest.has_room()
                && self.guest.credit(PORTS) as usize >= piece.len()
                && self.guest.send(PORTS, piece, 0)
            {
                (sent, idle) = (sent + piece.len(), 0);
            } else {
                idle += 1;
                self.guest.wait(false, Duration::from_millis(10)).unwrap();
            }
            self.guest.poll(|_, _| ()).unwrap();
        }
        sent
    }

    /// Until nothing of the guest's is with the device.
    fn wait_for_all(&mut self) {
        let deadline = Instant::now() + WITHIN;
        while self.guest.tx().in_flight() > 0 {
            assert!(Instant::now() < deadline, "{:?}", self.statistics());
            self.guest.poll(|_, _| ()).unwrap();
            self.guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
}

#[test]
fn packets_come_back_when_the_peer_has_them() {
    let (mut lender, content, sent) = Lender::full();
    let statistics = lender.statistics();
    assert!(u64::from(lender.guest.tx().in_flight()) >= statistics.zero_copy_in_flight);
    let mut peer = lender.peer.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut heard = Vec::new();
        peer.read_to_end(&mut heard).unwrap();
        heard
    });
    // The guest writes into each buffer again as soon as it has it back.
    send_all(&mut lender.guest, PORTS, &content[sent..]);
    lender.wait_for_all();
    lender.guest.shutdown(PORTS, 3);
    lender.guest.poll(|_, _| ()).unwrap();
    assert!(reader.join().unwrap() == content, "other bytes came");
    let statistics = lender.statistics();
    assert_eq!((statistics.zero_copy_in_flight, statistics.zero_copy_resets), (0, 0));
    assert!(statistics.totals.bytes_zero_copy > 1 << 20, "{statistics:?}");
}

#[test]
fn what_is_lent_when_a_connection_ends_is_delivered() {
    let (mut lender, content, sent) = Lender::full();
    lender.guest.shutdown(PORTS, 3);
    lender.guest.poll(|_, _| ()).unwrap();
    let mut heard = Vec::new();
    lender.peer.read_to_end(&mut heard).unwrap();
    assert!(heard == content[..sent], "{} of {sent} bytes", heard.len());
    lender.wait_for_all();
    assert_eq!(lender.statistics().zero_copy_resets, 0);
}

#[test]
fn a_guest_that_resets_a_connection_gets_everything_back_at_once() {
    let (mut lender, ..) = Lender::full();
    lender.guest.reset(PORTS);
    lender.wait_for_all();
    assert_eq!(lender.statistics().zero_copy_in_flight, 0);
    // What was on the way already is there, then comes the reset.
    let error = lender.peer.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// The guest may write to its memory when the ring has stopped, and whoever has not acknowledged what is there until then
/// must not get what comes instead.
#[test]
fn a_ring_that_stops_takes_everything_back() {
    let (mut lender, content, sent) = Lender::full();
    lender.frontend.stop(1).unwrap();
    lender.guest.poll(|_, _| ()).unwrap();
    assert_eq!(lender.guest.tx().in_flight(), 0);
    let statistics = lender.statistics();
    assert_eq!((statistics.zero_copy_in_flight, statistics.zero_copy_resets), (0, 1), "{statistics:?}");
    let mut heard = Vec::new();
    let error = lender.peer.read_to_end(&mut heard).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(heard.len() < sent && heard == content[..heard.len()]);
}

/// How many mappings of a memfd with this name the process has.
fn mapped(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("memfd:{name} "))).count()
}

/// A region that the guest gave up is the host's again, whatever a peer does that acknowledges nothing.
#[test]
fn memory_that_is_taken_away_is_unmapped_while_packets_are_lent() {
    let other = memfd_create("plugged", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 1 << 20).unwrap();
    let region = RegionInfo { guest: 0x1_0000_0000, size: 1 << 20, user: 0x1000_0000, offset: 0 };
    let payload = [words(&[0]), region.encode()].concat();
    let mut lender = Lender::new();
    lender.frontend.request(Code::ADD_MEM_REG, &payload, &[other.as_fd()]).unwrap();
    let content = bytes(32 << 20);
    let sent = lender.fill(&content);
    let lent = lender.statistics().zero_copy_in_flight;
    assert!(sent < content.len() && lent > 0, "{lent} are lent");
    assert_eq!(mapped("plugged"), 1);
    lender.frontend.request(Code::REM_MEM_REG, &payload, &[]).unwrap();
    assert_eq!(mapped("plugged"), 0, "{lent} packets that are lent keep it mapped");
    assert_eq!(lender.statistics().zero_copy_in_flight, lent, "the peer has nothing of them yet");
    // The connection goes on, and what is lent comes back.
    let mut peer = lender.peer.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut heard = Vec::new();
        peer.read_to_end(&mut heard).unwrap();
        heard
    });
    send_all(&mut lender.guest, PORTS, &content[sent..]);
    lender.wait_for_all();
    lender.guest.shutdown(PORTS, 3);
    lender.guest.poll(|_, _| ()).unwrap();
    assert!(reader.join().unwrap() == content, "other bytes came");
}

#[test]
fn a_ring_that_stops_waits_for_a_peer_that_reads() {
    let (mut lender, content, sent) = Lender::full();
    let mut peer = lender.peer.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut heard = Vec::new();
        peer.read_to_end(&mut heard).unwrap();
        heard
    });
    let base = lender.frontend.stop(1).unwrap();
    assert_eq!(lender.statistics().zero_copy_resets, 0);
    lender.guest.poll(|_, _| ()).unwrap();
    lender.frontend.start(lender.guest.tx(), base).unwrap();
    lender.guest.shutdown(PORTS, 3);
    lender.guest.poll(|_, _| ()).unwrap();
    assert!(reader.join().unwrap() == content[..sent]);
}

//! What another backend does wrong (returns buffers it never wrote, forgets ends, tells credit all the time), and hosts
//! that are slow.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use towline_frontend::Frontend;
use towline_frontend::vsock::{Event, Guest};
use towline_frontend::wire::{feature, protocol};
use towline_vsock::Limits;

use common::{Served, WITHIN, bytes, reach, send_all, until};

const SHUT_ALL: u32 = 3;
const SHUT_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_F_SEQPACKET`.
const SEQPACKET: u64 = 1 << 1;

/// Connections come and go with packets under way. The driver fails at a used entry that is not a packet for it.
#[test]
fn only_packets_come_back_in_receive_buffers() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let mut rng = fastrand::Rng::with_seed(5);
    let mut streams = Vec::new();
    let (mut asked, mut ended) = (0, 0);
    let deadline = Instant::now() + WITHIN;
    while ended < 400 {
        if streams.len() < 64 {
            streams.push(served.connect(22));
            asked += 1;
        }
        let index = rng.usize(..streams.len());
        // It may have been closed by the guest.
        let _ = streams[index].write_all(&[1; 3000]);
        if rng.bool() {
            drop(streams.swap_remove(index));
        }
        guest
            .poll(|guest, event| match event {
                Event::Request(ports) => guest.accept(ports),
                Event::Data { ports, len, .. } if rng.u8(..) < 64 => {
                    guest.send_any(ports, len);
                    guest.reset(ports);
                    ended += 1;
                }
                Event::Shutdown(ports, _) => {
                    guest.reset(ports);
                    ended += 1;
                }
                Event::Reset(_) => ended += 1,
                _ => {}
            })
            .unwrap();
        assert!(Instant::now() < deadline, "{asked} connections were asked for, {ended} ended");
    }
    assert_eq!(served.device.report().statistics.table.violations, 0);
}

/// The guest says that it is through while much is left for a host that does not read yet.
#[test]
fn an_end_with_bytes_left_is_confirmed_when_they_are_taken() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    let content = bytes(300_000);
    send_all(&mut guest, ports, &content);
    guest.shutdown(ports, SHUT_ALL);
    guest.poll(|_, event| assert!(!matches!(event, Event::Reset(_)), "reset before all was read")).unwrap();
    let reading = std::thread::spawn(move || {
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        heard
    });
    until(&mut guest, |_, event| (event == Event::Reset(ports)).then_some(()));
    assert!(reading.join().unwrap() == content);
}

/// A host side that goes is told to the guest that still sends to it.
#[test]
fn a_host_that_goes_is_told() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, stream) = reach(&served, &mut guest, 5000);
    assert!(guest.send(ports, &[1; 1000], 0));
    guest.poll(|_, _| ()).unwrap();
    drop(stream);
    until(&mut guest, |_, event| match event {
        Event::Shutdown(found, flags) if found == ports => {
            assert!(flags & SHUT_RECEIVE != 0, "it sends into nothing and is not told");
            Some(())
        }
        Event::Reset(found) if found == ports => Some(()),
        _ => None,
    });
}

#[test]
fn windows_grow_and_credit_is_told_rarely() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    assert!(guest.credit(ports) > 64 << 10, "{} bytes of credit at first", guest.credit(ports));
    let content = bytes(16 << 20);
    let expected = content.clone();
    let reading = std::thread::spawn(move || {
        let mut heard = vec![0; expected.len()];
        stream.read_exact(&mut heard).unwrap();
        assert!(heard == expected);
        stream
    });
    send_all(&mut guest, ports, &content);
    drop(reading.join().unwrap());
    let table = served.device.report().statistics.table;
    // The driver's own buffer is 256 KiB, of which a quarter is the least that is told.
    let most = content.len() as u64 / (64 << 10);
    assert!((1..=most).contains(&table.credit_updates_sent), "{table:?}");
}

#[test]
fn what_drivers_like_is_offered() {
    let served = Served::new(Limits::default());
    let mut frontend = Frontend::connect(&served.path("d"), WITHIN).unwrap();
    let wished = feature::INDIRECT | feature::EVENT_IDX | SEQPACKET;
    let agreed = frontend.negotiate(wished, 0, protocol::REPLY_ACK).unwrap();
    assert_eq!(agreed.features & wished, wished);
}

/// One host side takes a byte at a time and one takes nothing at all, while a third is served.
#[test]
fn slow_readers_lose_nothing_and_hold_up_nobody() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let (slow, mut slow_stream) = reach(&served, &mut guest, 5000);
    let (never, never_stream) = reach(&served, &mut guest, 5001);
    let (quick, mut quick_stream) = reach(&served, &mut guest, 5002);
    let content = bytes(4 << 20);
    let sent = [stuff(&mut guest, slow, &content), stuff(&mut guest, never, &content)];
    assert!(sent.iter().all(|sent| (1..content.len()).contains(sent)), "{sent:?}");
    let expected = content.clone();
    let reading = std::thread::spawn(move || {
        let mut heard = vec![0; expected.len()];
        quick_stream.read_exact(&mut heard).unwrap();
        assert!(heard == expected);
        quick_stream
    });
    let mut heard = vec![0; 1000];
    for byte in &mut heard {
        slow_stream.read_exact(std::slice::from_mut(byte)).unwrap();
    }
    send_all(&mut guest, quick, &content);
    drop(reading.join().unwrap());
    // And then it reads on.
    guest.shutdown(slow, SHUT_ALL);
    guest.poll(|_, _| ()).unwrap();
    let rest = std::thread::spawn(move || {
        let mut rest = Vec::new();
        slow_stream.read_to_end(&mut rest).unwrap();
        rest
    });
    until(&mut guest, |_, event| (event == Event::Reset(slow)).then_some(()));
    heard.extend(rest.join().unwrap());
    assert!(heard == content[..sent[0]], "{} of {} bytes", heard.len(), sent[0]);
    let report = served.device.report();
    assert!(
        report.buffered_bytes <= 1 << 20,
        "{} bytes are kept for one that reads nothing",
        report.buffered_bytes
    );
    let _ = never_stream.shutdown(Shutdown::Both);
}

/// Sends until no more is taken for a while; how much was.
fn stuff(guest: &mut Guest, ports: (u32, u32), content: &[u8]) -> usize {
    let (mut sent, mut idle) = (0, 0);
    while idle < 20 {
        let piece = &content[sent..(sent + 20_000).min(content.len())];
        if guest.has_room() && guest.send(ports, piece, 0) {
            (sent, idle) = (sent + piece.len(), 0);
        } else {
            idle += 1;
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
        guest.poll(|_, _| ()).unwrap();
    }
    sent
}

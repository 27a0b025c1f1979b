//! Conformance to the specification where other backends fail (unwritten buffers that are used, lost ends of
//! streams, needless credit updates), and slow hosts.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::time::Instant;

use towline_frontend::Frontend;
use towline_frontend::vsock::VsockEvent;
use towline_frontend::wire::{feature, protocol};
use towline_vsock::ConnectionLimits;

use common::{Served, TIMEOUT, bytes, connect_guest, poll_until, read_to_end, send_all, send_until_full};

const SHUT_ALL: u32 = 3;
const SHUT_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_F_SEQPACKET`.
const SEQPACKET: u64 = 1 << 1;

/// Connections come and go with packets in transit. The driver fails at a used buffer that has no packet for
/// it.
#[test]
fn used_receive_buffers_have_packets_for_the_guest() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let mut rng = fastrand::Rng::with_seed(5);
    let mut streams = Vec::new();
    let (mut requested, mut ended) = (0, 0);
    let deadline = Instant::now() + TIMEOUT;
    while ended < 400 {
        if streams.len() < 64 {
            streams.push(served.connect(22));
            requested += 1;
        }
        let index = rng.usize(..streams.len());
        // It may have been closed by the guest.
        let _ = streams[index].write_all(&[1; 3000]);
        if rng.bool() {
            drop(streams.swap_remove(index));
        }
        guest
            .poll(|guest, event| match event {
                VsockEvent::Request(ports) => guest.accept(ports),
                VsockEvent::Data { ports, len, .. } if rng.u8(..) < 64 => {
                    guest.send_any(ports, len);
                    guest.reset(ports);
                    ended += 1;
                }
                VsockEvent::Shutdown(ports, _) => {
                    guest.reset(ports);
                    ended += 1;
                }
                VsockEvent::Reset(_) => ended += 1,
                _ => {}
            })
            .unwrap();
        assert!(Instant::now() < deadline, "{requested} connections were requested, {ended} have ended");
    }
    assert_eq!(served.device.report().statistics.table.violations, 0);
}

/// The guest shuts down both directions while much data is buffered for a host that does not read yet.
#[test]
fn a_shutdown_is_confirmed_when_all_data_was_forwarded() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, stream) = connect_guest(&served, &mut guest, 5000);
    let content = bytes(300_000);
    send_all(&mut guest, ports, &content);
    guest.shutdown(ports, SHUT_ALL);
    guest
        .poll(|_, event| assert!(!matches!(event, VsockEvent::Reset(_)), "reset before all was read"))
        .unwrap();
    let reader = read_to_end(stream);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Reset(ports)).then_some(()));
    assert!(reader.join().unwrap() == content);
}

#[test]
fn a_guest_that_still_sends_is_notified_when_the_host_closes() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, stream) = connect_guest(&served, &mut guest, 5000);
    assert!(guest.send(ports, &[1; 1000], 0));
    guest.poll(|_, _| ()).unwrap();
    drop(stream);
    poll_until(&mut guest, |_, event| match event {
        VsockEvent::Shutdown(found, flags) if found == ports => {
            assert!(flags & SHUT_RECEIVE != 0, "the guest is not notified that its data is discarded");
            Some(())
        }
        VsockEvent::Reset(found) if found == ports => Some(()),
        _ => None,
    });
}

#[test]
fn windows_grow_and_credit_updates_are_rare() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, mut stream) = connect_guest(&served, &mut guest, 5000);
    assert!(guest.credit(ports) > 64 << 10, "{} bytes of credit at first", guest.credit(ports));
    let content = bytes(16 << 20);
    let expected = content.clone();
    let reading = std::thread::spawn(move || {
        let mut received = vec![0; expected.len()];
        stream.read_exact(&mut received).unwrap();
        assert!(received == expected);
        stream
    });
    send_all(&mut guest, ports, &content);
    drop(reading.join().unwrap());
    let table = served.device.report().statistics.table;
    // The driver's own buffer is 256 KiB, and an update is sent for a quarter of it at least.
    let most = content.len() as u64 / (64 << 10);
    assert!((1..=most).contains(&table.credit_updates_sent), "{table:?}");
}

#[test]
fn features_that_drivers_use_are_offered() {
    let served = Served::new(ConnectionLimits::default());
    let mut frontend = Frontend::connect(&served.path("d"), TIMEOUT).unwrap();
    let wanted = feature::INDIRECT | feature::EVENT_IDX | SEQPACKET;
    let agreed = frontend.negotiate(wanted, 0, protocol::REPLY_ACK).unwrap();
    assert_eq!(agreed.features & wanted, wanted);
}

/// One program reads a byte at a time and one reads nothing, while a third one reads everything.
#[test]
fn slow_readers_lose_nothing_and_do_not_delay_others() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let (slow, mut slow_stream) = connect_guest(&served, &mut guest, 5000);
    let (never, never_stream) = connect_guest(&served, &mut guest, 5001);
    let (quick, mut quick_stream) = connect_guest(&served, &mut guest, 5002);
    let content = bytes(4 << 20);
    let sent = [slow, never].map(|ports| send_until_full(&mut guest, ports, &content, 20_000));
    assert!(sent.iter().all(|sent| (1..content.len()).contains(sent)), "{sent:?}");
    let expected = content.clone();
    let reading = std::thread::spawn(move || {
        let mut received = vec![0; expected.len()];
        quick_stream.read_exact(&mut received).unwrap();
        assert!(received == expected);
        quick_stream
    });
    let mut received = vec![0; 1000];
    for byte in &mut received {
        slow_stream.read_exact(std::slice::from_mut(byte)).unwrap();
    }
    send_all(&mut guest, quick, &content);
    drop(reading.join().unwrap());
    // Then the slow one reads the rest.
    guest.shutdown(slow, SHUT_ALL);
    guest.poll(|_, _| ()).unwrap();
    let rest = read_to_end(slow_stream);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Reset(slow)).then_some(()));
    received.extend(rest.join().unwrap());
    assert!(received == content[..sent[0]], "{} of {} bytes", received.len(), sent[0]);
    let report = served.device.report();
    assert!(
        report.buffered_bytes <= 1 << 20,
        "{} bytes are buffered for one that reads nothing",
        report.buffered_bytes
    );
    let _ = never_stream.shutdown(Shutdown::Both);
}

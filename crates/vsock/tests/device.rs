//! The entire device, with a driver over shared memory in place of a guest, and real sockets.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read, Write as _};
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt;
use towline_frontend::vsock::{Options, PortPair, VsockEvent, VsockGuest};
use towline_frontend::wire::{RegionInfo, RequestCode, encode_u64s, feature};
use towline_frontend::{Frontend, MemoryArena, Queue, QueueBuffer, QueueOptions, wait_any};
use towline_vhost_user::Device as _;
use towline_vsock::{ConnectionLimits, LocalGuests, Settings, Vsock};

use common::{CID, DEVICE_STATE, Served, TIMEOUT, bytes, connect_guest, poll_until, send_until_full};

/// Sends as much as the device accepts for a socket that is not read, so it retains packets. Returns the
/// number of bytes sent.
fn fill(guest: &mut VsockGuest, ports: PortPair, content: &[u8]) -> usize {
    let sent = send_until_full(guest, ports, content, 20_000);
    assert!(sent > 200_000 && sent < content.len(), "{sent}");
    assert!(guest.tx().in_flight() > 0, "no chain is retained");
    sent
}

/// Stops and starts the transmit ring while a peer reads nothing, ends the connection, and reads.
fn assert_kept_by_a_stop(
    (mut frontend, mut guest): (Frontend, VsockGuest),
    ports: PortPair,
    mut stream: impl Read,
) {
    let content = bytes(32 << 20);
    let sent = fill(&mut guest, ports, &content);
    let base = frontend.stop(1).unwrap();
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(guest.tx().in_flight(), 0);
    frontend.start(guest.tx(), base).unwrap();
    guest.shutdown(ports, 2);
    guest.poll(|_, _| ()).unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == content[..sent], "{} of {sent} bytes", received.len());
}

#[test]
fn packets_that_are_retained_when_a_ring_stops_are_not_lost() {
    let served = Served::new(ConnectionLimits::default());
    let (frontend, mut guest) = served.guest();
    let (ports, stream) = connect_guest(&served, &mut guest, 5000);
    assert_kept_by_a_stop((frontend, guest), ports, stream);
}

#[test]
fn a_ring_that_stops_keeps_a_tcp_connection_whose_peer_reads_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
    let rule = format!("guest:80=tcp:{}", listener.local_addr().unwrap());
    let served = Served::with_rules(ConnectionLimits::default(), CID, &[rule]);
    let (frontend, mut guest) = served.guest();
    let ports = (1080, 80);
    guest.request(ports);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
    let stream = listener.accept().unwrap().0;
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert_kept_by_a_stop((frontend, guest), ports, stream);
}

/// Returns the number of mappings of a memfd with this name.
fn mapped(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&format!("memfd:{name} "))).count()
}

/// A region that was unplugged is unmapped, even if a peer reads nothing.
#[test]
fn unplugged_memory_is_unmapped_while_packets_are_retained() {
    let other = memfd_create("plugged", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 1 << 20).unwrap();
    let region =
        RegionInfo { guest_address: 0x1_0000_0000, size: 1 << 20, user_address: 0x1000_0000, mmap_offset: 0 };
    let payload = [encode_u64s(&[0]), region.encode()].concat();
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest) = served.guest();
    let (ports, mut stream) = connect_guest(&served, &mut guest, 5000);
    frontend.request(RequestCode::ADD_MEM_REG, &payload, &[other.as_fd()]).unwrap();
    let content = bytes(8 << 20);
    let sent = fill(&mut guest, ports, &content);
    assert_eq!(mapped("plugged"), 1);
    frontend.request(RequestCode::REM_MEM_REG, &payload, &[]).unwrap();
    assert_eq!(mapped("plugged"), 0, "packets that are retained keep it mapped");
    guest.shutdown(ports, 3);
    guest.poll(|_, _| ()).unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == content[..sent], "{} of {sent} bytes", received.len());
}

/// A program shuts down its sending side and closes later: the guest is notified of both without sending.
#[test]
fn both_steps_of_an_end_are_reported_to_the_guest() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, stream) = connect_guest(&served, &mut guest, 5000);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let shut =
        |event| if let VsockEvent::Shutdown(found, flags) = event { Some((found, flags)) } else { None };
    assert_eq!(poll_until(&mut guest, |_, event| shut(event)), (ports, 2));
    drop(stream);
    assert_eq!(poll_until(&mut guest, |_, event| shut(event)), (ports, 3));
}

/// While the device busy-polls, the end of a connection alone is published without an interrupt. The guest
/// gets one nevertheless, when the next packet is sent or the device polls no more.
#[test]
fn a_guest_is_interrupted_for_the_end_of_a_connection_after_requests() {
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    for _ in 0..50 {
        let mut client = served.connect(22);
        let ports = poll_until(&mut guest, |guest, event| match event {
            VsockEvent::Request(ports) => {
                guest.accept(ports);
                Some(ports)
            }
            _ => None,
        });
        // Traffic that changes its direction has the device poll.
        let mut reply = [0; 1];
        while reply != *b"\n" {
            client.read_exact(&mut reply).unwrap();
        }
        for _ in 0..4 {
            client.write_all(b"request").unwrap();
            let len = poll_until(&mut guest, |_, event| match event {
                VsockEvent::Data { len, .. } => Some(len),
                _ => None,
            });
            assert!(guest.send_any(ports, len));
            guest.poll(|_, _| ()).unwrap();
            client.read_exact(&mut [0; 7]).unwrap();
        }
        drop(client);
        let deadline = Instant::now() + TIMEOUT;
        let mut ended = false;
        while !ended {
            assert!(guest.wait(false, TIMEOUT).unwrap() && Instant::now() < deadline, "no interrupt");
            guest.poll(|_, event| ended |= matches!(event, VsockEvent::Shutdown(_, 3))).unwrap();
        }
        guest.reset(ports);
        guest.poll(|_, _| ()).unwrap();
    }
}

/// Data is read into several batches of buffers, and the guest is interrupted when no more follows at once.
#[test]
fn a_guest_is_interrupted_once_for_the_data_of_a_pass() {
    let served = Served::new(ConnectionLimits::default());
    // Without the event index each notification is counted, whether or not the driver has processed the last
    // one.
    let (_frontend, mut guest) = served.guest_with_features(128, 0);
    let content = bytes(100_000);
    let mut client = served.connect(22);
    client.write_all(&content).unwrap();
    let ports = poll_until(&mut guest, |_, event| match event {
        VsockEvent::Request(ports) => Some(ports),
        _ => None,
    });
    guest.rx().enable_callback(1);
    guest.rx().drain_call();
    guest.accept(ports);
    let (mut received, deadline) = (0, Instant::now() + TIMEOUT);
    while received < content.len() {
        let mut add = |event| {
            if let VsockEvent::Data { len, .. } = event {
                received += len as usize;
            }
        };
        guest.poll(|_, event| add(event)).unwrap();
        assert!(Instant::now() < deadline, "{received} bytes");
    }
    let interrupts = guest.rx().call_fd();
    assert!(wait_any(&[interrupts], TIMEOUT).unwrap(), "no interrupt");
    let mut count = [0; 8];
    rustix::io::read(interrupts, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
}

#[test]
fn a_new_driver_has_no_connections() {
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest) = served.guest();
    let (_, mut stream) = connect_guest(&served, &mut guest, 5000);
    frontend.stop(0).unwrap();
    frontend.stop(1).unwrap();
    let options = Options {
        cid: CID,
        size: 64,
        receive_bytes: 4096,
        features: frontend.negotiated().features,
        takes_at_once: true,
    };
    let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
    let mut received = Vec::new();
    // It may end with a reset.
    let _ = stream.read_to_end(&mut received);
    assert!(received.is_empty());
    std::fs::remove_file(served.path("v_5000")).unwrap();
    let (ports, mut stream) = connect_guest(&served, &mut guest, 5000);
    assert!(guest.send(ports, b"again", 0));
    guest.poll(|_, _| ()).unwrap();
    let mut received = [0; 5];
    stream.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"again");
}

#[test]
fn clients_that_come_before_the_guest_are_connected_to_it() {
    let served = Served::new(ConnectionLimits::default());
    let before_the_frontend = served.connect(22);
    let mut frontend = Frontend::connect(&served.path("d"), TIMEOUT).unwrap();
    let features = frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap().features;
    let before_the_driver = served.connect(22);
    let deadline = Instant::now() + TIMEOUT;
    while served.device.report().connections.len() < 2 {
        assert!(Instant::now() < deadline, "the device has not accepted both clients");
    }
    let options = Options { cid: CID, size: 64, receive_bytes: 4096, features, takes_at_once: true };
    let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
    let mut accepted = 0;
    poll_until(&mut guest, |guest, event| {
        if let VsockEvent::Request(ports) = event {
            guest.accept(ports);
            accepted += 1;
        }
        (accepted == 2).then_some(())
    });
    guest.poll(|_, _| ()).unwrap();
    for mut client in [before_the_frontend, before_the_driver] {
        let mut reply = [0; 3];
        client.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"OK ");
    }
}

#[test]
fn clients_are_refused_in_time_after_the_guest_has_gone() {
    let served = Served::new(ConnectionLimits::default());
    drop(served.guest());
    let since = Instant::now();
    // A session that is ending still accepts clients, and resets them.
    while served.device.is_served() {
        assert!(since.elapsed() < TIMEOUT, "its session does not end");
        std::thread::yield_now();
    }
    let since = Instant::now();
    let mut client = served.connect(22);
    let mut reply = Vec::new();
    // It may end with a reset.
    let _ = client.read_to_end(&mut reply);
    let waited = since.elapsed();
    assert!(reply.is_empty(), "{reply:?}");
    let limit = Duration::from_millis(towline_vsock::CONNECT_TIMEOUT_MS);
    // The device counts whole milliseconds; a busy host may be late.
    assert!(waited + Duration::from_millis(1) >= limit && waited < limit + TIMEOUT, "{waited:?}");
}

#[test]
fn a_migrated_guests_connections_are_reset() {
    let (here, there) = (Served::new(ConnectionLimits::default()), Served::new(ConnectionLimits::default()));
    let (mut frontend, mut guest) = here.guest();
    let (ports, _stream) = connect_guest(&here, &mut guest, 5000);
    let _other = here.connect(22);
    let requested = poll_until(&mut guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    });
    guest.poll(|_, _| ()).unwrap();
    let bases = [0, 1].map(|index| frontend.stop(index).unwrap());
    let state = frontend.save().unwrap();
    // The guest continues with another device: same memory, same rings, but none of its connections.
    let mut other = Frontend::connect(&there.path("d"), TIMEOUT).unwrap();
    other.negotiate(0, 1 << 29, DEVICE_STATE).unwrap();
    other.set_mem_table(Some(&Arc::clone(guest.memory()))).unwrap();
    assert!(!other.load(&state[1..]).unwrap(), "a truncated state was accepted");
    assert!(other.load(&state).unwrap());
    other.start(guest.rx(), bases[0]).unwrap();
    other.start(guest.tx(), bases[1]).unwrap();
    let mut left = vec![ports, requested];
    poll_until(&mut guest, |_, event| {
        if let VsockEvent::Reset(ports) = event {
            left.retain(|other| *other != ports);
        }
        left.is_empty().then_some(())
    });
    // New connections get other ports than those of the last process.
    let _stream = there.connect(22);
    let again =
        poll_until(
            &mut guest,
            |_, event| if let VsockEvent::Request(ports) = event { Some(ports) } else { None },
        );
    assert_eq!(again.1, requested.1 + 1);
    assert_eq!(there.device.migration_version(), here.device.migration_version());
    assert!(there.device.accepts(&here.device.migration_version().unwrap()).is_ok());
    let refused = there.device.accepts("vsock 1 seqpacket cid 34").unwrap_err();
    assert!(refused.to_string().contains("CID 34, this device has CID 33"));
}

/// Where the event queue is the device's, the driver gets a transport reset, and no connection before it has
/// processed it.
#[test]
fn connections_are_deferred_until_the_transport_reset_is_processed() {
    let (here, there) = (Served::new(ConnectionLimits::default()), Served::new(ConnectionLimits::default()));
    let (mut frontend, mut guest) = here.guest();
    let (ports, _stream) = connect_guest(&here, &mut guest, 5000);
    let bases = [0, 1].map(|index| frontend.stop(index).unwrap());
    let state = frontend.save().unwrap();
    let mut other = Frontend::connect(&there.path("d"), TIMEOUT).unwrap();
    let features = other.negotiate(0, feature::EVENT_IDX, DEVICE_STATE).unwrap().features;
    let memory = Arc::clone(guest.memory());
    other.set_mem_table(Some(&memory)).unwrap();
    assert!(other.load(&state).unwrap());
    let mut events = Queue::new(&memory, 2, QueueOptions { size: 8, features }).unwrap();
    let buffers = [(); 4].map(|()| QueueBuffer { guest: memory.alloc(8, 8), len: 8 });
    for (token, buffer) in (0..).zip(buffers) {
        memory.write(buffer.guest, &[0xff; 8]);
        assert!(events.add(&[], &[buffer], token));
    }
    events.publish();
    other.start(guest.rx(), bases[0]).unwrap();
    other.start(guest.tx(), bases[1]).unwrap();
    other.start(&events, 0).unwrap();
    events.force_kick();
    let _stream = there.connect(22);
    let mut reset = false;
    let mut notified = None;
    let deadline = Instant::now() + TIMEOUT;
    while notified.is_none() || !reset {
        assert!(Instant::now() < deadline, "the event came: {}; the reset: {reset}", notified.is_some());
        guest
            .poll(|_, event| match event {
                VsockEvent::Reset(found) => reset |= found == ports,
                event => panic!("{event:?} before the event"),
            })
            .unwrap();
        notified = notified.or(events.pop_used().unwrap());
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    let notified = notified.unwrap();
    assert_eq!((notified.token, notified.len), (0, 4));
    assert_eq!(memory.bytes(buffers[0].guest, 4), [0; 4], "VIRTIO_VSOCK_EVENT_TRANSPORT_RESET");
    for _ in 0..20 {
        guest.poll(|_, event| panic!("{event:?} before the guest has processed the event")).unwrap();
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    assert!(events.add(&[], &[buffers[0]], 0));
    events.publish();
    events.force_kick();
    poll_until(&mut guest, |_, event| matches!(event, VsockEvent::Request((22, _))).then_some(()));
}

#[test]
fn a_cid_can_be_used_by_one_guest_only() {
    let local_guests = Arc::new(LocalGuests::default());
    let settings = |cid| Settings {
        cid,
        uds: None,
        uds_seqpacket: None,
        rules: Vec::new(),
        groups: Vec::new(),
        limits: ConnectionLimits::default(),
        busy_poll: Duration::ZERO,
    };
    let _one = Vsock::new(settings(3), &local_guests).unwrap();
    let other = Vsock::new(settings(3), &local_guests).unwrap_err();
    assert_eq!(other.to_string(), "CID 3 is used by another guest; give each guest its own CID");
}

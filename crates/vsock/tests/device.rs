//! The whole device, with a driver over shared memory in the place of a guest, and real sockets.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::Read as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_frontend::vsock::{Event, Guest, Options};
use towline_frontend::wire::feature;
use towline_frontend::{Buffer, Frontend, Memory, Queue, QueueOptions};
use towline_vhost_user::Device as _;
use towline_vsock::{Limits, LocalGuests, Settings, Vsock, ZeroCopySend};

use common::{CID, DEVICE_STATE, Served, WITHIN, bytes, reach, until};

#[test]
fn what_is_held_when_a_ring_stops_is_not_lost() {
    let served = Served::new(Limits::default());
    let (mut frontend, mut guest) = served.guest();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    // As much as the device takes for a socket that nobody reads.
    let content = bytes(8 << 20);
    let (mut sent, mut idle) = (0, 0);
    while idle < 20 {
        let piece = &content[sent..(sent + 20_000).min(content.len())];
        if guest.has_room() && guest.send(ports, piece, 0) {
            sent += piece.len();
            idle = 0;
        } else {
            idle += 1;
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
        guest.poll(|_, _| ()).unwrap();
    }
    assert!(sent > 200_000 && sent < content.len(), "{sent}");
    let in_flight = guest.tx().in_flight();
    assert!(in_flight > 0, "chains are held");
    let base = frontend.stop(1).unwrap();
    guest.poll(|_, _| ()).unwrap();
    assert_eq!(guest.tx().in_flight(), 0);
    frontend.start(guest.tx(), base).unwrap();
    guest.shutdown(ports, 2);
    guest.poll(|_, _| ()).unwrap();
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).unwrap();
    assert!(heard == content[..sent], "{} of {sent} bytes", heard.len());
}

/// First it sends no more, later it has gone: the guest hears of both, and need not send to find out.
#[test]
fn a_host_that_ends_in_two_steps_is_told_in_two() {
    let served = Served::new(Limits::default());
    let (_frontend, mut guest) = served.guest();
    let (ports, stream) = reach(&served, &mut guest, 5000);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let shut = |event| if let Event::Shutdown(found, flags) = event { Some((found, flags)) } else { None };
    assert_eq!(until(&mut guest, |_, event| shut(event)), (ports, 2));
    drop(stream);
    assert_eq!(until(&mut guest, |_, event| shut(event)), (ports, 3));
}

#[test]
fn a_driver_that_begins_anew_has_no_connections() {
    let served = Served::new(Limits::default());
    let (mut frontend, mut guest) = served.guest();
    let (_, mut stream) = reach(&served, &mut guest, 5000);
    frontend.stop(0).unwrap();
    frontend.stop(1).unwrap();
    let options = Options {
        cid: CID,
        size: 64,
        receive_bytes: 4096,
        features: frontend.negotiated().features,
        takes_at_once: true,
    };
    let memory = Arc::new(Memory::new(Guest::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut guest = Guest::start(&mut frontend, &memory, options).unwrap();
    let mut heard = Vec::new();
    // Its end may be a reset.
    let _ = stream.read_to_end(&mut heard);
    assert!(heard.is_empty());
    std::fs::remove_file(served.path("v_5000")).unwrap();
    let (ports, mut stream) = reach(&served, &mut guest, 5000);
    assert!(guest.send(ports, b"again", 0));
    guest.poll(|_, _| ()).unwrap();
    let mut heard = [0; 5];
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"again");
}

#[test]
fn a_state_resets_what_the_guest_had_elsewhere() {
    let (here, there) = (Served::new(Limits::default()), Served::new(Limits::default()));
    let (mut frontend, mut guest) = here.guest();
    let (ports, _stream) = reach(&here, &mut guest, 5000);
    let _other = here.connect(22);
    let asked = until(&mut guest, |guest, event| match event {
        Event::Request(ports) => {
            guest.accept(ports);
            Some(ports)
        }
        _ => None,
    });
    guest.poll(|_, _| ()).unwrap();
    let bases = [0, 1].map(|index| frontend.stop(index).unwrap());
    let state = frontend.save().unwrap();
    // The guest goes on with another device: same memory, same rings, connections that are not there.
    let mut other = Frontend::connect(&there.path("d"), WITHIN).unwrap();
    other.negotiate(0, 1 << 29, DEVICE_STATE).unwrap();
    other.set_mem_table(Some(&Arc::clone(guest.memory()))).unwrap();
    assert!(!other.load(&state[1..]).unwrap(), "half a state is taken");
    assert!(other.load(&state).unwrap());
    other.start(guest.rx(), bases[0]).unwrap();
    other.start(guest.tx(), bases[1]).unwrap();
    let mut left = vec![ports, asked];
    until(&mut guest, |_, event| {
        if let Event::Reset(ports) = event {
            left.retain(|other| *other != ports);
        }
        left.is_empty().then_some(())
    });
    // New ones get other ports than the last process gave.
    let _stream = there.connect(22);
    let again =
        until(&mut guest, |_, event| if let Event::Request(ports) = event { Some(ports) } else { None });
    assert_eq!(again.1, asked.1 + 1);
    assert_eq!(there.device.migration_version(), here.device.migration_version());
    assert!(there.device.accepts(&here.device.migration_version().unwrap()).is_ok());
    let refused = there.device.accepts("vsock 1 seqpacket cid 34").unwrap_err();
    assert!(refused.to_string().contains("context 34, and this is for 33"));
}

/// Where the event queue is the device's, the driver hears that its connections are gone, and gets none before it has.
#[test]
fn nobody_is_let_in_before_the_guest_knows_that_it_was_moved() {
    let (here, there) = (Served::new(Limits::default()), Served::new(Limits::default()));
    let (mut frontend, mut guest) = here.guest();
    let (ports, _stream) = reach(&here, &mut guest, 5000);
    let bases = [0, 1].map(|index| frontend.stop(index).unwrap());
    let state = frontend.save().unwrap();
    let mut other = Frontend::connect(&there.path("d"), WITHIN).unwrap();
    let features = other.negotiate(0, feature::EVENT_IDX, DEVICE_STATE).unwrap().features;
    let memory = Arc::clone(guest.memory());
    other.set_mem_table(Some(&memory)).unwrap();
    assert!(other.load(&state).unwrap());
    let mut events = Queue::new(&memory, 2, QueueOptions { size: 8, features }).unwrap();
    let buffers = [(); 4].map(|()| Buffer { guest: memory.alloc(8, 8), len: 8 });
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
    let mut told = None;
    let deadline = Instant::now() + WITHIN;
    while told.is_none() || !reset {
        assert!(Instant::now() < deadline, "the event came: {}; the reset: {reset}", told.is_some());
        guest
            .poll(|_, event| match event {
                Event::Reset(found) => reset |= found == ports,
                event => panic!("{event:?} before the guest knows"),
            })
            .unwrap();
        told = told.or(events.pop_used().unwrap());
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    let told = told.unwrap();
    assert_eq!((told.token, told.len), (0, 4));
    assert_eq!(memory.bytes(buffers[0].guest, 4), [0; 4], "VIRTIO_VSOCK_EVENT_TRANSPORT_RESET");
    for _ in 0..20 {
        guest.poll(|_, event| panic!("{event:?} before the guest has taken the event")).unwrap();
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    assert!(events.add(&[], &[buffers[0]], 0));
    events.publish();
    events.force_kick();
    until(&mut guest, |_, event| matches!(event, Event::Request((22, _))).then_some(()));
}

/// LocalGuests that nobody else has.
#[test]
fn a_context_is_one_guest_s() {
    let local_guests = Arc::new(LocalGuests::default());
    let settings = |cid| Settings {
        cid,
        uds: None,
        uds_seqpacket: None,
        rules: Vec::new(),
        groups: Vec::new(),
        limits: Limits::default(),
        zero_copy_send: ZeroCopySend::Off,
        busy_poll: Duration::ZERO,
        unmigratable: false,
    };
    let _one = Vsock::new(settings(3), &local_guests).unwrap();
    let other = Vsock::new(settings(3), &local_guests).unwrap_err();
    assert_eq!(other.to_string(), "the context 3 is another guest's already; each needs one of its own");
}

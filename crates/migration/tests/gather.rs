//! Telling the connections of a migration apart, from strangers and from lanes that should not be.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::*;
use towline_channel::{
    Address, Cancel, Channel, ChannelExt, ConnectOptions, Error as ChannelError, IoBuf, Listener, SendFlags,
    connect,
};
use towline_migration::{Error, Incoming, Memory, Outgoing, incoming, outgoing};
use towline_protocol::multifd::Init;
use towline_protocol::{Error as ProtocolError, PeerMisbehaved};

const BLOCKS: [(&str, u64); 2] = [("vga.vram", 9), ("pc.ram", 700)];
const LANES_TIMEOUT: Duration = Duration::from_millis(200);

/// A listener of each kind, and what keeps it.
fn listeners() -> [(Listener, Option<tempfile::TempDir>); 2] {
    let directory = tempfile::tempdir().unwrap();
    let path = Address::Unix(directory.path().join("s"));
    [
        (Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap(), None),
        (Listener::bind(&path).unwrap(), Some(directory)),
    ]
}

fn deadline() -> Instant {
    Instant::now() + WATCHDOG
}

fn open(address: &Address) -> Box<dyn Channel> {
    connect(address, deadline(), &Cancel::new().unwrap()).unwrap()
}

fn opened(address: &Address, bytes: &[u8]) -> Box<dyn Channel> {
    let channel = open(address);
    channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty()).unwrap();
    channel
}

fn lane(address: &Address, id: u8, uuid: [u8; 16]) -> Box<dyn Channel> {
    opened(address, &Init { uuid, id }.encode())
}

/// A migration from this address's other end; the source has its own number of lanes.
fn source(address: &Address, lanes: usize) -> JoinHandle<Result<Arc<Memory>, Error>> {
    let address = address.clone();
    thread::spawn(move || {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
        let connections = outgoing::connect(
            &address,
            lanes,
            UUID,
            &ConnectOptions::default(),
            deadline(),
            &Cancel::new().unwrap(),
        )?;
        let options = outgoing::Options { answer_timeout: Duration::from_secs(2), ..options() };
        Outgoing::new(Arc::default(), Arc::default(), options).run(&connections, &*guest)?;
        Ok(guest)
    })
}

fn gather(listener: Listener, lanes: usize) -> Result<incoming::Connections, Error> {
    incoming::gather(listener, lanes, deadline(), LANES_TIMEOUT, &Cancel::new().unwrap())
}

fn receive(listener: Listener, lanes: usize, sink: &Memory) -> Result<(), Error> {
    let connections = gather(listener, lanes)?;
    let options = incoming::Options::default();
    Incoming::new(Arc::default(), Arc::default(), options).run(&connections, sink)
}

#[test]
fn unrelated_connections_have_no_effect() {
    for lanes in [0, 1, 4] {
        for (listener, _kept) in listeners() {
            let address = listener.local_address().clone();
            let strangers = [
                opened(&address, b"GET / HTTP/1.1\r\n\r\n"),
                opened(&address, b"Q"),
                opened(&address, &[0x11]),
                open(&address),
            ];
            drop(open(&address));
            drop(opened(&address, b"QE"));
            drop(opened(&address, &Init { uuid: UUID, id: 0 }.encode()[..30]));
            let source = source(&address, lanes);
            // Some come later.
            let late = thread::spawn({
                let address = address.clone();
                move || (0..5).map(|_| opened(&address, b"x")).collect::<Vec<_>>()
            });
            let sink = empty(MACHINES[0], &BLOCKS);
            receive(listener, lanes, &sink).unwrap();
            let guest = source.join().unwrap().unwrap();
            assert_eq!(difference(&guest, &sink), None);
            drop((strangers, late.join()));
        }
    }
}

#[test]
fn too_few_lanes_are_counted() {
    for (listener, _kept) in listeners() {
        let source = source(&listener.local_address().clone(), 2);
        let error = receive(listener, 3, &empty(MACHINES[0], &BLOCKS)).unwrap_err();
        assert!(
            matches!(error, Error::LanesMissing { connected: 2, expected: 3, waited: LANES_TIMEOUT }),
            "{error:?}"
        );
        assert!(error.to_string().starts_with("2 of 3 lanes connected within 0.2 s: "), "{error}");
        assert!(source.join().unwrap().is_err());
    }
}

#[test]
fn too_many_lanes_are_refused_whenever_they_come() {
    for lanes in [0, 1, 2] {
        for (listener, _kept) in listeners() {
            let source = source(&listener.local_address().clone(), lanes + 1);
            let sink = empty(MACHINES[0], &BLOCKS);
            let error = receive(listener, lanes, &sink).unwrap_err();
            match error {
                Error::LaneTooMany { id, expected } => {
                    assert_eq!((usize::from(id), expected), (lanes, lanes));
                }
                other => panic!("{other:?}"),
            }
            assert!(!sink.is_committed());
            assert!(source.join().unwrap().is_err());
        }
    }
}

#[test]
fn a_lane_that_comes_late_is_refused_before_the_guest_is_committed() {
    // Excess lanes are first searched for at the end of START; until then the source is held before its end.
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_address().clone();
    let late = std::sync::Mutex::new(None);
    let late = Arc::new(late);
    let stop = {
        let (late, address) = (Arc::clone(&late), address.clone());
        move || {
            *late.lock().unwrap() = Some(lane(&address, 1, UUID));
            Ok(())
        }
    };
    let guest =
        Memory::new(configuration(MACHINES[0]), &blocks(&BLOCKS)).unwrap().with_hooks(stop, || Ok(()));
    guest.set_device_state(device_state(1));
    let source = thread::spawn(move || {
        let connections = outgoing::connect(
            &address,
            1,
            UUID,
            &ConnectOptions::default(),
            deadline(),
            &Cancel::new().unwrap(),
        )?;
        Outgoing::new(Arc::default(), Arc::default(), options()).run(&connections, &guest)
    });
    let sink = empty(MACHINES[0], &BLOCKS);
    let error = receive(listener, 1, &sink).unwrap_err();
    assert!(matches!(error, Error::LaneTooMany { id: 1, expected: 1 }), "{error:?}");
    assert!(!sink.is_committed());
    assert!(source.join().unwrap().is_err());
}

fn misbehaved(error: Error) -> PeerMisbehaved {
    match error {
        Error::Protocol { source: ProtocolError::Misbehaved(error), .. } => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn lanes_have_numbers_of_their_own_and_one_uuid() {
    for (listener, _kept) in listeners() {
        let address = listener.local_address().clone();
        let _lanes = [lane(&address, 1, UUID), lane(&address, 1, UUID)];
        let error = gather(listener, 2).unwrap_err();
        assert_eq!(misbehaved(error), PeerMisbehaved::DuplicateLane { id: 1 });
    }
    for (listener, _kept) in listeners() {
        let address = listener.local_address().clone();
        let _first = lane(&address, 1, UUID);
        let other = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            lane(&address, 0, [0xa; 16])
        });
        let error = gather(listener, 2).unwrap_err();
        let found = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a".to_owned();
        let expected = "07070707-0707-0707-0707-070707070707".to_owned();
        assert_eq!(misbehaved(error), PeerMisbehaved::LaneUuid { found, expected });
        drop(other.join());
    }
}

#[test]
fn lanes_may_come_in_any_order_and_in_pieces() {
    for (listener, _kept) in listeners() {
        let address = listener.local_address().clone();
        let slow = thread::spawn(move || {
            let mut lanes = vec![lane(&address, 2, UUID), lane(&address, 0, UUID)];
            lanes.push(opened(&address, b"QEVM"));
            let piecewise = open(&address);
            for byte in (Init { uuid: UUID, id: 1 }).encode() {
                piecewise.send_all(&[IoBuf::from(&[byte])], SendFlags::empty()).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
            lanes.push(piecewise);
            for (number, channel) in [(2, 0), (0, 1), (1, 3)] {
                lanes[channel].send_all(&[IoBuf::from(&[number])], SendFlags::empty()).unwrap();
            }
            lanes
        });
        let connections =
            incoming::gather(listener, 3, deadline(), WATCHDOG, &Cancel::new().unwrap()).unwrap();
        let _kept = slow.join();
        assert_eq!(connections.uuid, Some(UUID));
        for (number, channel) in connections.lanes.iter().enumerate() {
            let mut byte = [9];
            channel.recv_exact(&mut [towline_channel::IoBufMut::from(&mut byte)]).unwrap();
            assert_eq!(usize::from(byte[0]), number);
        }
    }
}

#[test]
fn a_source_that_listens_drops_what_is_none_of_its_connections() {
    for (listener, _kept) in listeners() {
        let address = listener.local_address();
        let _stranger = opened(address, b"GET / HTTP/1.1\r\n");
        thread::scope(|scope| {
            let destination = scope.spawn(|| {
                let (options, cancel) = (ConnectOptions::default(), Cancel::new().unwrap());
                incoming::connect(address, 2, &options, deadline(), WATCHDOG, &cancel)
            });
            let cancel = Cancel::new().unwrap();
            let accepted = outgoing::accept(&listener, 2, UUID, deadline(), WATCHDOG, &cancel).unwrap();
            assert_eq!(destination.join().unwrap().unwrap().uuid, Some(UUID));
            assert_eq!(accepted.lanes.len(), 2);
        });
    }
}

#[test]
fn waiting_ends_at_its_deadline_and_when_it_is_cancelled() {
    for (listener, _kept) in listeners() {
        let _stranger = opened(listener.local_address(), b"x");
        let soon = Instant::now() + Duration::from_millis(50);
        let error = incoming::gather(listener, 2, soon, LANES_TIMEOUT, &Cancel::new().unwrap()).unwrap_err();
        assert!(matches!(error, Error::Channel(ChannelError::Timeout { .. })), "{error:?}");
    }
    for (listener, _kept) in listeners() {
        let cancel = Cancel::new().unwrap();
        let canceller = cancel.clone();
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            canceller.cancel();
        });
        let error = incoming::gather(listener, 2, deadline(), LANES_TIMEOUT, &cancel).unwrap_err();
        assert!(matches!(error, Error::Channel(ChannelError::Cancelled)), "{error:?}");
        thread.join().unwrap();
    }
}

//! Peers that do what none should: hand-written streams, and sinks that fail.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use rustix::event::{PollFd, PollFlags, poll};
use towline_channel::fault::{Cut, Direction};
use towline_channel::{
    Address, Cancel, Channel, ChannelExt, IoBuf, IoBufMut, Listener, PairChannel, RecvFlags, SendFlags,
    UnixChannel, pair,
};
use towline_migration::{
    ChannelId, Error, Incoming, LinkState, Memory, Pages, Relay, ReturnPathWriter, Session, Sink, incoming,
    outgoing, probe_link,
};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::machine::BarrierForm;
use towline_protocol::multifd::{HEADER_BYTES, Init, Packet};
use towline_protocol::ram;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::{SectionHeader, SectionType, put_footer};
use towline_protocol::source::{RamOptions, Setup};
use towline_protocol::wire::put_counted;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

fn ram_blocks() -> Vec<RamBlock> {
    vec![RamBlock { name: "pc.ram".into(), length: 32 * PAGE as u64, mapped: None }]
}

/// A whole main channel with no pages on it.
fn stream(lanes: usize, blocks: &[RamBlock]) -> Vec<u8> {
    stream_with_pings(&[], lanes, blocks)
}

/// As that, with these PINGs before the first of every stream.
fn stream_with_pings(pings: &[u32], lanes: usize, blocks: &[RamBlock]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let setup = Setup::begin_with_return_path(&configuration(MACHINES[0]), pings, &mut bytes);
    let barrier = (lanes > 0).then_some(BarrierForm::FlushRecord);
    let iterating = setup.write_ram_start(RamOptions { section_id: 2, barrier }, blocks, &mut bytes);
    let mut end = iterating.end(&mut bytes);
    end.records().barrier(&mut bytes);
    end.close(&mut bytes);
    bytes.extend(device_state(1));
    bytes
}

fn send(channel: &dyn Channel, bytes: &[u8]) {
    channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty()).unwrap();
}

fn packet(channel: &dyn Channel, packet: &Packet) {
    let mut header = [0; HEADER_BYTES];
    packet.encode(&ram_blocks(), &mut header);
    send(channel, &header);
    send(channel, &vec![9; packet.normal.len() * PAGE]);
}

/// Runs the destination of these channels under the watchdog.
fn receive(
    main: Box<dyn Channel>,
    lanes: Vec<PairChannel>,
    sink: Arc<dyn Sink + Send + Sync>,
    session: &Arc<Session>,
) -> Result<(), Error> {
    let (tell, told) = mpsc::channel();
    let session = Arc::clone(session);
    thread::spawn(move || {
        let lanes: Vec<_> = lanes.into_iter().map(|lane| Arc::new(lane) as Arc<dyn Channel>).collect();
        let connections = incoming::Connections::connected(Arc::from(main), &lanes, WATCHDOG).unwrap();
        let incoming = Incoming::new(session, Arc::default(), incoming::Options::default());
        let _ = tell.send(incoming.run(&connections, &*sink));
    });
    told.recv_timeout(WATCHDOG).unwrap_or_else(|error| match error {
        mpsc::RecvTimeoutError::Timeout => panic!("the destination hangs"),
        mpsc::RecvTimeoutError::Disconnected => Err(Error::Panicked),
    })
}

/// The destination's last messages.
fn said(channel: &dyn Channel) -> Vec<u8> {
    let mut all = Vec::new();
    let mut bytes = [0; 100];
    channel.set_timeouts(Some(Duration::from_secs(2)), None).unwrap();
    while let Ok(received @ 1..) = channel.recv(&mut [IoBufMut::from(&mut bytes)], RecvFlags::empty()) {
        all.extend_from_slice(&bytes[..received]);
    }
    all
}

fn message(message: &ReturnPathMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

fn sink() -> Arc<Memory> {
    empty(MACHINES[0], &[("pc.ram", 32)])
}

fn lane() -> (PairChannel, PairChannel) {
    let (source, destination) = pair(1 << 20);
    send(&source, &Init { uuid: UUID, id: 0 }.encode());
    (source, destination)
}

/// As QEMU does. With the first value earlier towlines request checksums of packets; this reply declines.
#[test]
fn a_ping_of_an_unknown_value_is_repeated() {
    let (source, main) = pair(1 << 20);
    let pings = [0x7477_6c01, 5];
    send(&source, &stream_with_pings(&pings, 0, &ram_blocks()));
    receive(Box::new(main), Vec::new(), sink(), &Arc::default()).unwrap();
    let pongs = pings.into_iter().chain([1]).map(ReturnPathMessage::Pong);
    let expected: Vec<_> = pongs.chain([ReturnPathMessage::Shut(0)]).map(|answer| message(&answer)).collect();
    assert_eq!(said(&source), expected.concat());
}

#[test]
fn a_lane_with_one_sync_too_many_is_ended() {
    let ((source, main), (lane, arriving)) = (pair(1 << 20), lane());
    for number in 0..3 {
        packet(&lane, &Packet::sync(number));
    }
    send(&source, &stream(1, &ram_blocks()));
    receive(Box::new(main), vec![arriving], sink(), &Arc::default()).unwrap();
    assert_eq!(
        said(&source),
        [message(&ReturnPathMessage::Pong(1)), message(&ReturnPathMessage::Shut(0))].concat()
    );
}

#[test]
fn pages_behind_the_last_barrier_are_refused_before_the_commit() {
    let ((source, main), (lane, arriving)) = (pair(1 << 20), lane());
    packet(&lane, &Packet::sync(0));
    packet(&lane, &Packet::sync(1));
    let normal = vec![0, 8192];
    let data_bytes = 8192;
    packet(&lane, &Packet { block: Some(BlockIndex(0)), normal, data_bytes, ..Packet::default() });
    send(&source, &stream(1, &ram_blocks()));
    let sink = sink();
    let error = receive(Box::new(main), vec![arriving], sink.clone(), &Arc::default()).unwrap_err();
    assert!(
        matches!(&error, Error::Lane { lane: 0, source } if matches!(**source, Error::BehindBarrier)),
        "{error}"
    );
    assert!(!sink.is_committed());
    assert_eq!(said(&source), message(&ReturnPathMessage::Pong(1)));
}

/// The behaviour of a QEMU before 9.0 at times (`multifd_send_thread`: a job too many). Were its lane shut
/// down, it would fail.
#[test]
fn an_empty_packet_behind_the_last_barrier_is_harmless() {
    let ((source, main), (lane, arriving)) = (pair(1 << 20), UnixChannel::pair().unwrap());
    send(&lane, &Init { uuid: UUID, id: 0 }.encode());
    packet(&lane, &Packet::sync(0));
    packet(&lane, &Packet::sync(1));
    send(&source, &stream(1, &ram_blocks()));
    let arriving: [Arc<dyn Channel>; 1] = [Arc::new(arriving)];
    let connections = incoming::Connections::connected(Arc::new(main), &arriving, WATCHDOG).unwrap();
    let incoming = Incoming::new(Arc::default(), Arc::default(), incoming::Options::default());
    incoming.run(&connections, &*sink()).unwrap();
    packet(&lane, &Packet::default());
    drop(source);
    connections.linger(WATCHDOG);
}

#[test]
fn a_guest_without_memory_is_compared_too() {
    let (source, main) = pair(1 << 20);
    send(&source, &stream(0, &[]));
    let error = receive(Box::new(main), Vec::new(), sink(), &Arc::default()).unwrap_err();
    assert_eq!(error.to_string(), "the source has 0 blocks, expected also \"pc.ram\" of 131072 bytes");
}

#[test]
fn an_acknowledgement_that_cannot_be_sent_is_an_error() {
    let (source, main) = pair(1 << 20);
    send(&source, &stream(0, &ram_blocks()));
    // Within SHUT, which follows PONG.
    let main = Cut::new(Box::new(main), 15, Direction::Send);
    let sink = sink();
    let error = receive(Box::new(main), Vec::new(), sink.clone(), &Arc::default()).unwrap_err();
    assert!(matches!(error, Error::Channel(towline_channel::Error::Fault { .. })), "{error}");
    assert!(sink.is_committed());
}

/// A memory that does something odd in one place.
struct Odd {
    memory: Arc<Memory>,
    session: Arc<Session>,
    in_pages: fn(&Session) -> Result<(), Error>,
    in_commit: fn(&Session) -> Result<(), Error>,
}

impl Odd {
    fn new(
        session: &Arc<Session>,
        in_pages: fn(&Session) -> Result<(), Error>,
        in_commit: fn(&Session) -> Result<(), Error>,
    ) -> Arc<Self> {
        Arc::new(Self { memory: sink(), session: Arc::clone(session), in_pages, in_commit })
    }
}

impl Sink for Odd {
    fn configuration(&self, configuration: &Configuration) -> Result<(), Error> {
        Sink::configuration(&*self.memory, configuration)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<(), Error> {
        Sink::blocks(&*self.memory, blocks)
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<(), Error> {
        (self.in_pages)(&self.session)?;
        self.memory.pages(stream, pages)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<(), Error> {
        self.memory.zero(stream, block, offsets)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<(), Error> {
        self.memory.current(page, content)
    }

    fn device_state(&self, state: DeviceState) -> Result<(), Error> {
        Sink::device_state(&*self.memory, state)
    }

    fn commit(&self) -> Result<(), Error> {
        (self.in_commit)(&self.session)?;
        self.memory.commit()
    }

    fn return_path(&self, writer: ReturnPathWriter) {
        drop(writer);
    }
}

#[test]
fn a_sink_that_panics_on_a_lane_or_in_the_end_blocks_no_thread() {
    let panics: fn(&Session) -> Result<(), Error> = |_| panic!("on purpose");
    let does_not: fn(&Session) -> Result<(), Error> = |_| Ok(());
    for (in_pages, in_commit) in [(panics, does_not), (does_not, panics)] {
        let ((source, main), (lane, arriving)) = (pair(1 << 20), lane());
        packet(&lane, &Packet::sync(0));
        let (normal, data_bytes) = (vec![0], 4096);
        packet(&lane, &Packet { block: Some(BlockIndex(0)), normal, data_bytes, ..Packet::default() });
        packet(&lane, &Packet::sync(1));
        send(&source, &stream(1, &ram_blocks()));
        let session = Arc::default();
        let odd = Odd::new(&session, in_pages, in_commit);
        let error = receive(Box::new(main), vec![arriving], odd, &session).unwrap_err();
        assert!(matches!(error, Error::Panicked), "{error}");
        assert_eq!(said(&source), message(&ReturnPathMessage::Pong(1)));
    }
}

#[test]
fn a_cancel_during_the_commit_sends_no_acknowledgement() {
    let (source, main) = pair(1 << 20);
    send(&source, &stream(0, &ram_blocks()));
    let session = Arc::default();
    let odd = Odd::new(
        &session,
        |_| Ok(()),
        |session| {
            session.fail(Error::Cancelled);
            Ok(())
        },
    );
    let error = receive(Box::new(main), Vec::new(), odd, &session).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert_eq!(said(&source), message(&ReturnPathMessage::Pong(1)));
}

#[test]
fn a_relay_refuses_pages_in_the_first_section() {
    let mut bytes = Vec::new();
    Setup::begin_with_return_path(&configuration(MACHINES[0]), &[], &mut bytes);
    let header = SectionHeader { id: 2, name: "ram".into(), instance: 0, version: 4 };
    header.encode(SectionType::Start, &mut bytes);
    ram::put_total(32 * PAGE as u64, &mut bytes);
    ram::put_block(&ram_blocks()[0], &mut bytes);
    bytes.extend_from_slice(&ram::RamFlags::ZERO.bits().to_be_bytes());
    put_counted(&mut bytes, ram_blocks()[0].name.as_bytes());
    bytes.push(0);
    ram::put_flag(ram::RamFlags::EOS, &mut bytes);
    put_footer(&mut bytes, 2);
    let (source, main) = pair(1 << 20);
    let (to, destination) = pair(1 << 20);
    send(&source, &bytes);
    send(&destination, &message(&ReturnPathMessage::Pong(1)));
    let session = Arc::<Session>::default();
    let connections =
        outgoing::Connections { main: Arc::new(to), lanes: Vec::new(), uuid: UUID, introduced: false };
    let relay =
        Arc::new(Relay::new(Arc::clone(&session), connections, outgoing::LaneOptions::default()).unwrap());
    let error = receive(Box::new(main), Vec::new(), relay, &session).unwrap_err();
    assert!(error.to_string().contains("pages before the first PART section"), "{error}");
}

#[test]
fn a_relay_with_fewer_lanes_is_reported() {
    let ((source, main), (lane, arriving)) = (pair(1 << 20), lane());
    packet(&lane, &Packet::sync(0));
    packet(&lane, &Packet { block: Some(BlockIndex(0)), zero: vec![0], ..Packet::default() });
    packet(&lane, &Packet::sync(1));
    send(&source, &stream(1, &ram_blocks()));
    let (to, destination) = pair(1 << 20);
    send(&destination, &message(&ReturnPathMessage::Pong(1)));
    let session = Arc::<Session>::default();
    let connections =
        outgoing::Connections { main: Arc::new(to), lanes: Vec::new(), uuid: UUID, introduced: false };
    let relay =
        Arc::new(Relay::new(Arc::clone(&session), connections, outgoing::LaneOptions::default()).unwrap());
    let error = receive(Box::new(main), vec![arriving], relay, &session).unwrap_err();
    let is_right = |error: &Error| matches!(error, Error::LaneTooMany { id: 0, expected: 0 });
    assert!(matches!(&error, Error::Lane { source, .. } if is_right(source)), "{error}");
}

/// A proxy's ping is no data, so a look at the connection does not wait for any.
#[test]
fn a_connection_with_only_a_ping_is_open() {
    let listener = Listener::bind(&"ws://127.0.0.1:0/vm".parse().unwrap()).unwrap();
    let Address::WebSocket { port, .. } = listener.local_address() else { panic!() };
    let mut raw = TcpStream::connect(("127.0.0.1", *port)).unwrap();
    let head = "GET /vm HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
    raw.write_all(head.as_bytes()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let channel = listener.accept(deadline, &Cancel::new().unwrap()).unwrap();
    let ping = [0x89, 0x80, 1, 2, 3, 4];
    let data = [0x82, 0x81, 1, 2, 3, 4, b'x' ^ 1];
    let arrives = |bytes: &[u8]| {
        raw.try_clone().unwrap().write_all(bytes).unwrap();
        let fd = channel.as_fd().unwrap();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
    };
    arrives(&ping);
    assert_eq!(probe_link(channel.as_ref()), LinkState::Open);
    // It was read, and is answered by the next call that may send.
    assert_eq!(probe_link(channel.as_ref()), LinkState::Open);
    arrives(&data);
    assert_eq!(probe_link(channel.as_ref()), LinkState::Open);
    let mut byte = [0];
    assert_eq!(channel.recv(&mut [IoBufMut::from(&mut byte[..])], RecvFlags::empty()).unwrap(), 1);
    raw.shutdown(Shutdown::Both).unwrap();
    poll(&mut [PollFd::new(&channel.as_fd().unwrap(), PollFlags::IN)], None).unwrap();
    assert_ne!(probe_link(channel.as_ref()), LinkState::Open);
}

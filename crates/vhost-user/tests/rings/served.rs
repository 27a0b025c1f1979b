//! A whole backend over a socket, with a frontend and drivers of this test.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_channel::{Channel as _, ChannelExt as _, IoBufMut, UnixChannel};
use towline_vhost_user::message::{HEADER_BYTES, MessageHeader, RequestCode};
use towline_vhost_user::{Cancel, Device, ServeError, features, serve};

use crate::driver::{AVAILABLE, Descriptor, Driver, GUEST, MEMORY_BYTES, TABLE, USED, USER};
use crate::harness::Echo;

const FEATURES: u64 = features::VERSION_1 | features::EVENT_IDX | features::PROTOCOL_FEATURES;
/// MQ, LOG_SHMFD, REPLY_ACK, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 15;
/// Offset of the second driver's memory, after the first one's.
const SECOND: u64 = MEMORY_BYTES;
const LOG_BYTES: u64 = 4096;

struct Frontend {
    channel: UnixChannel,
    backend: Option<JoinHandle<Result<(), ServeError>>>,
}

/// A ring's eventfds.
struct Events {
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Waits until an eventfd is signalled, and drains it.
#[track_caller]
fn wait_and_drain(fd: &OwnedFd) {
    let within = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&within)).unwrap(), 1, "not signalled");
    rustix::io::read(fd, &mut [0u8; 8]).unwrap();
}

fn is_quiet(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0u8; 8]).is_err()
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn encode_u32_pair(first: u32, second: u32) -> Vec<u8> {
    [first.to_le_bytes(), second.to_le_bytes()].concat()
}

impl Frontend {
    /// A frontend with negotiated features.
    fn new() -> Self {
        let (channel, far) = UnixChannel::pair().unwrap();
        let backend = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(Echo);
            serve(&far, &device, &Cancel::new().unwrap())
        });
        let frontend = Self { channel, backend: Some(backend) };
        frontend.send(RequestCode::SET_PROTOCOL_FEATURES, &words(&[PROTOCOL]), &[]);
        frontend.succeed(RequestCode::SET_FEATURES, &words(&[FEATURES]), &[]);
        frontend
    }

    fn send(&self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let need_reply = code != RequestCode::SET_PROTOCOL_FEATURES;
        let header = MessageHeader { code, need_reply, length: payload.len() }.encode();
        let bytes = [&header[..], payload].concat();
        assert_eq!(self.channel.send_fds(&bytes, fds).unwrap(), bytes.len());
    }

    /// Sends a request and receives the payload of its reply.
    fn request(&self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) -> [u8; 8] {
        self.send(code, payload, fds);
        let mut reply = [0; HEADER_BYTES + 8];
        self.channel.recv_exact(&mut [IoBufMut::from(&mut reply)]).unwrap();
        assert_eq!(reply[..4], code.0.to_le_bytes());
        *reply.last_chunk().unwrap()
    }

    /// Sends a request that succeeds.
    #[track_caller]
    fn succeed(&self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(u64::from_le_bytes(self.request(code, payload, fds)), 0, "{code}");
    }

    /// Shares the memory of the drivers, one after the other.
    fn share(&self, drivers: &[&Driver]) {
        let mut payload = encode_u32_pair(u32::try_from(drivers.len()).unwrap(), 0);
        for at in 0..drivers.len() as u64 {
            payload.extend(words(&[GUEST + at * SECOND, MEMORY_BYTES, USER + at * SECOND, 0]));
        }
        let fds: Vec<_> = drivers.iter().map(|driver| driver.file.as_fd()).collect();
        self.succeed(RequestCode::SET_MEM_TABLE, &payload, &fds);
    }

    fn address(&self, ring: u32, flags: u32) {
        let at = USER + u64::from(ring) * SECOND;
        let addresses =
            words(&[at + TABLE, at + USED, at + AVAILABLE, GUEST + u64::from(ring) * SECOND + USED]);
        self.succeed(RequestCode::SET_VRING_ADDR, &[encode_u32_pair(ring, flags), addresses].concat(), &[]);
    }

    fn start(&self, ring: u32, driver: &Driver, base: u32) -> Events {
        let events = Events { kick: event(), call: event(), err: event() };
        self.succeed(RequestCode::SET_VRING_NUM, &encode_u32_pair(ring, driver.size.into()), &[]);
        self.succeed(RequestCode::SET_VRING_BASE, &encode_u32_pair(ring, base), &[]);
        self.address(ring, 0);
        for (code, fd) in [
            (RequestCode::SET_VRING_CALL, &events.call),
            (RequestCode::SET_VRING_ERR, &events.err),
            (RequestCode::SET_VRING_KICK, &events.kick),
        ] {
            self.succeed(code, &words(&[ring.into()]), &[fd.as_fd()]);
        }
        self.succeed(RequestCode::SET_VRING_ENABLE, &encode_u32_pair(ring, 1), &[]);
        // A ring that starts notifies its driver, which may still wait.
        wait_and_drain(&events.call);
        events
    }

    fn stop(&self, ring: u32) -> u32 {
        let state = self.request(RequestCode::GET_VRING_BASE, &encode_u32_pair(ring, 0), &[]);
        u32::from_le_bytes(*state.last_chunk().unwrap())
    }

    fn end(mut self) -> Result<(), ServeError> {
        self.channel.shutdown(std::net::Shutdown::Both).unwrap();
        self.backend.take().unwrap().join().unwrap()
    }
}

/// Makes a request available. `at` is the offset of the driver's memory.
fn add_request(driver: &mut Driver, at: u64, text: &[u8]) -> u16 {
    let len = u32::try_from(text.len()).unwrap();
    let head = driver.write_chain(&[(len, false), (len, true)], false).unwrap();
    let second = driver.word(TABLE + 16 * u64::from(head) + 14);
    for (index, flags, next) in [(head, 1, second), (second, 2, 0)] {
        let address = GUEST + at + Driver::buffer(index);
        driver.write_descriptor(TABLE, index, Descriptor::new(address, len, flags, next));
    }
    driver.put(Driver::buffer(head), text);
    // A device that is still looking takes it at once.
    driver.make_available(head);
    second
}

/// Sends a text through a ring and receives it back.
#[track_caller]
fn echoes(driver: &mut Driver, at: u64, events: &Events, text: &[u8; 5]) {
    driver.set_used_event(driver.used);
    let reply = add_request(driver, at, text);
    signal(&events.kick);
    wait_and_drain(&events.call);
    assert_eq!(driver.pop_used().unwrap().1, 5);
    assert_eq!(&driver.get::<5>(Driver::buffer(reply)), text);
}

#[test]
fn two_rings_are_served_and_report_their_base() {
    let (mut one, mut two) = (Driver::new(8), Driver::new(4));
    let frontend = Frontend::new();
    frontend.share(&[&one, &two]);
    let events = [frontend.start(0, &one, 0), frontend.start(1, &two, 0)];
    for round in 0..20u8 {
        echoes(&mut one, 0, &events[0], &[round; 5]);
        echoes(&mut two, SECOND, &events[1], &[round + 100; 5]);
    }
    assert_eq!(frontend.stop(0), 20);
    // Chains that are made available later stay for the next start.
    add_request(&mut one, 0, b"later");
    signal(&events[0].kick);
    echoes(&mut two, SECOND, &events[1], b"other");
    assert_eq!(one.pop_used(), None);
    assert_eq!((frontend.stop(0), frontend.stop(1)), (20, 21));
    let again = frontend.start(0, &one, 20);
    signal(&again.kick);
    frontend.stop(0);
    assert_eq!(one.pop_used().unwrap().1, 5);
    frontend.end().unwrap();
}

#[test]
fn a_ring_with_a_fault_does_not_affect_the_other() {
    let (mut one, mut two) = (Driver::new(8), Driver::new(8));
    let frontend = Frontend::new();
    frontend.share(&[&one, &two]);
    let events = [frontend.start(0, &one, 0), frontend.start(1, &two, 0)];
    one.make_available(200);
    signal(&events[0].kick);
    wait_and_drain(&events[0].err);
    (0..5).for_each(|_| echoes(&mut two, SECOND, &events[1], b"alive"));
    assert!(is_quiet(&events[1].err));
    // Kicks of a ring with a fault are ignored.
    (0..1000).for_each(|_| signal(&events[0].kick));
    echoes(&mut two, SECOND, &events[1], b"again");
    // It works again after a reset.
    assert_eq!(frontend.stop(0), 0);
    let mut fresh = Driver::new(8);
    frontend.share(&[&fresh, &two]);
    let fresh_events = frontend.start(0, &fresh, 0);
    echoes(&mut fresh, 0, &fresh_events, b"reset");
    echoes(&mut two, SECOND, &events[1], b"still");
    frontend.end().unwrap();
}

#[test]
fn memory_changes_under_a_ring() {
    let (mut one, two) = (Driver::new(8), Driver::new(8));
    let frontend = Frontend::new();
    frontend.share(&[&one]);
    let events = frontend.start(0, &one, 0);
    echoes(&mut one, 0, &events, b"first");
    // A region more, a region less, and the same memory again.
    let region = words(&[0, GUEST + SECOND, MEMORY_BYTES, USER + SECOND, 0]);
    frontend.succeed(RequestCode::ADD_MEM_REG, &region, &[two.file.as_fd()]);
    echoes(&mut one, 0, &events, b"added");
    frontend.succeed(RequestCode::REM_MEM_REG, &region, &[]);
    frontend.share(&[&one]);
    echoes(&mut one, 0, &events, b"again");
    // No memory: the ring is abandoned.
    frontend.share(&[]);
    wait_and_drain(&events.err);
    signal(&events.kick);
    assert_eq!(frontend.stop(0), 3);
    frontend.end().unwrap();
}

fn take_dirty_pages(log: &File) -> Vec<u64> {
    let mut bytes = vec![0; usize::try_from(LOG_BYTES).unwrap()];
    log.read_exact_at(&mut bytes, 0).unwrap();
    log.write_all_at(&vec![0; bytes.len()], 0).unwrap();
    (0..LOG_BYTES * 8)
        .filter(|page| bytes[usize::try_from(page / 8).unwrap()] & 1 << (page % 8) != 0)
        .collect()
}

#[test]
fn writes_are_logged_while_the_log_is_on() {
    let mut one = Driver::new(8);
    let log: File = memfd_create("log", MemfdFlags::CLOEXEC).unwrap().into();
    ftruncate(&log, LOG_BYTES).unwrap();
    let frontend = Frontend::new();
    frontend.share(&[&one]);
    let events = frontend.start(0, &one, 0);
    frontend.succeed(RequestCode::SET_LOG_BASE, &words(&[LOG_BYTES, 0]), &[log.as_fd()]);
    echoes(&mut one, 0, &events, b"first");
    assert_eq!(take_dirty_pages(&log), [0u64; 0]);
    let switch = |on: bool| {
        let bit = if on { features::LOG_ALL } else { 0 };
        frontend.succeed(RequestCode::SET_FEATURES, &words(&[FEATURES | bit]), &[]);
        frontend.address(0, on.into());
    };
    for _ in 0..3 {
        switch(true);
        frontend.succeed(RequestCode::SET_VRING_ENABLE, &encode_u32_pair(0, 1), &[]);
        take_dirty_pages(&log);
        echoes(&mut one, 0, &events, b"onnnn");
        // A reply comes after the batch and its log.
        frontend.succeed(RequestCode::SET_VRING_ENABLE, &encode_u32_pair(0, 1), &[]);
        let pages = take_dirty_pages(&log);
        let used = (GUEST + USED) / 4096;
        assert!(pages.contains(&used), "{pages:?} lacks the used ring's {used}");
        let others: Vec<_> = pages.iter().filter(|page| **page != used).collect();
        let buffers = (GUEST + Driver::buffer(0)) / 4096..=(GUEST + Driver::buffer(8)) / 4096;
        assert!(others.len() == 1 && buffers.contains(others[0]), "{pages:?}");
        switch(false);
        take_dirty_pages(&log);
        echoes(&mut one, 0, &events, b"offff");
        assert_eq!(take_dirty_pages(&log), [0u64; 0]);
    }
    frontend.end().unwrap();
}

#[test]
fn a_frontend_that_reconnects_resumes_its_rings() {
    let mut one = Driver::new(8);
    for round in 0..5u32 {
        let frontend = Frontend::new();
        frontend.share(&[&one]);
        // As QEMU does: with the used index as the base.
        let events = frontend.start(0, &one, one.used.into());
        (0..3).for_each(|_| echoes(&mut one, 0, &events, b"hello"));
        assert_eq!(u32::from(one.used), 3 * (round + 1));
        frontend.end().unwrap();
    }
}

#[test]
fn a_refusal_is_replied_or_ends_the_connection() {
    let mut frontend = Frontend::new();
    assert_ne!(
        u64::from_le_bytes(frontend.request(RequestCode::SET_VRING_NUM, &encode_u32_pair(9, 8), &[])),
        0
    );
    assert_ne!(u64::from_le_bytes(frontend.request(RequestCode::POSTCOPY_ADVISE, &[], &[])), 0);
    let header = MessageHeader { code: RequestCode::SET_VRING_NUM, need_reply: false, length: 8 }.encode();
    frontend.channel.send_fds(&[&header[..], &encode_u32_pair(9, 8)].concat(), &[]).unwrap();
    let ended = frontend.backend.take().unwrap().join().unwrap().unwrap_err().to_string();
    assert!(ended.ends_with(": SET_VRING_NUM is for ring 9, but the device has 2"), "{ended}");
}

//! A whole backend over a socket, with a frontend and drivers of ours: what threads, session and rings do together.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline_channel::{Channel as _, ChannelExt as _, IoBufMut, UnixChannel};
use towline_vhost_user::message::{Code, HEADER_BYTES, Header};
use towline_vhost_user::{Cancel, Device, ServeError, features, serve};

use crate::driver::{AVAILABLE, Driver, GUEST, MEMORY_BYTES, TABLE, USED, USER};
use crate::harness::Echo;

const FEATURES: u64 = features::VERSION_1 | features::EVENT_IDX | features::PROTOCOL_FEATURES;
/// MQ, LOG_SHMFD, REPLY_ACK, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 15;
/// The second driver's memory, behind the first one's.
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

/// Waits until an eventfd was raised, and takes it back.
#[track_caller]
fn heard(fd: &OwnedFd) {
    let within = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&within)).unwrap(), 1, "never raised");
    rustix::io::read(fd, &mut [0u8; 8]).unwrap();
}

fn silent(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0u8; 8]).is_err()
}

fn raise(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn halves(first: u32, second: u32) -> Vec<u8> {
    [first.to_le_bytes(), second.to_le_bytes()].concat()
}

impl Frontend {
    /// A frontend that has negotiated.
    fn new() -> Self {
        let (channel, far) = UnixChannel::pair().unwrap();
        let backend = std::thread::spawn(move || {
            let device: Arc<dyn Device> = Arc::new(Echo);
            serve(&far, &device, &Cancel::new().unwrap())
        });
        let frontend = Self { channel, backend: Some(backend) };
        frontend.say(Code::SET_PROTOCOL_FEATURES, &words(&[PROTOCOL]), &[]);
        frontend.told(Code::SET_FEATURES, &words(&[FEATURES]), &[]);
        frontend
    }

    fn say(&self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let need_reply = code != Code::SET_PROTOCOL_FEATURES;
        let header = Header { code, need_reply, length: payload.len() }.encode();
        let bytes = [&header[..], payload].concat();
        assert_eq!(self.channel.send_fds(&bytes, fds).unwrap(), bytes.len());
    }

    /// Says it and takes the answer's payload.
    fn ask(&self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) -> [u8; 8] {
        self.say(code, payload, fds);
        let mut reply = [0; HEADER_BYTES + 8];
        self.channel.recv_exact(&mut [IoBufMut::from(&mut reply)]).unwrap();
        assert_eq!(reply[..4], code.0.to_le_bytes());
        *reply.last_chunk().unwrap()
    }

    /// Says it, and it is well.
    #[track_caller]
    fn told(&self, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(u64::from_le_bytes(self.ask(code, payload, fds)), 0, "{code}");
    }

    /// Memory of the drivers, one behind the other.
    fn share(&self, drivers: &[&Driver]) {
        let mut payload = halves(u32::try_from(drivers.len()).unwrap(), 0);
        for at in 0..drivers.len() as u64 {
            payload.extend(words(&[GUEST + at * SECOND, MEMORY_BYTES, USER + at * SECOND, 0]));
        }
        let fds: Vec<_> = drivers.iter().map(|driver| driver.file.as_fd()).collect();
        self.told(Code::SET_MEM_TABLE, &payload, &fds);
    }

    fn address(&self, ring: u32, flags: u32) {
        let at = USER + u64::from(ring) * SECOND;
        let places = words(&[at + TABLE, at + USED, at + AVAILABLE, GUEST + u64::from(ring) * SECOND + USED]);
        self.told(Code::SET_VRING_ADDR, &[halves(ring, flags), places].concat(), &[]);
    }

    fn start(&self, ring: u32, driver: &Driver, base: u32) -> Events {
        let events = Events { kick: event(), call: event(), err: event() };
        self.told(Code::SET_VRING_NUM, &halves(ring, driver.size.into()), &[]);
        self.told(Code::SET_VRING_BASE, &halves(ring, base), &[]);
        self.address(ring, 0);
        for (code, fd) in [
            (Code::SET_VRING_CALL, &events.call),
            (Code::SET_VRING_ERR, &events.err),
            (Code::SET_VRING_KICK, &events.kick),
        ] {
            self.told(code, &words(&[ring.into()]), &[fd.as_fd()]);
        }
        self.told(Code::SET_VRING_ENABLE, &halves(ring, 1), &[]);
        // A ring that starts says so, in case that somebody still waits.
        heard(&events.call);
        events
    }

    fn stop(&self, ring: u32) -> u32 {
        let state = self.ask(Code::GET_VRING_BASE, &halves(ring, 0), &[]);
        u32::from_le_bytes(*state.last_chunk().unwrap())
    }

    fn end(mut self) -> Result<(), ServeError> {
        self.channel.shutdown(std::net::Shutdown::Both).unwrap();
        self.backend.take().unwrap().join().unwrap()
    }
}

/// The second driver's buffers are elsewhere; it is told so by its chains.
fn request(driver: &mut Driver, at: u64, text: &[u8]) -> u16 {
    let len = u32::try_from(text.len()).unwrap();
    let head = driver.add(&[(len, false), (len, true)], false).unwrap();
    let second = driver.word(TABLE + 16 * u64::from(head) + 14);
    for (index, flags, next) in [(head, 1, second), (second, 2, 0)] {
        driver.descriptor(TABLE, index, (GUEST + at + Driver::buffer(index), len), (flags, next));
    }
    driver.put(Driver::buffer(head), text);
    second
}

/// Sends a text through a ring and gets it back.
#[track_caller]
fn echoes(driver: &mut Driver, at: u64, events: &Events, text: &[u8; 5]) {
    driver.want(driver.used);
    let answer = request(driver, at, text);
    raise(&events.kick);
    heard(&events.call);
    assert_eq!(driver.take().unwrap().1, 5);
    assert_eq!(&driver.get::<5>(Driver::buffer(answer)), text);
}

#[test]
fn two_rings_are_served_and_stop_where_they_are() {
    let (mut one, mut two) = (Driver::new(8), Driver::new(4));
    let frontend = Frontend::new();
    frontend.share(&[&one, &two]);
    let events = [frontend.start(0, &one, 0), frontend.start(1, &two, 0)];
    for round in 0..20u8 {
        echoes(&mut one, 0, &events[0], &[round; 5]);
        echoes(&mut two, SECOND, &events[1], &[round + 100; 5]);
    }
    assert_eq!(frontend.stop(0), 20);
    // What comes after that is not touched, and is there for the next.
    request(&mut one, 0, b"later");
    raise(&events[0].kick);
    echoes(&mut two, SECOND, &events[1], b"other");
    assert_eq!(one.take(), None);
    assert_eq!((frontend.stop(0), frontend.stop(1)), (20, 21));
    let again = frontend.start(0, &one, 20);
    raise(&again.kick);
    frontend.stop(0);
    assert_eq!(one.take().unwrap().1, 5);
    frontend.end().unwrap();
}

#[test]
fn a_broken_ring_leaves_the_other_alone() {
    let (mut one, mut two) = (Driver::new(8), Driver::new(8));
    let frontend = Frontend::new();
    frontend.share(&[&one, &two]);
    let events = [frontend.start(0, &one, 0), frontend.start(1, &two, 0)];
    one.offer(200);
    raise(&events[0].kick);
    heard(&events[0].err);
    (0..5).for_each(|_| echoes(&mut two, SECOND, &events[1], b"alive"));
    assert!(silent(&events[1].err));
    // A flood of kicks on a broken ring is not even heard.
    (0..1000).for_each(|_| raise(&events[0].kick));
    echoes(&mut two, SECOND, &events[1], b"again");
    // After a reset it is as good as new.
    assert_eq!(frontend.stop(0), 0);
    let mut anew = Driver::new(8);
    frontend.share(&[&anew, &two]);
    let events_anew = frontend.start(0, &anew, 0);
    echoes(&mut anew, 0, &events_anew, b"anew!");
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
    // More of it, less of it, and all anew at the same place.
    let region = words(&[0, GUEST + SECOND, MEMORY_BYTES, USER + SECOND, 0]);
    frontend.told(Code::ADD_MEM_REG, &region, &[two.file.as_fd()]);
    echoes(&mut one, 0, &events, b"added");
    frontend.told(Code::REM_MEM_REG, &region, &[]);
    frontend.share(&[&one]);
    echoes(&mut one, 0, &events, b"anew.");
    // None of it: the ring has nowhere to be.
    frontend.share(&[]);
    heard(&events.err);
    raise(&events.kick);
    assert_eq!(frontend.stop(0), 3);
    frontend.end().unwrap();
}

fn marked(log: &File) -> Vec<u64> {
    let mut bytes = vec![0; usize::try_from(LOG_BYTES).unwrap()];
    log.read_exact_at(&mut bytes, 0).unwrap();
    log.write_all_at(&vec![0; bytes.len()], 0).unwrap();
    (0..LOG_BYTES * 8)
        .filter(|page| bytes[usize::try_from(page / 8).unwrap()] & 1 << (page % 8) != 0)
        .collect()
}

#[test]
fn what_is_written_is_logged_while_that_is_on() {
    let mut one = Driver::new(8);
    let log: File = memfd_create("log", MemfdFlags::CLOEXEC).unwrap().into();
    ftruncate(&log, LOG_BYTES).unwrap();
    let frontend = Frontend::new();
    frontend.share(&[&one]);
    let events = frontend.start(0, &one, 0);
    frontend.told(Code::SET_LOG_BASE, &words(&[LOG_BYTES, 0]), &[log.as_fd()]);
    echoes(&mut one, 0, &events, b"first");
    assert_eq!(marked(&log), [0u64; 0]);
    let switch = |on: bool| {
        let bit = if on { features::LOG_ALL } else { 0 };
        frontend.told(Code::SET_FEATURES, &words(&[FEATURES | bit]), &[]);
        frontend.address(0, on.into());
    };
    for _ in 0..3 {
        switch(true);
        frontend.told(Code::SET_VRING_ENABLE, &halves(0, 1), &[]);
        marked(&log);
        echoes(&mut one, 0, &events, b"onnnn");
        // Whatever is asked is answered after the batch, with its log.
        frontend.told(Code::SET_VRING_ENABLE, &halves(0, 1), &[]);
        let pages = marked(&log);
        let used = (GUEST + USED) / 4096;
        assert!(pages.contains(&used), "{pages:?} lacks the used ring's {used}");
        let others: Vec<_> = pages.iter().filter(|page| **page != used).collect();
        let buffers = (GUEST + Driver::buffer(0)) / 4096..=(GUEST + Driver::buffer(8)) / 4096;
        assert!(others.len() == 1 && buffers.contains(others[0]), "{pages:?}");
        switch(false);
        marked(&log);
        echoes(&mut one, 0, &events, b"offff");
        assert_eq!(marked(&log), [0u64; 0]);
    }
    frontend.end().unwrap();
}

#[test]
fn a_frontend_that_comes_back_goes_on() {
    let mut one = Driver::new(8);
    for round in 0..5u32 {
        let frontend = Frontend::new();
        frontend.share(&[&one]);
        // As QEMU does: from where the used index stands.
        let events = frontend.start(0, &one, one.used.into());
        (0..3).for_each(|_| echoes(&mut one, 0, &events, b"hello"));
        assert_eq!(u32::from(one.used), 3 * (round + 1));
        frontend.end().unwrap();
    }
}

#[test]
fn what_is_refused_is_told_or_ends_the_connection() {
    let mut frontend = Frontend::new();
    assert_ne!(u64::from_le_bytes(frontend.ask(Code::SET_VRING_NUM, &halves(9, 8), &[])), 0);
    assert_ne!(u64::from_le_bytes(frontend.ask(Code::POSTCOPY_ADVISE, &[], &[])), 0);
    let header = Header { code: Code::SET_VRING_NUM, need_reply: false, length: 8 }.encode();
    frontend.channel.send_fds(&[&header[..], &halves(9, 8)].concat(), &[]).unwrap();
    let ended = frontend.backend.take().unwrap().join().unwrap().unwrap_err().to_string();
    assert!(ended.ends_with("is given up: SET_VRING_NUM names ring 9, but the device has 2"), "{ended}");
}

//! A lane that fails ends the migration at once and by its name, also while the others are blocked.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use towline_channel::{
    Capabilities, Channel, Error as ChannelError, Flushed, IoBuf, IoBufMut, RecvFlags,
    Result as ChannelResult, SendFlags, pair,
};
use towline_migration::{Compression, Error, Outgoing, Relay, Session, ZeroCopySend, outgoing};

const LANES: usize = 3;
/// The lane that fails.
const FAILING: usize = 1;
/// Capacity of a lane's connection: less than one packet.
const CAPACITY: usize = 10_000;
/// Times that each case is run; the median counts, as this machine may be busy.
const RUNS: usize = 5;
const AT_ONCE: Duration = Duration::from_secs(2);

/// A channel that signals when its sender blocks, and whose flush is controlled by a test.
#[derive(Debug)]
struct Watched {
    inner: Box<dyn Channel>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    sent: AtomicUsize,
    is_sending: AtomicBool,
    is_flushing: AtomicBool,
    flush: Mutex<Flush>,
    changed: Condvar,
}

/// Behaviour of a flush.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Flush {
    #[default]
    Done,
    /// Waits until this changes.
    Waits,
    Fails,
    /// The channel is shut down.
    Ended,
}

impl State {
    fn is_blocked(&self) -> bool {
        // There is no reader, so a blocked call ends only with the connection.
        self.sent.load(Ordering::SeqCst) == CAPACITY && self.is_sending.load(Ordering::SeqCst)
    }

    fn set_flush(&self, flush: Flush) {
        *self.flush.lock().unwrap() = flush;
        self.changed.notify_all();
    }
}

impl Channel for Watched {
    fn peer(&self) -> &str {
        self.inner.peer()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities() | Capabilities::ZERO_COPY
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> ChannelResult<usize> {
        self.state.is_sending.store(true, Ordering::SeqCst);
        let sent = self.inner.send(bufs, flags - SendFlags::ZERO_COPY)?;
        self.state.is_sending.store(false, Ordering::SeqCst);
        self.state.sent.fetch_add(sent, Ordering::SeqCst);
        Ok(sent)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> ChannelResult<usize> {
        self.inner.recv(bufs, flags)
    }

    fn flush(&self) -> ChannelResult<Flushed> {
        self.state.is_flushing.store(true, Ordering::SeqCst);
        let mut flush = self.state.flush.lock().unwrap();
        while *flush == Flush::Waits {
            flush = self.state.changed.wait(flush).unwrap();
        }
        let source = match *flush {
            Flush::Fails => std::io::ErrorKind::HostUnreachable,
            Flush::Ended => std::io::ErrorKind::BrokenPipe,
            Flush::Done | Flush::Waits => return Ok(Flushed::Done),
        };
        Err(ChannelError::Io { op: "flush", peer: self.peer().into(), source: source.into() })
    }

    fn shutdown(&self, how: Shutdown) -> ChannelResult<()> {
        self.state.set_flush(Flush::Ended);
        self.inner.shutdown(how)
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> ChannelResult<()> {
        self.inner.set_timeouts(recv, send)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }
}

/// Connections whose lanes are watched, and their other ends.
fn watched(capacity: usize) -> (outgoing::Connections, DestinationEnd, Vec<Arc<State>>) {
    let states: Vec<Arc<State>> = (0..LANES).map(|_| Arc::default()).collect();
    let (near, main) = pair(1 << 20);
    let lane = |state: &Arc<State>| -> (Arc<dyn Channel>, Arc<dyn Channel>) {
        let (near, far) = pair(capacity);
        (Arc::new(Watched { inner: Box::new(near), state: Arc::clone(state) }), Arc::new(far))
    };
    let (lanes, far): (Vec<_>, Vec<_>) = states.iter().map(lane).unzip();
    let source = outgoing::Connections { main: Arc::new(near), lanes, uuid: UUID, introduced: false };
    (source, DestinationEnd { main: Arc::new(main), lanes: far }, states)
}

fn assert_named(result: &Result<(), Error>) {
    assert!(matches!(result, Err(Error::Lane { lane: FAILING, .. })), "{result:?}");
}

fn assert_at_once(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    println!("{what}: {times:?}");
    assert!(times[RUNS / 2] < AT_ONCE, "{what}: {times:?}");
}

fn options_of(zero_copy_send: ZeroCopySend) -> outgoing::Options {
    outgoing::Options { answer_timeout: WATCHDOG, zero_copy_send, ..options() }
}

#[test]
fn an_outgoing_lane_that_fails_while_all_are_blocked() {
    for asked in [ZeroCopySend::Off, ZeroCopySend::On] {
        let times = (0..RUNS).map(|_| {
            let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 4 << 10)], 1);
            let (source, DestinationEnd { main, mut lanes }, states) = watched(CAPACITY);
            let (tell, told) = mpsc::channel();
            thread::spawn(move || {
                let engine = Outgoing::new(Arc::default(), Arc::default(), options_of(asked));
                tell.send(engine.run(&source, &*guest)).unwrap();
            });
            answer_ping(&*main);
            wait_until("blocked lanes", || states.iter().all(|state| state.is_blocked()));
            let begun = Instant::now();
            drop(lanes.remove(FAILING));
            let result = told.recv_timeout(WATCHDOG).expect("the source hangs");
            let time = begun.elapsed();
            assert_named(&result);
            assert_eq!(writer.counts(), (0, 0));
            time
        });
        assert_at_once("outgoing", times.collect());
    }
}

#[test]
fn a_relays_lane_that_fails_while_all_are_blocked() {
    for asked in [ZeroCopySend::Off, ZeroCopySend::On] {
        let times = (0..RUNS).map(|_| {
            let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 4 << 10)], 1);
            let Link { source, destination: arriving } = link(Kind::Unix, LANES);
            let (to, DestinationEnd { main, mut lanes }, states) = watched(CAPACITY);
            let (tell, told) = mpsc::channel();
            let teller = tell.clone();
            thread::spawn(move || {
                let engine = Outgoing::new(Arc::default(), Arc::default(), options_of(ZeroCopySend::Off));
                teller.send((false, engine.run(&source, &*guest))).unwrap();
            });
            thread::spawn(move || {
                let session = Arc::<Session>::default();
                let options = outgoing::LaneOptions { zero_copy_send: asked, ..Default::default() };
                let relay = Relay::new(Arc::clone(&session), to, options).unwrap();
                let (result, _) = receive(arriving, &relay, &session, Compression::None);
                tell.send((true, result)).unwrap();
            });
            answer_ping(&*main);
            wait_until("blocked lanes", || states.iter().all(|state| state.is_blocked()));
            let begun = Instant::now();
            drop(lanes.remove(FAILING));
            let ended = || told.recv_timeout(WATCHDOG).expect("the relay or its source hangs");
            let (ends, time) = ([ended(), ended()], begun.elapsed());
            for (is_relay, result) in ends {
                if is_relay { assert_named(&result) } else { assert!(result.is_err()) }
            }
            assert_eq!(writer.counts(), (0, 0));
            time
        });
        assert_at_once("relay", times.collect());
    }
}

/// At a barrier: one lane waits for its memory, another fails to get it back.
#[test]
fn a_flush_that_fails_while_another_waits() {
    let times = (0..RUNS).map(|_| {
        let (guest, writer) = Writer::guest(MACHINES[0], &[("pc.ram", 16)], 1);
        let (source, DestinationEnd { main, lanes }, states) = watched(1 << 20);
        states[0].set_flush(Flush::Waits);
        states[FAILING].set_flush(Flush::Waits);
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let engine = Outgoing::new(Arc::default(), Arc::default(), options_of(ZeroCopySend::On));
            tell.send(engine.run(&source, &*guest)).unwrap();
        });
        answer_ping(&*main);
        wait_until("lanes in their flush", || {
            states.iter().all(|state| state.is_flushing.load(Ordering::SeqCst))
        });
        let begun = Instant::now();
        states[FAILING].set_flush(Flush::Fails);
        let result = told.recv_timeout(WATCHDOG).expect("the source hangs");
        let time = begun.elapsed();
        assert_named(&result);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("flush on memory:1: host unreachable"), "{error}");
        assert_eq!((lanes.len(), writer.counts()), (LANES, (0, 0)));
        time
    });
    assert_at_once("flush", times.collect());
}

//! Sixteen guests of one process, three of which are hostile, each in its own way. The others get what they ask for.
//!
//! Turns with and without hostility alternate, and each of the others sends at a fixed rate below what the machine can do, so
//! that what is compared is what hostile guests take away and not how processors are shared. The slowest answers depend on that all the
//! same, so there are turns with three threads that compute, too. The ordinary run asserts that
//! everybody else goes on; `cargo xtask soak vsock-neighbours` runs more and longer turns, and asserts that the others get 0.9 of
//! the bytes and wait at most twice as long for an answer: p50 beside quiet neighbours, p99 beside busy ones.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, SocketAddrUnix};
use towline_frontend::vsock::{BUF_ALLOC, Guest, HOST_CID, Header, op};
use towline_frontend::{Buffer, Frontend};
use towline_vsock::{Limits, LocalGuests};

use common::{Served, listen_for_messages, message_socket};

const GUESTS: u64 = 16;
const HOSTILE: u64 = 3;
const CID_FIRST: u64 = 100;
/// What each of the others sends, in bytes a second and at a time.
const RATE: u64 = 8 << 20;
const PIECE: u32 = 32 << 10;
const PORT: u32 = 5000;

/// What the three do in a turn.
#[derive(Clone, Copy, PartialEq)]
enum Neighbours {
    /// Nothing.
    Quiet,
    /// They use processor time, and are not hostile: what a scheduler takes from the others is not a matter of hostility.
    Busy,
    Hostile,
}

/// Shared by all threads of a run.
#[derive(Default)]
struct Run {
    neighbours: AtomicU8,
    over: AtomicBool,
    /// Bytes that arrived at the host.
    arrived: AtomicU64,
    /// Round trips of a turn, in microseconds.
    trips_us: Mutex<Vec<u64>>,
    attacks: [AtomicU64; HOSTILE as usize],
}

impl Run {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn has(&self, neighbours: Neighbours) -> bool {
        self.neighbours.load(Ordering::Relaxed) == neighbours as u8
    }

    /// Whether a hostile guest goes on, after a pause where it shall not.
    fn attacks(&self, which: usize) -> bool {
        while !self.has(Neighbours::Hostile) && !self.is_over() {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        self.attacks[which].fetch_add(1, Ordering::Relaxed);
        !self.is_over()
    }
}

/// A hostile guest's driver has a processor of its own; here it takes what the others leave.
fn yield_to_others() {
    let _ = rustix::process::nice(19);
}

fn header(cid: u64, peer: u64, ports: (u32, u32), kind: u16, op: u16) -> Header {
    Header {
        src_cid: cid,
        dst_cid: peer,
        src_port: ports.0,
        dst_port: ports.1,
        len: 0,
        kind,
        op,
        flags: 0,
        buf_alloc: BUF_ALLOC,
        fwd_cnt: 0,
    }
}

/// Messages of very many pieces, of one byte, and without an end, to somebody who never reads; and then a new connection.
fn send_messages(run: &Run, cid: u64, (_frontend, mut guest): (Frontend, Guest), host: &Path) {
    yield_to_others();
    let listener = listen_for_messages(host);
    // It may be refused a connection.
    rustix::io::ioctl_fionbio(&listener, true).unwrap();
    let mut hosts = Vec::new();
    let mut port = 1000;
    while run.attacks(0) {
        port += 1;
        let ports = (port, PORT);
        guest.request_seqpacket(ports);
        guest.poll(|_, _| ()).unwrap();
        while let Ok(host) = rustix::net::accept(&listener) {
            hosts.push(host);
        }
        let header =
            |len: usize, flags| Header { len: len as u32, flags, ..header(cid, HOST_CID, ports, 2, op::RW) };
        let _ = guest.put_in_pieces(&header(8192, 0), &[1; 8192], 8);
        guest.poll(|_, _| ()).unwrap();
        for index in 0..2000 {
            let _ = guest.put_in_pieces(&header(1, index & 1), &[2], 8);
            guest.poll(|_, _| ()).unwrap();
        }
        guest.reset(ports);
        hosts.clear();
        guest.poll(|_, _| ()).unwrap();
    }
}

/// Connections that come and go, to the host and to each of the other guests, and packets of no connection; nothing that is
/// sent to it is taken.
fn flood(run: &Run, cid: u64, (_frontend, mut guest): (Frontend, Guest)) {
    yield_to_others();
    let mut port = 0u32;
    while run.attacks(1) {
        for peer in CID_FIRST..CID_FIRST + GUESTS {
            port = port.wrapping_add(1);
            for op in [op::REQUEST, op::RW, op::SHUTDOWN, op::CREDIT_REQUEST] {
                let _ = guest.put(&header(cid, peer, (port, PORT), 1, op), 0);
            }
            let _ = guest.put(&header(cid, HOST_CID, (port, PORT), 1, op::REQUEST), 0);
            if port.is_multiple_of(3) {
                let _ = guest.put(&header(cid, peer, (port, PORT), 1, op::RST), 0);
            }
        }
        guest.tx().publish();
        guest.reclaim().unwrap();
    }
}

/// Buffers to receive into that are of no use, while clients of the host send empty messages and say nothing.
fn waste(run: &Run, (_frontend, mut guest): (Frontend, Guest), directory: &Path) {
    yield_to_others();
    let client = message_socket();
    rustix::net::connect(&client, &SocketAddrUnix::new(directory.join("m")).unwrap()).unwrap();
    rustix::net::send(&client, b"CONNECT 22\n", SendFlags::empty()).unwrap();
    let mut silent = Vec::new();
    while run.attacks(2) {
        for _ in 0..100 {
            let _ = rustix::net::send(&client, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
        silent.extend(UnixStream::connect(directory.join("v")));
        if silent.len() > 400 {
            silent.clear();
        }
        let buffer = Buffer { guest: guest.memory().alloc(0, 64), len: 10 };
        let _ = guest.rx().add(&[], &[buffer], 0);
        guest.rx().publish();
        guest
            .poll(|guest, event| {
                if let towline_frontend::vsock::Event::Request(ports) = event {
                    guest.accept(ports);
                }
            })
            .unwrap();
    }
}

/// Sends at the rate, and asks for an answer with every piece.
fn work(run: &Run, (_frontend, mut guest): (Frontend, Guest)) {
    let ports = (6000, PORT);
    guest.request(ports);
    common::until(&mut guest, |_, event| {
        (event == towline_frontend::vsock::Event::Connected(ports)).then_some(())
    });
    let pause = Duration::from_micros(u64::from(PIECE) * 1_000_000 / RATE);
    let mut next = Instant::now();
    let mut asked: Option<Instant> = None;
    while !run.is_over() {
        if asked.is_none() && Instant::now() >= next && guest.send_any(ports, PIECE) {
            asked = Some(Instant::now());
            next = (next + pause).max(Instant::now() - 8 * pause);
        }
        guest
            .poll(|_, event| {
                if let (towline_frontend::vsock::Event::Data { .. }, Some(since)) = (event, asked) {
                    let took = u64::try_from(since.elapsed().as_micros()).unwrap();
                    run.trips_us.lock().unwrap().push(took);
                    asked = None;
                }
            })
            .unwrap();
        let left = next.saturating_duration_since(Instant::now()).max(Duration::from_micros(100));
        guest.wait(false, if asked.is_some() { Duration::from_millis(20) } else { left }).unwrap();
    }
}

/// The host's side of a guest that works: answers each piece with a byte.
fn answer(run: &Run, listener: &UnixListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut piece = vec![0; PIECE as usize];
    while stream.read_exact(&mut piece).is_ok() {
        run.arrived.fetch_add(PIECE.into(), Ordering::Relaxed);
        if stream.write_all(b"!").is_err() {
            return;
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Takes a processor, as the thread of a guest that uses its device a lot, when the neighbours are to be busy.
fn compute(run: &Run) {
    while !run.is_over() {
        if run.has(Neighbours::Busy) {
            std::hint::spin_loop();
        } else {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

/// What the others had in one turn.
struct Turn {
    bytes: u64,
    /// Of all of them, rising.
    trips_us: Vec<u64>,
}

impl Turn {
    fn play(run: &Run, neighbours: Neighbours, millis: u64) -> Self {
        run.neighbours.store(neighbours as u8, Ordering::Relaxed);
        // What went before has its end; then it is counted.
        std::thread::sleep(Duration::from_millis(millis / 5));
        let before = run.arrived.load(Ordering::Relaxed);
        run.trips_us.lock().unwrap().clear();
        std::thread::sleep(Duration::from_millis(millis));
        let bytes = run.arrived.load(Ordering::Relaxed) - before;
        let mut trips_us = std::mem::take(&mut *run.trips_us.lock().unwrap());
        trips_us.sort_unstable();
        Self { bytes, trips_us }
    }

    /// The time within which so many of a hundred round trips were over, in microseconds.
    fn percentile(&self, percent: usize) -> u64 {
        let last = self.trips_us.len().checked_sub(1).expect("nobody else has an answer");
        self.trips_us[last * percent / 100].max(1)
    }
}

/// Turns side by side: what the others have beside hostile guests, as a share of what they have otherwise.
#[derive(Default)]
struct Ratios {
    bytes: Vec<f64>,
    /// p50, of quiet neighbours'.
    half: Vec<f64>,
    /// p99, of busy neighbours', and of quiet ones'.
    most: Vec<f64>,
    most_of_quiet: Vec<f64>,
}

impl Ratios {
    fn add(&mut self, round: u64, [quiet, busy, hostile]: &[Turn; 3]) {
        let ratio = |with: u64, without: u64| with as f64 / without.max(1) as f64;
        let [half, most] =
            [50, 99].map(|percent| [quiet, busy, hostile].map(|turn| turn.percentile(percent)));
        self.bytes.push(ratio(hostile.bytes, quiet.bytes));
        self.half.push(ratio(half[2], half[0]));
        self.most.push(ratio(most[2], most[1]));
        self.most_of_quiet.push(ratio(most[2], most[0]));
        let count = hostile.trips_us.len();
        println!(
            "round {round}: {} of {} bytes; {count} round trips; quiet, busy, hostile: p50 {half:?} us, p99 {most:?} us",
            hostile.bytes, quiet.bytes
        );
    }
}

/// The one in the middle.
fn median(name: &str, mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    println!("{name}: median ratio {median:.3}, {:.3} to {:.3}", ratios[0], ratios[ratios.len() - 1]);
    median
}

/// Plays so many rounds of all kinds of turns.
fn play(run: &Run, rounds: u64, millis: u64) -> Ratios {
    let mut ratios = Ratios::default();
    for round in 0..rounds {
        let mut turns = [Neighbours::Quiet, Neighbours::Busy, Neighbours::Hostile].map(|kind| (kind, None));
        for index in 0..turns.len() {
            let (kind, turn) = &mut turns[(index + round as usize) % 3];
            *turn = Some(Turn::play(run, *kind, millis));
        }
        let turns = turns.map(|(_, turn)| turn.expect("each was played"));
        assert!(turns[2].bytes > 0, "nobody else gets anything");
        ratios.add(round, &turns);
    }
    ratios
}

#[test]
fn hostile_guests_take_nothing_from_others() {
    towline_vsock::raise_descriptor_limit();
    let (rounds, millis) =
        (setting("TOWLINE_SOAK_NEIGHBOURS", 2), setting("TOWLINE_SOAK_NEIGHBOURS_MS", 300));
    let limits = Limits { connections: 256, memory: 64 << 20, handshakes: 32, ..Limits::default() };
    let local_guests = Arc::new(LocalGuests::default());
    let served: Vec<Served> = (CID_FIRST..CID_FIRST + GUESTS)
        .map(|cid| {
            Served::among(limits, cid, &local_guests, |settings, directory| {
                settings.groups.push("lab".to_owned());
                settings.uds_seqpacket = Some(directory.join("m"));
            })
        })
        .collect();
    let run = Run::default();
    std::thread::scope(|scope| {
        let run = &run;
        for (index, served) in served.iter().enumerate() {
            let cid = CID_FIRST + index as u64;
            let pair = served.guest_with(if index == 0 { 2048 } else { 128 });
            match index {
                0 => {
                    let host = served.path(&format!("v_{PORT}"));
                    scope.spawn(move || send_messages(run, cid, pair, &host));
                }
                1 => {
                    scope.spawn(move || flood(run, cid, pair));
                }
                2 => {
                    let directory = served.path("");
                    scope.spawn(move || waste(run, pair, &directory));
                }
                _ => {
                    let listener = UnixListener::bind(served.path(&format!("v_{PORT}"))).unwrap();
                    scope.spawn(move || answer(run, &listener));
                    scope.spawn(move || work(run, pair));
                }
            }
        }
        (0..HOSTILE).for_each(|_| {
            scope.spawn(|| compute(run));
        });
        let ratios = play(run, rounds, millis);
        run.over.store(true, Ordering::Relaxed);
        let Ratios { bytes, half, most, most_of_quiet } = ratios;
        let (bytes, half, most) = (
            median("bytes", bytes),
            median("p50, of quiet neighbours'", half),
            median("p99, of busy neighbours'", most),
        );
        median("p99, of quiet neighbours'", most_of_quiet);
        println!("attacks {:?}", run.attacks);
        assert!(run.attacks.iter().all(|count| count.load(Ordering::Relaxed) > 0));
        if rounds > 2 {
            assert!(bytes >= 0.9, "the others get {bytes:.3} of what they have without hostile guests");
            assert!(
                half <= 2.0,
                "half of the round trips take {half:.2} times as long as beside quiet neighbours"
            );
            assert!(
                most <= 2.0,
                "the slowest round trips take {most:.2} times as long as beside busy neighbours"
            );
        }
    });
    for (index, served) in served.iter().enumerate() {
        let Limits { memory, .. } = limits;
        let statistics = served.device.report().statistics;
        assert!(statistics.memory_reserved <= memory, "guest {index}: {statistics:?}");
    }
}

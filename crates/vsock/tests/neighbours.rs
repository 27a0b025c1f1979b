//! Sixteen guests of one process, three of which are hostile in different ways. The others keep their
//! throughput and latency.
//!
//! Phases with and without hostile guests alternate. Each of the other guests sends at a fixed rate below the
//! capacity of the machine, so the effect of hostility is measured and not that of sharing CPUs. The highest
//! latencies depend on the CPUs nevertheless, so there are phases with three computing threads too. The
//! ordinary run asserts that all others make progress; `cargo xtask soak vsock-neighbours` runs more and
//! longer phases, and asserts that the others keep 0.9 of their throughput and at most twice their latency:
//! p50 beside quiet neighbours, p99 beside busy ones.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, SocketAddrUnix};
use towline_frontend::vsock::{BUF_ALLOC, HOST_CID, PacketHeader, PortPair, VsockGuest, op};
use towline_frontend::{Frontend, QueueBuffer};
use towline_vsock::{ConnectionLimits, LocalGuests};

use common::{Served, listen_seqpacket, seqpacket_socket};

const GUESTS: u64 = 16;
const HOSTILE: u64 = 3;
const CID_FIRST: u64 = 100;
/// Data rate of each of the others in bytes per second, and its unit.
const RATE: u64 = 8 << 20;
const UNIT: u32 = 32 << 10;
const PORT: u32 = 5000;

/// Behaviour of the three in a phase.
#[derive(Clone, Copy, PartialEq)]
enum Neighbours {
    /// Idle.
    Quiet,
    /// They use CPU time without hostility, to separate its effect from that of the scheduler.
    Busy,
    /// They attack the device.
    Hostile,
}

/// Parts of the process whose CPU time is counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Drivers and clients of the hostile guests.
    HostileDrivers,
    /// Workers of their devices.
    HostileWorkers,
    OtherDrivers,
    OtherWorkers,
    /// The computing threads.
    Computing,
}

const PARTS: [Part; 5] =
    [Part::HostileDrivers, Part::HostileWorkers, Part::OtherDrivers, Part::OtherWorkers, Part::Computing];

/// State that all threads of a run share.
#[derive(Default)]
struct Run {
    /// The thread IDs of each part.
    threads: Mutex<Vec<(i32, Part)>>,
    neighbours: AtomicU8,
    over: AtomicBool,
    /// Bytes that arrived at the host.
    arrived: AtomicU64,
    /// Round trips of a phase in microseconds.
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

    /// Assigns the calling thread to a part.
    fn enter(&self, part: Part) {
        self.threads.lock().unwrap().push((rustix::thread::gettid().as_raw_nonzero().get(), part));
    }

    /// Returns the CPU time of each part up to now in milliseconds.
    fn cpu_ms(&self) -> [u64; PARTS.len()] {
        let threads = self.threads.lock().unwrap();
        PARTS.map(|part| {
            threads
                .iter()
                .filter(|(_, of)| *of == part)
                .map(|(thread, _)| thread_cpu_us(*thread))
                .sum::<u64>()
                / 1000
        })
    }

    /// Returns true if a hostile guest continues, after a pause in phases without hostility.
    fn attacks(&self, which: usize) -> bool {
        while !self.has(Neighbours::Hostile) && !self.is_over() {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        self.attacks[which].fetch_add(1, Ordering::Relaxed);
        !self.is_over()
    }
}

/// Returns the CPU time of a thread in microseconds.
fn thread_cpu_us(thread: i32) -> u64 {
    let schedstat = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap();
    schedstat.split_whitespace().next().unwrap().parse::<u64>().unwrap() / 1000
}

/// Returns the threads of all workers.
fn workers() -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let numbers = tasks.map(|task| task.unwrap().file_name().into_string().unwrap().parse().unwrap());
    let is_worker = |thread: &i32| {
        let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
        name.is_ok_and(|name| name.starts_with("vsock-"))
    };
    numbers.filter(is_worker).collect()
}

/// A hostile guest's driver has its own CPUs in reality; here it has the lowest priority.
fn yield_to_others() {
    let _ = rustix::process::nice(19);
}

fn header(cid: u64, peer: u64, ports: PortPair, kind: u16, op: u16) -> PacketHeader {
    PacketHeader {
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

/// Sends messages of many segments, of one byte, and without an end to a program that never reads, on one
/// connection after another.
fn send_messages(run: &Run, cid: u64, (_frontend, mut guest): (Frontend, VsockGuest), host: &Path) {
    run.enter(Part::HostileDrivers);
    yield_to_others();
    let listener = listen_seqpacket(host);
    // The connection may be refused.
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
        let header = |len: usize, flags| PacketHeader {
            len: len as u32,
            flags,
            ..header(cid, HOST_CID, ports, 2, op::RW)
        };
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

/// Opens and closes connections to the host and to each of the other guests, sends packets of unknown
/// connections, and posts no buffers.
fn flood(run: &Run, cid: u64, (_frontend, mut guest): (Frontend, VsockGuest)) {
    run.enter(Part::HostileDrivers);
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

/// Posts useless receive buffers, while clients of the host send empty messages or nothing.
fn waste(run: &Run, (_frontend, mut guest): (Frontend, VsockGuest), directory: &Path) {
    run.enter(Part::HostileDrivers);
    yield_to_others();
    let client = seqpacket_socket();
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
        let buffer = QueueBuffer { guest: guest.memory().alloc(0, 64), len: 10 };
        let _ = guest.rx().add(&[], &[buffer], 0);
        guest.rx().publish();
        guest
            .poll(|guest, event| {
                if let towline_frontend::vsock::VsockEvent::Request(ports) = event {
                    guest.accept(ports);
                }
            })
            .unwrap();
    }
}

/// Sends at the fixed rate, and waits for the reply to every unit.
fn work(run: &Run, (_frontend, mut guest): (Frontend, VsockGuest)) {
    run.enter(Part::OtherDrivers);
    let ports = (6000, PORT);
    guest.request(ports);
    common::poll_until(&mut guest, |_, event| {
        (event == towline_frontend::vsock::VsockEvent::Connected(ports)).then_some(())
    });
    let pause = Duration::from_micros(u64::from(UNIT) * 1_000_000 / RATE);
    let mut next = Instant::now();
    let mut sent_at: Option<Instant> = None;
    while !run.is_over() {
        if sent_at.is_none() && Instant::now() >= next && guest.send_any(ports, UNIT) {
            sent_at = Some(Instant::now());
            next = (next + pause).max(Instant::now() - 8 * pause);
        }
        guest
            .poll(|_, event| {
                if let (towline_frontend::vsock::VsockEvent::Data { .. }, Some(since)) = (event, sent_at) {
                    let took = u64::try_from(since.elapsed().as_micros()).unwrap();
                    run.trips_us.lock().unwrap().push(took);
                    sent_at = None;
                }
            })
            .unwrap();
        let left = next.saturating_duration_since(Instant::now()).max(Duration::from_micros(100));
        guest.wait(false, if sent_at.is_some() { Duration::from_millis(20) } else { left }).unwrap();
    }
}

/// The host's end of a working guest: replies to each unit with a byte.
fn reply(run: &Run, listener: &UnixListener) {
    run.enter(Part::OtherDrivers);
    let (mut stream, _) = listener.accept().unwrap();
    let mut unit = vec![0; UNIT as usize];
    while stream.read_exact(&mut unit).is_ok() {
        run.arrived.fetch_add(UNIT.into(), Ordering::Relaxed);
        if stream.write_all(b"!").is_err() {
            return;
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Uses a CPU, like the worker of a guest with much traffic, in phases with busy neighbours.
fn compute(run: &Run) {
    run.enter(Part::Computing);
    while !run.is_over() {
        if run.has(Neighbours::Busy) {
            std::hint::spin_loop();
        } else {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

/// Measurements of the others in one phase.
struct Phase {
    bytes: u64,
    /// All round trips, ascending.
    trips_us: Vec<u64>,
    /// CPU time of each part in thousandths of a CPU.
    cpu: [u64; PARTS.len()],
}

impl Phase {
    fn run(run: &Run, neighbours: Neighbours, millis: u64) -> Self {
        run.neighbours.store(neighbours as u8, Ordering::Relaxed);
        // The phase before ends first.
        std::thread::sleep(Duration::from_millis(millis / 5));
        let before = run.arrived.load(Ordering::Relaxed);
        let (cpu_before, since) = (run.cpu_ms(), Instant::now());
        run.trips_us.lock().unwrap().clear();
        std::thread::sleep(Duration::from_millis(millis));
        let bytes = run.arrived.load(Ordering::Relaxed) - before;
        let (cpu_after, elapsed) = (run.cpu_ms(), since.elapsed().as_millis() as u64);
        let cpu = std::array::from_fn(|part| 1000 * (cpu_after[part] - cpu_before[part]) / elapsed.max(1));
        let mut trips_us = std::mem::take(&mut *run.trips_us.lock().unwrap());
        trips_us.sort_unstable();
        Self { bytes, trips_us, cpu }
    }

    /// Returns a percentile of the round trips in microseconds.
    fn percentile(&self, percent: usize) -> u64 {
        let last = self.trips_us.len().checked_sub(1).expect("the other guests have no reply");
        self.trips_us[last * percent / 100].max(1)
    }
}

/// Measurements beside hostile guests, as a ratio of those without them.
#[derive(Default)]
struct Ratios {
    bytes: Vec<f64>,
    /// Of p50, to that beside quiet neighbours.
    half: Vec<f64>,
    /// Of p99, to those beside busy and beside quiet neighbours.
    most: Vec<f64>,
    most_of_quiet: Vec<f64>,
}

impl Ratios {
    fn add(&mut self, round: u64, [quiet, busy, hostile]: &[Phase; 3]) {
        let ratio = |with: u64, without: u64| with as f64 / without.max(1) as f64;
        let [half, most] =
            [50, 99].map(|percent| [quiet, busy, hostile].map(|phase| phase.percentile(percent)));
        self.bytes.push(ratio(hostile.bytes, quiet.bytes));
        self.half.push(ratio(half[2], half[0]));
        self.most.push(ratio(most[2], most[1]));
        self.most_of_quiet.push(ratio(most[2], most[0]));
        let count = hostile.trips_us.len();
        println!(
            "round {round}: {} of {} bytes; {count} round trips; quiet, busy, hostile: p50 {half:?} us, p99 {most:?} us",
            hostile.bytes, quiet.bytes
        );
        for (kind, phase) in [("quiet", quiet), ("busy", busy), ("hostile", hostile)] {
            println!("  thousandths of a CPU, {kind}: {:?}", PARTS.iter().zip(phase.cpu).collect::<Vec<_>>());
        }
    }
}

/// Returns the median.
fn median(name: &str, mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    println!("{name}: median ratio {median:.3}, {:.3} to {:.3}", ratios[0], ratios[ratios.len() - 1]);
    median
}

/// Runs all kinds of phases `rounds` times.
fn run_phases(run: &Run, rounds: u64, millis: u64) -> Ratios {
    let mut ratios = Ratios::default();
    for round in 0..rounds {
        let mut phases = [Neighbours::Quiet, Neighbours::Busy, Neighbours::Hostile].map(|kind| (kind, None));
        for index in 0..phases.len() {
            let (kind, phase) = &mut phases[(index + round as usize) % 3];
            *phase = Some(Phase::run(run, *kind, millis));
        }
        let phases = phases.map(|(_, phase)| phase.expect("each phase has run"));
        assert!(phases[2].bytes > 0, "the other guests make no progress");
        ratios.add(round, &phases);
    }
    ratios
}

/// Prints the medians; asserts the limits if there were enough rounds for one.
fn assert_unaffected(ratios: Ratios, rounds: u64) {
    let Ratios { bytes, half, most, most_of_quiet } = ratios;
    let bytes = median("bytes", bytes);
    let half = median("p50, to quiet neighbours", half);
    let most = median("p99, to busy neighbours", most);
    median("p99, to quiet neighbours", most_of_quiet);
    if rounds > 2 {
        assert!(bytes >= 0.9, "the others have {bytes:.3} of their throughput without hostile guests");
        assert!(half <= 2.0, "p50 is {half:.2} times that beside quiet neighbours");
        assert!(most <= 2.0, "p99 is {most:.2} times that beside busy neighbours");
    }
}

#[test]
fn hostile_guests_do_not_affect_others() {
    towline_vsock::raise_descriptor_limit();
    let (rounds, millis) =
        (setting("TOWLINE_SOAK_NEIGHBOURS", 2), setting("TOWLINE_SOAK_NEIGHBOURS_MS", 300));
    let limits = ConnectionLimits {
        connections: 256,
        memory: 64 << 20,
        handshakes: 32,
        ..ConnectionLimits::default()
    };
    let local_guests = Arc::new(LocalGuests::default());
    let served: Vec<Served> = (CID_FIRST..CID_FIRST + GUESTS)
        .map(|cid| {
            Served::with_local_guests(limits, cid, &local_guests, |settings, directory| {
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
            let before = workers();
            let pair = served.guest_with_rings(if index == 0 { 2048 } else { 128 });
            let part = if cid < CID_FIRST + HOSTILE { Part::HostileWorkers } else { Part::OtherWorkers };
            let new = workers().into_iter().filter(|thread| !before.contains(thread));
            run.threads.lock().unwrap().extend(new.map(|thread| (thread, part)));
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
                    scope.spawn(move || reply(run, &listener));
                    scope.spawn(move || work(run, pair));
                }
            }
        }
        (0..HOSTILE).for_each(|_| {
            scope.spawn(|| compute(run));
        });
        let ratios = run_phases(run, rounds, millis);
        run.over.store(true, Ordering::Relaxed);
        println!("attacks {:?}", run.attacks);
        assert!(run.attacks.iter().all(|count| count.load(Ordering::Relaxed) > 0));
        assert_unaffected(ratios, rounds);
    });
    for (index, served) in served.iter().enumerate() {
        let ConnectionLimits { memory, .. } = limits;
        let statistics = served.device.report().statistics;
        assert!(statistics.memory_reserved <= memory, "guest {index}: {statistics:?}");
    }
}

//! Connections whose ends stall at random, for an arbitrary time: every byte comes back, and the device's
//! memory does not grow.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use crate::support::{Fixture, WITHIN, connect};

/// Parallel connections.
const WORKERS: u64 = 6;
/// Maximum number of bytes of a connection.
const LONGEST: usize = 4 << 20;
/// Maximum growth of the device's memory after the first tenth of the time, in KiB: the buffers of one
/// connection, and the allocator's overhead.
const GROWTH_KIB: u64 = 8 << 10;

/// Duration in seconds; `TOWLINE_SOAK_VSOCK_STALLS_S` overrides it.
fn seconds() -> u64 {
    std::env::var("TOWLINE_SOAK_VSOCK_STALLS_S").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(4)
}

/// Returns a free port for the device.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

#[derive(Default)]
struct Tally {
    connections: AtomicU64,
    abandoned: AtomicU64,
    bytes: AtomicU64,
}

/// Needs an echo on port 5001, also through this TCP port.
pub(crate) fn stalls_lose_no_bytes(fixture: &mut Fixture, tcp_port: u16) {
    let time = Duration::from_secs(seconds());
    let (until, tally, uds) = (Instant::now() + time, Arc::new(Tally::default()), fixture.uds());
    let mut rng = fastrand::Rng::with_seed(7);
    let content: Arc<Vec<u8>> = Arc::new((0..2 * LONGEST).map(|_| rng.u8(..)).collect());
    let (mut first, mut last) = (None, 0);
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (uds, content, tally) = (&uds, &content, &tally);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(worker);
                while Instant::now() < until {
                    talk(uds, tcp_port, content, &mut rng, tally);
                }
            });
        }
        for step in 1..=10 {
            while Instant::now() + time * (10 - step) / 10 < until {
                std::thread::sleep(time / 100);
            }
            last = own_kib(fixture.device.pid());
            println!(
                "{:>5} s: {} connections, {} of them abandoned, {} MiB came back, {last} KiB its own",
                (time * step / 10).as_secs(),
                tally.connections.load(Ordering::Relaxed),
                tally.abandoned.load(Ordering::Relaxed),
                tally.bytes.load(Ordering::Relaxed) >> 20,
            );
            first.get_or_insert(last);
        }
    });
    assert!(tally.connections.load(Ordering::Relaxed) >= WORKERS);
    assert!(fixture.device.runs().unwrap());
    let first = first.unwrap();
    assert!(last <= first + GROWTH_KIB, "{first} KiB its own after a tenth of the time, {last} in the end");
}

/// Memory of a process, without the guest's, which is shared.
fn own_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// One connection: sends some bytes, reads the same back, then the end of the stream. Some are abandoned half
/// way.
fn talk(uds: &Path, tcp_port: u16, content: &Arc<Vec<u8>>, rng: &mut fastrand::Rng, tally: &Tally) {
    let stream = open(uds, tcp_port, rng);
    let total = [0, 1, 3000, 70_000, 1 << 20, LONGEST][rng.usize(..6)];
    let start = rng.usize(..LONGEST);
    let kept = if rng.u32(..8) == 0 { rng.usize(..=total) } else { total };
    let mut writer = stream.try_clone().unwrap();
    let (sent, mut other) = (Arc::clone(content), rng.fork());
    let writing = std::thread::spawn(move || {
        let mut at = 0;
        while at < total {
            let here = other.usize(1..=256 << 10).min(total - at);
            // An abandoned connection fails at some point.
            if writer.write_all(&sent[start + at..start + at + here]).is_err() {
                return false;
            }
            at += here;
            stall(&mut other);
        }
        shutdown(&writer, Shutdown::Write).is_ok()
    });
    let (mut at, mut buffer, mut reader) = (0, vec![0; 256 << 10], stream);
    let ended = loop {
        if kept < total && at >= kept {
            break false;
        }
        let room = rng.usize(1..=buffer.len());
        let len = match reader.read(&mut buffer[..room]) {
            // A process that was stopped for a while gets this error.
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            len => len.unwrap(),
        };
        if len == 0 {
            break true;
        }
        assert!(at + len <= total, "more came back than was sent");
        assert!(buffer[..len] == content[start + at..start + at + len], "other bytes came back after {at}");
        at += len;
        stall(rng);
    };
    if !ended {
        // Both directions at once, with bytes under way.
        let _ = shutdown(&reader, Shutdown::Both);
        tally.abandoned.fetch_add(1, Ordering::Relaxed);
    }
    let sent = writing.join().unwrap();
    assert!(!ended || (sent && at == total), "{at} of {total} bytes came back");
    tally.connections.fetch_add(1, Ordering::Relaxed);
    tally.bytes.fetch_add(at as u64, Ordering::Relaxed);
}

/// Connects by either socket, and returns it as a file: only reads and writes matter.
fn open(uds: &Path, tcp_port: u16, rng: &mut fastrand::Rng) -> File {
    if rng.bool() {
        return OwnedFd::from(connect(uds, 5001)).into();
    }
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, tcp_port)).unwrap();
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    OwnedFd::from(stream).into()
}

/// Stalls: usually never, now and then for a moment, seldom for long.
fn stall(rng: &mut fastrand::Rng) {
    match rng.u32(..200) {
        0 => std::thread::sleep(Duration::from_millis(1500)),
        1..20 => std::thread::sleep(Duration::from_millis(rng.u64(..40))),
        _ => {}
    }
}

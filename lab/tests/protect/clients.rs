//! Clients of the guest's echo: connections that send numbered requests, one after the other, and compare each reply.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use towline_lab::{Network, wait_until};

use crate::network::WITHIN;

/// Time in which a request is answered, also while the guest goes to its other host.
const ANSWERED_WITHIN: Duration = Duration::from_secs(90);
/// Lengths of requests: their number, and up to three segments.
const LENGTHS: std::ops::Range<usize> = 16..4096;

/// Connections of one client, each with a thread.
pub(crate) struct Clients {
    connections: Vec<Arc<Connection>>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

/// Results of the connections so far, in their order.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) replies: Vec<u64>,
    /// Longest time between two replies, the one that lasts included.
    pub(crate) longest_gaps: Vec<Duration>,
    /// Errors of those that have one, with their number.
    pub(crate) errors: Vec<String>,
}

struct Connection {
    number: usize,
    seen: Mutex<Seen>,
}

struct Seen {
    replies: u64,
    last: Instant,
    longest_gap: Duration,
    error: Option<String>,
}

impl Clients {
    /// Connects this number of times to an echo, from a network.
    pub(crate) fn begin(network: &Network, to: SocketAddr, count: usize) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (mut connections, mut threads) = (Vec::new(), Vec::new());
        for number in 0..count {
            let stream = network.enter(|| connect(to)).unwrap();
            let seen = Seen { replies: 0, last: Instant::now(), longest_gap: Duration::ZERO, error: None };
            let connection = Arc::new(Connection { number, seen: Mutex::new(seen) });
            let (runs, ends) = (connection.clone(), stop.clone());
            threads.push(std::thread::spawn(move || runs.talk(stream, &ends)));
            connections.push(connection);
        }
        Self { connections, threads, stop }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let seen: Vec<_> = self.connections.iter().map(|connection| connection.seen()).collect();
        let error = |(number, seen): (usize, &MutexGuard<'_, Seen>)| {
            seen.error.as_ref().map(|error| format!("connection {number}: {error}"))
        };
        Snapshot {
            replies: seen.iter().map(|seen| seen.replies).collect(),
            longest_gaps: seen.iter().map(|seen| seen.longest_gap.max(seen.present_gap())).collect(),
            errors: seen.iter().enumerate().filter_map(error).collect(),
        }
    }

    /// Forgets the gaps that have ended.
    pub(crate) fn forget_gaps(&self) {
        self.connections.iter().for_each(|connection| connection.seen().longest_gap = Duration::ZERO);
    }

    /// Waits until each connection has this number of further replies.
    pub(crate) fn wait_more(&self, more: u64) {
        let wanted: Vec<_> = self.snapshot().replies.iter().map(|replies| replies + more).collect();
        let are_there = || {
            let now = self.snapshot();
            assert!(now.errors.is_empty(), "{now:?}");
            Ok(now.replies.iter().zip(&wanted).all(|(replies, wanted)| replies >= wanted).then_some(()))
        };
        wait_until("replies on each connection", WITHIN, are_there)
            .unwrap_or_else(|error| panic!("{error}: {:?}, expected {wanted:?}", self.snapshot()));
    }

    /// Ends the connections after their present requests.
    pub(crate) fn end(mut self) -> Snapshot {
        self.stop();
        self.snapshot()
    }

    pub(crate) fn stop(&mut self) {
        self.stop.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            thread.join().expect("a connection does not panic");
        }
    }
}

impl Snapshot {
    pub(crate) fn longest_gap(&self) -> Duration {
        self.longest_gaps.iter().copied().max().unwrap_or_default()
    }
}

impl Seen {
    /// Time since the last reply; after an error nothing is awaited.
    fn present_gap(&self) -> Duration {
        if self.error.is_some() { Duration::ZERO } else { self.last.elapsed() }
    }
}

impl Connection {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn talk(&self, mut stream: TcpStream, ends: &AtomicBool) {
        for number in (0..).take_while(|_| !ends.load(SeqCst)) {
            let answered = ask(&mut stream, &request(self.number, number));
            let mut seen = self.seen();
            if let Err(error) = answered {
                seen.error = Some(format!("request {number}: {error}"));
                return;
            }
            let gap = seen.last.elapsed();
            seen.longest_gap = seen.longest_gap.max(gap);
            seen.last = Instant::now();
            seen.replies += 1;
        }
    }
}

/// Request of a connection: its number, and bytes that no other one has.
fn request(connection: usize, number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number << 8 | connection as u64);
    let mut bytes = vec![0; random.usize(LENGTHS)];
    random.fill(&mut bytes);
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Sends a request, and compares its reply.
fn ask(stream: &mut TcpStream, request: &[u8]) -> Result<(), String> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => "the guest has closed the connection".to_owned(),
        ErrorKind::WouldBlock => format!("no reply within {} s", ANSWERED_WITHIN.as_secs()),
        _ => error.to_string(),
    };
    stream.write_all(request).map_err(failed)?;
    let mut reply = vec![0; request.len()];
    stream.read_exact(&mut reply).map_err(failed)?;
    match reply.iter().zip(request).position(|(reply, request)| reply != request) {
        Some(at) => Err(format!("the reply differs from byte {at} of {} on", request.len())),
        None => Ok(()),
    }
}

fn connect(to: SocketAddr) -> TcpStream {
    let connected = || Ok(TcpStream::connect_timeout(&to, WITHIN).ok());
    let stream = wait_until("a connection", WITHIN, connected).unwrap();
    stream.set_read_timeout(Some(ANSWERED_WITHIN)).unwrap();
    stream.set_write_timeout(Some(ANSWERED_WITHIN)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

impl Drop for Clients {
    fn drop(&mut self) {
        // The threads end with their requests; a test that has failed does not wait for them.
        self.stop.store(true, SeqCst);
    }
}

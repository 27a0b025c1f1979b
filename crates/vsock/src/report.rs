//! What a device has done, for whoever asks: its thread writes it down when it is asked, and when it ends.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::connection::{ConnectionKey, ConnectionState};
use crate::engine::{ConnectionStatistics, Statistics};
use crate::packet::Kind;

/// How long a thread may take to write it down; then what it last wrote is taken.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// What a device has done since its guest was last connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// All together.
    pub statistics: Statistics,
    /// Bytes that are kept for sockets which do not take them.
    pub buffered_bytes: usize,
    /// The names of all connections, and the port of the host side that comes next.
    pub(crate) names: Vec<(ConnectionKey, Kind)>,
    pub(crate) next_port: u32,
    /// Each connection that there is.
    pub connections: Vec<(ConnectionKey, Kind, ConnectionState, ConnectionStatistics)>,
}

impl fmt::Display for Report {
    /// One line, and one for each connection.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Statistics {
            table,
            totals,
            sends,
            receives,
            socket_full,
            out_of_credit,
            rx_ring_empty,
            connections,
            connections_peak,
            zero_copy_in_flight,
            zero_copy_resets,
            memory_reserved,
            memory_waits,
        } = self.statistics;
        write!(
            f,
            "connections={connections} peak={connections_peak} from_guest={} to_guest={} refused_by_limit={} \
             bytes_to_host={} bytes_to_guest={} packets_from_guest={} packets_to_guest={} bytes_copied={} \
             bytes_zero_copy={} zero_copy_in_flight={zero_copy_in_flight} zero_copy_resets={zero_copy_resets} buffered_bytes={} \
             memory_reserved={memory_reserved} memory_waits={memory_waits} \
             sends={sends} receives={receives} socket_full={socket_full} out_of_credit={out_of_credit} rx_ring_empty={rx_ring_empty} resets_sent={} \
             resets_received={} violations={} dropped={} credit_updates_sent={} credit_updates_received={}",
            table.requests_from_guest,
            table.requests_to_guest,
            table.refused_by_limit,
            totals.bytes_to_host,
            totals.bytes_to_guest,
            totals.packets_from_guest,
            totals.packets_to_guest,
            totals.bytes_copied,
            totals.bytes_zero_copy,
            self.buffered_bytes,
            table.resets_sent,
            table.resets_received,
            table.violations,
            table.dropped,
            table.credit_updates_sent,
            table.credit_updates_received,
        )?;
        for (key, kind, phase, line) in &self.connections {
            let kind = name(*kind);
            write!(
                f,
                "\n  {kind} guest:{} {}:{} {} bytes_to_host={} bytes_to_guest={} bytes_copied={} bytes_zero_copy={}",
                key.guest_port,
                key.peer_cid,
                key.peer_port,
                format!("{phase:?}").to_lowercase(),
                line.bytes_to_host,
                line.bytes_to_guest,
                line.bytes_copied,
                line.bytes_zero_copy
            )?;
        }
        Ok(())
    }
}

/// A connection, as statistics show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionReport {
    /// `stream` or `seqpacket`.
    pub kind: &'static str,
    /// The guest's port.
    pub guest_port: u32,
    /// The context of the other end: the host's, or another guest's.
    pub peer_cid: u64,
    /// And its port.
    pub peer_port: u32,
    /// What went over it.
    pub statistics: ConnectionStatistics,
}

impl Report {
    /// Each connection that there is.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionReport> {
        self.connections.iter().map(|(key, kind, _, line)| ConnectionReport {
            kind: name(*kind),
            guest_port: key.guest_port,
            peer_cid: key.peer_cid,
            peer_port: key.peer_port,
            statistics: *line,
        })
    }
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Stream => "stream",
        Kind::Seqpacket => "seqpacket",
    }
}

/// Where it is written down.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    wanted: AtomicBool,
    /// And how often it was.
    written: Mutex<(Report, u64)>,
    news: Condvar,
    /// Threads that can write.
    writers: AtomicUsize,
}

impl Desk {
    /// Whether somebody asks; only the first call says so.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) && self.wanted.swap(false, Ordering::Acquire)
    }

    /// A thread begins to write here.
    pub(crate) fn open(&self) {
        self.writers.fetch_add(1, Ordering::Relaxed);
    }

    /// It writes no more.
    pub(crate) fn close(&self) {
        self.writers.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.writers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn write(&self, report: Report) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        *written = (report, written.1 + 1);
        self.news.notify_all();
    }

    /// Asks, by waking the thread, and gives what was written last.
    pub(crate) fn ask(&self, wake: impl FnOnce()) -> Report {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_open() {
            return written.0.clone();
        }
        let before = written.1;
        self.wanted.store(true, Ordering::Release);
        wake();
        let waited = self.news.wait_timeout_while(written, ANSWER_WITHIN, |written| written.1 == before);
        waited.unwrap_or_else(PoisonError::into_inner).0.0.clone()
    }
}

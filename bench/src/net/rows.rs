//! Rows of the tables: traffic, queues, contenders and drivers; columns and goals.

use std::sync::Arc;

use towline_lab::Network;

use crate::applications::{Connections, Direction, Traffic};
use crate::options::Bench;
use crate::table::{Bound, Column, Entry};
use crate::vhost::Signals;

/// DPDK's test program.
pub(super) const TESTPMD: &str = "dpdk-testpmd";
/// Cloud Hypervisor's backend.
pub(super) const VHOST_USER_NET: &str = "vhost_user_net";
/// User-mode networking without a tap: it ends the guest's connections, and opens sockets for them.
pub(super) const PASST: &str = "passt";

/// Goals, as ratios; the peer is vhost_user_net.
const TRANSMIT_MIN: f64 = 1.7;
const RECEIVE_MIN: f64 = 5.0;
const TO_GUEST_MIN: f64 = 6.0;
const FROM_GUEST_MIN: f64 = 1.2;
const REQUEST_MIN: f64 = 1.5;
const CONNECTION_MIN: f64 = 1.2;
const VETH_MIN: f64 = 0.9;
/// Of the tap, for frames of 64 B and for longer ones.
const TAP_MIN: f64 = 0.9;
const TAP_LONG_MIN: f64 = 0.95;
/// Goal of several queues against one, within the noise of most machines.
const QUEUES_MIN: f64 = 0.95;
const LARGE: usize = 64 << 10;

/// Measured traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Frames of this length, with their Ethernet header and without their checksum.
    Transmit(usize),
    Receive(usize),
    Tcp(Traffic),
}

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Towline,
    /// towline without busy-polling.
    Sleeping,
    /// towline with AF_XDP on a veth pair, whose driver copies.
    Xdp,
    VhostUserNet,
    Testpmd,
    Passt,
    /// A loop that reads from one tap and writes to the other, for TCP.
    Loop,
    /// The tap itself, or a veth pair for TCP.
    Limit,
}

const CARRIERS: [Carrier; 8] = [
    Carrier::Towline,
    Carrier::Sleeping,
    Carrier::Xdp,
    Carrier::VhostUserNet,
    Carrier::Testpmd,
    Carrier::Passt,
    Carrier::Loop,
    Carrier::Limit,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) work: Work,
    pub(super) queues: usize,
    pub(super) carrier: Carrier,
}

impl Entry for Run {
    fn group(&self) -> String {
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let queues = many(self.queues, "queue");
        match self.work {
            Work::Transmit(len) => format!("transmit, {len} B"),
            Work::Receive(len) => format!("receive, {len} B"),
            Work::Tcp(Traffic::Stream { direction, size, sessions }) => {
                let direction = if direction == Direction::ToGuest { "to" } else { "from" };
                format!("TCP stream {direction} the guest, {size} B, {}, {queues}", many(sessions, "session"))
            }
            Work::Tcp(Traffic::Request { connections, size, sessions }) => {
                let what = if connections == Connections::Kept { "TCP_RR" } else { "TCP_CRR" };
                format!("{what}, {size} B, {}, {queues}", many(sessions, "session"))
            }
        }
    }

    fn label(&self) -> &'static str {
        match self.carrier {
            Carrier::Towline => "towline",
            Carrier::Sleeping => "towline --poll-us 0",
            Carrier::Xdp => "towline --af-xdp, copying",
            Carrier::VhostUserNet => VHOST_USER_NET,
            Carrier::Testpmd => TESTPMD,
            Carrier::Passt => PASST,
            Carrier::Loop => "loop between taps",
            Carrier::Limit if matches!(self.work, Work::Tcp(_)) => "veth pair",
            Carrier::Limit => "the tap itself",
        }
    }
}

impl Run {
    /// The rows of one queue.
    pub(super) fn single() -> Vec<Self> {
        let works = [64, 1514].into_iter().flat_map(|len| [Work::Transmit(len), Work::Receive(len)]);
        let streams = [32, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 512 << 10];
        let tcp = [Traffic::streams(&streams, &[1]), Traffic::requests(&[64], &[1])].concat();
        works.chain(tcp.into_iter().map(Work::Tcp)).flat_map(|work| Self::contenders(work, 1)).collect()
    }

    /// The rows of several queues.
    pub(super) fn multiqueue() -> Vec<Self> {
        let streams = Traffic::streams(&[1, 64, 256, 512, 1 << 10, 4 << 10, 16 << 10], &[1, 2, 4, 8]);
        let requests = Traffic::requests(&[1, 64, 256], &[1, 2, 4, 8, 20, 50, 100]);
        let tcp = [streams, requests].concat();
        let of = |traffic| {
            [1, 2, 4].into_iter().flat_map(move |queues| Self::contenders(Work::Tcp(traffic), queues))
        };
        tcp.into_iter().flat_map(of).collect()
    }

    /// Contenders of a group.
    fn contenders(work: Work, queues: usize) -> impl Iterator<Item = Self> {
        let is_tcp = matches!(work, Work::Tcp(_));
        // The limits have no queues, and are measured once. Busy-polling matters for requests only, and its
        // effect does not depend on the number of queues.
        let wanted = move |carrier: &Carrier| match carrier {
            Carrier::Limit => queues == 1,
            Carrier::Loop => queues == 1 && is_tcp,
            Carrier::Sleeping => queues == 1 && matches!(work, Work::Tcp(Traffic::Request { .. })),
            Carrier::Xdp => matches!(work, Work::Transmit(_)),
            // It has one queue, and no interface that could carry other frames.
            Carrier::Passt => queues == 1 && is_tcp,
            Carrier::Towline | Carrier::VhostUserNet | Carrier::Testpmd => true,
        };
        let run = move |carrier| Self { work, queues, carrier };
        CARRIERS.into_iter().filter(wanted).map(run)
    }

    pub(super) fn is_frames(self) -> bool {
        !matches!(self.work, Work::Tcp(_))
    }

    pub(super) fn is_stream(self) -> bool {
        matches!(self.work, Work::Tcp(Traffic::Stream { .. }))
    }

    pub(super) fn is_request(self) -> bool {
        matches!(self.work, Work::Tcp(Traffic::Request { .. }))
    }
}

fn peer(run: Run) -> Run {
    Run { carrier: Carrier::VhostUserNet, ..run }
}

/// Limits are measured with one queue.
fn limit(run: Run) -> Run {
    Run { carrier: Carrier::Limit, queues: 1, ..run }
}

fn taps(run: Run) -> Run {
    Run { carrier: Carrier::Loop, ..limit(run) }
}

fn one_queue(run: Run) -> Run {
    Run { queues: 1, ..run }
}

pub(super) const FRAMES: [Column<Run>; 8] = [
    Column::spread("Mpps", 3),
    Column::ratio("× peer", "Mpps", peer).with_goal(against_peer),
    Column::ratio("× tap", "Mpps", limit).with_goal(against_limit),
    Column::spread("Gbit/s", 2),
    Column::median("ns/frame", 0),
    Column::ratio("× tap by CPU", "frames/CPU s", limit),
    Column::median("backend % CPU", 0),
    Column::median("norm kpps", 1),
];
pub(super) const STREAMS: [Column<Run>; 8] = [
    Column::spread("Gbit/s", 2),
    Column::ratio("× peer", "Gbit/s", peer).with_goal(against_peer),
    Column::ratio("× loop", "Gbit/s", taps),
    Column::ratio("× veth", "Gbit/s", limit).with_goal(against_limit),
    Column::ratio("× 1 queue", "Gbit/s", one_queue).with_goal(against_one_queue),
    Column::median("backend % CPU", 0),
    Column::median("machine % CPU", 0),
    Column::median("norm Mbit/s", 1),
];
pub(super) const REQUESTS: [Column<Run>; 9] = [
    Column::spread("1/s", 0),
    Column::ratio("× peer", "1/s", peer).with_goal(against_peer),
    Column::ratio("× loop", "1/s", taps),
    Column::ratio("× veth", "1/s", limit).with_goal(against_limit),
    Column::ratio("× 1 queue", "1/s", one_queue).with_goal(against_one_queue),
    Column::median("p50 µs", 0),
    Column::median("p99 µs", 0),
    Column::median("machine % CPU", 0),
    Column::median("norm", 0),
];
pub(super) const NOTES: [&str; 2] = [
    "× peer: against vhost_user_net; norm: the figure per % of one processor that the machine used",
    "QEMU's in-process virtio-net has no socket to drive; its guest would be emulated: see docs/benchmarks.md",
];

fn against_peer(run: Run) -> Option<Bound> {
    let least = match run.work {
        Work::Transmit(_) => TRANSMIT_MIN,
        Work::Receive(_) => RECEIVE_MIN,
        Work::Tcp(Traffic::Stream { size, .. }) if size < LARGE => return None,
        Work::Tcp(Traffic::Stream { direction: Direction::ToGuest, .. }) => TO_GUEST_MIN,
        Work::Tcp(Traffic::Stream { .. }) => FROM_GUEST_MIN,
        Work::Tcp(Traffic::Request { connections: Connections::Kept, .. }) => REQUEST_MIN,
        Work::Tcp(Traffic::Request { .. }) => CONNECTION_MIN,
    };
    (run.carrier == Carrier::Towline && run.queues == 1).then_some(Bound::Least(least))
}

fn against_one_queue(run: Run) -> Option<Bound> {
    (run.carrier == Carrier::Towline && run.queues > 1).then_some(Bound::Least(QUEUES_MIN))
}

fn against_limit(run: Run) -> Option<Bound> {
    let least = match run.work {
        Work::Transmit(len) | Work::Receive(len) => {
            if len > 64 {
                TAP_LONG_MIN
            } else {
                TAP_MIN
            }
        }
        Work::Tcp(Traffic::Stream { direction: Direction::ToGuest, size: LARGE, sessions: 1 })
            if run.queues == 1 =>
        {
            VETH_MIN
        }
        _ => return None,
    };
    (run.carrier == Carrier::Towline).then_some(Bound::Least(least))
}

/// One run of a row.
pub(super) struct Hosts<'a> {
    pub(super) bench: &'a Bench,
    pub(super) run: Run,
    pub(super) outside: Network,
    pub(super) signals: Arc<Signals>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_each_contender_once_and_limits_with_one_queue() {
        let single = Run::single();
        assert!(single.iter().enumerate().all(|(at, run)| !single[..at].contains(run)));
        let [many, limits] = [1, 2].map(|least| {
            let all = Run::multiqueue().into_iter().filter(|run| run.queues >= least);
            all.filter(|run| run.carrier == Carrier::Limit).count()
        });
        assert_eq!((many, limits), (2 * 4 * 7 + 2 * 7 * 3, 0));
        let groups = [single[0].group(), Run::multiqueue()[0].group()];
        assert_eq!(groups, ["transmit, 64 B", "TCP stream to the guest, 1 B, 1 session, 1 queue"]);
    }
}

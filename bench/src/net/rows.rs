//! Rows of the tables: traffic, queues, contenders and drivers; columns and goals.

use crate::applications::{Kind, Traffic};
use crate::table::{Bound, Column, Contender, Entry, Row};

/// DPDK's test program.
pub(super) const TESTPMD: &str = "dpdk-testpmd";
/// Cloud Hypervisor's backend.
pub(super) const VHOST_USER_NET: &str = "vhost_user_net";
/// User-mode networking without a tap: it ends the guest's connections, and opens sockets for them.
pub(super) const PASST: &str = "passt";

const LARGE: usize = 64 << 10;

/// Measured traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Frames of this length from the guest, with their Ethernet header and without their checksum.
    Transmit(usize),
    /// Such frames to the guest.
    Receive(usize),
    Tcp(Traffic),
}

/// Contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Towline,
    /// towline without busy-polling.
    Sleeping,
    VhostUserNet,
    Testpmd,
    Passt,
    /// A loop that reads from one tap and writes to the other, for TCP.
    Loop,
    /// The tap itself, for frames: their limit.
    Tap,
    /// A pair of them, for TCP: its limit.
    Veth,
}

const TOWLINE: Contender<Carrier> = Contender::new("towline", Carrier::Towline);
const PEER: Contender<Carrier> = Contender::new(VHOST_USER_NET, Carrier::VhostUserNet);
const LOOP: Contender<Carrier> = Contender::new("loop between taps", Carrier::Loop);
const TAP: Contender<Carrier> = Contender::new("the tap itself", Carrier::Tap);
const VETH: Contender<Carrier> = Contender::new("veth pair", Carrier::Veth);
const CONTENDERS: [Contender<Carrier>; 8] = [
    TOWLINE,
    Contender::new("towline --poll-us 0", Carrier::Sleeping),
    PEER,
    Contender::new(TESTPMD, Carrier::Testpmd),
    Contender::new(PASST, Carrier::Passt),
    LOOP,
    TAP,
    VETH,
];

/// Traffic, and the queues of the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) work: Work,
    pub(super) queues: usize,
}

pub(super) type Run = Entry<Path, Carrier>;

impl Row for Path {
    fn name(&self) -> String {
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let Traffic { kind, size, sessions } = match self.work {
            Work::Transmit(len) => return format!("transmit, {len} B"),
            Work::Receive(len) => return format!("receive, {len} B"),
            Work::Tcp(traffic) => traffic,
        };
        let what = match kind {
            Kind::ToGuest => "TCP stream to the guest",
            Kind::FromGuest => "TCP stream from the guest",
            Kind::Request => "TCP_RR",
            Kind::Connection => "TCP_CRR",
        };
        format!("{what}, {size} B, {}, {}", many(sessions, "session"), many(self.queues, "queue"))
    }
}

impl Path {
    /// The rows of one queue.
    pub(super) fn single() -> Vec<Run> {
        let frames = [64, 1514].into_iter().flat_map(|len| [Work::Transmit(len), Work::Receive(len)]);
        let sizes = [32, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 512 << 10];
        let streams = Traffic::all(Kind::STREAMS, &sizes, &[1]);
        let tcp = [streams, Traffic::all(Kind::REQUESTS, &[64], &[1])].concat();
        let works = frames.chain(tcp.into_iter().map(Work::Tcp));
        measured(works.map(|work| Self { work, queues: 1 }))
    }

    /// The rows of several queues.
    pub(super) fn multiqueue() -> Vec<Run> {
        let sizes = [1, 64, 256, 512, 1 << 10, 4 << 10, 16 << 10];
        let streams = Traffic::all(Kind::STREAMS, &sizes, &[1, 2, 4, 8]);
        let requests = Traffic::all(Kind::REQUESTS, &[1, 64, 256], &[1, 2, 4, 8, 20, 50, 100]);
        let works = [streams, requests].concat().into_iter().map(Work::Tcp);
        measured(works.flat_map(|work| [1, 2, 4].map(|queues| Self { work, queues })))
    }

    /// Returns true if the contender has such traffic.
    fn has(self, carrier: Carrier) -> bool {
        let (is_tcp, is_single) = (matches!(self.work, Work::Tcp(_)), self.queues == 1);
        match carrier {
            // The limits have no queues, and are measured once.
            Carrier::Tap => !is_tcp,
            // It has one queue, and no interface that could carry other frames.
            Carrier::Veth | Carrier::Loop | Carrier::Passt => is_single && is_tcp,
            // Busy-polling matters for requests only, and its effect does not depend on the number of queues.
            Carrier::Sleeping => is_single && self.is_request(),
            Carrier::Towline | Carrier::VhostUserNet | Carrier::Testpmd => true,
        }
    }

    pub(super) fn is_frames(self) -> bool {
        !matches!(self.work, Work::Tcp(_))
    }

    pub(super) fn is_stream(self) -> bool {
        matches!(self.work, Work::Tcp(traffic) if traffic.is_stream())
    }

    pub(super) fn is_request(self) -> bool {
        matches!(self.work, Work::Tcp(traffic) if !traffic.is_stream())
    }
}

fn measured(rows: impl Iterator<Item = Path>) -> Vec<Run> {
    let mut all = Entry::all(rows, &CONTENDERS);
    all.retain(|run| run.row.has(run.contender.kind));
    all
}

fn peer(run: Run) -> Run {
    run.with(PEER)
}

/// Limits are measured with one queue.
fn limit(run: Run) -> Run {
    one_queue(run.with(if run.row.is_frames() { TAP } else { VETH }))
}

fn taps(run: Run) -> Run {
    one_queue(run.with(LOOP))
}

fn one_queue(run: Run) -> Run {
    Run { row: Path { queues: 1, ..run.row }, ..run }
}

pub(super) const FRAMES: [Column<Path, Carrier>; 8] = [
    Column::spread("Mpps", 3),
    Column::ratio("× peer", "Mpps", peer).with_goal(against_peer),
    Column::ratio("× tap", "Mpps", limit).with_goal(against_limit),
    Column::spread("Gbit/s", 2),
    Column::median("ns/frame", 0),
    Column::ratio("× tap by CPU", "frames/CPU s", limit),
    Column::median("backend % CPU", 0),
    Column::median("norm kpps", 1),
];
pub(super) const STREAMS: [Column<Path, Carrier>; 8] = [
    Column::spread("Gbit/s", 2),
    Column::ratio("× peer", "Gbit/s", peer).with_goal(against_peer),
    Column::ratio("× loop", "Gbit/s", taps),
    Column::ratio("× veth", "Gbit/s", limit).with_goal(against_limit),
    Column::ratio("× 1 queue", "Gbit/s", one_queue).with_goal(against_one_queue),
    Column::median("backend % CPU", 0),
    Column::median("machine % CPU", 0),
    Column::median("norm Mbit/s", 1),
];
pub(super) const REQUESTS: [Column<Path, Carrier>; 9] = [
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

/// Goals of the ratio to vhost_user_net.
fn against_peer(run: Run) -> Option<Bound> {
    let least = match run.row.work {
        Work::Transmit(_) => 1.7,
        Work::Receive(_) => 5.0,
        Work::Tcp(traffic) => match traffic.kind {
            Kind::ToGuest | Kind::FromGuest if traffic.size < LARGE => return None,
            Kind::ToGuest => 6.0,
            Kind::FromGuest => 1.2,
            Kind::Request => 1.5,
            Kind::Connection => 1.2,
        },
    };
    run.at_least(TOWLINE, least).filter(|_| run.row.queues == 1)
}

/// Goal of several queues, within the noise of most machines.
fn against_one_queue(run: Run) -> Option<Bound> {
    run.at_least(TOWLINE, 0.95).filter(|_| run.row.queues > 1)
}

/// Goals of the ratio to the limit: a tap, or a veth pair.
fn against_limit(run: Run) -> Option<Bound> {
    const LARGE_TO_GUEST: Traffic = Traffic { kind: Kind::ToGuest, size: LARGE, sessions: 1 };
    let least = match run.row.work {
        Work::Transmit(..=64) | Work::Receive(..=64) => 0.9,
        Work::Transmit(_) | Work::Receive(_) => 0.95,
        Work::Tcp(LARGE_TO_GUEST) if run.row.queues == 1 => 0.9,
        Work::Tcp(_) => return None,
    };
    run.at_least(TOWLINE, least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_each_contender_once_and_limits_with_one_queue() {
        let single = Path::single();
        assert!(single.iter().enumerate().all(|(at, run)| !single[..at].contains(run)));
        let [many, limits] = [1, 2].map(|least| {
            let all = Path::multiqueue().into_iter().filter(|run| run.row.queues >= least);
            all.filter(|run| run.contender == VETH).count()
        });
        assert_eq!((many, limits), (2 * 4 * 7 + 2 * 7 * 3, 0));
        let groups = [single[0].row.name(), Path::multiqueue()[0].row.name()];
        assert_eq!(groups, ["transmit, 64 B", "TCP stream to the guest, 1 B, 1 session, 1 queue"]);
    }
}

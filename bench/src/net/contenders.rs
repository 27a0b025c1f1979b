//! Rows of the tables: traffic, queues, contenders and drivers.

use super::card::Driver;
use super::frames::FrameKind;
use super::parameters::{PASST, Parameters, TESTPMD, VHOST_USER_NET};
use super::tcp::Traffic;
use crate::rounds::Contender;

/// Measured traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Transmit(FrameKind),
    Receive(FrameKind),
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) work: Work,
    pub(super) queues: usize,
    pub(super) carrier: Carrier,
    pub(super) driver: Driver,
}

pub(super) fn entries(parameters: &Parameters) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut add = |work, queues| entries.extend(contenders(work, queues));
    if !parameters.multiqueue {
        for kind in [FrameKind::Plain(64), FrameKind::Plain(1514), FrameKind::Super] {
            add(Work::Transmit(kind), 1);
            add(Work::Receive(kind), 1);
        }
    }
    for to_guest in [true, false] {
        for &sessions in &parameters.stream_sessions {
            for &size in &parameters.stream_sizes {
                for &queues in &parameters.queues {
                    add(Work::Tcp(Traffic::Stream { size, sessions, to_guest }), queues);
                }
            }
        }
    }
    for reconnects in [false, true] {
        for &sessions in &parameters.request_sessions {
            for &size in &parameters.request_sizes {
                for &queues in &parameters.queues {
                    add(Work::Tcp(Traffic::Request { size, sessions, reconnects }), queues);
                }
            }
        }
    }
    if !parameters.multiqueue {
        entries.extend(other_drivers());
    }
    entries
}

/// Contenders of a row.
fn contenders(work: Work, queues: usize) -> impl Iterator<Item = Entry> {
    let carriers = [
        Carrier::Towline,
        Carrier::Sleeping,
        Carrier::Xdp,
        Carrier::VhostUserNet,
        Carrier::Testpmd,
        Carrier::Passt,
        Carrier::Loop,
        Carrier::Limit,
    ];
    // The limits have no queues, and are measured once. Busy-polling matters for requests only, and its
    // effect does not depend on the number of queues.
    let wanted = move |carrier: &Carrier| match carrier {
        Carrier::Limit => queues == 1,
        Carrier::Loop => queues == 1 && matches!(work, Work::Tcp(_)),
        Carrier::Sleeping => queues == 1 && matches!(work, Work::Tcp(Traffic::Request { .. })),
        Carrier::Xdp => matches!(work, Work::Transmit(_)),
        // It has one queue, and no interface that could carry other frames.
        Carrier::Passt => queues == 1 && matches!(work, Work::Tcp(_)),
        _ => true,
    };
    let carriers = carriers.into_iter().filter(wanted);
    carriers.map(move |carrier| Entry { work, queues, carrier, driver: Driver::Linux })
}

/// Rows that depend on the driver's notifications, with drivers other than Linux's.
fn other_drivers() -> Vec<Entry> {
    let request = |reconnects| Work::Tcp(Traffic::Request { size: 64, sessions: 1, reconnects });
    let works = [Work::Transmit(FrameKind::Plain(64)), Work::Receive(FrameKind::Plain(64))];
    let works = works.into_iter().chain([false, true].map(request));
    let mut entries = Vec::new();
    for work in works {
        for driver in [Driver::Flags, Driver::Polling] {
            for carrier in [Carrier::Towline, Carrier::VhostUserNet] {
                entries.push(Entry { work, queues: 1, carrier, driver });
            }
        }
    }
    entries
}

impl Entry {
    pub(super) fn contender(&self) -> Contender {
        let queues = match self.queues {
            1 => "1 queue".to_owned(),
            many => format!("{many} queues"),
        };
        let sessions = |count: usize| match count {
            1 => "1 session".to_owned(),
            many => format!("{many} sessions"),
        };
        let group = match self.work {
            Work::Transmit(kind) => format!("transmit, {}", kind.name()),
            Work::Receive(kind) => format!("receive, {}", kind.name()),
            Work::Tcp(Traffic::Stream { size, sessions: count, to_guest }) => {
                let direction = if to_guest { "to the guest" } else { "from the guest" };
                format!("TCP stream {direction}, {size} B, {}, {queues}", sessions(count))
            }
            Work::Tcp(Traffic::Request { size, sessions: count, reconnects }) => {
                let what = if reconnects { "TCP_CRR" } else { "TCP_RR" };
                format!("{what}, {size} B, {}, {queues}", sessions(count))
            }
        };
        let group = match self.driver {
            Driver::Linux => group,
            Driver::Flags => format!("{group}, driver without event index"),
            Driver::Polling => format!("{group}, polling driver"),
        };
        let label = match (self.carrier, self.work) {
            (Carrier::Limit, Work::Tcp(_)) => "veth pair".to_owned(),
            (Carrier::Limit, _) => "the tap itself".to_owned(),
            (carrier, _) => carrier.name().to_owned(),
        };
        Contender { group, label }
    }
}

impl Carrier {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Towline => "towline",
            Self::Sleeping => "towline --poll-us 0",
            Self::Xdp => "towline --af-xdp, copying",
            Self::VhostUserNet => VHOST_USER_NET,
            Self::Testpmd => TESTPMD,
            Self::Passt => PASST,
            Self::Loop => "loop between taps",
            Self::Limit => "limit",
        }
    }
}

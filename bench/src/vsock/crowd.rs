//! `cargo xtask bench vsock-guests`: many guests of one process, one of them hostile.
//!
//! ```text
//!   15 guests ── a stream each ──┐
//!                                ├─ one towline vsock ── readers, whose throughput is measured
//!   1 guest ─── the same, or ────┘
//!               useless packets at its full rate
//! ```
//! The throughput of 15 guests beside the hostile one is compared with that beside another ordinary one: a hostile guest must not use
//! more than its share of the processors.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use tempfile::TempDir;
use towline_frontend::vsock::{HOST_CID, PacketHeader, VsockGuest, op};

use super::entry::{Buffers, Direction, Parameters, Work};
use super::guest::Machine;
use super::host::{Host, PORT, Target};
use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use crate::vhost::backend::Backend;
use crate::vhost::{Signals, Window, window};

/// Number of guests.
const GUESTS: u64 = 16;
const CID_FIRST: u64 = 3;
/// CID of the hostile guest.
const HOSTILE: u64 = CID_FIRST + GUESTS - 1;
const MESSAGE_BYTES: usize = 16 << 10;
/// Goal of the others' throughput, as a ratio.
const OTHERS_MIN: f64 = 0.9;
/// Packets per update of the hostile guest's ring.
const FLOOD: usize = 32;
const SLEEP: Duration = Duration::from_millis(20);

/// Measures the table.
///
/// # Errors
/// The run was cancelled.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let labels = ["beside an ordinary guest", "beside a hostile guest"];
    let contender = |label: &str| Contender {
        group: format!("{} of {GUESTS} guests, a stream of 16 KiB from each", GUESTS - 1),
        label: label.into(),
    };
    let contenders = labels.map(contender);
    let outcomes =
        rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| run(parameters, LAST[index]))?;
    Ok(vec![table(parameters, &contenders, &outcomes)])
}

/// Measures the throughput of all guests but the last one.
fn run(parameters: &Parameters, last: Last) -> Result<Window> {
    let directory = TempDir::with_prefix("towline-bench-")?;
    let path = |kind: &str, cid: u64| directory.path().join(format!("{kind}{cid}"));
    let mut arguments = vec!["vsock".to_owned()];
    for cid in CID_FIRST..CID_FIRST + GUESTS {
        let (socket, uds) = (path("d", cid), path("v", cid));
        arguments.push("--guest".into());
        arguments.push(format!("cid={cid},socket={},uds={}", socket.display(), uds.display()));
    }
    let mut backend = Backend::start(directory.path(), &parameters.towline, arguments)?;
    let signals = [Arc::new(Signals::default()), Arc::new(Signals::default())];
    let mut parties = Parties::default();
    let begun = (CID_FIRST..CID_FIRST + GUESTS).try_for_each(|cid| {
        let own = &signals[usize::from(cid == HOSTILE)];
        parties.add(
            &mut backend,
            (path("d", cid), path("v", cid)),
            cid,
            own,
            if cid == HOSTILE { last } else { Last::Ordinary },
        )
    });
    let measured =
        begun.and_then(|()| window(&signals[0], Some(&mut backend), parameters.window, &parameters.cancel));
    parties.end(&signals)?;
    measured
}

/// Behaviour of the last guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    Ordinary,
    Hostile,
}

const LAST: [Last; 2] = [Last::Ordinary, Last::Hostile];

/// Guests, and the readers of their streams.
#[derive(Default)]
struct Parties {
    hosts: Vec<Host>,
    guests: Vec<JoinHandle<Result<()>>>,
}

impl Parties {
    fn add(
        &mut self,
        backend: &mut Backend,
        (socket, uds): (PathBuf, PathBuf),
        cid: u64,
        signals: &Arc<Signals>,
        last: Last,
    ) -> Result<()> {
        let work = Work::Stream { size: MESSAGE_BYTES, connections: 1, direction: Direction::FromGuest };
        let frontend = backend.connect(&socket)?;
        let mut machine = Machine::start(frontend, cid, Buffers::Linux, work, signals)?;
        if last == Last::Hostile {
            self.guests.push(machine.spawn_with(flood));
            return Ok(());
        }
        let mut host = Host::default();
        let listening = host.read(signals, &Target::Vsock { path: uds, port: PORT }.listener(), 1);
        self.hosts.push(host);
        listening?;
        machine.connect()?;
        self.guests.push(machine.spawn());
        Ok(())
    }

    fn end(self, signals: &[Arc<Signals>]) -> Result<()> {
        let mut outcome = Ok(());
        signals.iter().for_each(|signals| signals.stop.store(true, Ordering::Relaxed));
        for host in self.hosts {
            outcome = outcome.and(host.end(&signals[0]).map(drop));
        }
        signals.iter().for_each(|signals| signals.power_off.store(true, Ordering::Relaxed));
        for guest in self.guests {
            outcome = outcome.and(guest.join().expect("the thread does not panic"));
        }
        outcome
    }
}

/// Sends packets that violate the specification: of unknown connections, with wrong lengths and of unknown kinds.
fn flood(guest: &mut VsockGuest, turn: u64) -> Result<()> {
    guest.reclaim()?;
    for index in 0..FLOOD as u64 {
        let number = (turn.wrapping_mul(FLOOD as u64).wrapping_add(index)) as u32;
        let header = PacketHeader {
            src_cid: HOSTILE,
            dst_cid: HOST_CID,
            src_port: number,
            dst_port: number.rotate_left(16),
            len: if number.is_multiple_of(3) { u32::MAX } else { 0 },
            kind: 1 + (number % 3) as u16,
            op: if number.is_multiple_of(5) { op::REQUEST } else { (number % 9) as u16 },
            flags: number,
            buf_alloc: u32::MAX,
            fwd_cnt: number,
        };
        if !guest.put(&header, 0) {
            break;
        }
    }
    guest.tx().publish();
    guest.poll(|_, _| ())?;
    if !guest.can_send() {
        guest.wait(true, SLEEP)?;
    }
    Ok(())
}

fn table(parameters: &Parameters, contenders: &[Contender], outcomes: &[Outcome<Window>]) -> Table {
    let gigabits = |window: &Window| window.rate() * 8.0 / 1e9;
    let rates: Vec<Vec<f64>> =
        outcomes.iter().map(|outcome| outcome.values.iter().map(gigabits).collect()).collect();
    let rows = contenders.iter().enumerate().map(|(index, Contender { group, label })| {
        let ratio = Summary::of_ratios(&rates[index], &rates[0]);
        let content = match (&outcomes[index].failure, Summary::of(rates[index].iter().copied()), ratio) {
            (None, Some(rate), Some(ratio)) => {
                let met = ratio.median >= OTHERS_MIN;
                let goal = if index == 0 { "–".into() } else { format!("≥ {OTHERS_MIN}: {}", yes(met)) };
                Content::Measured {
                    cells: vec![rate.to_string(), ratio.to_string(), goal],
                    data: json!({ "gigabits": rates[index], "ratio": ratio.median }),
                }
            }
            (failure, ..) => Content::Missing(failure.clone().unwrap_or_else(|| "no run".into())),
        };
        Row { group: group.clone(), label: label.clone(), content }
    });
    Table {
        name: "vsock-guests",
        title: format!("Guests of one process, {} runs, median (min–max)", parameters.runs),
        columns: vec!["what", "Gbit/s, all together", "ratio", "goal"],
        rows: rows.collect(),
        notes: vec![
            "the hostile guest sends packets of unknown connections, kinds and lengths, and requests".into(),
        ],
    }
}

fn yes(met: bool) -> &'static str {
    if met { "yes" } else { "no" }
}

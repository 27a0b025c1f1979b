//! `cargo xtask bench lanes`: memory to memory over TCP on the loopback, against QEMU's multifd and iperf3.
//!
//! ```text
//!   warm   source process ═ 1, 2, 4, 8 lanes ═ destination process     vectored · zero-copy · auto · TLS
//!          QEMU ═ multifd ═ QEMU, with and without zero-copy-send      memory: a preallocated memfd at both ends
//!          iperf3 -P 1, 2, 4, 8; the cipher alone
//!   cold   vectored and QEMU, into untouched memory
//! ```
//! CPU time is user and system time of both processes, from before the connections until the guest has arrived. A GB is 10⁹ bytes of
//! page contents.
//!
//! Limits: the synthetic guest does not write, and QEMU's is stopped; both are filled with random data.

mod cipher;
pub(crate) mod ends;
mod iperf;
mod qemu;
mod transfer;

use anyhow::{Context, Result, anyhow};
use tempfile::TempDir;
use towline_lab::certificates::Authority;
use towline_migration::ZeroCopySend;

use crate::machine::MIB;
use crate::options::Bench;
use crate::table::{self, Column, Contender, Entry, Figures, Row, Table};
use ends::{Ends, Request};
use transfer::{Conditions, Memory, Peer};

/// Memory of the guest in MiB.
const MEMORY_MIB: u64 = 2048;
const LANES: [usize; 4] = [1, 2, 4, 8];

/// Program and settings that send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Towline(ZeroCopySend),
    /// Vectored, with TLS.
    TowlineTls,
    Qemu(Peer),
    Iperf,
    /// The cipher of TLS lanes alone.
    Cipher,
}

impl Row for Conditions {
    fn name(&self) -> String {
        let memory = if self.memory == Memory::Warm { "warm" } else { "cold" };
        format!("{memory}, {} {}", self.lanes, if self.lanes == 1 { "lane" } else { "lanes" })
    }
}

type Transfer = Entry<Conditions, Method>;

const VECTORED: Contender<Method> = Contender::new("vectored", Method::Towline(ZeroCopySend::Off));
const ZERO_COPY: Contender<Method> = Contender::new("zero-copy on", Method::Towline(ZeroCopySend::On));
const AUTO: Contender<Method> = Contender::new("auto", Method::Towline(ZeroCopySend::Auto));
const TLS: Contender<Method> = Contender::new("vectored, TLS", Method::TowlineTls);
const QEMU: Contender<Method> = Contender::new("QEMU's multifd", Method::Qemu(Peer::Plain));
const QEMU_TLS: Contender<Method> = Contender::new("QEMU's multifd, TLS", Method::Qemu(Peer::Tls));
const IPERF: Contender<Method> = Contender::new("iperf3", Method::Iperf);
const CIPHER: Contender<Method> = Contender::new("the cipher alone", Method::Cipher);
const WARM: [Contender<Method>; 9] = [
    VECTORED,
    ZERO_COPY,
    AUTO,
    QEMU,
    Contender::new("QEMU's multifd, zero-copy-send", Method::Qemu(Peer::ZeroCopy)),
    IPERF,
    TLS,
    QEMU_TLS,
    CIPHER,
];
const COLD: [Contender<Method>; 2] = [VECTORED, QEMU];

const COLUMNS: [Column<Conditions, Method>; 10] = [
    Column::spread("GB/s", 2),
    Column::ratio("× QEMU's", "GB/s", |it| it.with(QEMU))
        .with_goal(|it| it.at_least(VECTORED, if it.row.memory == Memory::Warm { 1.3 } else { 1.5 })),
    Column::ratio("× iperf3", "GB/s", |it| it.with(IPERF)).with_goal(|it| it.at_least(VECTORED, 1.0)),
    Column::spread("CPU s/GB", 2),
    Column::ratio("× QEMU's CPU", "CPU s/GB", |it| it.with(QEMU))
        .with_goal(|it| it.at_most(VECTORED, 0.8).filter(|_| it.row.memory == Memory::Warm)),
    Column::ratio("× vectored", "GB/s", |it| it.with(VECTORED))
        .with_goal(|it| it.at_least(AUTO, 0.98).or(it.at_least(TLS, 0.7))),
    Column::ratio("× zero-copy", "GB/s", |it| it.with(ZERO_COPY)).with_goal(|it| it.at_least(AUTO, 0.98)),
    Column::ratio("× QEMU's TLS", "GB/s", |it| it.with(QEMU_TLS)).with_goal(|it| it.at_least(TLS, 1.3)),
    Column::ratio("× cipher", "GB/s", |it| it.with(CIPHER)).with_goal(|it| it.at_least(TLS, 0.9)),
    Column::median("calls", 0),
];
const NOTES: [&str; 3] = [
    "towline: two processes; from before it connects until the destination has acknowledged the guest",
    "QEMU: 10.0 to 10.0, stopped guest, total-time of query-migrate; iperf3: its own report",
    "CPU: user and system time of both processes; calls: send calls of the lanes",
];

fn all() -> Vec<Transfer> {
    let of = |memory, contenders| Entry::all(LANES.map(|lanes| Conditions { memory, lanes }), contenders);
    [of(Memory::Warm, &WARM[..]), of(Memory::Cold, &COLD)].concat()
}

/// Measures the tables.
///
/// # Errors
/// The ends do not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let all = bench.chosen(all())?;
    let mut programs = Programs::start(bench)?;
    let mut lanes = None;
    let results = table::measure(bench, all, |it| {
        // The first transfer after others were measured is slower by up to a half.
        if it.row.memory == Memory::Warm && lanes.replace(it.row.lanes) != Some(it.row.lanes) {
            programs.run(it.with(VECTORED))?;
        }
        programs.run(it)
    })?;
    let of = |memory, name, what: &str| {
        let title =
            format!("Lanes: {} MiB, memory to memory over TCP on the loopback, {what}", programs.memory_mib);
        results.table(name, &title, &COLUMNS, |row| row.memory == memory).with_notes(NOTES)
    };
    Ok(vec![
        of(Memory::Warm, "lanes", "memory touched before"),
        of(Memory::Cold, "lanes-cold", "destination's memory touched during the measurement"),
    ])
}

/// The programs of all transfers.
struct Programs<'a> {
    bench: &'a Bench,
    memory_mib: u64,
    ends: Ends,
    qemu: Result<qemu::Source>,
    /// Certificates for both ends, towline's and QEMU's.
    certificates: TempDir,
}

impl<'a> Programs<'a> {
    fn start(bench: &'a Bench) -> Result<Self> {
        let memory_mib = bench.size_mib(MEMORY_MIB);
        eprintln!("lanes: filling {memory_mib} MiB of a synthetic guest and of a QEMU's");
        let ends = Ends::start(bench, memory_mib * MIB).context("both ends")?;
        let certificates = bench.directory()?;
        Authority::new("towline-bench")?.furnish(certificates.path())?;
        let qemu = qemu::Source::start(bench, memory_mib, certificates.path());
        Ok(Self { bench, memory_mib, ends, qemu, certificates })
    }

    fn run(&mut self, it: Transfer) -> Result<Figures> {
        let row = it.row;
        let cost = match it.contender.kind {
            Method::Towline(zero_copy_send) => {
                return self.ends.send(&Request { conditions: row, certificates: None }, zero_copy_send);
            }
            Method::TowlineTls => {
                let certificates = Some(self.certificates.path().into());
                return self.ends.send(&Request { conditions: row, certificates }, ZeroCopySend::Off);
            }
            Method::Qemu(peer) => {
                let source = self.qemu.as_ref().map_err(|error| anyhow!("{error:#}"))?;
                source.migrate(self.bench, row, peer)?
            }
            Method::Iperf => iperf::run(row.lanes)?,
            Method::Cipher => cipher::run(row.lanes, self.memory_mib * MIB)?,
        };
        Ok(cost.figures())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_lanes_has_every_contender() {
        let all = all();
        assert_eq!(all.len(), LANES.len() * (WARM.len() + COLD.len()));
        assert_eq!((all[0].row.name(), all[0].contender), ("warm, 1 lane".into(), VECTORED));
        assert_eq!(all.last().map(|it| it.row.name()), Some("cold, 8 lanes".into()));
    }
}

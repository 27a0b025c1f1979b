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
mod end;
mod iperf;
mod qemu;
mod transfer;

use anyhow::{Context, Result};
use tempfile::TempDir;
use towline_lab::certificates::Authority;

use crate::machine::MIB;
use crate::options::Bench;
use crate::table::{self, Bound, Column, Entry, Figures, Table};
use end::End;
pub(crate) use end::{END, serve_end};
use transfer::{Memory, Method, Mode, Peer, Transfer};

/// Memory of the guest in MiB.
const MEMORY_MIB: u64 = 2048;
const LANES: [usize; 4] = [1, 2, 4, 8];
/// Goals, as ratios.
const QEMU_WARM_MIN: f64 = 1.3;
const QEMU_COLD_MIN: f64 = 1.5;
const QEMU_CPU_MAX: f64 = 0.8;
const IPERF_MIN: f64 = 1.0;
const AUTO_MIN: f64 = 0.98;
/// Of the rate without TLS.
const TLS_MIN: f64 = 0.7;
/// Of the cipher alone.
const CIPHER_MIN: f64 = 0.9;

impl Entry for Transfer {
    fn group(&self) -> String {
        let memory = if self.memory == Memory::Warm { "warm" } else { "cold" };
        format!("{memory}, {} {}", self.lanes, if self.lanes == 1 { "lane" } else { "lanes" })
    }

    fn label(&self) -> &'static str {
        match self.method {
            Method::Towline(mode) => mode.name(),
            Method::Qemu(Peer::Plain) => "QEMU's multifd",
            Method::Qemu(Peer::ZeroCopy) => "QEMU's multifd, zero-copy-send",
            Method::Qemu(Peer::Tls) => "QEMU's multifd, TLS",
            Method::Iperf => "iperf3",
            Method::Cipher => "the cipher alone",
        }
    }
}

const QEMU: Method = Method::Qemu(Peer::Plain);
const VECTORED: Method = Method::Towline(Mode::Vectored);
const AUTO: Method = Method::Towline(Mode::Auto);
const TLS: Method = Method::Towline(Mode::Tls);
const WARM: [Method; 9] = [
    VECTORED,
    Method::Towline(Mode::ZeroCopy),
    AUTO,
    QEMU,
    Method::Qemu(Peer::ZeroCopy),
    Method::Iperf,
    TLS,
    Method::Qemu(Peer::Tls),
    Method::Cipher,
];
const COLD: [Method; 2] = [VECTORED, QEMU];

const COLUMNS: [Column<Transfer>; 10] = [
    Column::spread("GB/s", 2),
    Column::ratio("× QEMU's", "GB/s", |it: Transfer| it.by(QEMU)).with_goal(|it| {
        let least = if it.memory == Memory::Warm { QEMU_WARM_MIN } else { QEMU_COLD_MIN };
        it.at_least(VECTORED, least)
    }),
    Column::ratio("× iperf3", "GB/s", |it: Transfer| it.by(Method::Iperf))
        .with_goal(|it| it.at_least(VECTORED, IPERF_MIN)),
    Column::spread("CPU s/GB", 2),
    Column::ratio("× QEMU's CPU", "CPU s/GB", |it: Transfer| it.by(QEMU)).with_goal(|it| {
        let is_judged = it.method == VECTORED && it.memory == Memory::Warm;
        is_judged.then_some(Bound::Most(QEMU_CPU_MAX))
    }),
    Column::ratio("× vectored", "GB/s", |it: Transfer| it.by(VECTORED))
        .with_goal(|it| it.at_least(AUTO, AUTO_MIN).or(it.at_least(TLS, TLS_MIN))),
    Column::ratio("× zero-copy", "GB/s", |it: Transfer| it.by(Method::Towline(Mode::ZeroCopy)))
        .with_goal(|it| it.at_least(AUTO, AUTO_MIN)),
    Column::ratio("× QEMU's TLS", "GB/s", |it: Transfer| it.by(Method::Qemu(Peer::Tls)))
        .with_goal(|it| it.at_least(TLS, QEMU_WARM_MIN)),
    Column::ratio("× cipher", "GB/s", |it: Transfer| it.by(Method::Cipher))
        .with_goal(|it| it.at_least(TLS, CIPHER_MIN)),
    Column::median("calls", 0),
];
const NOTES: [&str; 3] = [
    "towline: two processes; from before it connects until the destination has acknowledged the guest",
    "QEMU: 10.0 to 10.0, stopped guest, total-time of query-migrate; iperf3: its own report",
    "CPU: user and system time of both processes; calls: send calls of the lanes",
];

impl Transfer {
    fn by(self, method: Method) -> Self {
        Self { method, ..self }
    }

    fn at_least(self, method: Method, least: f64) -> Option<Bound> {
        (self.method == method).then_some(Bound::Least(least))
    }

    fn all() -> impl Iterator<Item = Self> {
        let of = |memory, methods: &'static [Method]| {
            let of_lanes = move |lanes| methods.iter().map(move |&method| Self { memory, lanes, method });
            LANES.into_iter().flat_map(of_lanes)
        };
        of(Memory::Warm, &WARM).chain(of(Memory::Cold, &COLD))
    }
}

/// Measures the tables.
///
/// # Errors
/// The ends do not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let all = bench.chosen(Transfer::all())?;
    let mut ends = Ends::start(bench)?;
    let mut lanes = None;
    let results = table::measure(bench, all, |it| {
        // The first transfer after others were measured is slower by up to a half.
        if it.memory == Memory::Warm && lanes.replace(it.lanes) != Some(it.lanes) {
            ends.run(it.by(VECTORED))?;
        }
        ends.run(it)
    })?;
    let of = |memory, name, what: &str| {
        let title =
            format!("Lanes: {} MiB, memory to memory over TCP on the loopback, {what}", ends.memory_mib);
        results.table(name, &title, &COLUMNS, |it| it.memory == memory).with_notes(NOTES)
    };
    Ok(vec![
        of(Memory::Warm, "lanes", "memory touched before"),
        of(Memory::Cold, "lanes-cold", "destination's memory touched during the measurement"),
    ])
}

/// Both ends of all transfers.
struct Ends<'a> {
    bench: &'a Bench,
    memory_mib: u64,
    source: End,
    destination: End,
    qemu: Result<qemu::Source>,
    /// Certificates for both ends, towline's and QEMU's.
    certificates: TempDir,
}

impl<'a> Ends<'a> {
    fn start(bench: &'a Bench) -> Result<Self> {
        let memory_mib = bench.size_mib(MEMORY_MIB);
        eprintln!("lanes: filling {memory_mib} MiB of a synthetic guest and of a QEMU's");
        let end = |role: &str| End::start(bench, role, memory_mib * MIB);
        let source = end("source").context("source")?;
        let destination = end("destination").context("destination")?;
        let certificates = bench.directory()?;
        Authority::new("towline-bench")?.furnish(certificates.path())?;
        let qemu = qemu::Source::start(bench, memory_mib, certificates.path());
        Ok(Self { bench, memory_mib, source, destination, qemu, certificates })
    }

    fn run(&mut self, it: Transfer) -> Result<Figures> {
        let cost = match it.method {
            Method::Towline(mode) => {
                return self.source.send(&mut self.destination, it, mode, self.certificates.path());
            }
            Method::Qemu(peer) => {
                let source = self.qemu.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
                source.migrate(self.bench, it, peer)?
            }
            Method::Iperf => iperf::run(it.lanes)?,
            Method::Cipher => cipher::run(it.lanes, self.memory_mib * MIB)?,
        };
        Ok(cost.figures())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_lanes_has_every_contender() {
        let all: Vec<_> = Transfer::all().collect();
        assert_eq!(all.len(), LANES.len() * (WARM.len() + COLD.len()));
        assert_eq!((all[0].group(), all[0].label()), ("warm, 1 lane".into(), "vectored"));
        assert_eq!(all.last().map(Entry::group), Some("cold, 8 lanes".into()));
    }
}

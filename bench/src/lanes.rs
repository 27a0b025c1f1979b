//! `cargo xtask bench lanes`: memory to memory over TCP on the loopback, against QEMU's multifd and iperf3.
//!
//! ```text
//!   warm   source process ═ 1, 2, 4, 8 lanes ═ destination process     linear buffer · a page a call · vectored · zero-copy · auto
//!          QEMU ═ multifd ═ QEMU, with and without zero-copy-send      memory: a preallocated memfd at both ends
//!   tls    both with TLS; the cipher alone
//!          iperf3 -P 1, 2, 4, 8
//!   cold   the same into untouched memory
//!   calls  one main channel: calls, pages and seconds of a 4 GiB guest, linear buffer and vectored
//! ```
//!
//! CPU time is user and system time of both processes, from before the connections until the guest has arrived. A GB is 10⁹ bytes of
//! page contents.
//!
//! Limits: the synthetic guest does not write, and QEMU's is stopped; both are filled with random data.

mod calls;
mod cipher;
mod end;
mod entry;
mod iperf;
mod layers;
mod process;
mod qemu;
mod tables;

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;
use towline_lab::certificates::Authority;

use crate::rounds::{self, Contender};
use crate::table::Table;
pub use calls::measure as calls;
use end::Mode;
pub use end::{role, serve};
use entry::{Entry, MIB, Method, Peer};
pub use entry::{Load, Parameters};
use process::{Cost, End, Job};

/// Measures under these loads.
///
/// # Errors
/// The ends do not start, or the run was cancelled. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters, loads: &[Load]) -> Result<Vec<Table>> {
    let entries = entries(parameters, loads);
    let mut bench = Bench::new(parameters)?;
    let contenders: Vec<Contender> = entries.iter().map(Entry::contender).collect();
    let outcomes =
        rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| bench.run(entries[index]))?;
    Ok(tables::all(parameters, &entries, &outcomes))
}

fn entries(parameters: &Parameters, loads: &[Load]) -> Vec<Entry> {
    let takes_part = |method: &Method| parameters.has_qemu || !matches!(method, Method::Qemu(_));
    let peers = [Method::Qemu(Peer::Plain), Method::Qemu(Peer::ZeroCopy), Method::Iperf];
    let warm: Vec<_> = Mode::PLAIN.map(Method::Towline).into_iter().chain(peers).filter(takes_part).collect();
    let idle_only = [Method::Towline(Mode::Tls), Method::Qemu(Peer::Tls), Method::Cipher];
    let idle_only: Vec<_> = idle_only.into_iter().filter(takes_part).collect();
    let cold = [Method::Towline(Mode::Vectored), Method::Qemu(Peer::Plain)];
    let cold: Vec<_> = cold.into_iter().filter(takes_part).collect();
    // In the same round as the rows that they are compared with.
    let idle: Vec<_> = warm.iter().chain(&idle_only).copied().collect();
    let of = |load, is_cold, method: &[Method]| -> Vec<Entry> {
        let lanes = parameters.lanes.iter();
        let entry = |&lanes| method.iter().map(move |&method| Entry { load, is_cold, lanes, method });
        lanes.flat_map(entry).collect()
    };
    let warm_under = |&load: &Load| of(load, false, if load == Load::Idle { &idle } else { &warm });
    let mut entries: Vec<_> = loads.iter().flat_map(warm_under).collect();
    if loads.contains(&Load::Idle) {
        entries.extend(of(Load::Idle, true, &cold));
    }
    entries
}

/// Resources of the whole measurement.
struct Bench<'a> {
    parameters: &'a Parameters,
    source: End,
    destination: End,
    qemu: Option<Result<qemu::Source>>,
    /// Certificates for both ends, towline's and QEMU's.
    certificates: TempDir,
    /// CPUs of sources and of destinations, for pinned runs.
    halves: (Vec<usize>, Vec<usize>),
}

impl<'a> Bench<'a> {
    fn new(parameters: &'a Parameters) -> Result<Self> {
        let bytes = parameters.memory_mib * MIB;
        let end = |role: &str| End::start(&parameters.program, &json!({ role: { "bytes": bytes } }));
        eprintln!("lanes: filling {} MiB of a synthetic guest", parameters.memory_mib);
        let source = end("source").context("source")?;
        let destination = end("destination").context("destination")?;
        let certificates = tempfile::Builder::new().prefix("towline-bench-").tempdir()?;
        Authority::new("towline-bench")?.furnish(certificates.path())?;
        let qemu = parameters.has_qemu.then(|| qemu::Source::start(parameters, certificates.path()));
        let cpus: Vec<usize> = (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        let (first, second) = cpus.split_at(cpus.len().div_ceil(2));
        // With one CPU both halves are the same.
        let second = if second.is_empty() { first } else { second };
        let halves = (first.to_vec(), second.to_vec());
        Ok(Self { parameters, source, destination, qemu, certificates, halves })
    }

    fn run(&mut self, entry: Entry) -> Result<Cost> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let stress = match entry.load {
            Load::Stress => Some(End::start(&self.parameters.program, &json!({ "spin": threads }))?),
            _ => None,
        };
        let halves = (entry.load == Load::Pinned).then_some((&self.halves.0[..], &self.halves.1[..]));
        let cost = match entry.method {
            Method::Towline(mode) => {
                let tls = (mode == Mode::Tls).then(|| self.certificates.path());
                let Entry { lanes, is_cold, .. } = entry;
                let job = Job { mode: mode.name(), lanes, is_cold, cpus: halves, tls };
                process::migrate(&mut self.source, &mut self.destination, job)
            }
            Method::Qemu(peer) => {
                let source = self.qemu.as_ref().context("QEMU is not among the contenders")?;
                let source = source.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
                let Entry { lanes, is_cold, .. } = entry;
                let certificates = self.certificates.path();
                source.migrate(
                    self.parameters,
                    qemu::Settings { lanes, peer, is_cold, cpus: halves, certificates },
                )
            }
            Method::Iperf => iperf::run(entry.lanes, self.parameters.iperf_seconds, halves),
            Method::Cipher => cipher::run(entry.lanes, self.parameters.memory_mib * MIB),
        };
        drop(stress);
        cost
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use towline_channel::Cancel;

    use super::*;

    #[test]
    fn every_number_of_lanes_has_every_contender() {
        let parameters = Parameters::of(Path::new("towline"), 1, Cancel::new().unwrap());
        let warm = entries(&parameters, &[Load::Idle]);
        assert_eq!(warm.len(), 4 * (Mode::PLAIN.len() + 3 + 3) + 4 * 2);
        assert_eq!(warm[0].contender().group, "warm, 1 lane");
        assert_eq!(warm.last().unwrap().contender().group, "cold, 8 lanes");
        let busy = entries(&Parameters { has_qemu: false, ..parameters }, &[Load::Stress, Load::Pinned]);
        assert_eq!(busy.len(), 2 * 4 * (Mode::PLAIN.len() + 1));
        assert_eq!(busy.last().unwrap().contender().group, "pinned, 8 lanes");
    }
}

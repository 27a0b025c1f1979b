//! Whole-path benchmarks: real guests, side by side with the peers found on the machine.
//!
//! ```text
//! cargo xtask bench [TABLE...]  ─►  run  ─►  ram, live, instant, lanes  ─►  Vec<Table>  ─►  text, and DIR/ram.{txt,json,html}
//!                                                └─ rounds: contenders A B C, then B C A …, so that none has the machine to itself
//! ```
//! Contenders are measured interleaved in one run. A figure is a median with its spread; a ratio is taken round by round before its
//! median. Every figure is published beside its peer's. A contender that cannot be measured is a row with the reason. Guests,
//! processes and files are removed at the end, also of a cancelled run.
//!
//! Out of scope: tests. Nothing about speed is asserted, and figures hold for the machine that they were measured on.

mod counter;
pub mod instant;
pub mod lanes;
pub mod live;
mod machine;
pub mod net;
pub mod ram;
mod report;
pub mod rounds;
pub mod run;
pub mod sandbox;
pub mod stats;
pub mod table;
pub mod vhost;
pub mod vsock;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use towline_channel::Cancel;

use crate::table::Table;

/// Options of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names of the tables; empty: all.
    pub tables: Vec<String>,
    /// Directory for each table as text, as JSON and as a page.
    pub report: Option<PathBuf>,
    /// Number of runs of each row, at least 1.
    pub runs: usize,
    /// Memory of the guests in MiB, for tables with several sizes; empty: their default.
    pub sizes_mib: Vec<u64>,
    /// Parts of the names of the groups to measure, for tables with many rows; empty: all.
    pub rows: Vec<String>,
    /// Binary under test.
    pub towline: PathBuf,
    /// This program, which also runs the ends of `lanes`.
    pub own: PathBuf,
    /// Programs of peers that are not found by themselves, by name.
    pub peers: Vec<(String, PathBuf)>,
    /// Cancels the run, which then removes what it created.
    pub cancel: Cancel,
}

/// Directory of the programs that `cargo xtask peers` builds.
const PEERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/peers/bin");

impl Options {
    /// Finds a peer's program: an option's, that of `cargo xtask peers`, or one in `PATH`.
    fn peer(&self, name: &str) -> Option<PathBuf> {
        let configured = self.peers.iter().find(|(known, _)| known == name).map(|(_, path)| path.clone());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let candidates = std::iter::once(Path::new(PEERS).join(name))
            .chain(std::env::split_paths(&path).map(|directory| directory.join(name)));
        configured.or_else(|| candidates.into_iter().find(|path| path.is_file()))
    }

    fn net(&self, parameters: net::Parameters) -> net::Parameters {
        let names = [net::TESTPMD, net::VHOST_USER_NET, net::PASST];
        let [testpmd, vhost_user_net, passt] = names.map(|name| self.peer(name));
        net::Parameters { testpmd, vhost_user_net, passt, rows: self.rows.clone(), ..parameters }
    }
}

/// Error of an unknown table.
#[derive(Debug, thiserror::Error)]
#[error("unknown table {name:?}: expected one of {}", known.join(", "))]
pub struct UnknownTable {
    /// The requested name.
    pub name: String,
    /// Names of all tables.
    pub known: Vec<&'static str>,
}

/// A benchmark by its name on the command line.
struct Benchmark {
    name: &'static str,
    measure: fn(&Options) -> Result<Vec<Table>>,
}

const BENCHMARKS: [Benchmark; 15] = [
    Benchmark {
        name: "ram",
        measure: |options| {
            ram::measure(&ram::Parameters::of(&options.towline, options.runs, options.cancel.clone()))
        },
    },
    Benchmark {
        name: "live",
        measure: |options| {
            live::measure(&live::Parameters::of(&options.towline, options.runs, options.cancel.clone()))
        },
    },
    Benchmark {
        name: "instant",
        measure: |options| {
            let mut parameters =
                instant::Parameters::of(&options.towline, options.runs, options.cancel.clone());
            if !options.sizes_mib.is_empty() {
                parameters.sizes_mib.clone_from(&options.sizes_mib);
            }
            instant::measure(&parameters)
        },
    },
    Benchmark {
        name: "run",
        measure: |options| {
            let mut parameters = run::Parameters::of(&options.towline, options.runs, options.cancel.clone());
            if !options.sizes_mib.is_empty() {
                parameters.sizes_mib.clone_from(&options.sizes_mib);
            }
            run::measure(&parameters)
        },
    },
    Benchmark {
        name: "lanes",
        measure: |options| lanes::measure(&parameters(options), &[lanes::Load::Idle]),
    },
    Benchmark {
        name: "lanes-busy",
        measure: |options| lanes::measure(&parameters(options), &[lanes::Load::Stress, lanes::Load::Pinned]),
    },
    Benchmark { name: "calls", measure: |options| lanes::calls(&parameters(options)) },
    Benchmark {
        name: "vsock",
        measure: |options| {
            let peer = options.peer(vsock::PEER);
            let (runs, cancel) = (options.runs, options.cancel.clone());
            let rows = options.rows.clone();
            let parameters = vsock::Parameters::of(&options.towline, peer, runs, cancel);
            vsock::measure(&vsock::Parameters { rows, ..parameters })
        },
    },
    Benchmark {
        name: "vsock-linux",
        measure: |options| {
            let (runs, cancel, own) = (options.runs, options.cancel.clone(), options.own.clone());
            let rows = options.rows.clone();
            let parameters = vsock::Parameters::of(&options.towline, options.peer(vsock::PEER), runs, cancel);
            vsock::linux::measure(&vsock::Parameters { own, rows, ..parameters })
        },
    },
    Benchmark {
        name: "vsock-guests",
        measure: |options| {
            let (runs, cancel) = (options.runs, options.cancel.clone());
            vsock::crowd::measure(&vsock::Parameters::of(&options.towline, None, runs, cancel))
        },
    },
    Benchmark {
        name: "net",
        measure: |options| {
            let cancel = options.cancel.clone();
            net::measure(&options.net(net::Parameters::of(&options.towline, options.runs, cancel)))
        },
    },
    Benchmark {
        name: "net-queues",
        measure: |options| {
            let cancel = options.cancel.clone();
            net::measure(&options.net(net::Parameters::multiqueue(&options.towline, options.runs, cancel)))
        },
    },
    Benchmark {
        name: "af-xdp",
        measure: |options| {
            net::af_xdp::measure(&net::af_xdp::Parameters {
                stream_sizes: vec![64, 256, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10],
                request_sizes: vec![64, 1 << 10, 8 << 10],
                window: Duration::from_secs(2),
                runs: options.runs,
                towline: options.towline.clone(),
                own: options.own.clone(),
                rows: options.rows.clone(),
                cancel: options.cancel.clone(),
            })
        },
    },
    Benchmark {
        name: "sandbox",
        measure: |options| {
            let (runs, cancel) = (options.runs, options.cancel.clone());
            Ok(vec![sandbox::calls::measure(&sandbox::calls::Parameters { runs, cancel })?])
        },
    },
    Benchmark {
        name: "sandbox-paths",
        measure: |options| {
            sandbox::measure(&sandbox::Parameters::of(&options.towline, options.runs, options.cancel.clone()))
        },
    },
];

fn parameters(options: &Options) -> lanes::Parameters {
    lanes::Parameters::of(&options.own, options.runs, options.cancel.clone())
}

/// Measures tables and prints them.
///
/// # Errors
/// A table is unknown ([`UnknownTable`], before anything runs), the machine lacks something that all rows need, the run was
/// cancelled, or the report cannot be written.
pub fn run(options: &Options) -> Result<()> {
    let chosen = chosen(&options.tables)?;
    ensure!(options.runs > 0, "0 runs: expected at least 1");
    if let Some(directory) = &options.report {
        // Before the measurements, so that an error is reported early.
        std::fs::create_dir_all(directory)?;
    }
    for benchmark in chosen {
        let machine = machine::describe();
        let tables = (benchmark.measure)(options)?;
        print!("{}", report::text(&machine, &tables));
        if let Some(directory) = &options.report {
            report::write(directory, benchmark.name, &machine, &tables)?;
        }
    }
    Ok(())
}

fn chosen(names: &[String]) -> Result<Vec<&'static Benchmark>, UnknownTable> {
    if names.is_empty() {
        return Ok(BENCHMARKS.iter().collect());
    }
    let known = || BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
    let find = |name: &String| BENCHMARKS.iter().find(|benchmark| benchmark.name == name);
    names
        .iter()
        .map(|name| find(name).ok_or_else(|| UnknownTable { name: name.clone(), known: known() }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_table_is_an_error_with_the_known_ones() {
        let error = chosen(&["ram".into(), "disk".into()]).err().unwrap();
        assert_eq!(
            error.to_string(),
            "unknown table \"disk\": expected one of ram, live, instant, run, lanes, lanes-busy, calls, vsock, vsock-linux, vsock-guests, net, net-queues, af-xdp, sandbox, sandbox-paths"
        );
        assert_eq!(chosen(&[]).unwrap().len(), BENCHMARKS.len());
    }
}

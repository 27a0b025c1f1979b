//! Whole-path benchmarks: real guests, side by side with the peers found on the machine.
//!
//! ```text
//! cargo xtask bench [TABLE...]  ─►  run  ─►  ram, live, instant, lanes  ─►  Vec<Table>  ─►  text, and DIR/ram.txt, DIR/ram.json
//!                                                └─ rounds: contenders A B C, then B C A …, so that none has the machine to itself
//! ```
//! What is compared was measured in one run, interleaved; a figure is a median with its spread, and a ratio is taken round
//! by round before its median is. Nothing is published without its peer beside it. What cannot be measured stays in its
//! table as a row with the reason. Guests, processes and files go when the run ends, also when it is cancelled.
//!
//! What this is not: a test. It asserts nothing about speed, and its figures are of the machine that it ran on.

mod counter;
pub mod instant;
pub mod lanes;
pub mod live;
mod machine;
pub mod net;
pub mod ram;
mod report;
pub mod rounds;
pub mod sandbox;
pub mod stats;
pub mod table;
pub mod vhost;
pub mod vsock;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use towline_channel::Cancel;

use crate::table::Table;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names of tables; all if empty.
    pub tables: Vec<String>,
    /// Also write each table here, as text and as JSON.
    pub report: Option<PathBuf>,
    /// Runs of each row, at least 1.
    pub runs: usize,
    /// MiB of the guests, for tables that have several sizes; theirs if empty.
    pub sizes_mib: Vec<u64>,
    /// Only rows whose group's name has one of these in it, for tables with very many; all if empty.
    pub rows: Vec<String>,
    /// Binary under test.
    pub towline: PathBuf,
    /// This program, which also runs the ends of `lanes`.
    pub own: PathBuf,
    /// Where peers are that are not found by themselves, by name.
    pub peers: Vec<(String, PathBuf)>,
    /// Ends the run early; everything is put away.
    pub cancel: Cancel,
}

/// Where `cargo xtask peers` puts what it builds.
const PEERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/peers/bin");

impl Options {
    /// A peer's program: where the user says, where `cargo xtask peers` puts it, or anywhere in `PATH`.
    fn peer(&self, name: &str) -> Option<PathBuf> {
        let given = self.peers.iter().find(|(known, _)| known == name).map(|(_, path)| path.clone());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = std::iter::once(Path::new(PEERS).join(name))
            .chain(std::env::split_paths(&path).map(|directory| directory.join(name)));
        given.or_else(|| places.into_iter().find(|place| place.is_file()))
    }

    fn net(&self, parameters: net::Parameters) -> net::Parameters {
        let [testpmd, vhost_user_net] = [net::TESTPMD, net::VHOST_USER_NET].map(|name| self.peer(name));
        net::Parameters { testpmd, vhost_user_net, rows: self.rows.clone(), ..parameters }
    }
}

/// No table has this name.
#[derive(Debug, thiserror::Error)]
#[error("there is no table {name:?}; there are: {}", known.join(", "))]
pub struct UnknownTable {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub known: Vec<&'static str>,
}

/// A benchmark by its name on the command line.
struct Benchmark {
    name: &'static str,
    measure: fn(&Options) -> Result<Vec<Table>>,
}

const BENCHMARKS: [Benchmark; 12] = [
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

/// Measures and prints.
///
/// # Errors
/// A table is unknown ([`UnknownTable`], before anything runs), the machine lacks what all rows need, it was cancelled, or
/// the report cannot be written.
pub fn run(options: &Options) -> Result<()> {
    let chosen = chosen(&options.tables)?;
    ensure!(options.runs > 0, "0 runs measure nothing, expected at least 1");
    if let Some(directory) = &options.report {
        // Now rather than after all is measured.
        std::fs::create_dir_all(directory)?;
    }
    for benchmark in chosen {
        let machine = machine::describe();
        let tables = (benchmark.measure)(options)?;
        let text = report::text(&machine, &tables);
        print!("{text}");
        if let Some(directory) = &options.report {
            report::write(directory, benchmark.name, &text, &report::json(&machine, &tables))?;
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
    fn an_unknown_table_is_named_with_those_that_are_known() {
        let error = chosen(&["ram".into(), "disk".into()]).err().unwrap();
        assert_eq!(
            error.to_string(),
            "there is no table \"disk\"; there are: ram, live, instant, lanes, lanes-busy, calls, vsock, vsock-guests, net, net-queues, sandbox, sandbox-paths"
        );
        assert_eq!(chosen(&[]).unwrap().len(), BENCHMARKS.len());
    }
}

//! Options of the benchmarks, and what these share: programs of peers, sizes, directories.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use tempfile::TempDir;
use towline_channel::Cancel;

/// Directory of the programs that `cargo xtask peers` builds.
const PEERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/peers/bin");

/// Names of the tables.
pub(crate) const TABLES: [&str; 12] = [
    "ram",
    "live",
    "instant",
    "run",
    "fork",
    "lanes",
    "vsock",
    "vsock-linux",
    "net",
    "net-queues",
    "af-xdp",
    "sandbox",
];

/// Benchmarks on real guests, side by side with the peers that this machine has
///
/// Tables:
///   ram            save and restore of a guest's memory, against QEMU's own
///   live           a busy guest through towline, against QEMU to QEMU
///   instant        a restored guest that runs at once, against QEMU's own restore and postcopy
///   run            a guest from an image by one command: its parts, cached and not
///   fork           a running guest that is forked or stored, by what it has written, against QEMU's own saves
///   lanes          memory over lanes, against QEMU's multifd and iperf3
///   vsock          streams and requests, against vhost-device-vsock and a plain Unix socket
///   vsock-linux    streams, requests and connections of an emulated Linux guest, against vhost-device-vsock
///   net            frames and TCP, against vhost_user_net, dpdk-testpmd, passt, a tap and a veth pair
///   net-queues     the same with several queues
///   af-xdp         TCP of a guest by the tap and by AF_XDP with and without copies, inside of an emulated guest
///   sandbox        system calls with and without the sandbox's filters
/// `cargo xtask setup` installs the guests and QEMUs, `cargo xtask peers` the peers.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", version, verbatim_doc_comment, max_term_width = 110)]
#[command(override_usage = "cargo xtask bench [OPTIONS] [TABLE]...")]
#[command(after_help = "\
Examples:
  cargo xtask bench ram
  cargo xtask bench ram --report report/
  cargo xtask bench instant --sizes 1G --runs 1
  cargo xtask bench vsock --runs 3
  cargo xtask bench net --peer vhost_user_net=/opt/vhost_user_net
  cargo xtask bench net-queues --runs 1 --rows 'TCP_CRR, 1 B' --rows 'TCP_RR, 1 B'

Exit status: 0 done; 1 failed or cancelled; 2 usage.
")]
pub(crate) struct Options {
    /// Tables to measure [default: all]
    #[arg(value_name = "TABLE", value_parser = TABLES)]
    pub(crate) tables: Vec<String>,
    /// Directory for each table as text and as JSON with every single value
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Number of runs of each row; the median is printed
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) runs: u16,
    /// Memory of the guests, in bytes (suffixes M, G); several for `instant` and `run` [default: that of the published tables]
    #[arg(long, value_name = "BYTES", value_parser = mebibytes, value_delimiter = ',')]
    pub(crate) sizes: Vec<u64>,
    /// Seconds in which a row of a device is measured [default: those of the published tables]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) window: Option<Duration>,
    /// Part of the names of the groups of rows to measure; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) rows: Vec<String>,
    /// Program of a peer that is not found by itself: vhost_user_net=PATH, vhost-device-vsock=PATH; may be repeated
    #[arg(long = "peer", value_name = "NAME=PATH", value_parser = peer)]
    pub(crate) peers: Vec<(String, PathBuf)>,
    /// Binary under test
    #[arg(long, value_name = "PATH", env = "TOWLINE_BIN")]
    pub(crate) towline: PathBuf,
}

/// Options, program and cancellation of all benchmarks.
pub(crate) struct Bench {
    pub(crate) options: Options,
    /// This program, which also runs ends of migrations and applications of guests.
    pub(crate) own: PathBuf,
    /// Cancels the run, which then removes what it created.
    pub(crate) cancel: Cancel,
}

impl Bench {
    /// Returns the sizes of the guests in MiB.
    pub(crate) fn sizes_mib(&self, published: &[u64]) -> Vec<u64> {
        if self.options.sizes.is_empty() { published.to_vec() } else { self.options.sizes.clone() }
    }

    /// Returns the size of the guest in MiB, of a benchmark with one.
    pub(crate) fn size_mib(&self, published: u64) -> u64 {
        self.options.sizes.first().copied().unwrap_or(published)
    }

    pub(crate) fn window(&self, published: Duration) -> Duration {
        self.options.window.unwrap_or(published)
    }

    /// Finds a peer's program: an option's, that of `cargo xtask peers`, or one in `PATH`.
    pub(crate) fn peer(&self, name: &str) -> Result<PathBuf> {
        let configured = self.options.peers.iter().find(|(known, _)| known == name);
        let configured = configured.map(|(_, path)| path.clone());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories = std::iter::once(PEERS.into()).chain(std::env::split_paths(&path));
        let mut candidates = configured.into_iter().chain(directories.map(|directory| directory.join(name)));
        candidates.find(|path| path.is_file()).with_context(|| {
            format!("{name} is missing; run `cargo xtask peers`, or give --peer {name}=PATH")
        })
    }

    /// Creates a directory for images and sockets, which is removed when it is dropped.
    pub(crate) fn directory(&self) -> Result<TempDir> {
        Ok(TempDir::with_prefix("towline-bench-")?)
    }

    #[cfg(test)]
    pub(crate) fn of_test<const N: usize>(words: [&str; N]) -> Self {
        let words = ["bench", "--towline", "towline"].iter().chain(&words);
        Self {
            options: Options::try_parse_from(words).unwrap(),
            own: PathBuf::new(),
            cancel: Cancel::new().unwrap(),
        }
    }
}

/// Parses `NAME=PATH`.
fn peer(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').unwrap_or_default();
    if name.is_empty() || path.is_empty() {
        return Err("expected NAME=PATH".into());
    }
    Ok((name.to_owned(), path.into()))
}

fn seconds(text: &str) -> Result<Duration> {
    let seconds = Duration::try_from_secs_f64(text.parse()?)?;
    ensure!(!seconds.is_zero(), "expected more than 0 seconds");
    Ok(seconds)
}

/// Parses a size such as `512M` or `4G` into MiB.
fn mebibytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "M" | "MIB" => 1,
        "G" | "GIB" => 1 << 10,
        _ => return Err(format!("{text}: expected a size with the suffix M or G")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text}: expected a size such as 512M or 4G"))?;
    match number.checked_mul(scale) {
        None | Some(0) => Err(format!("{text}: the size is out of range")),
        Some(mebibytes) => Ok(mebibytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let bench = Bench::of_test(["net", "--sizes", "1G,512m", "--peer", "a=/b=c", "--window", "0.2"]);
        let options = bench.options;
        assert_eq!(options.sizes, [1024, 512]);
        assert_eq!(options.peers, [("a".to_owned(), PathBuf::from("/b=c"))]);
        assert_eq!((options.tables, options.runs), (vec!["net".to_owned()], 5));
        assert_eq!(options.window, Some(Duration::from_millis(200)));
    }

    #[test]
    fn what_cannot_be_measured_is_a_usage_error() {
        for wrong in [
            "disk",
            "--runs 0",
            "--window 0",
            "--sizes 0G",
            "--sizes 1",
            "--sizes 99999999999999999999G",
            "--peer =a",
            "--peer a",
        ] {
            let words = format!("bench --towline t {wrong}");
            let error = Options::try_parse_from(words.split(' ')).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong}");
        }
    }
}

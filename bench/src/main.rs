//! `towline-bench`, started as `cargo xtask bench`: the command line of the benchmarks.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use towline_bench::net::af_xdp;
use towline_bench::vsock::linux;
use towline_bench::{Options, UnknownTable};
use towline_channel::Cancel;

/// Exit status of an unusable command line.
const EXIT_USAGE: u8 = 2;

/// Benchmarks on real guests, side by side with the peers that this machine has
///
/// Tables:
///   ram            save and restore of a guest's memory, against QEMU's own
///   live           a busy guest through towline, against QEMU to QEMU
///   instant        a restored guest that runs at once, against QEMU's own restore and postcopy
///   run            a guest from an image by one command: its parts, cached and not
///   lanes          memory over lanes, against QEMU's multifd and iperf3
///   lanes-busy     the same on a busy machine, and pinned
///   calls          pages copied into a linear buffer, against vectors
///   vsock          streams and requests, against vhost-device-vsock and a plain Unix socket
///   vsock-linux    streams, requests and connections of an emulated Linux guest, against vhost-device-vsock
///   vsock-guests   sixteen guests of one process, one of them hostile
///   net            frames and TCP, against vhost_user_net, dpdk-testpmd, a tap and a veth pair
///   net-queues     the same with several queues
///   af-xdp         TCP of a guest by the tap and by AF_XDP with and without copies, inside of an emulated guest
///   sandbox        system calls with and without the sandbox's filters
///   sandbox-paths  devices and a copy with and without a sandbox
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
struct Arguments {
    /// Tables to measure [default: all]
    #[arg(value_name = "TABLE")]
    tables: Vec<String>,
    /// Directory for each table as text, as JSON and as a page with charts
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Number of runs of each row; the median is printed
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
    /// Memory sizes of the guests of `instant` and `run`, in bytes (suffixes M, G) [default: 1G,4G,8G; 512M too for `run`]
    #[arg(long, value_name = "BYTES", value_parser = mebibytes, value_delimiter = ',')]
    sizes: Vec<u64>,
    /// Part of the names of the rows to measure, for `net`, `net-queues`, `af-xdp`, `vsock` and `vsock-linux`; may be repeated
    #[arg(long, value_name = "TEXT")]
    rows: Vec<String>,
    /// Program of a peer that is not found by itself: vhost_user_net=PATH, vhost-device-vsock=PATH; may be repeated
    #[arg(long = "peer", value_name = "NAME=PATH", value_parser = peer)]
    peers: Vec<(String, PathBuf)>,
    /// Binary under test
    #[arg(long, value_name = "PATH", env = "TOWLINE_BIN")]
    towline: PathBuf,
}

fn main() -> ExitCode {
    // A measured end of a migration and the application of a guest are this program again.
    let words: Vec<_> = std::env::args_os().collect();
    let result = if let Some(role) = towline_bench::lanes::role(&words) {
        towline_bench::lanes::serve(role)
    } else if linux::is_application(&words) {
        linux::serve()
    } else if let Some(role) = af_xdp::role(&words) {
        af_xdp::serve(role)
    } else {
        run(Arguments::parse_from(words))
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(if error.is::<UnknownTable>() { EXIT_USAGE } else { 1 })
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    let Arguments { tables, report, runs, sizes, rows, peers, towline } = arguments;
    let own = std::env::current_exe().context("path of this program")?;
    let cancel = cancel_on_signals()?;
    towline_bench::run(&Options { tables, report, runs, sizes_mib: sizes, rows, towline, own, peers, cancel })
}

/// Returns a token that SIGINT, SIGTERM and SIGHUP cancel: guests, processes and files are removed then.
fn cancel_on_signals() -> Result<Cancel> {
    let cancel = Cancel::new().context("cancellation token")?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signal handlers")?;
    let token = cancel.clone();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            eprintln!("bench: cancelling; guests and images are removed");
            token.cancel();
        }
    });
    Ok(cancel)
}

/// Parses `NAME=PATH`.
fn peer(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').unwrap_or_default();
    if name.is_empty() || path.is_empty() {
        return Err("expected NAME=PATH".into());
    }
    Ok((name.to_owned(), path.into()))
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
        let words = "bench net --sizes 1G,512m --peer a=/b=c --rows TCP_RR --towline /bin/towline";
        let arguments = Arguments::try_parse_from(words.split(' ')).unwrap();
        assert_eq!(arguments.sizes, [1024, 512]);
        assert_eq!(arguments.peers, [("a".to_owned(), PathBuf::from("/b=c"))]);
        assert_eq!((arguments.tables, arguments.runs), (vec!["net".to_owned()], 5));
        for wrong in ["--sizes 0G", "--sizes 1", "--sizes 99999999999999999999G", "--peer =a", "--peer a"] {
            let words = format!("bench --towline t {wrong}");
            assert!(Arguments::try_parse_from(words.split(' ')).is_err(), "{wrong}");
        }
    }
}

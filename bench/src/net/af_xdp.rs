//! `cargo xtask bench af-xdp`: TCP of a guest by the tap and by AF_XDP, side by side, inside of a Linux guest whose card has zero-copy.
//!
//! ```text
//!   inside of a Linux guest of QEMU                                             a namespace of this machine
//!   application ─ tap1 ─ driver ─ rings ─ towline net ─┬ AF_XDP ───────► eth0 ──► wire0 ── application
//!    (a namespace)                  ▲                  └ tap0 ─ kernel ─► eth0
//!                                   └──────────────────── tap0 ◄ kernel ◄ eth1 ◄── wire1
//! ```
//! The queue of a socket does not receive, so packets to the guest take another card. Without ARP: the interfaces of a direction have
//! one address. Cards restart for each figure, in one guest for the whole run.
//!
//! Limits: the guest is emulated, so figures are compared with each other only. Needs root and a kernel of Debian 13's backports.

mod inner;

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use towline_lab::{Kernel, LinuxGuest, Network, Qemu, Version, wait_until};

use super::hosts::{INSIDE, OUTSIDE, serve as serve_clients};
use crate::applications::{Applications, Kind, Traffic};
use crate::guest::number;
use crate::machine::{self, MIB};
use crate::options::Bench;
use crate::sys::Offloads;
use crate::table::{self, Column, Contender, Entry, Figures, Row, Table};

pub(crate) use inner::{APPLICATION, serve};
use inner::{OUT, Outcome, Role, SOCKET};

/// Address of the interfaces on the way in.
const IN: &str = "52:54:00:63:00:02";
const WITHIN: Duration = Duration::from_secs(60);
const WINDOW: Duration = Duration::from_secs(2);
const STREAM_SIZES: [usize; 8] = [64, 256, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10];
const REQUEST_SIZES: [usize; 3] = [64, 1 << 10, 8 << 10];

/// Path of the guest's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Path {
    /// Options of the card.
    options: &'static str,
    /// Offloads that the driver negotiates. Without, the guest's kernel computes packets and checksums itself: this driver can read
    /// only such packets from guest memory, as it accepts one descriptor per packet.
    offloads: Offloads,
    /// The mode that the card reports.
    mode: &'static str,
}

/// The guest's stream, or its requests and their replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Connection(Traffic);

type Run = Entry<Connection, Path>;

impl Row for Connection {
    fn name(&self) -> String {
        let what = if self.0.is_stream() { "TCP stream from the guest" } else { "TCP requests" };
        format!("{what}, {} B", self.0.size)
    }
}

const ZERO_COPY: &str = "af-xdp-zero-copy";
const DEFAULT: &str = "--af-xdp eth0";
const TAP: Contender<Path> = path("tap", "", Offloads::On, "tap");
const TAP_WITHOUT_OFFLOADS: Contender<Path> = path("tap, no offloads", "", Offloads::Off, "tap");
const CONTENDERS: [Contender<Path>; 6] = [
    TAP,
    path("AF_XDP, copy", "--af-xdp eth0 --af-xdp-copy", Offloads::On, "af-xdp-copy"),
    path("AF_XDP, zero-copy", "--af-xdp eth0 --zero-copy-send on", Offloads::On, ZERO_COPY),
    path("default", DEFAULT, Offloads::On, "tap"),
    TAP_WITHOUT_OFFLOADS,
    path("default, no offloads", DEFAULT, Offloads::Off, ZERO_COPY),
];

const fn path(
    name: &'static str,
    options: &'static str,
    offloads: Offloads,
    mode: &'static str,
) -> Contender<Path> {
    Contender::new(name, Path { options, offloads, mode })
}

/// The tap with the same offloads.
fn by_tap(run: Run) -> Run {
    run.with(if run.contender.kind.offloads == Offloads::On { TAP } else { TAP_WITHOUT_OFFLOADS })
}

const STREAMS: [Column<Connection, Path>; 8] = [
    Column::spread("Gbit/s", 3),
    Column::ratio("× tap", "Gbit/s", by_tap),
    Column::median("card CPU ms/MiB", 2),
    Column::ratio("× tap", "card CPU ms/MiB", by_tap),
    Column::median("receiver ms/MiB", 2),
    Column::median("kicks/MiB", 1),
    Column::median("interrupts/MiB", 1),
    Column::median("zero-copy %", 0),
];
const REQUESTS: [Column<Connection, Path>; 8] = [
    Column::spread("1/s", 0),
    Column::ratio("× tap", "1/s", by_tap),
    Column::median("card CPU µs", 0),
    Column::ratio("× tap", "card CPU µs", by_tap),
    Column::median("p50 µs", 0),
    Column::median("kicks", 2),
    Column::median("interrupts", 2),
    Column::median("zero-copy %", 0),
];
const NOTE: &str = "the guest is emulated: compare the rows of one table; × tap: with the same offloads; kicks, interrupts: of the whole connection";

/// Measures the tables.
///
/// # Errors
/// The guest does not start, the measurement was cancelled, or no row is selected.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let of = |kind| move |size| Connection(Traffic { kind, size, sessions: 1 });
    let streams = STREAM_SIZES.map(of(Kind::FromGuest));
    let requests = REQUEST_SIZES.map(of(Kind::Request));
    let all = bench.chosen(Entry::all(streams.into_iter().chain(requests), &CONTENDERS))?;
    let mut outer = Outer::start(bench)?;
    let results = table::measure(bench, all, |run| outer.run(run))?;
    let title = "TCP streams of a guest";
    let streams = results.table("af-xdp-streams", title, &STREAMS, |row| row.0.is_stream());
    let title = "TCP requests of a guest";
    let requests = results.table("af-xdp-requests", title, &REQUESTS, |row| !row.0.is_stream());
    Ok(vec![streams.with_notes([NOTE]), requests.with_notes([NOTE])])
}

/// The Linux guest that has the card, and the network that it leads to.
struct Outer<'b> {
    bench: &'b Bench,
    guest: LinuxGuest,
    _qemu: Qemu,
    // Last: the guest's end comes first.
    network: Network,
}

impl<'b> Outer<'b> {
    fn start(bench: &'b Bench) -> Result<Self> {
        let network = Network::new()?;
        for (wire, address) in [("wire0", OUT), ("wire1", IN)] {
            network.run(&["ip", "tuntap", "add", "dev", wire, "mode", "tap", "vnet_hdr"])?;
            network.run(&["ip", "link", "set", wire, "address", address, "arp", "off", "up"])?;
        }
        network.run(&[
            "sysctl",
            "-qw",
            "net.ipv4.conf.all.rp_filter=0",
            "net.ipv4.conf.wire0.rp_filter=0",
        ])?;
        network.run(&["ip", "address", "add", &format!("{OUTSIDE}/24"), "dev", "wire0"])?;
        network.run(&["ip", "route", "add", &format!("{INSIDE}/32"), "dev", "wire1"])?;
        let builder = Qemu::builder(Version::V10_0).linux().kernel(Kernel::Newest);
        let programs = [&bench.options.towline, &bench.own];
        let mut builder = builder.memory_mib(2048).processors(2).guest_programs(programs);
        for (wire, address) in [("wire0", OUT), ("wire1", IN)] {
            let netdev = format!("tap,ifname={wire},script=no,downscript=no,id={wire}");
            let device =
                format!("virtio-net-pci,netdev={wire},mac={address},iommu_platform=on,disable-legacy=on");
            builder = builder.args(["-netdev", &netdev, "-device", &device]);
        }
        let qemu = builder.within(&network).start()?;
        let mut guest = qemu.linux(WITHIN)?;
        for line in [
            "ip link set lo up",
            "ip link set eth0 arp off up",
            "ip link set eth1 arp off up",
            &format!("ip route add {OUTSIDE}/32 dev eth0"),
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
            "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter",
        ] {
            guest.shell(line, WITHIN)?;
        }
        Ok(Self { bench, guest, _qemu: qemu, network })
    }

    fn shell(&mut self, line: &str) -> Result<String> {
        self.guest.shell(line, WITHIN)
    }

    fn run(&mut self, run: Run) -> Result<Figures> {
        let options = run.contender.kind.options;
        self.shell(&format!(
            "rm -f {SOCKET}; towline net --json --socket {SOCKET} --tap tap0 {options} \
             > /tmp/card.out 2> /tmp/card.err & echo $! > /tmp/card.pid"
        ))?;
        let measured = self.measure(run);
        let pid = "$(cat /tmp/card.pid)";
        self.shell(&format!("kill -TERM {pid} || true"))?;
        let end = wait_until("the card's exit", WITHIN, || {
            let line = format!("test -e /proc/{pid}/exe && echo runs || true");
            Ok(self.guest.shell(&line, WITHIN)?.trim().is_empty().then_some(()))
        });
        let errors = self.shell("tail -n 3 /tmp/card.err")?;
        let (outcome, receiver) = measured.with_context(|| format!("the card: {errors}"))?;
        end?;
        let last = self.shell("tail -n 1 /tmp/card.out")?;
        let statistics: Value = serde_json::from_str(&last).context("statistics of the card")?;
        figures(run, &outcome, receiver, &statistics["pairs"][0]["tx"]).with_context(|| errors)
    }

    /// Returns the result of the application in the guest, and the receiver's CPU time for each unit.
    fn measure(&mut self, run: Run) -> Result<(Outcome, f64)> {
        wait_until("the card's socket", WITHIN, || {
            let line = format!("test -e {SOCKET} && echo yes || true");
            Ok((self.guest.shell(&line, WITHIN)?.trim() == "yes").then_some(()))
        })?;
        self.shell(&format!(
            "ip link set tap0 address {OUT} arp off up && ip route add {INSIDE}/32 dev tap0"
        ))?;
        let Connection(traffic) = run.row;
        let mut receiver = Applications::default();
        serve_clients(&self.network, OUTSIDE, traffic, &mut receiver)?;
        let (window, offloads) = (self.bench.window(WINDOW), run.contender.kind.offloads == Offloads::On);
        let role = serde_json::to_string(&Role { traffic, window, offloads })?;
        let own = self.bench.own.file_name().context("a program has a name")?.to_string_lossy().into_owned();
        let line = format!("busybox unshare -n {own} {APPLICATION} '{role}' $(cat /tmp/card.pid)");
        let cpu = machine::own_seconds();
        let output = self.shell(&line);
        let cpu = machine::own_seconds() - cpu;
        let received = receiver.signals.units.load(Ordering::Relaxed).max(1) as f64;
        receiver.end()?;
        let output = output?;
        let outcome = serde_json::from_str(output.lines().last().unwrap_or_default());
        Ok((outcome.with_context(|| format!("`{output}` of the application"))?, cpu / received))
    }
}

/// Figures of a run, and of the receiver's CPU time for each byte. Whatever the card counts covers the whole connection.
fn figures(run: Run, outcome: &Outcome, receiver: f64, transmit: &Value) -> Result<Figures> {
    let mode = transmit["mode"].as_str().unwrap_or_default();
    ensure!(mode == run.contender.kind.mode, "the mode of transmission was {mode}");
    let all = outcome.all_units as f64;
    let (kicks, interrupts) = (number(transmit, "kicks")? / all, number(transmit, "notifications")? / all);
    let zero_copy = number(transmit, "zero-copy")? / number(transmit, "packets")?.max(1.0);
    let mut figures = Figures::from([("zero-copy %", 100.0 * zero_copy)]);
    if run.row.0.is_stream() {
        let mib = MIB as f64;
        figures.extend([
            ("Gbit/s", outcome.rate * 8e-9),
            ("card CPU ms/MiB", outcome.card_seconds * 1e3 * mib),
            ("receiver ms/MiB", receiver * 1e3 * mib),
            ("kicks/MiB", kicks * mib),
            ("interrupts/MiB", interrupts * mib),
        ]);
    } else {
        figures.extend([
            ("1/s", outcome.rate),
            ("card CPU µs", outcome.card_seconds * 1e6),
            ("p50 µs", outcome.p50_us.context("no latency")?),
            ("kicks", kicks),
            ("interrupts", interrupts),
        ]);
    }
    Ok(figures)
}

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

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_lab::{Kernel, LinuxGuest, Network, Qemu, Version, wait_until};

use super::hosts::{INSIDE, OUTSIDE, PORT};
use crate::applications::{Applications, Connections, Service};
use crate::machine::{self, MIB};
use crate::options::Bench;
use crate::table::{self, Column, Entry, Figures, Table};
use crate::vhost::Signals;

pub(crate) use inner::{APPLICATION, serve};

/// Addresses of the interfaces on the way out and on the way in.
const OUT: &str = "52:54:00:63:00:01";
const IN: &str = "52:54:00:63:00:02";
const SOCKET: &str = "/tmp/net.sock";
const WITHIN: Duration = Duration::from_secs(60);
const WINDOW: Duration = Duration::from_secs(2);
const STREAM_SIZES: [usize; 8] = [64, 256, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10];
const REQUEST_SIZES: [usize; 3] = [64, 1 << 10, 8 << 10];

/// Traffic of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// A stream from the guest.
    Stream(usize),
    /// Requests of the guest, one at a time, and replies of the same length.
    Request(usize),
}

/// Path of the guest's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carrier {
    Tap,
    CopyMode,
    References,
    /// Without options: what a user gets.
    Default,
    /// As `Tap` and `Default`; the guest's kernel computes packets and checksums itself. This driver can read only such packets
    /// from guest memory, as it accepts one descriptor per packet.
    TapWithoutOffloads,
    DefaultWithoutOffloads,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    work: Work,
    carrier: Carrier,
}

impl Entry for Run {
    fn group(&self) -> String {
        match self.work {
            Work::Stream(size) => format!("TCP stream from the guest, {size} B"),
            Work::Request(size) => format!("TCP requests, {size} B"),
        }
    }

    fn label(&self) -> &'static str {
        match self.carrier {
            Carrier::Tap => "tap",
            Carrier::CopyMode => "AF_XDP, copy",
            Carrier::References => "AF_XDP, zero-copy",
            Carrier::Default => "default",
            Carrier::TapWithoutOffloads => "tap, no offloads",
            Carrier::DefaultWithoutOffloads => "default, no offloads",
        }
    }
}

const STREAMS: [Column<Run>; 8] = [
    Column::spread("Gbit/s", 3),
    Column::ratio("× tap", "Gbit/s", Run::by_tap),
    Column::median("card CPU ms/MiB", 2),
    Column::ratio("× tap", "card CPU ms/MiB", Run::by_tap),
    Column::median("receiver ms/MiB", 2),
    Column::median("kicks/MiB", 1),
    Column::median("interrupts/MiB", 1),
    Column::median("zero-copy %", 0),
];
const REQUESTS: [Column<Run>; 8] = [
    Column::spread("1/s", 0),
    Column::ratio("× tap", "1/s", Run::by_tap),
    Column::median("card CPU µs", 0),
    Column::ratio("× tap", "card CPU µs", Run::by_tap),
    Column::median("p50 µs", 0),
    Column::median("kicks", 2),
    Column::median("interrupts", 2),
    Column::median("zero-copy %", 0),
];
const NOTE: &str = "the guest is emulated: compare the rows of one table; × tap: with the same offloads; kicks, interrupts: of the whole connection";

impl Carrier {
    const ALL: [Self; 6] = [
        Self::Tap,
        Self::CopyMode,
        Self::References,
        Self::Default,
        Self::TapWithoutOffloads,
        Self::DefaultWithoutOffloads,
    ];

    fn arguments(self) -> &'static str {
        match self {
            Self::Tap | Self::TapWithoutOffloads => "",
            Self::CopyMode => "--af-xdp eth0 --af-xdp-copy",
            Self::References => "--af-xdp eth0 --zero-copy-send on",
            Self::Default | Self::DefaultWithoutOffloads => "--af-xdp eth0",
        }
    }

    /// Offloads that the driver negotiates.
    fn offloads(self) -> &'static str {
        match self {
            Self::TapWithoutOffloads | Self::DefaultWithoutOffloads => "off",
            _ => "on",
        }
    }

    /// The mode that the card reports.
    fn mode(self) -> &'static str {
        match self {
            Self::Tap | Self::Default | Self::TapWithoutOffloads => "tap",
            Self::CopyMode => "af-xdp-copy",
            Self::References | Self::DefaultWithoutOffloads => "af-xdp-zero-copy",
        }
    }
}

impl Run {
    /// The tap with the same offloads.
    fn by_tap(self) -> Self {
        let without = self.carrier.offloads() == "off";
        Self { carrier: if without { Carrier::TapWithoutOffloads } else { Carrier::Tap }, ..self }
    }

    fn is_stream(self) -> bool {
        matches!(self.work, Work::Stream(_))
    }
}

/// Measures the tables.
///
/// # Errors
/// The guest does not start, the measurement was cancelled, or no row is selected.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let works = STREAM_SIZES.map(Work::Stream).into_iter().chain(REQUEST_SIZES.map(Work::Request));
    let all = works.flat_map(|work| Carrier::ALL.map(|carrier| Run { work, carrier }));
    let all = bench.chosen(all)?;
    let mut outer = Outer::start(bench)?;
    let results = table::measure(bench, all, |run| outer.run(run))?;
    let streams = results.table("af-xdp-streams", "TCP streams of a guest", &STREAMS, Run::is_stream);
    let requests =
        results.table("af-xdp-requests", "TCP requests of a guest", &REQUESTS, |run| !run.is_stream());
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
        let arguments = run.carrier.arguments();
        self.shell(&format!(
            "rm -f {SOCKET}; towline net --json --socket {SOCKET} --tap tap0 {arguments} \
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
        let measured = measured.with_context(|| format!("the card: {errors}"))?;
        end?;
        let last = self.shell("tail -n 1 /tmp/card.out")?;
        let statistics: Value = serde_json::from_str(&last).context("statistics of the card")?;
        figures(run, &measured, &statistics["pairs"][0]["tx"]).with_context(|| errors)
    }

    /// Returns the result of the application in the guest.
    fn measure(&mut self, run: Run) -> Result<Value> {
        wait_until("the card's socket", WITHIN, || {
            let line = format!("test -e {SOCKET} && echo yes || true");
            Ok((self.guest.shell(&line, WITHIN)?.trim() == "yes").then_some(()))
        })?;
        self.shell(&format!("ip link set tap0 address {OUT} arp off && ip route add {INSIDE}/32 dev tap0"))?;
        let (service, size) = match run.work {
            Work::Stream(size) => (Service::Read, size),
            Work::Request(size) => (Service::Echo(Connections::Kept), size),
        };
        let signals: Arc<Signals> = Arc::default();
        let mut receiver = Applications::new(&signals);
        self.network.enter(|| {
            let listener = TcpListener::bind((OUTSIDE, PORT))?;
            listener.set_nonblocking(true)?;
            receiver.serve(listener, service, 1);
            anyhow::Ok(())
        })??;
        let role = json!({
            "stream": run.is_stream(),
            "size": size,
            "seconds": self.bench.window(WINDOW).as_secs_f64(),
            "offloads": run.carrier.offloads(),
        });
        let own = self.bench.own.file_name().context("a program has a name")?.to_string_lossy().into_owned();
        let line = format!("busybox unshare -n {own} {APPLICATION} '{role}' $(cat /tmp/card.pid)");
        let cpu = machine::own_seconds();
        let output = self.shell(&line);
        let cpu = machine::own_seconds() - cpu;
        let received = signals.units.load(Ordering::Relaxed).max(1) as f64;
        receiver.end()?;
        let output = output?;
        let result = serde_json::from_str(output.lines().last().unwrap_or_default());
        let mut result: Value = result.with_context(|| format!("`{output}` of the application"))?;
        result["receiver-seconds"] = (cpu / received).into();
        Ok(result)
    }
}

/// Figures of a run. Whatever the card counts covers the whole connection.
fn figures(run: Run, measured: &Value, transmit: &Value) -> Result<Figures> {
    let number = |value: &Value| value.as_f64().with_context(|| format!("`{value}`, expected a number"));
    let mode = transmit["mode"].as_str().unwrap_or_default();
    ensure!(mode == run.carrier.mode(), "the mode of transmission was {mode}");
    let (units, all) = (number(&measured["units"])?, number(&measured["all-units"])?);
    let (rate, card) = (units / number(&measured["seconds"])?, number(&measured["card-seconds"])? / units);
    let [kicks, interrupts] = ["kicks", "notifications"].map(|key| number(&transmit[key]));
    let (kicks, interrupts) = (kicks? / all, interrupts? / all);
    let zero_copy = number(&transmit["zero-copy"])? / number(&transmit["packets"])?.max(1.0);
    let mut figures = Figures::from([("zero-copy %", 100.0 * zero_copy)]);
    if run.is_stream() {
        let (mib, receiver) = (MIB as f64, number(&measured["receiver-seconds"])?);
        figures.extend([
            ("Gbit/s", rate * 8e-9),
            ("card CPU ms/MiB", card * 1e3 * mib),
            ("receiver ms/MiB", receiver * 1e3 * mib),
            ("kicks/MiB", kicks * mib),
            ("interrupts/MiB", interrupts * mib),
        ]);
    } else {
        figures.extend([
            ("1/s", rate),
            ("card CPU µs", card * 1e6),
            ("p50 µs", number(&measured["p50-us"])?),
            ("kicks", kicks),
            ("interrupts", interrupts),
        ]);
    }
    Ok(figures)
}

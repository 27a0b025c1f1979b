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

mod entry;
mod guest;
mod table;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use towline_lab::{Kernel, LinuxGuest, Network, ProgramDisk, Qemu, Version, wait_until};

use crate::rounds::{self, Contender, Outcome};
use crate::table::Table;

pub use entry::Parameters;
use entry::{
    Carrier, Entry, Figure, INSIDE, OUT, OUTSIDE, REQUEST_PORT, Received, SOCKET, STREAM_PORT, Work,
};
pub use guest::{role, serve};

const WITHIN: Duration = Duration::from_secs(60);
/// A receiver whose peer has gone ends after this time.
const LOST_AFTER: Duration = Duration::from_secs(3);
/// Address of the interface on the way in.
const IN: &str = "52:54:00:63:00:02";
const READ_BYTES: usize = 256 << 10;

struct Bench<'p> {
    parameters: &'p Parameters,
    guest: LinuxGuest,
    received: Arc<Mutex<Received>>,
    // Last: the guest's end comes first.
    _qemu: Qemu,
    _network: Network,
}

/// Measures the table.
///
/// # Errors
/// The guest does not start, the measurement was cancelled, or no row is selected.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let works = parameters.stream_sizes.iter().map(|size| Work::Stream(*size));
    let works = works.chain(parameters.request_sizes.iter().map(|size| Work::Request(*size)));
    let entries = works.flat_map(|work| Carrier::ALL.map(|carrier| Entry { work, carrier }));
    let chosen = |entry: &Entry| {
        let name = entry.contender().group;
        parameters.rows.is_empty() || parameters.rows.iter().any(|text| name.contains(text))
    };
    let entries: Vec<Entry> = entries.filter(chosen).collect();
    ensure!(!entries.is_empty(), "no row matches --rows {:?}: leave it out for all rows", parameters.rows);
    let mut bench = Bench::start(parameters)?;
    let contenders: Vec<Contender> = entries.iter().map(|entry| entry.contender()).collect();
    let outcomes: Vec<Outcome<Figure>> =
        rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| bench.run(entries[index]))?;
    Ok(table::tables(parameters, &entries, &outcomes))
}

impl<'p> Bench<'p> {
    fn start(parameters: &'p Parameters) -> Result<Self> {
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
        let received = Arc::default();
        serve_streams(&network, &received)?;
        serve_requests(&network)?;
        let programs = ProgramDisk::pack(&[&parameters.towline, &parameters.own])?;
        let mut builder = Qemu::builder(Version::V10_0)
            .linux()
            .kernel(Kernel::Newest)
            .memory_mib(2048)
            .processors(2)
            .args(programs.arguments());
        for (wire, address) in [("wire0", OUT), ("wire1", IN)] {
            let netdev = format!("tap,ifname={wire},script=no,downscript=no,id={wire}");
            let device =
                format!("virtio-net-pci,netdev={wire},mac={address},iommu_platform=on,disable-legacy=on");
            builder = builder.args(["-netdev", &netdev, "-device", &device]);
        }
        let qemu = builder.within(&network).start()?;
        let mut guest = qemu.linux(WITHIN)?;
        guest.unpack_programs()?;
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
        Ok(Self { parameters, guest, received, _qemu: qemu, _network: network })
    }

    fn shell(&mut self, line: &str) -> Result<String> {
        self.guest.shell(line, WITHIN)
    }

    fn run(&mut self, entry: Entry) -> Result<Figure> {
        let arguments = entry.carrier.arguments();
        self.shell(&format!(
            "rm -f {SOCKET}; towline net --json --socket {SOCKET} --tap tap0 {arguments} \
             > /tmp/card.out 2> /tmp/card.err & echo $! > /tmp/card.pid"
        ))?;
        let figure = self.measure(entry);
        let pid = "$(cat /tmp/card.pid)";
        self.shell(&format!("kill -TERM {pid} || true"))?;
        let end = wait_until("the card's exit", WITHIN, || {
            let line = format!("test -e /proc/{pid}/exe && echo runs || true");
            Ok(self.guest.shell(&line, WITHIN)?.trim().is_empty().then_some(()))
        });
        let errors = self.shell("tail -n 3 /tmp/card.err")?;
        let (measured, receiver) = figure.with_context(|| format!("the card: {errors}"))?;
        end?;
        let last = self.shell("tail -n 1 /tmp/card.out")?;
        let statistics: Value = serde_json::from_str(&last).context("statistics of the card")?;
        entry.figure(&measured, &receiver, &statistics["pairs"][0]["tx"]).with_context(|| errors)
    }

    /// Returns the result of the application in the guest, and what its peer has received.
    fn measure(&mut self, entry: Entry) -> Result<(Value, Received)> {
        wait_until("the card's socket", WITHIN, || {
            let line = format!("test -e {SOCKET} && echo yes || true");
            Ok((self.guest.shell(&line, WITHIN)?.trim() == "yes").then_some(()))
        })?;
        self.shell(&format!("ip link set tap0 address {OUT} arp off && ip route add {INSIDE}/32 dev tap0"))?;
        let (kind, size) = match entry.work {
            Work::Stream(size) => ("stream", size),
            Work::Request(size) => ("request", size),
        };
        *self.received.lock().expect("no thread panics with it") = Received::default();
        let window_ms = u64::try_from(self.parameters.window.as_millis())?;
        let own =
            self.parameters.own.file_name().context("a program has a name")?.to_string_lossy().into_owned();
        let offloads = entry.carrier.offloads();
        let role = json!({ "kind": kind, "size": size, "window-ms": window_ms, "offloads": offloads });
        let line = format!("busybox unshare -n {own} {} '{role}' $(cat /tmp/card.pid)", guest::OPTION);
        let output = self.shell(&line)?;
        let result = serde_json::from_str(output.lines().last().unwrap_or_default());
        let result = result.with_context(|| format!("`{output}` of the application"))?;
        // Its peer may still read what is under way.
        wait_until("the end of the connection", WITHIN, || {
            let received = self.received.lock().expect("no thread panics with it");
            Ok((kind == "request" || received.cpu > Duration::ZERO).then_some(()))
        })?;
        Ok((result, std::mem::take(&mut *self.received.lock().expect("no thread panics with it"))))
    }
}

/// Receives streams, and adds up what they cost.
fn serve_streams(network: &Network, received: &Arc<Mutex<Received>>) -> Result<()> {
    let received = Arc::clone(received);
    serve_each(network, STREAM_PORT, move |mut stream| {
        let (mut bytes, mut buffer) = (0, vec![0; READ_BYTES]);
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            bytes += read as u64;
        }
        let mut received = received.lock().expect("no thread panics with it");
        received.bytes += bytes;
        received.cpu += Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
    })
}

/// Sends back what comes.
fn serve_requests(network: &Network) -> Result<()> {
    serve_each(network, REQUEST_PORT, |mut stream| {
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..read]).is_err() {
                return;
            }
        }
    })
}

/// Serves each connection on a thread of its own, until this process ends.
fn serve_each(
    network: &Network,
    port: u16,
    serve: impl Fn(TcpStream) + Clone + Send + 'static,
) -> Result<()> {
    let listener = network.enter(|| TcpListener::bind((OUTSIDE, port)))??;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || {
                let options =
                    stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(LOST_AFTER)));
                if options.is_ok() {
                    serve(stream);
                }
            });
        }
    });
    Ok(())
}

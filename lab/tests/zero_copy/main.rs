//! Zero-copy sends that are really without a copy: towline inside a guest sends over its virtio network card.
//!
//! ```text
//!   guest   towline copy mem: tcp:10.0.2.2:PORT ── virtio-net ── tap ──► network of its own   towline copy tcp:… mem:
//!           towline copy mem: mem:              ── loopback (the kernel copies)
//! ```
//! The loopback and local virtual links always copy, so this is the only test in which a send is without a
//! copy. (Over QEMU's user network, without a tap, the guest's card has no scatter-gather, and its kernel
//! copies too.) CPU time is not asserted; its table is printed.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod stock;

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use towline_lab::{
    LinuxGuest, Network, Qemu, Towline, Version, require_lab, skip, towline_binary, wait_until,
};

const WITHIN: Duration = Duration::from_secs(120);
const LANES: &str = "2";
/// Enough full packets on each lane for a decision: no zero pages.
const GUEST: &str = "mem:160M,zero=0";
/// All pages of it.
const PAGES: u64 = 160 << 8;
/// Packets for these pages.
const PACKETS: u64 = PAGES / 128;

/// A network with a tap for a guest's card; `None`: the test `name` is skipped.
fn network(name: &str) -> Option<Network> {
    let made = Network::new().and_then(|network| {
        // It accepts packets of any size without checksums, so the guest's card offers scatter-gather.
        network.run(&["ip", "tuntap", "add", "dev", "tap0", "mode", "tap", "vnet_hdr"])?;
        network.run(&["ip", "address", "add", "10.0.2.2/24", "dev", "tap0"])?;
        network.run(&["ip", "link", "set", "tap0", "up"])?;
        Ok(network)
    });
    made.inspect_err(|error| skip(name, &format!("no separate network: {error:#}"))).ok()
}

/// Starts a Linux with a network card on a network of this host, and these programs in it.
fn guest(network: &Network, programs: &[&Path]) -> (Qemu, LinuxGuest) {
    let card =
        ["-netdev", "tap,id=net,ifname=tap0,script=no,downscript=no", "-device", "virtio-net-pci,netdev=net"];
    let builder = Qemu::builder(Version::V10_0).linux().memory_mib(1024).processors(2).within(network);
    let (qemu, mut guest) = builder.guest_programs(programs).args(card).boot(WITHIN).unwrap();
    let up = "ip link set lo up && ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up";
    guest.shell(up, WITHIN).unwrap();
    // Bit 0 of a virtio card's features, VIRTIO_NET_F_CSUM, without which Linux does not use scatter-gather.
    let features = guest.shell("cat /sys/class/net/eth0/device/features", WITHIN).unwrap();
    assert!(
        features.starts_with('1'),
        "the guest's card has neither checksums nor scatter-gather: {features}"
    );
    (qemu, guest)
}

/// Runs a towline in the guest; returns its final report.
fn report(guest: &mut LinuxGuest, arguments: &str) -> Value {
    let line = format!("towline copy --json --multifd-channels {LANES} {arguments}");
    let output = guest.shell(&line, WITHIN).unwrap();
    let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "completed", "{output}");
    last
}

/// A towline on this host's end of the network that receives.
struct Receiver {
    towline: Towline,
    port: String,
}

impl Receiver {
    /// Starts it, and waits until it listens.
    fn start(network: &Network, destination: &str) -> Self {
        let receive = ["copy", "--json", "--multifd-channels", LANES, "tcp:10.0.2.2:0", destination];
        let mut towline = Towline::start_after(&network.prefix(), &receive).unwrap();
        let port = wait_until("towline that listens", WITHIN, || {
            let stdout = towline.stdout();
            let port = stdout.split_once("listening on tcp:10.0.2.2:").map(|(_, rest)| rest.to_owned());
            assert!(port.is_some() || towline.runs()?, "it ended: {stdout}{}", towline.stderr());
            Ok(port.and_then(|rest| Some(rest.split_once('"')?.0.to_owned())))
        });
        Self { towline, port: port.unwrap() }
    }

    /// Waits for its end. Returns its last event.
    fn wait(self) -> Value {
        let received = self.towline.wait_done(WITHIN).unwrap();
        serde_json::from_str(received.stdout.lines().last().unwrap()).unwrap()
    }
}

/// Sends to a towline on this host, which verifies every page.
fn over_the_card(network: &Network, guest: &mut LinuxGuest, asked: &str) -> Value {
    let receiver = Receiver::start(network, "mem:");
    let to = format!("--zero-copy-send {asked} {GUEST} tcp:10.0.2.2:{}", receiver.port);
    let report = report(guest, &to);
    let last = receiver.wait();
    assert_eq!(last["memory"]["verified-pages"], PAGES, "{last}");
    report
}

fn lanes(report: &Value) -> &[Value] {
    report["lanes"].as_array().unwrap()
}

fn number(lane: &Value, key: &str) -> u64 {
    lane[key].as_u64().unwrap()
}

/// Prints a row of the table: the measurements of the first lane.
fn row(label: &str, lane: &Value, way: &str) {
    let of = &lane[way];
    println!(
        "{label:<28} {:>8} packets  {:>10} ns CPU a packet  {:>8.0} ms CPU a GB",
        of["packets"],
        of["cpu-ns-per-packet"],
        of["cpu-ms-per-gb"].as_f64().unwrap_or(f64::NAN)
    );
}

#[test]
#[ignore = "nightly"]
fn zero_copy_happens_on_a_virtio_card_and_not_on_loopback() {
    let name = "zero_copy_happens_on_a_virtio_card_and_not_on_loopback";
    if !require_lab(name) {
        return;
    }
    let Some(network) = network(name) else { return };
    let (_qemu, mut guest) = guest(&network, &[&towline_binary().unwrap()]);
    // Plain sends first, as the base of the comparison.
    let off = over_the_card(&network, &mut guest, "off");
    let on = over_the_card(&network, &mut guest, "on");
    let auto = over_the_card(&network, &mut guest, "auto");
    row("vectored", &lanes(&off)[0], "plain");
    row("zero-copy on", &lanes(&on)[0], "zero-copy");
    row("auto, its plain packets", &lanes(&auto)[0], "plain");
    row("auto, its zero-copy packets", &lanes(&auto)[0], "zero-copy");
    assert_eq!(on["ram"]["dirty-sync-missed-zero-copy"], 0, "every flush says done: {on}");
    let sends: u64 = lanes(&on).iter().map(|lane| number(lane, "sends-zero-copied")).sum();
    assert!(sends >= PACKETS, "{on}");
    for lane in lanes(&on) {
        assert_eq!(number(lane, "sends-copied"), 0, "{lane}");
    }
    for lane in lanes(&auto) {
        assert_eq!((lane["mode"].as_str(), number(lane, "sends-copied")), (Some("zero-copy"), 0), "{lane}");
        assert!(number(lane, "sends-zero-copied") > 20, "{lane}");
    }
    let on = report(&mut guest, &format!("--zero-copy-send on {GUEST} mem:"));
    let passes = number(&on["ram"], "dirty-sync-count");
    let missed = number(&on["ram"], "dirty-sync-missed-zero-copy");
    assert!((2..=2 * passes).contains(&missed), "a flush of each lane says that all was copied: {on}");
    for lane in lanes(&on) {
        assert!(number(lane, "sends-copied") > 0 && number(lane, "sends-zero-copied") == 0, "{lane}");
    }
    row("zero-copy on, on loopback", &lanes(&on)[0], "zero-copy");
}

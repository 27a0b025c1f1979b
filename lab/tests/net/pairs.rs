//! Pairs of cards that differ in one property: the verdicts of `towline check` on the QEMUs (`qmp:`) and on
//! the cards (`ctl:`), the outcome of `towline move` with both, and of a Linux that is migrated from one to
//! the other with an open connection.
//!
//! `make test` has two pairs that are not moved; `cargo xtask soak net-pairs` has all, and prints the table.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use towline_lab::expect::qmp;
use towline_lab::{Builder, Finished, Network, Qemu, Towline, Version, require_lab, towline, wait_until};

use crate::support::{
    GUEST, WITHIN, builder_with, card, datagram, give_addresses, guest_address, network, path, scratch,
    set_up, talk,
};

/// Length of UDP's and IPv4's headers.
const HEADERS: usize = 28;
/// Attempts of a datagram that may be lost: of one that should arrive and of one that should not.
const ATTEMPTS: usize = 20;

/// A card, and its QEMU.
#[derive(Clone, Copy)]
struct Side {
    version: Version,
    /// Options of the card, and of QEMU.
    queues: (usize, usize),
    mtu: usize,
    /// More properties of the guest's device, as `rx_queue_size=1024`.
    property: Option<&'static str>,
    migratable: bool,
}

const SIDE: Side =
    Side { version: Version::V10_0, queues: (2, 2), mtu: 1500, property: None, migratable: true };

struct Pair {
    name: &'static str,
    source: Side,
    destination: Side,
    /// True if the guest has a working network at its destination.
    runs: bool,
}

fn pairs() -> Vec<Pair> {
    let pair = |name, source, destination, runs| Pair { name, source, destination, runs };
    let queues = |card, qemu| Side { queues: (card, qemu), ..SIDE };
    let with = |property| Side { property: Some(property), ..SIDE };
    let mtu = |mtu| Side { mtu, ..SIDE };
    let old = Side { version: Version::V7_2, queues: (1, 1), ..SIDE };
    let new = Side { version: Version::V10_0, ..old };
    vec![
        pair("one that is started unmigratable", Side { migratable: false, ..SIDE }, SIDE, false),
        pair("MTU 1500 to 1400", SIDE, mtu(1400), false),
        pair("alike", SIDE, SIDE, true),
        pair("the card's queues 2 to 4", queues(2, 2), queues(4, 2), true),
        pair("the card's queues 4 to 2, one in use", queues(4, 1), queues(2, 1), true),
        pair("the card's queues 2 to 1, both in use", queues(2, 2), queues(1, 2), false),
        pair("ring 256 to 1024", with("rx_queue_size=256"), with("rx_queue_size=1024"), true),
        pair("ring 1024 to 256", with("rx_queue_size=1024"), with("rx_queue_size=256"), true),
        pair("offloads off there", SIDE, with("csum=off"), false),
        pair("offloads off at the source", with("csum=off"), SIDE, true),
        pair("event_idx off there", SIDE, with("event_idx=off"), false),
        pair("MTU 1400 to 1500", mtu(1400), SIDE, true),
        pair("7.2 to 10.0", old, new, true),
        pair("10.0 to 7.2", new, old, true),
    ]
}

/// A network with a bridge between a tap and the hub, and a card on the tap.
struct Host {
    _network: Network,
    _card: Towline,
    socket: PathBuf,
    control: String,
    side: Side,
}

impl Host {
    fn new(hub: &Network, name: &str, side: Side, directory: &Path) -> Self {
        let network = Network::new().unwrap();
        hub.connect(name, &network, "uplink").unwrap();
        hub.run(&["ip", "link", "set", name, "master", "br0"]).unwrap();
        for line in [
            "ip link add br0 type bridge",
            "ip tuntap add dev tap0 mode tap multi_queue vnet_hdr",
            "ip link set uplink master br0 up",
            &format!("ip link set tap0 mtu {} master br0 up", side.mtu),
            "ip link set br0 up",
        ] {
            network.run(&line.split(' ').collect::<Vec<_>>()).unwrap();
        }
        let (socket, control) = (directory.join(name), directory.join(format!("{name}.qmp")));
        let control = control.display().to_string();
        let queues = side.queues.0.to_string();
        let more: &[&str] = if side.migratable { &[] } else { &["--unmigratable"] };
        let arguments = [&["--tap", "tap0", "--queues", &queues, "--qmp", &control], more].concat();
        let card = card(&network, &socket, &arguments);
        Self { _network: network, _card: card, socket, control, side }
    }

    fn qemu(&self, oldest: Version) -> Builder {
        let queues = self.side.queues.1;
        let vectors = if oldest == Version::V7_2 { 0 } else { 2 * queues + 2 };
        let qemu = builder_with(self.side.version, &self.socket, queues, vectors).machine(oldest.machine());
        match self.side.property {
            Some(property) => qemu.args(["-set".to_owned(), format!("device.card.{property}")]),
            None => qemu,
        }
    }
}

/// Verdict of `towline check` on two ends: true if the guest would run, and the text.
fn check(source: &str, destination: &str) -> (bool, String) {
    let checked = towline(["check", "--json", source, destination]).unwrap();
    let Finished { status, stdout, stderr } = checked.wait(WITHIN).unwrap();
    assert!(matches!(status.code(), Some(0 | 1)), "{status}: {stdout}{stderr}");
    let report: Value = serde_json::from_str(stdout.trim()).unwrap();
    (status.success(), report["verdict"].as_str().unwrap().to_owned())
}

/// Returns true if the guest answers, also to the largest packet of its network.
fn talks(hub: &Network, mtu: usize) -> bool {
    let talks = || {
        talk(guest_address(GUEST), 1 << 18, 1);
        datagram(guest_address(GUEST), mtu - HEADERS, ATTEMPTS);
    };
    // On a separate thread: a panic there means that it does not.
    hub.enter(|| std::panic::catch_unwind(talks).is_ok()).unwrap()
}

/// Has QEMU itself migrate, and waits until the guest runs at its destination; false if it does not get so
/// far.
fn migrate(source: &Qemu, destination: &Qemu) -> bool {
    let uri = format!("unix:{}", destination.directory().join("stream").display());
    destination.qmp().execute("migrate-incoming", json!({ "uri": uri })).unwrap();
    if source.qmp().execute("migrate", json!({ "uri": uri })).is_err() {
        return false;
    }
    wait_until("an end of the migration", WITHIN, || {
        if destination.exited()?.is_some() {
            return Ok(Some(false));
        }
        Ok(destination.qmp().status().is_ok_and(|status| status == "running").then_some(true))
    })
    .unwrap()
}

/// Runs one pair: its row of the table, and its disagreements.
fn judge(pair: &Pair) -> (String, Option<String>) {
    let hub = Network::new().unwrap();
    hub.run(&["ip", "link", "add", "br0", "type", "bridge"]).unwrap();
    give_addresses(&hub, "br0");
    let scratch = scratch();
    let directory = path(&scratch, "");
    let [a, b] = [("host-a", pair.source), ("host-b", pair.destination)]
        .map(|(name, side)| Host::new(&hub, name, side, &directory));
    let versions = [pair.source.version, pair.destination.version];
    let oldest = if versions.contains(&Version::V7_2) { Version::V7_2 } else { Version::V10_0 };
    let (source, mut guest) = a.qemu(oldest).boot(WITHIN).unwrap();
    set_up(&mut guest);
    drop(guest);
    assert!(talks(&hub, pair.source.mtu), "{}: before it is moved", pair.name);
    let (cards_fit, of_cards) = check(&format!("ctl:{}", a.control), &format!("ctl:{}", b.control));
    let mut wrong = Vec::new();
    let (of_qemus, says, runs, moved) = match b.qemu(oldest).incoming_defer().start() {
        Err(error) => (
            format!("does not start: {error:#}").chars().take(14).collect(),
            cards_fit,
            false,
            "no destination",
        ),
        Ok(destination) => {
            let (qemus_fit, of_qemus) = check(&qmp(&source), &qmp(&destination));
            let fits = qemus_fit && cards_fit;
            let cards = format!("{}={}", a.control, b.control);
            let (from, to) = (qmp(&source), qmp(&destination));
            let moved = towline(["move", "--json", "--device-ctl", &cards, &from, &to]).unwrap();
            let Finished { status, stderr, .. } = moved.wait(WITHIN).unwrap();
            if status.code() != Some(i32::from(!fits)) {
                wrong.push(format!("check says {of_qemus} and {of_cards}, move: {status}: {stderr}"));
            }
            let runs = if fits {
                talks(&hub, pair.source.mtu)
            } else {
                if !talks(&hub, pair.source.mtu) {
                    wrong.push("the guest was lost when its move was refused".to_owned());
                }
                migrate(&source, &destination) && talks(&hub, pair.source.mtu)
            };
            (of_qemus, fits, runs, if fits { "moved" } else { "refused, talks on" })
        }
    };
    if says != runs {
        wrong.push(format!(
            "verdict on QEMUs: {of_qemus}, of cards: {of_cards}; the guest has a network: {runs}"
        ));
    }
    if runs != pair.runs {
        wrong.push(format!("it was to talk on: {}", pair.runs));
    }
    let happened = if runs { "talks on" } else { "does not" };
    let row = format!("{:<40} {of_qemus:<16} {of_cards:<16} {moved:<18} {happened}", pair.name);
    (row, (!wrong.is_empty()).then(|| format!("{}: {}", pair.name, wrong.join("; "))))
}

#[test]
#[ignore = "nightly"]
fn verdicts_on_cards_agree_with_what_happens() {
    let name = "verdicts_on_cards_agree_with_what_happens";
    if !require_lab(name) || network(name).is_none() {
        return;
    }
    let all = std::env::var_os("TOWLINE_SOAK_NET_PAIRS").is_some();
    let wanted = if all { usize::MAX } else { 2 };
    println!("{:<40} {:<16} {:<16} {:<18} and then", "pair", "QEMUs", "cards", "towline");
    let rows: Vec<_> = pairs().iter().take(wanted).map(judge).inspect(|(row, _)| println!("{row}")).collect();
    let wrong: Vec<_> = rows.iter().filter_map(|(_, wrong)| wrong.as_deref()).collect();
    println!("{} of {} agree", rows.len() - wrong.len(), rows.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

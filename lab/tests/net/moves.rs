//! A guest moves between two hosts on one bridge while it has an open connection.
//!
//! ```text
//!   hub  br0 10.7.0.1, a client of the guest's echo
//!    ├─ veth ── host a  br0 ── tap0 ── towline net ── QEMU a ─┐
//!    └─ veth ── host b  br0 ── tap0 ── towline net ── QEMU b ◄┘ towline move
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use towline_lab::expect::{lift_rate_limit, qmp};
use towline_lab::{Network, Qemu, Towline, Version, require_lab, towline, wait_until};

use crate::support::{
    BulkClient, EchoClient, Fixture, GUEST, WITHIN, add_tap, builder, builder_with, card, end,
    give_addresses, guest_address, network, number, path, scratch, set_up, sum,
};

/// A host of the picture, with its card's process.
struct Host {
    network: Network,
    card: Option<Towline>,
    name: &'static str,
}

impl Host {
    fn new(hub: &Network, name: &'static str) -> Self {
        Self { network: bridged(hub, name), card: None, name }
    }

    /// Starts a new card on this host; returns its socket.
    fn card(&mut self, scratch: &TempDir) -> PathBuf {
        let socket = path(scratch, self.name);
        if let Some(card) = self.card.take() {
            end(card);
        }
        self.card = Some(card(&self.network, &socket, &["--tap", "tap0", "--queues", "2"]));
        socket
    }
}

/// The network of a host with a tap, on the hub's bridge.
pub(crate) fn bridged(hub: &Network, name: &str) -> Network {
    let network = Network::new().unwrap();
    hub.connect(name, &network, "uplink").unwrap();
    hub.run(&["ip", "link", "set", name, "master", "br0"]).unwrap();
    network.run(&["ip", "link", "add", "br0", "type", "bridge"]).unwrap();
    network.run(&["ip", "tuntap", "add", "dev", "tap0", "mode", "tap", "multi_queue", "vnet_hdr"]).unwrap();
    for interface in ["uplink", "tap0"] {
        network.run(&["ip", "link", "set", interface, "master", "br0", "up"]).unwrap();
    }
    network.run(&["ip", "link", "set", "br0", "up"]).unwrap();
    network
}

pub(crate) fn hub(name: &str) -> Option<Network> {
    let hub = network(name)?;
    hub.run(&["ip", "link", "add", "br0", "type", "bridge"]).unwrap();
    give_addresses(&hub, "br0");
    Some(hub)
}

/// Moves a guest to and fro with an open connection; `versions` are those of the QEMUs, and all use the first
/// one's machine type.
fn move_to_and_fro(name: &str, versions: &[Version], queues: usize) -> Option<Duration> {
    let hub = hub(name)?;
    let scratch = scratch();
    let mut hosts = [Host::new(&hub, "host-a"), Host::new(&hub, "host-b")];
    let oldest = if versions.contains(&Version::V7_2) { Version::V7_2 } else { Version::V10_0 };
    let (machine, vectors) = (oldest.machine(), if oldest == Version::V7_2 { 0 } else { 2 * queues + 2 });
    let build = |version, socket: &Path| builder_with(version, socket, queues, vectors).machine(machine);
    let (mut source, mut guest) = build(versions[0], &hosts[0].card(&scratch)).boot(WITHIN).unwrap();
    set_up(&mut guest);
    drop(guest);
    let clients: Vec<_> = (0..2).map(|_| EchoClient::begin(&hub, guest_address(GUEST))).collect();
    clients.iter().for_each(|client| client.wait_blocks(5));
    for (round, version) in versions[1..].iter().enumerate() {
        let socket = hosts[(round + 1) % 2].card(&scratch);
        let destination = build(*version, &socket).incoming_defer().start().unwrap();
        move_running(&source, &destination, &clients, &path(&scratch, "move.qmp"));
        clients.iter().for_each(|client| client.wait_blocks(5));
        source = destination;
    }
    let longest = clients.into_iter().map(EchoClient::end).max();
    let mut guest = source.linux(WITHIN).unwrap();
    let kernel = guest.shell("dmesg", WITHIN).unwrap();
    assert!(!kernel.contains("NETDEV WATCHDOG") && !kernel.contains("Oops"), "{kernel}");
    let here = &mut hosts[(versions.len() - 1) % 2];
    let statistics = end(here.card.take().unwrap());
    // The host's super-frames reach the guest here too: the guest's offloads are set on the tap.
    let bytes_a_packet = sum(&statistics, "rx", "bytes") / sum(&statistics, "rx", "packets");
    assert!(bytes_a_packet > 1600, "{bytes_a_packet} bytes a packet: {statistics}");
    longest
}

/// Moves a guest while its clients talk. Where QEMU loses writes of an emulated guest
/// ([`Version::tracks_emulated_writes`]) it is stopped during the first pass, before any is lost.
fn move_running(source: &Qemu, destination: &Qemu, clients: &[EchoClient], control: &Path) {
    let (here, there) = (qmp(source), qmp(destination));
    let line = ["move", "--json", "--qmp", control.to_str().unwrap(), &here, &there];
    if source.version().tracks_emulated_writes() {
        towline(line).unwrap().wait_done(WITHIN).unwrap();
        return;
    }
    let command = towline([&line[..], &["--run", "--max-bandwidth", "1M"]].concat()).unwrap();
    source.qmp().wait_migration("active", WITHIN).unwrap();
    clients.iter().for_each(|client| client.wait_blocks(1));
    source.qmp().execute("stop", json!({})).unwrap();
    let migration = source.qmp().execute("query-migrate", json!({})).unwrap();
    assert_eq!(migration["ram"]["dirty-sync-count"], 1, "the first pass is over: {migration}");
    lift_rate_limit(control);
    command.wait_done(WITHIN).unwrap();
}

#[test]
fn a_guest_that_talks_moves_between_hosts() {
    let name = "a_guest_that_talks_moves_between_hosts";
    if !require_lab(name) {
        return;
    }
    let rounds = usize::try_from(number("TOWLINE_SOAK_NET_MOVES", 2)).unwrap();
    if let Some(longest) = move_to_and_fro(name, &vec![Version::V10_0; rounds + 1], 2) {
        println!("{rounds} moves; the longest block took {longest:?}");
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_with_open_connections_moves_between_versions() {
    let name = "a_guest_with_open_connections_moves_between_versions";
    if !require_lab(name) {
        return;
    }
    if let Some(longest) = move_to_and_fro(name, &[Version::V7_2, Version::V10_0, Version::V7_2], 1) {
        println!("7.2, 10.0, 7.2; the longest block took {longest:?}");
    }
}

#[test]
fn a_guest_with_open_connections_is_restored_by_postcopy() {
    let name = "a_guest_with_open_connections_is_restored_by_postcopy";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 1);
    let (socket, image) = (path(&scratch, "net.sock"), path(&scratch, "image"));
    let first = card(&network, &socket, &["--tap", "tap0"]);
    let (source, mut guest) = builder(Version::V10_0, &socket, 1).boot(WITHIN).unwrap();
    set_up(&mut guest);
    drop(guest);
    let client = EchoClient::begin(&network, guest_address(GUEST));
    client.wait_blocks(5);
    let image = image.to_str().unwrap();
    towline(["copy", "--json", &qmp(&source), image]).unwrap().wait_done(WITHIN).unwrap();
    drop(source);
    end(first);
    let second = card(&network, &socket, &["--tap", "tap0"]);
    let destination = builder(Version::V10_0, &socket, 1).incoming_defer().start().unwrap();
    // The card's threads fault as the guest does, on rings and buffers that have not arrived.
    let restored = towline(["copy", "--postcopy", "--json", image, &qmp(&destination)]).unwrap();
    client.wait_blocks(5);
    restored.wait_done(WITHIN).unwrap();
    client.wait_blocks(5);
    let longest = client.end();
    assert!(sum(&end(second), "rx", "packets") > 0);
    println!("the longest block took {longest:?}");
}

/// QEMU has taken the guest's link down, and nothing raises it at a destination that is connected to its
/// card.
#[test]
fn a_card_whose_process_has_ended_is_noted_before_a_move() {
    let name = "a_card_whose_process_has_ended_is_noted_before_a_move";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 1);
    let (here, there) = (path(&scratch, "here.sock"), path(&scratch, "there.sock"));
    let mut first = card(&network, &here, &["--tap", "tap0"]);
    let source = builder(Version::V10_0, &here, 1).start().unwrap();
    first.kill().unwrap();
    let second = card(&network, &there, &["--tap", "tap0"]);
    let destination = builder(Version::V10_0, &there, 1).incoming_defer().start().unwrap();
    let noted = "is not connected to the process of network backend n0";
    wait_until("the note", WITHIN, || {
        let checked = towline(["check", &qmp(&source), &qmp(&destination)]).unwrap().wait(WITHIN)?;
        assert_eq!(checked.status.code(), Some(0), "{}", checked.stdout);
        Ok(checked.stdout.contains(noted).then_some(()))
    })
    .unwrap();
    // A process that is there again raises the link. The tap has one user at a time.
    drop(second);
    let third = card(&network, &here, &["--tap", "tap0"]);
    wait_until("no note", WITHIN, || {
        let checked = towline(["check", &qmp(&source), &qmp(&destination)]).unwrap().wait(WITHIN)?;
        Ok((!checked.stdout.contains(noted)).then_some(()))
    })
    .unwrap();
    end(third);
}

/// Restarts of the rings in each move, while memory is copied.
const RESTARTS: u64 = 10;

/// QEMU stops its card's rings when its link is set down, and releases the dirty log with them. It starts
/// them again with frames in the tap, and sends the next log afterwards.
#[test]
fn every_byte_arrives_while_the_rings_restart_during_moves() {
    let name = "every_byte_arrives_while_the_rings_restart_during_moves";
    if !require_lab(name) {
        return;
    }
    let Some(hub) = hub(name) else { return };
    let scratch = scratch();
    let mut hosts = [Host::new(&hub, "host-a"), Host::new(&hub, "host-b")];
    let build = |socket: &Path| builder(Version::V10_0, socket, 2);
    let (mut source, mut guest) = build(&hosts[0].card(&scratch)).boot(WITHIN).unwrap();
    set_up(&mut guest);
    // Incompressible memory, so the first pass is long.
    guest.fill(48 << 20, 7).unwrap();
    drop(guest);
    let client = EchoClient::begin(&hub, guest_address(GUEST));
    let bulk = BulkClient::begin(&hub, guest_address(GUEST));
    let moves = usize::try_from(number("TOWLINE_SOAK_NET_RESTARTED_MOVES", 1)).unwrap();
    for round in 1..=moves {
        let destination = build(&hosts[round % 2].card(&scratch)).incoming_defer().start().unwrap();
        let (here, there) = (qmp(&source), qmp(&destination));
        let control = path(&scratch, "move.qmp");
        // The first pass takes longer than the restarts, which are over before it may end.
        let slowly = ["--max-bandwidth", "1M", "--qmp", control.to_str().unwrap()];
        let command =
            towline([&["move", "--json"], &slowly[..], &[here.as_str(), there.as_str()]].concat()).unwrap();
        let migration = || source.qmp().execute("query-migrate", json!({})).unwrap();
        source.qmp().wait_migration("active", WITHIN).unwrap();
        for _ in 0..RESTARTS {
            client.wait_blocks(1);
            for up in [false, true] {
                source.qmp().execute("set_link", json!({ "name": "card", "up": up })).unwrap();
            }
            assert_eq!(migration()["status"], "active", "the rings restart while memory is copied");
        }
        lift_rate_limit(&control);
        command.wait_done(WITHIN).unwrap();
        client.wait_blocks(5);
        source = destination;
    }
    let longest = client.end();
    let bytes = bulk.end();
    assert!(bytes > 0, "nothing was sent in bulk");
    println!(
        "{moves} moves, {} restarts, {bytes} bytes in bulk; the longest block took {longest:?}",
        moves as u64 * RESTARTS
    );
}

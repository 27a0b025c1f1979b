//! A guest with a card of `towline net` continues in another QEMU while it talks (`--with-devices`).
//!
//! ```text
//!   client of the guest's echo ── tap0 ── towline net ─┬─ old QEMU ── eth0, the guest's echo
//!                                  counter of frames   └─ new QEMU ──  the same, from the switchover on
//! ```
//! Every byte that comes back is compared: none is lost, and none comes twice.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use fastrand::Rng;
use towline_lab::downtime::Times;
use towline_lab::expect::{completed, number};
use towline_lab::{Network, Qemu, Towline, Version, require_lab, require_qemu, skip};

use crate::network::{
    EchoClient, GUEST, add_tap, card, card_options, end, guest_address, network, path, scratch, set_up, sum,
};
use crate::series::{Series, sizes};
use crate::support::{Guest, LongestGap, MIB, WITHIN, named_file, program};

const UPGRADES: u64 = 3;
/// Time in which the longest gap without an upgrade is found.
const QUIET: Duration = Duration::from_secs(2);

/// Frames that the tap has received from the guest.
fn frames(counters: &File) -> u64 {
    let mut bytes = [0; 4096];
    let length = counters.read_at(&mut bytes, 0).unwrap();
    let text = String::from_utf8_lossy(&bytes[..length]);
    let line = text.lines().find_map(|line| line.trim().strip_prefix("tap0:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// TCP's counters, of the host in this network, or of the guest.
#[derive(Debug, Clone)]
struct TcpCounters(String);

impl TcpCounters {
    fn of_host(network: &Network) -> Self {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap();
        Self(network.enter(|| read("snmp") + &read("netstat")).unwrap())
    }

    fn of_guest(guest: &Guest) -> Self {
        Self(guest.linux().shell("cat /proc/net/snmp /proc/net/netstat", WITHIN).unwrap())
    }

    fn of(&self, name: &str) -> u64 {
        let lines: Vec<_> = self.0.lines().collect();
        let found = lines.chunks_exact(2).find_map(|pair| {
            let at = pair[0].split_whitespace().position(|word| word == name)?;
            pair[1].split_whitespace().nth(at)?.parse().ok()
        });
        found.unwrap_or_else(|| panic!("no counter {name}"))
    }

    /// Segments sent again: by a timer that assumes a loss, and by a probe, which follows after only two
    /// round trips.
    fn sent_again(&self, before: &Self) -> String {
        let since = |name| self.of(name) - before.of(name);
        let (all, timeouts, probes) = (since("RetransSegs"), since("TCPTimeouts"), since("TCPLossProbes"));
        format!("{all} segments sent again, {timeouts} timeouts, {probes} probes")
    }
}

/// A guest, its card and its network.
struct Scene {
    network: Network,
    card: Option<Towline>,
    guest: Guest,
    scratch: tempfile::TempDir,
}

impl Scene {
    fn new(name: &str, version: Version, mib: u64, queues: usize) -> Option<Self> {
        let network = network(name)?;
        add_tap(&network, queues);
        let scratch = scratch();
        let socket = path(&scratch, "net.sock");
        let card = card(&network, &socket, &["--tap", "tap0", "--queues", &queues.to_string()]);
        let guest = Guest::boot(|place| {
            let builder = Qemu::builder(version).cpu("Nehalem").linux().processors(2);
            let options = card_options(version, &socket, queues, 2 * queues + 2);
            named_file(builder, Version::V10_0.machine(), place, mib).args(options)
        });
        set_up(&mut guest.linux());
        Some(Self { network, card: Some(card), guest, scratch })
    }

    fn talk(&self) -> Vec<EchoClient> {
        let clients: Vec<_> =
            (0..2).map(|_| EchoClient::begin(&self.network, guest_address(GUEST))).collect();
        clients.iter().for_each(|client| client.wait_blocks(5));
        clients
    }

    /// Begins to look for the longest time in which no frame comes from the guest.
    fn watch_frames(&self) -> LongestGap {
        // The file stays that of the network in which it was opened.
        let counters = self.network.enter(|| File::open("/proc/thread-self/net/dev").unwrap()).unwrap();
        LongestGap::begin(move || frames(&counters))
    }

    /// Ends the card; the guest is not told.
    fn end(mut self) {
        let statistics = end(self.card.take().unwrap());
        println!("{statistics}");
        assert!(sum(&statistics, "rx", "packets") > 0, "{statistics}");
    }
}

fn goes_on(name: &str, from: Version, to: &[Version], mib: u64, queues: usize) {
    let Some(scene) = Scene::new(name, from, mib, queues) else { return };
    let upgrades = usize::try_from(number("TOWLINE_UPGRADES", UPGRADES)).unwrap();
    let clients = scene.talk();
    let quiet = scene.watch_frames();
    EchoClient::run_for(&clients, QUIET);
    let quiet = quiet.end();
    let before = (TcpCounters::of_host(&scene.network), TcpCounters::of_guest(&scene.guest));
    let (mut series, mut gaps) = (Series::of(&scene.guest), Times::default());
    for version in to.iter().cycle().take(upgrades) {
        let gap = scene.watch_frames();
        series.upgrade(&program(*version), &["--with-devices"]);
        clients.iter().for_each(|client| client.wait_blocks(5));
        gaps.push(gap.end().as_secs_f64() * 1e3);
    }
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    let after = (TcpCounters::of_host(&scene.network), TcpCounters::of_guest(&scene.guest));
    println!(
        "{from:?} to {to:?}, {upgrades} upgrades of {mib} MiB with a card of {queues} pairs in traffic: STOP to RESUME {}; longest gap \
         of frames {gaps} (without upgrades {quiet:.1?}), longest block {longest:.1?}; host: {}; guest: {}; at most {} bytes moved",
        series.downtime,
        after.0.sent_again(&before.0),
        after.1.sent_again(&before.1),
        series.sent_max
    );
    assert!(series.sent_max <= MIB, "{} bytes were moved", series.sent_max);
    let kernel = scene.guest.linux().shell("dmesg", WITHIN).unwrap();
    assert!(!kernel.contains("NETDEV WATCHDOG") && !kernel.contains("Oops"), "{kernel}");
    scene.guest.assert_ticks();
    scene.end();
}

#[test]
fn connections_of_a_card_survive_in_another_qemu() {
    let name = "connections_of_a_card_survive_in_another_qemu";
    if require_lab(name) {
        sizes().into_iter().for_each(|mib| goes_on(name, Version::V10_0, &[Version::V10_0], mib, 1));
    }
}

#[test]
#[ignore = "nightly"]
fn connections_of_several_queues_survive_in_another_qemu() {
    let name = "connections_of_several_queues_survive_in_another_qemu";
    if require_lab(name) {
        goes_on(name, Version::V10_0, &[Version::V10_0], 256, 2);
    }
}

#[test]
#[ignore = "nightly"]
fn connections_of_a_card_survive_between_10_0_and_the_newest_qemu() {
    let name = "connections_of_a_card_survive_between_10_0_and_the_newest_qemu";
    if !require_qemu(name, &[Version::Newest]) {
        return;
    }
    // A guest that was started in a QEMU with enlarged virtqueues cannot go to the newest; one that was
    // started there can return.
    let (first, second) = if Version::V10_0.enlarges_virtqueues().unwrap() {
        (Version::Newest, Version::V10_0)
    } else {
        (Version::V10_0, Version::Newest)
    };
    goes_on(name, first, &[second, first], 256, 1);
}

/// The card's queues, which its process serves, are queried without a pause in its traffic.
#[test]
#[ignore = "nightly"]
fn a_card_with_enlarged_virtqueues_stays_where_it_is() {
    let name = "a_card_with_enlarged_virtqueues_stays_where_it_is";
    if !require_qemu(name, &[Version::Stable, Version::Newest]) {
        return;
    }
    if !Version::Stable.enlarges_virtqueues().unwrap() {
        return skip(name, "the QEMU of Debian 13 no longer enlarges virtqueues");
    }
    let Some(scene) = Scene::new(name, Version::Stable, 256, 1) else { return };
    let clients = scene.talk();
    let to_newest = ["--with-devices", "--qemu", &program(Version::Newest)];
    let finished = scene.guest.upgrade(&to_newest, &[]).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    let expected = "has 1024 entries, there at most 256";
    assert!(finished.stderr.contains(expected), "{}", finished.stderr);
    clients.iter().for_each(|client| client.wait_blocks(5));
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    assert!(longest < WITHIN, "{longest:?}");
    scene.guest.assert_untouched();
    scene.end();
}

/// A new QEMU that does not get the guest leaves the card to the old one.
#[test]
fn a_card_stays_with_its_guest_when_the_upgrade_is_refused() {
    let name = "a_card_stays_with_its_guest_when_the_upgrade_is_refused";
    if !require_lab(name) {
        return;
    }
    let Some(scene) = Scene::new(name, Version::V10_0, 256, 1) else { return };
    let clients = scene.talk();
    let go_on = || clients.iter().for_each(|client| client.wait_blocks(5));
    let refused = |options: &[&str], arguments: &[&str], expected: &str| {
        let finished = scene.guest.upgrade(options, arguments).wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
        assert!(finished.stderr.contains(expected), "{}", finished.stderr);
        go_on();
    };
    refused(&[], &[], "--with-devices");
    refused(&["--with-devices"], &["-smp", "3"], "does not fit");
    scene.guest.upgrade(&["--with-devices", "--dry-run"], &[]).wait_done(WITHIN).unwrap();
    go_on();
    // A second QEMU is connected already.
    let second = std::os::unix::net::UnixStream::connect(path(&scene.scratch, "net.sock")).unwrap();
    refused(&["--with-devices"], &[], "does not reply to a second QEMU");
    drop(second);
    scene.guest.upgrade(&["--with-devices", "--dry-run"], &[]).wait_done(WITHIN).unwrap();
    clients.into_iter().for_each(|client| assert!(client.end() < WITHIN));
    scene.guest.assert_untouched();
    scene.end();
}

/// The card's process is killed at a share of an upgrade's duration, and started again as a service manager
/// does: the guest runs in one QEMU, and its connections continue there.
#[test]
#[ignore = "nightly"]
fn a_card_that_is_killed_at_any_moment_returns_to_the_one_guest() {
    let name = "a_card_that_is_killed_at_any_moment_returns_to_the_one_guest";
    if !require_lab(name) {
        return;
    }
    let (kills, first) = (number("TOWLINE_UPGRADE_CARD_KILLS", 5), number("TOWLINE_UPGRADE_SEED", 1));
    for seed in first..first + kills {
        let share = Rng::with_seed(seed).f64();
        let Some(mut scene) = Scene::new(name, Version::V10_0, 256, 1) else { return };
        let clients = scene.talk();
        let begun = Instant::now();
        let options = ["--with-devices"];
        completed(&scene.guest.upgrade(&options, &[]).wait(WITHIN).unwrap());
        let undisturbed = begun.elapsed();
        clients.iter().for_each(|client| client.wait_blocks(5));
        let before = scene.guest.qemus();
        let towline = scene.guest.upgrade(&options, &[]);
        std::thread::sleep(undisturbed.mul_f64(share));
        scene.card.take().unwrap().kill().unwrap();
        scene.card = Some(card(&scene.network, &path(&scene.scratch, "net.sock"), &["--tap", "tap0"]));
        let finished = towline.wait(WITHIN).unwrap();
        println!(
            "{seed}: killed at {share:.2} of {undisturbed:.1?}: {:?} {}",
            finished.status.code(),
            finished.stderr.trim()
        );
        assert!(matches!(finished.status.code(), Some(0 | 1)), "{}", finished.stderr);
        clients.iter().for_each(|client| client.wait_blocks(5));
        clients.into_iter().for_each(|client| assert!(client.end() < WITHIN));
        scene.guest.assert_ticks();
        assert_eq!(scene.guest.monitor().status().unwrap(), "running");
        // That of the second upgrade has another process than that of the first.
        let after = scene.guest.qemus();
        assert_eq!(after.len(), 1, "one QEMU has the guest");
        assert_eq!(after == before, finished.status.code() == Some(1), "{before:?}, {after:?}");
        scene.end();
    }
}

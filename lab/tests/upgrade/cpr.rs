//! QEMU's own replacement of itself, `migrate` with `mode=cpr-transfer`, beside an upgrade of the same guest.
//!
//! The longest interval between two steps of the guest's counter is measured the same way for both, in the
//! memory that both QEMUs map. `TOWLINE_UPGRADES` is the number of each.

use std::path::Path;

use serde_json::json;
use towline_lab::downtime::Times;
use towline_lab::expect::number;
use towline_lab::{Builder, Qemu, Version, require_lab, wait_until};

use crate::scene::{Scene, counter, small_guest};
use crate::support::{LongestGap, WITHIN, directory, named_file};

const UPGRADES: u64 = 3;
const MEMORY_MIB: u64 = 256;

fn guest(place: &Path) -> Builder {
    let machine = format!("{},aux-ram-share=on", Version::V10_0.machine());
    named_file(small_guest(), &machine, place, MEMORY_MIB)
}

/// Has QEMU replace itself.
fn transfer(old: &Qemu, place: &Path, round: usize) -> Qemu {
    let [main, cpr] = ["main", "cpr"].map(|name| place.join(format!("{name}-{round}")));
    let channel = |kind: &str, path: &Path| {
        let path = path.to_str().unwrap();
        json!({ "channel-type": kind, "addr": { "transport": "socket", "type": "unix", "path": path } })
    };
    let channels = [channel("main", &main), channel("cpr", &cpr)];
    let incoming = channels.iter().flat_map(|channel| ["-incoming".to_owned(), channel.to_string()]);
    let new = guest(place).args(incoming);
    std::thread::scope(|scope| {
        // It replies once it has the descriptors of the old one.
        let starting = scope.spawn(|| new.start().unwrap());
        let mode = json!({ "mode": "cpr-transfer" });
        old.qmp().execute("migrate-set-parameters", mode).unwrap();
        wait_until("the new QEMU's socket", WITHIN, || {
            let migrate = json!({ "channels": channels });
            // It listens some time after the socket's file exists.
            Ok((cpr.exists() && old.qmp().execute("migrate", migrate).is_ok()).then_some(()))
        })
        .unwrap();
        starting.join().unwrap()
    })
}

fn milliseconds(gap: LongestGap) -> f64 {
    gap.end().as_secs_f64() * 1e3
}

#[test]
#[ignore = "nightly"]
fn qemus_own_transfer_beside_an_upgrade() {
    if !require_lab("qemus_own_transfer_beside_an_upgrade") {
        return;
    }
    let rounds = usize::try_from(number("TOWLINE_UPGRADES", UPGRADES)).unwrap();
    let place = directory();
    let mut qemu = guest(place.path()).start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    let (mut transfers, mut upgrades) = (Times::default(), Times::default());
    for round in 0..rounds {
        let memory = std::fs::File::open(place.path().join("ram")).unwrap();
        let gap = LongestGap::begin(move || counter(&memory));
        let new = transfer(&qemu, place.path(), round);
        qemu.qmp().wait_migration("completed", WITHIN).unwrap();
        wait_until("the guest in the new QEMU", WITHIN, || {
            Ok((new.qmp().status()? == "running").then_some(()))
        })
        .unwrap();
        transfers.push(milliseconds(gap));
        qemu = new;
        qemu.wait_counting(WITHIN).unwrap();
    }
    drop(qemu);
    let place = directory();
    let scene = Scene::on(small_guest(), place, MEMORY_MIB);
    for _ in 0..rounds {
        let gap = scene.watch();
        scene.upgrade().wait_done(WITHIN).unwrap();
        upgrades.push(milliseconds(gap));
        scene.has_its_monitor().unwrap();
    }
    println!(
        "downtime of a guest of {MEMORY_MIB} MiB, {rounds} times: cpr-transfer {transfers}; towline upgrade {upgrades}"
    );
}

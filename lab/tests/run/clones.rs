//! State that clones of one guest have in common, and that is different in each.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use towline_lab::{Kernel, LinuxGuest, require_kernel, require_lab, wait_until};

use crate::support::{Recipe, Saved, WITHIN};

/// Generation id of the guest that is saved.
const SAVED_ID: &str = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
/// MAC address of the guest that is saved.
const SAVED_MAC: &str = "52:54:00:00:00:99";
/// Message of Linux when the id has changed.
const RESEEDED: &str = "crng reseeded due to virtual machine fork";
/// Time between two reads of clocks on a busy machine.
const SECONDS_APART: u64 = 20;

fn arguments(words: &str) -> Vec<String> {
    words.split(' ').map(str::to_owned).collect()
}

fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

#[test]
fn each_clone_has_a_generation_id_of_its_own_and_reseeds() {
    let test = "each_clone_has_a_generation_id_of_its_own_and_reseeds";
    if !require_kernel(test, Kernel::Newest) {
        return;
    }
    let device = arguments(&format!("-device vmgenid,guid={SAVED_ID}"));
    // A generator that has no entropy yet has nothing to reseed.
    let line = "head -c 1 /dev/random > /dev/null";
    let saved = Saved::of(&Recipe { kernel: Kernel::Newest, arguments: &device, line, ..Recipe::default() });
    let mut run = saved.run(&["--name", "web", "--count", "2"], &saved.settings());
    let mut ids = vec![SAVED_ID.to_owned()];
    for name in ["web-0", "web-1"] {
        saved.assert_runs(&mut run, name);
        let id = saved.monitor(name).execute("query-vm-generation-id", Value::Null).unwrap();
        ids.push(id["guid"].as_str().unwrap().to_owned());
        let mut guest = saved.agent(name);
        let is_reseeded = || Ok(shell(&mut guest, "dmesg").contains(RESEEDED).then_some(()));
        let reseeded = wait_until("a guest that reseeds", WITHIN, is_reseeded);
        reseeded.unwrap_or_else(|error| panic!("{error:#}: {}", shell(&mut guest, "dmesg | tail -n 20")));
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
    assert!(!run.stderr().contains("vmgenid"), "{}", run.stderr());
    saved.interrupt(run);
}

/// The card's address is the guest's state; a card that is plugged in afterwards has its own.
#[test]
fn a_card_keeps_its_address_and_a_new_one_has_its_own() {
    if !require_lab("a_card_keeps_its_address_and_a_new_one_has_its_own") {
        return;
    }
    let devices = arguments(&format!(
        "-netdev user,id=net0 -device virtio-net-pci,netdev=net0,id=nic0,mac={SAVED_MAC} -device pcie-root-port,id=port0,chassis=1 \
         -netdev user,id=net1"
    ));
    let saved = Saved::of(&Recipe { arguments: &devices, ..Recipe::default() });
    let mut settings = saved.settings();
    settings.push("device.nic0.mac=52:54:00:00:00:0{n}".into());
    let mut run = saved.run(&["--name", "web", "--count", "2"], &settings);
    for (n, name) in ["web-0", "web-1"].into_iter().enumerate() {
        saved.assert_runs(&mut run, name);
        let mut guest = saved.agent(name);
        assert_eq!(shell(&mut guest, "cat /sys/class/net/eth0/address"), SAVED_MAC);
        let mac = format!("52:54:00:00:01:0{n}");
        let plug = ["driver=virtio-net-pci", "netdev=net1", "bus=port0", "id=nic1", &format!("mac={mac}")];
        saved.ctl(&[&[name, "device_add"], &plug[..]].concat());
        wait_until("a card that was plugged in", WITHIN, || {
            let found = guest.shell("cat /sys/class/net/eth1/address", WITHIN);
            Ok(found.ok().filter(|found| found.trim() == mac).map(drop))
        })
        .unwrap();
        // In the guest the first card's address can be changed.
        shell(&mut guest, &format!("ip link set eth0 down; ip link set eth0 address 52:54:00:00:00:0{n}"));
        assert_eq!(shell(&mut guest, "cat /sys/class/net/eth0/address"), format!("52:54:00:00:00:0{n}"));
    }
    assert!(run.stderr().contains("each sends with the stored guest's MAC addresses"), "{}", run.stderr());
    assert!(run.stderr().contains("2 of the clones have no vmgenid device"), "{}", run.stderr());
    saved.interrupt(run);
}

/// The battery-backed clock follows the host's while the guest is stored, for any `-rtc base=`.
#[test]
#[ignore = "nightly"]
fn the_clock_of_a_clone_is_set_from_its_rtc() {
    if !require_lab("the_clock_of_a_clone_is_set_from_its_rtc") {
        return;
    }
    // The system's clock is wrong when the guest is saved, as that of a guest that was stored for years.
    let saved = Saved::of(&Recipe { line: "busybox date -s '2001-02-03 04:05:06'", ..Recipe::default() });
    let mut settings = saved.settings();
    settings.push("rtc.base=2031-02-03T04:05:06".into());
    let mut run = saved.run(&["--name", "web"], &settings);
    saved.assert_runs(&mut run, "web");
    // It is one guest, and no clone of another.
    assert!(!run.stderr().contains("vmgenid"), "{}", run.stderr());
    let mut guest = saved.agent("web");
    assert!(shell(&mut guest, "busybox date -u +%Y") == "2001");
    let read = |guest: &mut LinuxGuest, line: &str| shell(guest, line).parse::<u64>().unwrap();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let rtc = read(&mut guest, "cat /sys/class/rtc/rtc0/since_epoch");
    assert!(now().abs_diff(rtc) < SECONDS_APART, "{rtc} of the host's {}", now());
    shell(&mut guest, "busybox hwclock --hctosys --utc");
    let set = read(&mut guest, "busybox date +%s");
    assert!(now().abs_diff(set) < SECONDS_APART, "{set} of the host's {}", now());
    saved.interrupt(run);
}

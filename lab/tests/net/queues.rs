//! Queues and taps of every kind, and refusals.

use serde_json::json;
use towline_lab::{Finished, Network, Qemu, Towline, Version, require_lab};

use crate::support::{
    EchoClient, Fixture, GUEST, MAC, VERSIONS, WITHIN, add_tap, boot, builder, card, end, give_addresses,
    guest_address, network, path, scratch, shell, sum, talk,
};

fn refused(network: &Network, arguments: &[&str]) -> Finished {
    let words = [&["net"][..], arguments].concat();
    Towline::start_after(&network.prefix(), &words).unwrap().wait(WITHIN).unwrap()
}

#[test]
#[ignore = "nightly"]
fn a_guest_with_one_queue_receives_all_flows_of_a_tap_with_four() {
    let name = "a_guest_with_one_queue_receives_all_flows_of_a_tap_with_four";
    if !require_lab(name) {
        return;
    }
    let Some(network) = network(name) else { return };
    for version in VERSIONS {
        let scratch = scratch();
        let socket = path(&scratch, "net.sock");
        // This tap does not exist before.
        let card = card(&network, &socket, &["--tap", "tap0", "--queues", "4"]);
        give_addresses(&network, "tap0");
        let (_qemu, _guest) = boot(&builder(version, &socket, 1));
        // Enough connections that every queue would get one of them.
        network.enter(|| (0..16).for_each(|seed| talk(guest_address(GUEST), 64 << 10, seed))).unwrap();
        let statistics = end(card);
        assert!(sum(&statistics, "rx", "bytes") > 16 * (64 << 10), "{statistics}");
        for pair in &statistics["pairs"].as_array().unwrap()[1..] {
            assert_eq!((pair["rx"]["packets"].as_u64(), pair["tx"]["packets"].as_u64()), (Some(0), Some(0)));
        }
    }
}

#[test]
fn invalid_taps_and_queues_are_refused_with_a_remedy() {
    let name = "invalid_taps_and_queues_are_refused_with_a_remedy";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    let socket = path(&scratch, "net.sock");
    let socket = socket.to_str().unwrap();
    network.run(&["ip", "tuntap", "add", "dev", "single", "mode", "tap", "vnet_hdr"]).unwrap();
    for (arguments, code, texts) in [
        (vec!["--socket", socket], 2, &["--tap"][..]),
        (vec!["--tap", "tap0"], 2, &["--socket"]),
        (vec!["--socket", socket, "--tap", "tap0", "--tap-fds", "5"], 2, &["cannot be used with"]),
        (vec!["--socket", socket, "--tap-fds", "5", "--queues", "1"], 2, &["cannot be used with"]),
        (vec!["--socket", socket, "--tap-fds", "5:5"], 1, &["descriptor 5 is given twice"]),
        (vec!["--socket", socket, "--tap-fds", "77"], 1, &["descriptor 77 is not open"]),
        (vec!["--socket", socket, "--tap", "single", "--queues", "2"], 1, &["single", "multi_queue"]),
        (
            vec!["--socket", socket, "--tap", "lo"],
            1,
            &["cannot attach queue 0 of 1 to interface lo", "it is not a tap"],
        ),
        (vec!["--socket", socket, "--tap", "tap0", "--queues", "129"], 2, &["129", "1 to 128"]),
        (
            vec!["--socket", socket, "--tap", "a-name-that-is-too-long"],
            2,
            &["a-name-that-is-too-long", "15 bytes"],
        ),
    ] {
        let finished = refused(&network, &arguments);
        assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {finished:?}");
        for text in texts {
            assert!(finished.stderr.contains(text), "{arguments:?}: {text:?} is not in {}", finished.stderr);
        }
    }
}

#[test]
fn a_card_comes_and_goes_while_another_one_talks() {
    let name = "a_card_comes_and_goes_while_another_one_talks";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 1);
    network.run(&["ip", "tuntap", "add", "dev", "tap1", "mode", "tap", "multi_queue", "vnet_hdr"]).unwrap();
    network.run(&["ip", "address", "add", "10.8.0.1/24", "dev", "tap1"]).unwrap();
    network.run(&["ip", "link", "set", "tap1", "up"]).unwrap();
    let [first, second] = ["first", "second"].map(|name| path(&scratch, name));
    let one = card(&network, &first, &["--tap", "tap0"]);
    let other = card(&network, &second, &["--tap", "tap1", "--queues", "2"]);
    let qemu = builder(Version::V10_0, &first, 1).args(["-device", "pcie-root-port,id=root-port,chassis=9"]);
    let (qemu, mut guest) = boot(&qemu);
    let client = EchoClient::begin(&network, guest_address(GUEST));
    let qmp = qemu.qmp();
    for round in 0..crate::support::number("TOWLINE_SOAK_NET_PLUGS", 2) {
        let backend = json!({ "type": "socket", "data": { "addr": { "type": "unix", "data": { "path": second } },
            "server": false, "reconnect": 1 } });
        qmp.execute("chardev-add", json!({ "id": "net1", "backend": backend })).unwrap();
        qmp.execute(
            "netdev_add",
            json!({ "type": "vhost-user", "id": "n1", "chardev": "net1", "queues": 2 }),
        )
        .unwrap();
        let device = json!({ "driver": "virtio-net-pci", "id": "second", "netdev": "n1", "bus": "root-port", "mq": true,
            "mac": "52:54:00:07:00:03" });
        qmp.execute("device_add", device).unwrap();
        towline_lab::wait_until("the guest's second card", WITHIN, || {
            Ok(shell(&mut guest, "ls /sys/class/net").contains("eth1").then_some(()))
        })
        .unwrap();
        shell(&mut guest, "ip addr add 10.8.0.2/24 dev eth1 && ip link set eth1 up");
        network.enter(|| talk(guest_address("10.8.0.2"), 256 << 10, round)).unwrap();
        // It is removed while it is in use.
        let second = EchoClient::begin(&network, guest_address("10.8.0.2"));
        second.wait_blocks(2);
        unplug(&qemu);
        drop(second);
        // Its chardev is removed with it, a moment later.
        qmp.execute("netdev_del", json!({ "id": "n1" })).unwrap();
        towline_lab::wait_until("the end of a chardev", WITHIN, || {
            let chardevs = qmp.execute("query-chardev", json!({}))?;
            let has = chardevs.as_array().is_some_and(|all| all.iter().any(|one| one["label"] == "net1"));
            Ok((!has).then_some(()))
        })
        .unwrap();
        client.wait_blocks(3);
    }
    client.end();
    assert!(shell(&mut guest, "ip link show eth0").contains(MAC));
    let statistics = end(other);
    assert!(sum(&statistics, "tx", "packets") > 0, "{statistics}");
    end(one);
}

/// Unplugs the second card; the guest has to agree.
fn unplug(qemu: &Qemu) {
    qemu.qmp().execute("device_del", json!({ "id": "second" })).unwrap();
    qemu.qmp().wait_event("DEVICE_DELETED", WITHIN).unwrap();
}

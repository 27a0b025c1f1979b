//! The card's process dies or ends, and is started again, and the guest's connections survive.

use serde_json::json;
use towline_lab::{Qmp, Version, require_lab, wait_until};

use crate::support::{
    EchoClient, Fixture, GUEST, HOST, VERSIONS, WITHIN, add_tap, boot, builder, card, end, guest_address,
    host_echo, network, number, path, scratch, shell, start_card, sum,
};

#[test]
fn connections_survive_the_death_of_the_cards_process() {
    let name = "connections_survive_the_death_of_the_cards_process";
    if !require_lab(name) {
        return;
    }
    let Some(network) = network(name) else { return };
    add_tap(&network, 2);
    let restarts = number("TOWLINE_SOAK_NET_RESTARTS", 2);
    for version in VERSIONS {
        let scratch = scratch();
        let socket = path(&scratch, "net.sock");
        let state = path(&scratch, "net.state");
        let arguments = ["--tap", "tap0", "--queues", "2", "--state", state.to_str().unwrap()];
        let mut process = card(&network, &socket, &arguments);
        let (_qemu, mut guest) = boot(&builder(version, &socket, 2));
        let clients: Vec<_> = (0..3).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
        clients.iter().for_each(|client| client.wait_blocks(5));
        for _ in 0..restarts {
            process.kill().unwrap();
            process = card(&network, &socket, &arguments);
            clients.iter().for_each(|client| client.wait_blocks(5));
        }
        let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
        // The other direction, through all buffers of the rings: a lost descriptor would be missing by now.
        guest.talk(host_echo(&network), 2 << 20, 1).unwrap();
        let statistics = end(process);
        assert!(sum(&statistics, "rx", "packets") > 0, "{statistics}");
        println!("{version:?}: {restarts} restarts, the longest block took {longest:?}");
    }
}

/// Replacement of the card's process: a signal that a service manager sends, and a new process with the same
/// command line.
#[test]
#[ignore = "nightly"]
fn a_new_process_continues_with_the_state_of_the_former_one() {
    let name = "a_new_process_continues_with_the_state_of_the_former_one";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let (socket, control) = (path(&scratch, "net.sock"), path(&scratch, "control"));
    let state = path(&scratch, "net.state");
    let [state, qmp] = [&state, &control].map(|path| path.to_str().unwrap());
    let arguments = ["--tap", "tap0", "--queues", "2", "--state", state, "--qmp", qmp];
    let mut process = card(&network, &socket, &arguments);
    let (_qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 2));
    let clients: Vec<_> = (0..3).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
    clients.iter().for_each(|client| client.wait_blocks(5));
    for _ in 0..2 {
        assert!(sum(&end(process), "rx", "packets") > 0);
        process = card(&network, &socket, &arguments);
        clients.iter().for_each(|client| client.wait_blocks(5));
    }
    // A second one is refused before it changes the tap of the first, whose guest relies on the tap's
    // offloads.
    let second = start_card(&network, &socket, &arguments).wait(WITHIN).unwrap();
    assert_eq!(second.status.code(), Some(1), "{}", second.stderr);
    assert!(second.stderr.contains("in use"), "{}", second.stderr);
    clients.iter().for_each(|client| client.wait_blocks(5));
    // One that cannot open all that its options name ends, and the next one continues.
    end(process);
    let invalid = [&arguments[..6], &["--qmp", "/nonexistent/control"]].concat();
    let invalid = start_card(&network, &socket, &invalid).wait(WITHIN).unwrap();
    assert_eq!(invalid.status.code(), Some(1), "{}", invalid.stderr);
    process = card(&network, &socket, &arguments);
    clients.iter().for_each(|client| client.wait_blocks(5));
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    // Through all buffers of the rings: a lost descriptor would be missing by now.
    guest.talk(host_echo(&network), 2 << 20, 1).unwrap();

    let link = |up| {
        let qmp = Qmp::connect(&control, WITHIN).unwrap();
        qmp.execute("set_link", json!({ "name": "tap0", "up": up })).unwrap();
    };
    link(false);
    end(process);
    process = card(&network, &socket, &arguments);
    let line = format!("ping -c 1 -W 1 {HOST} > /dev/null; true");
    wait_until("a frame that is dropped because the link is down", WITHIN, || {
        shell(&mut guest, &line);
        let qmp = Qmp::connect(&control, WITHIN)?;
        let only = json!({ "provider": "towline", "names": ["dropped-link-down"] });
        let stats = qmp.execute("query-stats", json!({ "providers": [only], "target": "net-queue" }))?;
        let dropped = stats.as_array().unwrap().iter().filter_map(|one| one["stats"][0]["value"].as_u64());
        Ok((dropped.sum::<u64>() > 0).then_some(()))
    })
    .unwrap();
    link(true);
    guest.talk(host_echo(&network), 1 << 16, 1).unwrap();
    end(process);
    println!("the longest block took {longest:?}");
}

#[test]
fn a_card_whose_tap_is_deleted_ends() {
    let name = "a_card_whose_tap_is_deleted_ends";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let socket = path(&scratch, "net.sock");
    let card = card(&network, &socket, &["--tap", "tap0", "--queues", "2"]);
    network.run(&["ip", "link", "delete", "tap0"]).unwrap();
    let ended = card.wait(WITHIN).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("tap0 was deleted"), "{}", ended.stderr);
}

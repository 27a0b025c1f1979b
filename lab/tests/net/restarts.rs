//! The card's process dies and is started again, or another one takes over from it, and the guest's connections
//! survive.

use std::os::unix::fs::PermissionsExt as _;

use towline_lab::{Version, require_lab};

use crate::support::{
    EchoClient, Fixture, GUEST, VERSIONS, WITHIN, add_tap, boot, builder, card, end, guest_address,
    host_echo, network, number, path, scratch, start_card, sum,
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
        let (_qemu, mut guest) = boot(builder(version, &socket, 2));
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

#[test]
fn another_process_takes_over_and_the_guest_notices_nothing() {
    let name = "another_process_takes_over_and_the_guest_notices_nothing";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let (socket, upgrade_socket) = (path(&scratch, "net.sock"), path(&scratch, "upgrade.sock"));
    let arguments =
        |queues| ["--tap", "tap0", "--queues", queues, "--upgrade-socket", upgrade_socket.to_str().unwrap()];
    let mut process = card(&network, &socket, &arguments("2"));
    let (_qemu, mut guest) = boot(builder(Version::V10_0, &socket, 2));
    let mode = std::fs::metadata(&upgrade_socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "any process that can connect has the card");
    let clients: Vec<_> = (0..3).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
    clients.iter().for_each(|client| client.wait_blocks(5));
    for _ in 0..number("TOWLINE_SOAK_NET_UPGRADES", 3) {
        let successor = start_card(&network, &socket, &arguments("2"));
        let before = std::mem::replace(&mut process, successor).wait_done(WITHIN).unwrap();
        let last = before.stdout.lines().last().unwrap().to_owned();
        assert!(last.contains("statistics"), "{last}");
        clients.iter().for_each(|client| client.wait_blocks(5));
    }
    // A card with other properties is refused, and the one that runs continues.
    let refused = start_card(&network, &socket, &arguments("1")).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    let expected = "the running process has 2 queue pairs, expected 1";
    assert!(refused.stderr.contains(expected), "{}", refused.stderr);
    clients.iter().for_each(|client| client.wait_blocks(5));
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    guest.talk(host_echo(&network), 2 << 20, 1).unwrap();
    let statistics = end(process);
    assert!(sum(&statistics, "rx", "packets") > 0, "{statistics}");
    println!("the longest block took {longest:?}");
    assert!(!socket.exists() && !upgrade_socket.exists(), "the last one has cleared up");
}

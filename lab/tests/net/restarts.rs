//! The card's process dies and is started again, and the guest's connections go on.

use towline_lab::{Version, require_lab};

use crate::support::{
    Conversation, GUEST, WITHIN, add_tap, builder, card, end, guest_address, host_echo, network, number,
    path, scratch, set_up, sum,
};

#[test]
fn connections_survive_the_death_of_the_cards_process() {
    let name = "connections_survive_the_death_of_the_cards_process";
    if !require_lab(name) {
        return;
    }
    let Some(network) = network(name) else { return };
    add_tap(&network, 2);
    let restarts = number("TOWLINE_SOAK_NET_RESTARTS", 3);
    // With QEMU 7.2 the guest does not go on after its card's process died; docs/net.md says so.
    for version in [Version::V10_0] {
        let scratch = scratch();
        let socket = path(&scratch, "net.sock");
        let arguments = ["--tap", "tap0", "--queues", "2"];
        let mut process = card(&network, &socket, &arguments);
        let qemu = builder(version, &socket, 2).start().unwrap();
        let mut guest = qemu.linux(WITHIN).unwrap();
        set_up(&mut guest);
        let conversations: Vec<_> =
            (0..3).map(|_| Conversation::begin(&network, guest_address(GUEST))).collect();
        conversations.iter().for_each(|conversation| conversation.goes_on(5));
        for _ in 0..restarts {
            process.kill().unwrap();
            process = card(&network, &socket, &arguments);
            conversations.iter().for_each(|conversation| conversation.goes_on(5));
        }
        let longest = conversations.into_iter().map(Conversation::end).max().unwrap();
        // The other way round, on all buffers of the rings: a descriptor that was lost would be missing by now.
        guest.talk(host_echo(&network), 2 << 20, 1).unwrap();
        let statistics = end(process);
        assert!(sum(&statistics, "rx", "packets") > 0, "{statistics}");
        println!("{version:?}: {restarts} restarts, the longest block took {longest:?}");
    }
}

//! A Linux guest whose packets leave by AF_XDP, from its own memory.
//!
//! ```text
//!   guest ── towline net ── AF_XDP ── out0 ═══ in0 10.7.0.1   a network of another host
//!                ▲                     │
//!                └── tap0 ── bridge ───┘ what comes back
//! ```

use towline_lab::{Version, require_lab, skip};

use crate::support::{
    EchoClient, GUEST, GUEST_6, WITHIN, builder, card, datagram, end, give_addresses, guest_address,
    host_echo, network, path, scratch, set_up, sum, talk,
};

const MIB: usize = 1 << 20;

#[test]
fn a_guest_sends_by_af_xdp() {
    let name = "a_guest_sends_by_af_xdp";
    if !require_lab(name) {
        return;
    }
    let (Some(near), Some(far)) = (network(name), network(name)) else { return };
    near.connect("out0", &far, "in0").unwrap();
    give_addresses(&far, "in0");
    for line in [
        "ip link add br0 type bridge",
        "ip link set br0 up",
        "ip tuntap add dev tap0 mode tap vnet_hdr",
        "ip link set tap0 up",
        "ip link set tap0 master br0",
        "ip link set out0 master br0",
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        if let Err(error) = near.run(&words) {
            return skip(name, &format!("{error:#}"));
        }
    }
    let scratch = scratch();
    let socket = path(&scratch, "net.sock");
    let card = card(&near, &socket, &["--tap", "tap0", "--af-xdp", "out0", "--af-xdp-copy"]);
    let qemu = builder(Version::V10_0, &socket, 1).start().unwrap();
    let mut guest = qemu.linux(WITHIN).unwrap();
    set_up(&mut guest);
    let echo = host_echo(&far);
    far.enter(|| {
        talk(guest_address(GUEST), 4 * MIB, 1);
        talk(guest_address(GUEST_6), 2 * MIB, 2);
        for length in [1, 1400, 20_000] {
            datagram(guest_address(GUEST), length, 20);
        }
    })
    .unwrap();
    guest.talk(echo, 4 << 20, 1).unwrap();
    let client = EchoClient::begin(&far, guest_address(GUEST));
    client.wait_blocks(20);
    // Packets under way when the guest was stopped have been sent when it runs on.
    for command in ["stop", "cont"] {
        qemu.qmp().execute(command, serde_json::Value::Null).unwrap();
    }
    client.wait_blocks(20);
    client.end();
    drop(guest);
    drop(qemu);
    let statistics = end(card);
    // Super-frames, and all but short frames, were sent from the guest's memory.
    assert!(sum(&statistics, "tx", "bytes") > 10 << 20, "{statistics}");
    assert!(sum(&statistics, "tx", "referenced") > 100, "{statistics}");
    assert_eq!(sum(&statistics, "tx", "pending"), 0, "{statistics}");
}

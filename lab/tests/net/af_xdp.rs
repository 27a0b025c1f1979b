//! A Linux guest whose packets leave by AF_XDP, from its own memory.
//!
//! ```text
//!   guest ── towline net ── AF_XDP ── out0 ═══ in0 10.7.0.1   a network of another host
//!                ▲                     │
//!                └── tap0 ── bridge ───┘ what comes back
//! ```

use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::sync::Arc;

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with, sockopt};
use towline_frontend::net::{DriverPair, HEADER_BYTES, Options, feature as net};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena};
use towline_lab::{Network, Towline, Version, require_lab, skip, towline_binary, wait_until};

use crate::support::{
    EchoClient, GUEST, GUEST_6, HOST, MAC, WITHIN, boot, builder, card, datagram, end, give_addresses,
    guest_address, host_echo, network, path, scratch, sum, talk,
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
    let (qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 1));
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

/// Number of the macvtap's interface, and so of its file in `/dev`, which all network namespaces share.
const MACVTAP_INDEX: &str = "7411";

/// Interfaces of a card that receives by a macvtap of the interface by which it sends. `None` without
/// macvtaps.
fn macvtap(name: &str, near: &Network, far: &Network) -> Option<()> {
    near.connect("out0", far, "in0").unwrap();
    give_addresses(far, "in0");
    let neighbour = ["ip", "neigh", "add", GUEST, "lladdr", MAC, "nud", "permanent", "dev", "in0"];
    far.run(&neighbour).unwrap();
    let line = format!(
        "ip link add link out0 name vm0 index {MACVTAP_INDEX} address {MAC} type macvtap mode bridge"
    );
    if let Err(error) = near.run(&line.split(' ').collect::<Vec<&str>>()) {
        skip(name, &format!("no macvtap: {error:#}"));
        return None;
    }
    near.run(&["ip", "link", "set", "vm0", "up"]).unwrap();
    Some(())
}

/// A manager opens the AF_XDP socket, and starts the card without the right to open another one.
#[test]
fn a_card_sends_by_its_managers_socket_and_receives_by_a_macvtap() {
    const FRAMES: u8 = 32;
    let name = "a_card_sends_by_its_managers_socket_and_receives_by_a_macvtap";
    let (Some(near), Some(far)) = (network(name), network(name)) else { return };
    let Some(()) = macvtap(name, &near, &far) else { return };
    let open = |family, protocol| socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, protocol);
    let passed = near.enter(|| open(AddressFamily::XDP, None)).unwrap().unwrap();
    let wire = far.enter(|| open(AddressFamily::PACKET, Some(eth::ALL))).unwrap().unwrap();
    sockopt::set_socket_timeout(&wire, sockopt::Timeout::Recv, Some(WITHIN)).unwrap();
    let scratch = scratch();
    let (socket, towline, prefix) = (path(&scratch, "net.sock"), towline_binary().unwrap(), near.prefix());
    let line = format!(
        "setpriv --bounding-set=-net_raw --inh-caps=-net_raw -- {} net --json --socket {} --tap vm0 --af-xdp out0 \
         --af-xdp-copy --xsk-fds {}",
        towline.display(),
        socket.display(),
        passed.as_raw_fd()
    );
    let line = prefix[1..].iter().map(String::as_str).chain(line.split(' '));
    let mut card = Towline::start_with(Path::new(&prefix[0]), line, None, &[passed.as_fd()]).unwrap();
    drop(passed);
    wait_until("the card's socket", WITHIN, || {
        assert!(card.runs()?, "it ended: {}", card.stderr());
        Ok(socket.exists().then_some(()))
    })
    .unwrap();

    let mut frontend = Frontend::connect(&socket, WITHIN).unwrap();
    let wanted = feature::EVENT_IDX | feature::INDIRECT;
    let features = frontend.negotiate(net::MRG_RXBUF, wanted, 0).unwrap().features;
    let options = Options { size: 64, receive_bytes: 2048, transmit_bytes: 2048, features };
    let memory = Arc::new(MemoryArena::new(DriverPair::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut pair = DriverPair::start(&mut frontend, &memory, 0, options).unwrap();
    let mut bytes = vec![0; 1 << 16];
    for number in 0..FRAMES {
        let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9, 0x88, 0xb5], &[number; 700]].concat();
        assert!(pair.transmit(&[&[0; HEADER_BYTES][..], &frame].concat()));
        pair.flush();
        // The kernel of the other host sends packets as well.
        while recv(&wire, &mut bytes[..], RecvFlags::empty())
            .map(|(length, _)| bytes[..length] != frame[..])
            .unwrap()
        {}
        wait_until("the chain to be used", WITHIN, || Ok((pair.reclaim()? > 0).then_some(()))).unwrap();
    }
    let sender = far.enter(|| UdpSocket::bind((HOST, 0))).unwrap().unwrap();
    sender.send_to(&[0x5a; 900], (GUEST, 9)).unwrap();
    let mut received = false;
    while !received {
        pair.receive(|frame| received |= frame.to_vec().ends_with(&[0x5a; 900])).unwrap();
        if !received {
            pair.rx().wait(WITHIN).unwrap();
        }
    }
    let errors = card.stderr();
    let statistics = end(card);
    assert_eq!(statistics["pairs"][0]["tx"]["mode"], "af-xdp-copy", "{statistics}\n{errors}");
    assert_eq!(sum(&statistics, "tx", "referenced"), u64::from(FRAMES), "{statistics}");
}

//! A driver that is neither ours nor Linux's: DPDK's virtio-user, in dpdk-testpmd, which sends back all
//! frames.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{Network, Towline, command_after, paths, require_lab, signal, skip, wait_until};

use crate::support::{
    GUEST, MAC, WITHIN, add_tap, card, datagram, end, guest_address, network, number, path, scratch, sum,
};

const QUEUES: &str = "4";
/// Frames that the host sends when the tap comes up.
const EARLY_MAX: u64 = 16;

#[test]
fn another_driver_gets_and_sends_back_every_frame() {
    let name = "another_driver_gets_and_sends_back_every_frame";
    if !require_lab(name) {
        return;
    }
    let Some(program) = testpmd() else {
        return skip(name, "no dpdk-testpmd; `cargo xtask peers` brings it");
    };
    let Some(network) = network(name) else { return };
    add_tap(&network, 4);
    // Only counted frames may be on this network.
    network.run(&["ip", "-6", "address", "flush", "dev", "tap0"]).unwrap();
    network.run(&["ip", "link", "set", "tap0", "addrgenmode", "none"]).unwrap();
    network.run(&["ip", "neigh", "add", GUEST, "lladdr", MAC, "dev", "tap0"]).unwrap();
    let seconds = Duration::from_secs(number("TOWLINE_SOAK_TESTPMD_SECONDS", 2));
    // Addresses and ports are swapped: the returned frame is an echo, and is compared.
    let answered = swap(&network, &program, "5tswap", || {
        let until = Instant::now() + seconds;
        let lengths = [1, 18, 300, 1472];
        for length in lengths.iter().cycle() {
            // Each socket is another flow.
            datagram(guest_address(GUEST), *length, 3);
            if Instant::now() > until {
                return;
            }
        }
    });
    // Only the Ethernet addresses are swapped: no frame is answered, and the tap's full rate is sent.
    let flooded = swap(&network, &program, "macswap", || {
        let sockets: Vec<_> = (0..64).map(|_| std::net::UdpSocket::bind("0.0.0.0:0").unwrap()).collect();
        let until = Instant::now() + seconds;
        while Instant::now() < until {
            for socket in &sockets {
                // Frames that exceed the tap's queue are counted by the tap.
                let _ = socket.send_to(&[7; 64], guest_address(GUEST));
            }
        }
    });
    println!("{answered} frames came back and were compared, {flooded} were counted");
}

/// Swaps every frame that `traffic` causes; returns the number of returned frames.
fn swap(network: &Network, program: &Path, mode: &str, traffic: impl FnOnce() + Send) -> u64 {
    let scratch = scratch();
    let socket = path(&scratch, "net.sock");
    let before = counters(network);
    let card = card(network, &socket, &["--tap", "tap0", "--queues", QUEUES]);
    let device = format!("net_virtio_user0,path={},queues={QUEUES},mac={MAC}", socket.display());
    let line = "-l 0,1 --no-pci --no-huge -m 128 --no-shconf --vdev DEVICE -- --no-mlockall --nb-cores=1 \
                --rxq=4 --txq=4 --total-num-mbufs=8192 --stats-period=1 --forward-mode=MODE";
    let line = line.replace("DEVICE", &device).replace("MODE", mode).replace("=4", &format!("={QUEUES}"));
    let mut pmd = Towline::start(program, line.split_whitespace()).unwrap();
    wait_until("forwarding", WITHIN, || {
        assert!(pmd.runs()?, "testpmd ended: {}{}", pmd.stdout(), pmd.stderr());
        Ok(pmd.stdout().contains("NIC statistics for port 0").then_some(()))
    })
    .unwrap();
    network.enter(traffic).unwrap();
    // All frames under way are returned, except those that exceed testpmd's ring, which it counts. The end is
    // reached when all three counters are equal, and are unchanged two tables later.
    let (mut sent, mut back, mut since) = (0, 0, usize::MAX);
    wait_until("the last frame", WITHIN, || {
        let text = pmd.stdout();
        let known = ["RX-packets:", "TX-packets:"].map(|key| number_behind(&text, key));
        let tables = text.matches("NIC statistics").count();
        let now = counters(network);
        if known != [sent, back] || known != [now[0] - before[0], now[1] - before[1]] {
            (sent, back, since) = (now[0] - before[0], now[1] - before[1], tables);
        }
        Ok((tables >= since.saturating_add(2)).then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}: {sent} sent, {back} came back; {}", pmd.stdout()));
    signal(pmd.pid(), Signal::TERM);
    let text = pmd.wait(WITHIN).unwrap().stdout;
    let statistics = end(card);
    // Of forwarding, which drops frames that are queued when it begins.
    let [taken, given, dropped] =
        ["RX-packets:", "TX-packets:", "TX-dropped:"].map(|key| number_behind(&text, key));
    assert_eq!([given, taken], [back, back + dropped], "{text}");
    assert!(taken <= sent && sent - taken <= EARLY_MAX, "{sent} sent, {taken} taken: {text}");
    assert_eq!(
        [sum(&statistics, "rx", "packets"), sum(&statistics, "tx", "packets")],
        [sent, back],
        "{statistics}"
    );
    for pair in statistics["pairs"].as_array().unwrap() {
        assert!(pair["rx"]["packets"].as_u64() > Some(0), "a queue without a flow: {statistics}");
    }
    back
}

/// Counts frames that the host has sent to the tap and the card has read, and frames that were returned.
fn counters(network: &Network) -> [u64; 2] {
    let words = ["ip", "-json", "-statistics", "link", "show", "tap0"];
    let output = command_after(&network.prefix()).args(words).output();
    let links: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    ["tx", "rx"].map(|way| links[0]["stats64"][way]["packets"].as_u64().unwrap())
}

/// Reads a number in the last table of testpmd.
fn number_behind(text: &str, key: &str) -> u64 {
    let (_, behind) = text.rsplit_once(key).unwrap_or_else(|| panic!("no {key} in {text}"));
    behind.split_whitespace().next().unwrap().parse().unwrap()
}

fn testpmd() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places =
        [paths::workspace().join("target/peers/bin")].into_iter().chain(std::env::split_paths(&path));
    places.map(|place| place.join("dpdk-testpmd")).find(|file| file.is_file())
}

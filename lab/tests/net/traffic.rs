//! Traffic through the card: every protocol, size and direction, with every number of queues and some of its
//! offloads.

use std::time::Duration;

use towline_lab::{Version, require_lab, skip};

use crate::support::{
    EchoClient, Fixture, GUEST, GUEST_6, HOST, WITHIN, add_tap, boot, builder, card, datagram, end,
    guest_address, host_echo, network, number, path, scratch, set_up, shell, sum, talk,
};

const MIB: usize = 1 << 20;
/// Maximum unacknowledged bytes of the guest.
const TALK_MIB: usize = 128;
/// Maximum memory of a card with four queues.
const OWN_KIB_MAX: u64 = 24 << 10;

/// Memory of a process that is not shared with its guest.
fn own_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib = |line: &str| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
    let own = |line: &&str| line.starts_with("RssAnon:") || line.starts_with("RssFile:");
    status.lines().filter(own).map(kib).sum()
}

#[test]
fn every_kind_of_packet_goes_both_ways() {
    let name = "every_kind_of_packet_goes_both_ways";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 4);
    let socket = path(&scratch, "net.sock");
    let card = card(&network, &socket, &["--tap", "tap0", "--queues", "4"]);
    let (_qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 4));
    let ping = shell(&mut guest, &format!("ping -c 3 -W 60 {HOST}"));
    assert!(ping.contains(" 0% packet loss"), "{ping}");

    let echo = host_echo(&network);
    let mib = usize::try_from(number("TOWLINE_SOAK_NET_MIB", 8)).unwrap();
    network
        .enter(|| {
            talk(guest_address(GUEST), mib * MIB, 1);
            talk(guest_address(GUEST_6), 4 * MIB, 2);
            for length in [1, 1400, 65_507] {
                datagram(guest_address(GUEST), length, 20);
            }
            datagram(guest_address(GUEST_6), 9000, 20);
        })
        .unwrap();
    for at in (0..mib).step_by(TALK_MIB) {
        guest.talk(echo, (TALK_MIB.min(mib - at) * MIB) as u64, 1).unwrap();
    }
    guest.talk(echo, 100, number("TOWLINE_SOAK_NET_CONNECTIONS", 500)).unwrap();

    // A VLAN, and frames of 9000 bytes.
    let vlan =
        network.run(&["ip", "link", "add", "link", "tap0", "name", "tap0.7", "type", "vlan", "id", "7"]);
    match vlan {
        Ok(()) => {
            network.run(&["ip", "address", "add", "10.77.0.1/24", "dev", "tap0.7"]).unwrap();
            network.run(&["ip", "link", "set", "tap0.7", "up"]).unwrap();
            shell(&mut guest, "ip link add link eth0 name eth0.7 type vlan id 7");
            shell(&mut guest, "ip addr add 10.77.0.2/24 dev eth0.7 && ip link set eth0.7 up");
            network.enter(|| talk(guest_address("10.77.0.2"), MIB, 3)).unwrap();
        }
        Err(error) => skip(name, &format!("its part with a VLAN: {error:#}")),
    }
    network.run(&["ip", "link", "set", "tap0", "mtu", "9000"]).unwrap();
    shell(&mut guest, "ip link set eth0 mtu 9000");
    network
        .enter(|| {
            talk(guest_address(GUEST), 4 * MIB, 4);
            datagram(guest_address(GUEST), 8900, 20);
        })
        .unwrap();
    let kib = own_kib(card.pid());
    // The program's own pages count too, and it is larger when it is not optimised.
    let released = std::env::var_os("TOWLINE_SOAK_NET_MIB").is_some();
    assert!(!released || kib <= OWN_KIB_MAX, "the card takes {kib} KiB besides its guest's memory");
    println!("the card takes {kib} KiB besides its guest's memory");
    let statistics = end(card);
    assert!(sum(&statistics, "rx", "bytes") > 13 << 20, "{statistics}");
    assert!(sum(&statistics, "tx", "bytes") > 13 << 20, "{statistics}");
    // 8 MiB in packets of 1448 bytes are 5800 packets: here they are super-frames.
    let bytes_a_packet = sum(&statistics, "tx", "bytes") / sum(&statistics, "tx", "packets");
    assert!(sum(&statistics, "rx", "notifications") <= sum(&statistics, "rx", "batches"), "{statistics}");
    println!("{bytes_a_packet} bytes a transmitted packet: {statistics}");
}

#[test]
#[ignore = "nightly"]
fn a_guests_settings_change_while_it_sends() {
    let name = "a_guests_settings_change_while_it_sends";
    if !require_lab(name) {
        return;
    }
    let programs = ["/usr/sbin/ethtool", "/sbin/ethtool"].map(std::path::Path::new);
    let Some(ethtool) = programs.into_iter().find(|path| path.is_file()) else {
        return skip(name, "no ethtool; run `cargo xtask setup`");
    };
    let Some(network) = network(name) else { return };
    let scratch = scratch();
    add_tap(&network, 4);
    let socket = path(&scratch, "net.sock");
    let card = card(&network, &socket, &["--tap", "tap0", "--queues", "4"]);
    let (_qemu, mut guest) =
        builder(Version::V10_0, &socket, 4).guest_programs([ethtool]).boot(WITHIN).unwrap();
    set_up(&mut guest);
    let channels = shell(&mut guest, "ethtool -l eth0");
    let combined: Vec<&str> = channels.lines().filter(|line| line.starts_with("Combined:")).collect();
    assert!(combined.len() == 2 && combined.iter().all(|line| line.ends_with('4')), "{channels}");

    let clients: Vec<_> = (0..4).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
    let seconds = |name| Duration::from_secs(number(name, 0));
    EchoClient::run_for(&clients, seconds("TOWLINE_SOAK_NET_SECONDS"));
    for change in
        ["-L eth0 combined 1", "-L eth0 combined 3", "-L eth0 combined 4", "-K eth0 sg off", "-K eth0 sg on"]
            .into_iter()
            .chain(["-K eth0 tso off", "-K eth0 tx off", "-K eth0 tx on", "-K eth0 sg on", "-K eth0 tso on"])
    {
        shell(&mut guest, &format!("ethtool {change}"));
        clients.iter().for_each(|client| client.wait_blocks(3));
    }
    // A monitor that does not read blocks nothing.
    let packets = std::process::Command::new("tcpdump").arg("--version").output();
    if packets.is_ok_and(|output| output.status.success()) {
        let (tcpdump, words) = ("tcpdump".as_ref(), ["-i", "tap0", "-w", "/dev/null"]);
        let dump = towline_lab::Towline::start_within(&network.prefix(), tcpdump, words).unwrap();
        towline_lab::wait_until("tcpdump that listens", WITHIN, || {
            Ok(dump.stderr().contains("listening on").then_some(()))
        })
        .unwrap();
        towline_lab::signal(dump.pid(), rustix::process::Signal::STOP);
        clients.iter().for_each(|client| client.wait_blocks(50));
        EchoClient::run_for(&clients, seconds("TOWLINE_SOAK_NET_SUSPENDED_S"));
    } else {
        skip(name, "its part with tcpdump: not here; run `cargo xtask setup`");
    }
    for client in clients {
        client.end();
    }
    let statistics = end(card);
    for pair in statistics["pairs"].as_array().unwrap() {
        assert!(pair["tx"]["packets"].as_u64() > Some(0), "{statistics}");
    }
}

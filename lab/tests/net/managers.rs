//! Facilities for managers of guests: taps and a connection that they opened, processors for the threads,
//! QEMU's `set_link`, and guests with a driver from before virtio 1.0.

use serde_json::json;
use towline_lab::{Finished, Network, Towline, Version, paths, towline_binary, wait_until};

use crate::support::{
    EchoClient, Fixture, GUEST, WITHIN, add_tap, boot, builder, card, end, guest_address, host_echo, path,
    shell, sum, talk,
};

/// A manager: opens a descriptor for each `INTERFACE=FLAGS` (of `TUNSETIFF`), accepts a connection if a
/// socket's path is given, and becomes the command after `--`, in which `TAPS` and `CONNECTION` are replaced
/// by the descriptors.
const MANAGER: &str = r#"
import fcntl, os, socket, struct, sys
where = sys.argv.index("--")
taps, path, line = [], sys.argv[1], sys.argv[where + 1:]
for word in sys.argv[2:where]:
    name, flags = word.split("=")
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, 0x400454ca, struct.pack("16sH22x", name.encode(), int(flags, 0)))
    os.set_inheritable(tap, True)
    taps.append(str(tap))
connection = ""
if path:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    connection = listener.accept()[0].detach()
    os.set_inheritable(connection, True)
os.execv(line[0], [word.replace("TAPS", ":".join(taps)).replace("CONNECTION", str(connection)) for word in line])
"#;
/// `IFF_TAP`, `IFF_TUN`, `IFF_NO_PI`, `IFF_VNET_HDR`, `IFF_MULTI_QUEUE`.
const TAP: u16 = 0x2;
const TUN: u16 = 0x1;
const NO_PI: u16 = 0x1000;
const VNET_HDR: u16 = 0x4000;
const MULTI_QUEUE: u16 = 0x100;
const GOOD: u16 = TAP | NO_PI | VNET_HDR | MULTI_QUEUE;

/// Starts a card of which a manager opened the taps, and accepted the connection at `socket` if it is not
/// empty.
fn managed(network: &Network, socket: &str, taps: &[(&str, u16)], arguments: &[&str]) -> Towline {
    let towline = towline_binary().unwrap();
    let python = paths::lab_directory().join("python/bin/python");
    let mut line = vec!["-c".to_owned(), MANAGER.into(), socket.into()];
    line.extend(taps.iter().map(|(name, flags)| format!("{name}={flags:#x}")));
    line.extend(["--".into(), towline.display().to_string(), "net".into(), "--json".into()]);
    line.extend(arguments.iter().copied().map(str::to_owned));
    Towline::start_within(&network.prefix(), &python, line).unwrap()
}

/// Processors that each thread of a queue pair may use.
fn processors(pid: u32) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim();
        let is_worker = field("Name:").strip_prefix("net-").is_some_and(|rest| rest.parse::<u8>().is_ok());
        if is_worker {
            found.push((field("Name:").to_owned(), field("Cpus_allowed_list:").to_owned()));
        }
    }
    found.sort();
    found
}

#[test]
fn taps_and_a_connection_that_a_manager_opened_serve_a_guest() {
    let name = "taps_and_a_connection_that_a_manager_opened_serve_a_guest";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let socket = path(&scratch, "net.sock");
    let arguments = ["--fd", "CONNECTION", "--tap-fds", "TAPS", "--cpus", "1,0"];
    let card = managed(&network, socket.to_str().unwrap(), &[("tap0", GOOD); 2], &arguments);
    wait_until("the manager's socket", WITHIN, || Ok(socket.exists().then_some(()))).unwrap();
    let (_qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 2));
    network.enter(|| (0..16).for_each(|seed| talk(guest_address(GUEST), 64 << 10, seed))).unwrap();
    guest.talk(host_echo(&network), 1 << 20, 8).unwrap();
    let pinned = [("net-0", "1"), ("net-1", "0")].map(|(name, cpu)| (name.to_owned(), cpu.to_owned()));
    assert_eq!(processors(card.pid()), pinned);
    let statistics = end(card);
    assert_eq!(statistics["tap"], "tap0");
    for pair in statistics["pairs"].as_array().unwrap() {
        assert!(pair["rx"]["packets"].as_u64() > Some(0), "no flow reached a pair: {statistics}");
    }
    assert!(sum(&statistics, "tx", "bytes") > 8 << 20, "{statistics}");
}

#[test]
fn taps_of_a_manager_that_do_not_fit_together_are_refused() {
    let name = "taps_of_a_manager_that_do_not_fit_together_are_refused";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    let socket = path(&scratch, "net.sock");
    let socket = socket.to_str().unwrap();
    let single = GOOD & !MULTI_QUEUE;
    for (taps, texts) in [
        // A tap has one set of flags, so those without the header belong to another interface.
        (
            &[("tap0", GOOD), ("tap1", GOOD & !VNET_HDR)][..],
            ["(tap1) was opened without the virtio header", "IFF_VNET_HDR"],
        ),
        (&[("tap0", GOOD), ("tap1", GOOD)], ["belongs to interface tap0", "to tap1; all must belong to one"]),
        (&[("tun0", GOOD & !TAP | TUN)], ["(tun0) was opened as a tun", "IFF_TAP"]),
        (&[("tap0", single), ("tap1", single)], ["(tap0) was opened for one queue", "IFF_MULTI_QUEUE"]),
    ] {
        let refused = managed(&network, "", taps, &["--socket", socket, "--tap-fds", "TAPS"]);
        let Finished { status, stderr, .. } = refused.wait(WITHIN).unwrap();
        assert_eq!(status.code(), Some(1), "{taps:?}: {stderr}");
        for text in texts {
            assert!(stderr.contains(text), "{taps:?}: {text:?} is not in {stderr}");
        }
    }
}

#[test]
fn a_legacy_guest_has_a_network_and_sees_the_link_that_qemu_sets() {
    let name = "a_legacy_guest_has_a_network_and_sees_the_link_that_qemu_sets";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 1);
    let (socket, control) = (path(&scratch, "net.sock"), path(&scratch, "net.qmp"));
    let card = card(&network, &socket, &["--tap", "tap0", "--qmp", control.to_str().unwrap()]);
    // Without virtio 1.0 and without mergeable buffers the header has 10 bytes.
    let legacy = ["disable-modern=on", "disable-legacy=off", "mrg_rxbuf=off"];
    let legacy =
        legacy.into_iter().flat_map(|property| ["-set".to_owned(), format!("device.card.{property}")]);
    let (qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 1).args(legacy));
    let facts = towline_lab::Qmp::connect(&control, WITHIN).unwrap();
    let facts = facts.execute("query-device-facts", json!({})).unwrap();
    let negotiated = facts["subject"]["negotiated"].as_array().unwrap();
    for absent in ["VIRTIO_F_VERSION_1", "VIRTIO_NET_F_MRG_RXBUF"] {
        assert!(!negotiated.contains(&json!(absent)), "{facts}");
    }
    assert!(negotiated.contains(&json!("VIRTIO_NET_F_GUEST_TSO4")), "{facts}");
    network.enter(|| talk(guest_address(GUEST), 1 << 20, 1)).unwrap();
    guest.talk(host_echo(&network), 1 << 20, 1).unwrap();

    let client = EchoClient::begin(&network, guest_address(GUEST));
    client.wait_blocks(2);
    for (up, carrier) in [(false, "0"), (true, "1")] {
        qemu.qmp().execute("set_link", json!({ "name": "card", "up": up })).unwrap();
        wait_until("the guest's carrier", WITHIN, || {
            Ok((shell(&mut guest, "cat /sys/class/net/eth0/carrier") == carrier).then_some(()))
        })
        .unwrap();
    }
    client.wait_blocks(2);
    client.end();
    let statistics = end(card);
    // Super-frames both ways: the largest frame of the MTU has 1514 bytes.
    for way in ["rx", "tx"] {
        let bytes = sum(&statistics, way, "bytes") / sum(&statistics, way, "packets");
        assert!(bytes > 1514, "{way}: {bytes} bytes a frame: {statistics}");
    }
}

//! The guest's network: a bridge in each host, and one between them.

use towline_lab::Network;

/// The tap of the guest, on each host.
pub(crate) const TAP: &str = "vm0";

/// A bridge that forwards from the start on, to all ports.
pub(crate) fn add_bridge(network: &Network) {
    let options = ["type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"];
    network.run(&[&["ip", "link", "add", "br0"][..], &options].concat()).unwrap();
    network.run(&["ip", "link", "set", "br0", "up"]).unwrap();
}

/// Connects a host's bridge, with the tap of its guest, to that of the hub.
pub(crate) fn attach(hub: &Network, host: &Network, port: &str) {
    hub.connect(port, host, "uplink").unwrap();
    hub.run(&["ip", "link", "set", port, "master", "br0"]).unwrap();
    add_bridge(host);
    host.run(&["ip", "tuntap", "add", "dev", TAP, "mode", "tap", "multi_queue", "vnet_hdr"]).unwrap();
    for interface in ["uplink", TAP] {
        host.run(&["ip", "link", "set", interface, "master", "br0", "up"]).unwrap();
    }
}

/// Has a host lose what it sends to this address of the link between hosts, or mends that.
pub(crate) fn set_apart(host: &Network, other: &str, are_apart: bool) {
    let (verb, address): (_, &[&str]) = match are_apart {
        true => ("replace", &["lladdr", "02:00:00:00:00:01", "nud", "permanent"]),
        false => ("delete", &[]),
    };
    host.run(&[&["ip", "neighbor", verb, other, "dev", "link0"][..], address].concat()).unwrap();
}

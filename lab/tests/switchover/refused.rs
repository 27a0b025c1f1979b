//! A destination that refuses the device state, late: the last byte is held back until it has loaded
//! everything before it.

use towline_lab::{Version, require_lab};

use crate::support::{assert_ended, assert_runs_only_in, counting, end, listening, qmp, small, start};

#[test]
fn a_device_state_that_a_stock_destination_cannot_load_leaves_the_source_running() {
    if !require_lab("a_device_state_that_a_stock_destination_cannot_load_leaves_the_source_running") {
        return;
    }
    for version in [Version::V10_0, Version::V7_2] {
        let source = counting(&small(version).args(["-device", "virtio-rng-pci"]));
        // No such device; and one whose state belongs to another configuration.
        for other in [
            &["-device", "virtio-serial-pci"][..],
            &["-device", "virtio-rng-pci,disable-legacy=on,packed=on"],
        ] {
            let (destination, address) = listening(&small(version).args(other.iter().copied()));
            let finished = end(start(&format!("move {} tcp:{address}", qmp(&source))));
            assert_ended(&finished, 1, &["the guest: safe at its source"]);
            assert_runs_only_in(&source, &destination);
        }
    }
}

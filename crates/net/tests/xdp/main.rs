//! Frames sent by AF_XDP to a veth pair, and received by a packet socket in the network namespace of the
//! other end.
//!
//! ```text
//!   a driver ── ring 1 ── Net ── AF_XDP ── out0 ═══ in0 ── packet socket, compared with the model of `segments`
//!                          └──── tap0, for unsupported frames
//! ```
//! A veth has no zero-copy, so the kernel copies from guest memory; everything else is as with zero-copy.
//! `out0` has no checksum offload, so checksums are computed here, or by the kernel in software.
#![allow(clippy::unwrap_used, reason = "a failure of a helper is a failure of its test")]

mod bench;
#[path = "../common/mod.rs"]
mod common;
#[path = "../segments/model.rs"]
mod model;
mod orphaned;
mod sockets;

use std::sync::Arc;

use bench::{Bench, SLOTS, VIRTIO, WITHIN};
use rustix::net::{RecvFlags, recv};
use towline_frontend::wire::RequestCode;
use towline_lab::wait_until;
use towline_net::{QueueStatistics, TransmitMode, Xdp};

#[test]
fn frames_of_every_kind_arrive_unchanged() {
    let name = "frames_of_every_kind_arrive_unchanged";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    bench.traffic(0, 400);
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Copy]);
    let found = bench.statistics(0);
    assert!(found.referenced > 100, "{found:?}");
    assert_eq!((found.drops, found.zero_copy, found.pending), ([0; 6], 0, 0), "{found:?}");
    wait_until("400 frames", WITHIN, || Ok((bench.statistics(0).packets == 400).then_some(()))).unwrap();
    assert_eq!(bench.statistics(0).copied, 400, "the kernel copies on a veth");
}

#[test]
fn checksums_can_be_computed_in_software() {
    let name = "checksums_can_be_computed_in_software";
    let Some(mut bench) = Bench::new(name, 1, Xdp::with_software_checksums) else { return };
    bench.traffic(0, 400);
    assert!(bench.statistics(0).referenced > 100, "{:?}", bench.statistics(0));
}

#[test]
fn pairs_share_a_umem() {
    let name = "pairs_share_a_umem";
    let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
    bench.wait_for_sockets();
    for _ in 0..4 {
        bench.traffic(0, 32);
        bench.traffic(1, 32);
    }
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Copy; 2]);
}

#[test]
fn memory_changes_and_rings_stop_with_frames_in_flight() {
    let name = "memory_changes_and_rings_stop_with_frames_in_flight";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    for round in 0..6 {
        bench.traffic(0, 32);
        // A frame that is in flight at that time is sent and completed.
        let (sent, arrives) = bench.packet();
        bench.transmit(0, 0, &sent);
        bench.queues[0].publish();
        if round % 2 == 0 {
            let memory = Arc::clone(&bench.memory);
            bench.frontend.set_mem_table(Some(&memory)).unwrap();
        } else {
            let base = bench.frontend.stop(1).unwrap();
            bench.frontend.start(&bench.queues[0], base).unwrap();
            bench.queues[0].force_kick();
        }
        for wanted in arrives {
            assert!(bench.receive() == wanted);
        }
        bench.wait_until_sent(0);
        bench.wait_for_mode(TransmitMode::Copy);
    }
}

#[test]
fn without_the_interface_frames_go_by_the_tap() {
    let name = "without_the_interface_frames_go_by_the_tap";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    bench.traffic(0, 32);
    bench.near.run(&["ip", "link", "set", "out0", "down"]).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x11; 600]].concat();
    bench.transmit(0, 0, &frame);
    bench.queues[0].publish();
    bench.wait_until_sent(0);
    bench.wait_for_mode(TransmitMode::Tap);
    bench.near.run(&["ip", "link", "set", "out0", "up"]).unwrap();
    // AF_XDP is tried again with the next frames, and a link may drop frames just after it is up.
    let mut bytes = vec![0; 1 << 16];
    wait_until("a frame by the interface again", WITHIN, || {
        bench.transmit(0, 0, &frame);
        bench.queues[0].publish();
        bench.wait_until_sent(0);
        let mut came = || match recv(&bench.receiver, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => Some(bytes[..length] == frame[VIRTIO..]),
            Err(_) => None,
        };
        Ok(std::iter::from_fn(&mut came).any(|is_it| is_it).then_some(()))
    })
    .unwrap();
    bench.wait_for_mode(TransmitMode::Copy);
}

/// Frames with unsupported or invalid offloads are sent to the tap, which validates them.
#[test]
fn damaged_frames_are_left_to_the_tap() {
    let name = "damaged_frames_are_left_to_the_tap";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    for _ in 0..100 {
        for slot in 0..SLOTS {
            let (mut bytes, _) = bench.packet();
            for _ in 0..bench.random.usize(1..4) {
                let at = bench.random.usize(..bytes.len().min(60));
                bytes[at] = bench.random.u8(..);
            }
            bytes.truncate(bench.random.usize(1..bytes.len() * 2).min(bytes.len()));
            bench.transmit(0, slot, &bytes);
        }
        bench.queues[0].publish();
        bench.wait_until_sent(0);
    }
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Copy]);
    let known = |found: &QueueStatistics| found.packets + found.drops.iter().sum::<u64>() == 100 * SLOTS;
    wait_until("all frames to be counted", WITHIN, || Ok(known(&bench.statistics(0)).then_some(()))).unwrap();
}

#[test]
fn postcopy_and_wrong_interfaces_are_refused() {
    const PAGEFAULT: u64 = 1 << 8;
    let name = "postcopy_and_wrong_interfaces_are_refused";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    assert_eq!(bench.frontend.number(RequestCode::GET_PROTOCOL_FEATURES).unwrap() & PAGEFAULT, 0);
    let missing = bench.near.enter(|| Xdp::new("out7", 0, None)).unwrap().unwrap_err();
    assert_eq!(missing.to_string(), "there is no interface out7 in this network to transmit by");
    let file = tempfile().into();
    let wrong = bench.near.enter(|| Xdp::new("out0", 0, Some(vec![file]))).unwrap().unwrap_err();
    assert_eq!(wrong.to_string(), "descriptor 1 is not an AF_XDP socket");
}

fn tempfile() -> std::fs::File {
    std::fs::File::open("/dev/null").unwrap()
}

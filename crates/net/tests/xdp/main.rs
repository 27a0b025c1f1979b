//! Frames that leave by AF_XDP, on a veth pair whose other end is looked at by a packet socket of another network.
//!
//! ```text
//!   a driver ── ring 1 ── Net ── AF_XDP ── out0 ═══ in0 ── packet socket, compared with the model of `segments`
//!                          └──── tap0, for what cannot go so
//! ```
//! A veth has no zero-copy, so that the kernel copies what it is shown in the guest's memory; all else is as with a card
//! that has it. `out0` makes no checksums, so that those that arrive are made here, or by the kernel in software.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod leaving;
#[path = "../segments/model.rs"]
mod model;

use std::sync::Arc;

use bench::{Bench, SLOTS, VIRTIO, WITHIN};
use rustix::net::{RecvFlags, recv};
use towline_frontend::wire::Code;
use towline_lab::wait_until;
use towline_net::{Mode, QueueStatistics, Xdp};

#[test]
fn frames_of_every_kind_arrive_from_anywhere() {
    let name = "frames_of_every_kind_arrive_from_anywhere";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    bench.traffic(0, 400);
    assert_eq!(bench.net.modes(), [Mode::Copy]);
    let found = bench.statistics(0);
    assert!(found.referenced > 100, "{found:?}");
    assert_eq!((found.drops, found.zero_copy, found.pending), ([0; 6], 0, 0), "{found:?}");
    wait_until("400 frames", WITHIN, || Ok((bench.statistics(0).packets == 400).then_some(()))).unwrap();
    assert_eq!(bench.statistics(0).copied, 400, "the kernel copies on a veth");
}

#[test]
fn checksums_are_made_here_as_well() {
    let name = "checksums_are_made_here_as_well";
    let Some(mut bench) = Bench::new(name, 1, Xdp::with_software_checksums) else { return };
    bench.traffic(0, 400);
    assert!(bench.statistics(0).referenced > 100, "{:?}", bench.statistics(0));
}

#[test]
fn pairs_share_what_is_pinned() {
    let name = "pairs_share_what_is_pinned";
    let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
    for _ in 0..4 {
        bench.traffic(0, 32);
        bench.traffic(1, 32);
    }
    assert_eq!(bench.net.modes(), [Mode::Copy; 2]);
}

#[test]
fn memory_changes_and_rings_stop_under_way() {
    let name = "memory_changes_and_rings_stop_under_way";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    for round in 0..6 {
        bench.traffic(0, 32);
        // What is under way when it is said is sent, and comes back.
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
        bench.all_back(0);
        bench.is_in(Mode::Copy);
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
    bench.all_back(0);
    bench.is_in(Mode::Tap);
    bench.near.run(&["ip", "link", "set", "out0", "up"]).unwrap();
    // It is tried again when there is something to send, and a link that is up does not carry yet.
    let mut bytes = vec![0; 1 << 16];
    wait_until("a frame by the interface again", WITHIN, || {
        bench.transmit(0, 0, &frame);
        bench.queues[0].publish();
        bench.all_back(0);
        let mut came = || match recv(&bench.receiver, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => Some(bytes[..length] == frame[VIRTIO..]),
            Err(_) => None,
        };
        Ok(std::iter::from_fn(&mut came).any(|is_it| is_it).then_some(()))
    })
    .unwrap();
    bench.is_in(Mode::Copy);
}

/// What the card does not do itself, and what nobody does, goes to the tap, which judges it.
#[test]
fn nonsense_is_left_to_the_tap() {
    let name = "nonsense_is_left_to_the_tap";
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
        bench.all_back(0);
    }
    assert_eq!(bench.net.modes(), [Mode::Copy]);
    let known = |found: &QueueStatistics| found.packets + found.drops.iter().sum::<u64>() == 100 * SLOTS;
    wait_until("all to be counted", WITHIN, || Ok(known(&bench.statistics(0)).then_some(()))).unwrap();
}

#[test]
fn a_guest_whose_memory_comes_later_is_refused() {
    const PAGEFAULT: u64 = 1 << 8;
    let name = "a_guest_whose_memory_comes_later_is_refused";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    assert_eq!(bench.frontend.number(Code::GET_PROTOCOL_FEATURES).unwrap() & PAGEFAULT, 0);
    let missing = bench.near.enter(|| Xdp::new("out7", 0, None)).unwrap().unwrap_err();
    assert_eq!(missing.to_string(), "there is no interface out7 in this network to transmit by");
    let file = tempfile().into();
    let wrong = bench.near.enter(|| Xdp::new("out0", 0, Some(vec![file]))).unwrap().unwrap_err();
    assert_eq!(wrong.to_string(), "descriptor 1 is no AF_XDP socket");
}

fn tempfile() -> std::fs::File {
    std::fs::File::open("/dev/null").unwrap()
}

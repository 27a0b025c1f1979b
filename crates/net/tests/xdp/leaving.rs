//! Sockets that are closed while the kernel still has frames of theirs: their chains go back when it cannot read them any more.
//!
//! ```text
//!   Net ── AF_XDP ── mac0 ── out0, whose queueing lets no packet through ═══ in0
//! ```
//! A packet that waits there belongs to the socket it was sent by, whose queue is not free before that.

use std::sync::Arc;

use rustix::fs::{FallocateFlags, fallocate};
use towline_frontend::{GUEST_BASE, Memory, Queue, QueueOptions};
use towline_lab::wait_until;
use towline_net::{DropReason, Mode, Net, Options, Taps, Xdp};

use crate::bench::{Bench, SLOTS, VIRTIO, WITHIN, agree};
use crate::common::Served;

const FRAME_BYTES: usize = 1000;

/// A card of whose frames some stay with the kernel; how many.
fn held(name: &str) -> Option<(Bench, usize)> {
    let mut bench = Bench::on("mac0", name, 1, |xdp| xdp)?;
    // Some packets, and then a byte each second.
    let queueing = "tc qdisc add dev out0 root tbf rate 8bit burst 5000 limit 10mb";
    bench.near.run(&queueing.split(' ').collect::<Vec<_>>()).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x11; FRAME_BYTES]].concat();
    (0..SLOTS).for_each(|slot| bench.transmit(0, slot, &frame));
    bench.queues[0].publish();
    wait_until("frames to be sent", WITHIN, || {
        let found = bench.statistics(0);
        // Those that went through are back, and all others are waited for.
        Ok((found.referenced == SLOTS && found.pending > 0 && found.pending < SLOTS - 3).then_some(()))
    })
    .unwrap();
    bench.is_in(Mode::Copy);
    let back = taken(&mut bench.queues[0]);
    Some((bench, SLOTS as usize - back))
}

/// How many chains came back since it was last looked at.
fn taken(queue: &mut Queue) -> usize {
    std::iter::from_fn(|| queue.pop_used().unwrap()).count()
}

fn let_through(bench: &Bench) {
    bench.near.run(&"tc qdisc del dev out0 root".split(' ').collect::<Vec<_>>()).unwrap();
}

#[test]
fn a_queue_that_cannot_be_stopped_ends_the_connection() {
    let name = "a_queue_that_cannot_be_stopped_ends_the_connection";
    let Some((mut bench, held)) = held(name) else { return };
    assert!(bench.frontend.stop(1).is_err(), "the frontend is told that nothing is under way");
    assert_eq!(taken(&mut bench.queues[0]), 0, "the kernel has {held} frames yet");
    let error = bench.served.failure().to_string();
    let wanted = format!(
        "mac0 may still send {held} of its frames, as its queue is not free 1 s after the socket was closed"
    );
    assert!(error.contains(&wanted), "{error}");
    // The frontend comes again, with the used index as it is. The ring would give those chains again, and they would go back by
    // another way.
    let (mut served, _frontend) = Served::start(&bench.near, &bench.net);
    let error = served.failure().to_string();
    assert!(error.contains("mac0 may still send frames of the connection before"), "{error}");
    let_through(&bench);
    let (served, mut frontend) = wait_until("the queue to be free", WITHIN, || {
        let (mut served, mut frontend) = Served::start(&bench.near, &bench.net);
        if agree(&mut frontend).is_ok() {
            return Ok(Some((served, frontend)));
        }
        served.failure();
        Ok(None)
    })
    .unwrap();
    bench.served = served;
    frontend.set_mem_table(Some(&bench.memory)).unwrap();
    let base = u16::try_from(SLOTS as usize - held).unwrap();
    frontend.start(&bench.queues[0], base).unwrap();
    bench.frontend = frontend;
    bench.queues[0].force_kick();
    bench.all_back(0);
}

#[test]
fn what_a_socket_had_that_was_given_up_comes_back_when_its_queue_is_free() {
    let name = "what_a_socket_had_that_was_given_up_comes_back_when_its_queue_is_free";
    let Some((mut bench, held)) = held(name) else { return };
    // Nothing comes back for some seconds.
    bench.is_in(Mode::Tap);
    // Others go by the tap meanwhile.
    let frame = [&[0; VIRTIO][..], &[0x22; FRAME_BYTES]].concat();
    bench.transmit(0, SLOTS, &frame);
    bench.queues[0].publish();
    bench.queues[0].wait(WITHIN).unwrap();
    assert_eq!(bench.queues[0].pop_used().unwrap().map(|used| used.token), Some(SLOTS));
    assert_eq!(taken(&mut bench.queues[0]), 0, "the kernel has {held} frames yet");
    assert_eq!(bench.statistics(0).pending, held as u64);
    let_through(&bench);
    bench.all_back(0);
    // It is tried again each second, when there is something to send.
    wait_until("the mode", WITHIN, || {
        bench.transmit(0, 0, &frame);
        bench.queues[0].publish();
        bench.all_back(0);
        Ok((bench.net.modes()[0] == Mode::Copy).then_some(()))
    })
    .unwrap();
    assert_eq!(bench.statistics(0).dropped(DropReason::Refused), held as u64);
}

/// Also that of the pair that registered the memory which all use.
#[test]
fn each_pair_has_its_queue_for_itself() {
    let name = "each_pair_has_its_queue_for_itself";
    let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
    bench.traffic(0, 32);
    bench.traffic(1, 32);
    assert_eq!(bench.net.modes(), [Mode::Copy; 2]);
    // A balloon takes memory: the first pair sees it, as it sends, and stays with the tap.
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(bench.memory.fd(), hole, 4 << 20, 1 << 20).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x33; FRAME_BYTES]].concat();
    while bench.net.modes()[0] == Mode::Copy {
        assert!(bench.statistics(0).packets < 10_000, "nothing is missed");
        (0..SLOTS).for_each(|slot| bench.transmit(0, slot, &frame));
        bench.queues[0].publish();
        bench.all_back(0);
    }
    assert_eq!(bench.net.modes(), [Mode::Tap, Mode::Copy]);
    // So somebody else can have its queue, and only that.
    let card = |queue| {
        let made = bench.near.enter(|| {
            let taps = Taps::open(&format!("tap{}", 5 + queue), 1).unwrap();
            Net::with_xdp(taps, Some(Xdp::new("out0", queue, None).unwrap()), Options::default())
        });
        let net = Arc::new(made.unwrap());
        let (_served, mut frontend) = Served::start(&bench.near, &net);
        let features = agree(&mut frontend).unwrap();
        let memory = Arc::new(Memory::new(1 << 20).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let mut ring = Queue::new(&memory, 1, QueueOptions { size: 16, features }).unwrap();
        frontend.start(&ring, 0).unwrap();
        let at = memory.alloc(frame.len() as u64, 8);
        memory.write(at, &frame);
        let len = u32::try_from(frame.len()).unwrap();
        assert!(at >= GUEST_BASE && ring.add(&[towline_frontend::Buffer { guest: at, len }], &[], 0));
        ring.publish();
        ring.wait(WITHIN).unwrap();
        net.modes()[0]
    };
    assert_eq!((card(0), card(1)), (Mode::Copy, Mode::Tap));
    bench.traffic(1, 32);
}

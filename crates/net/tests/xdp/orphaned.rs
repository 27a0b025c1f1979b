//! Sockets that are closed with frames in flight: their chains are completed once the kernel can no longer
//! read them.
//!
//! ```text
//!   Net ── AF_XDP ── mac0 ── out0, whose queueing discipline holds packets back ═══ in0
//! ```
//! A queued packet belongs to the socket that sent it, whose queue is not free before it is sent.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use towline_frontend::{Frontend, GUEST_BASE, MemoryArena, Queue, QueueOptions};
use towline_lab::wait_until;
use towline_net::{DropReason, Net, Options, Taps, TransmitMode, Xdp};
use towline_vhost_user::InFlightRecord;

use crate::bench::{Bench, SLOTS, VIRTIO, WITHIN, negotiate};
use crate::common::Served;

const FRAME_BYTES: usize = 1000;

/// A card with frames in the queueing discipline, and their number.
fn bench_with_queued_frames(name: &str) -> Option<(Bench, usize)> {
    queue_frames(Bench::on("mac0", name, 1, |xdp| xdp)?)
}

/// Has the card send frames that stay in the queueing discipline. Returns their number, too.
fn queue_frames(mut bench: Bench) -> Option<(Bench, usize)> {
    // A burst of some packets, then a byte each second.
    let queueing = "tc qdisc add dev out0 root tbf rate 8bit burst 5000 limit 10mb";
    bench.near.run(&queueing.split(' ').collect::<Vec<_>>()).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x11; FRAME_BYTES]].concat();
    (0..SLOTS).for_each(|slot| bench.transmit(0, slot, &frame));
    bench.queues[0].publish();
    wait_until("frames to be sent", WITHIN, || {
        let found = bench.statistics(0);
        // The burst is complete, the rest is in flight.
        Ok((found.referenced == SLOTS && found.pending > 0 && found.pending < SLOTS - 3).then_some(()))
    })
    .unwrap();
    bench.wait_for_mode(TransmitMode::Copy);
    let used = pop_all(&mut bench.queues[0]);
    Some((bench, SLOTS as usize - used))
}

/// Pops all used chains. Returns their number.
fn pop_all(queue: &mut Queue) -> usize {
    std::iter::from_fn(|| queue.pop_used().unwrap()).count()
}

fn release_queued_frames(bench: &Bench) {
    bench.near.run(&"tc qdisc del dev out0 root".split(' ').collect::<Vec<_>>()).unwrap();
}

/// Sends a frame, which goes by the tap while frames are in flight, and then has those sent. Returns the
/// frame.
fn assert_tap_sends_until_released(bench: &mut Bench, queued: usize) -> Vec<u8> {
    let frame = [&[0; VIRTIO][..], &[0x22; FRAME_BYTES]].concat();
    bench.transmit(0, SLOTS, &frame);
    bench.queues[0].publish();
    bench.queues[0].wait(WITHIN).unwrap();
    assert_eq!(bench.queues[0].pop_used().unwrap().map(|used| used.token), Some(SLOTS));
    assert_eq!(pop_all(&mut bench.queues[0]), 0, "{queued} frames are still queued");
    // Statistics are updated after the used ring.
    wait_until("the frames in flight to be counted", WITHIN, || {
        Ok((bench.statistics(0).pending == queued as u64).then_some(()))
    })
    .unwrap();
    release_queued_frames(bench);
    bench.wait_until_sent(0);
    frame
}

#[test]
fn a_queue_that_cannot_be_stopped_ends_the_connection() {
    let name = "a_queue_that_cannot_be_stopped_ends_the_connection";
    let Some((mut bench, queued)) = bench_with_queued_frames(name) else { return };
    assert!(bench.frontend.stop(1).is_err(), "the frontend has a reply although frames are in flight");
    assert_eq!(pop_all(&mut bench.queues[0]), 0, "{queued} frames are still queued");
    let error = bench.served.failure().to_string();
    let wanted =
        format!("mac0 may still send {queued} frames: its queue is busy 1 s after the socket was closed");
    assert!(error.contains(&wanted), "{error}");
    // The frontend connects again, with the used index unchanged: its ring contains those chains again.
    let (mut served, _frontend) = Served::start(&bench.near, &bench.net);
    let error = served.failure().to_string();
    assert!(error.contains("mac0 may still send frames of the previous connection"), "{error}");
    release_queued_frames(&bench);
    let (served, mut frontend) = wait_until("the queue to be free", WITHIN, || {
        let (mut served, mut frontend) = Served::start(&bench.near, &bench.net);
        if negotiate(&mut frontend).is_ok() {
            return Ok(Some((served, frontend)));
        }
        served.failure();
        Ok(None)
    })
    .unwrap();
    bench.served = served;
    frontend.set_mem_table(Some(&bench.memory)).unwrap();
    let base = u16::try_from(SLOTS as usize - queued).unwrap();
    frontend.start(&bench.queues[0], base).unwrap();
    bench.frontend = frontend;
    bench.queues[0].force_kick();
    bench.wait_until_sent(0);
}

/// Serves a card on this tap with the chains in flight in a record.
fn start_recorded(bench: &Bench, tap: &str, record: &OwnedFd) -> (Arc<Net>, Served, Frontend) {
    let net = bench.near.enter(|| {
        let xdp = Xdp::new("mac0", 0, None).unwrap().with_copy_mode();
        Arc::new(Net::with_xdp(Taps::open(tap, 1).unwrap(), Some(xdp), Options::default()))
    });
    let net = net.unwrap();
    let fd = record.as_fd().try_clone_to_owned().unwrap();
    let record = InFlightRecord::open(fd, 2, "the record").unwrap();
    let (served, mut frontend) = Served::start_recorded(&bench.near, &net, record);
    negotiate(&mut frontend).unwrap();
    frontend.set_mem_table(Some(&bench.memory)).unwrap();
    (net, served, frontend)
}

/// A connection that cannot be stopped leaves the record and the kernel as the death of the process does.
#[test]
fn chains_of_a_killed_process_are_used_when_its_queue_is_free() {
    let name = "chains_of_a_killed_process_are_used_when_its_queue_is_free";
    let Some(mut bench) = Bench::on("mac0", name, 1, |xdp| xdp) else { return };
    bench.frontend.stop(1).unwrap();
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    (bench.net, bench.served, bench.frontend) = start_recorded(&bench, "tap1", &record);
    bench.frontend.start(&bench.queues[0], 0).unwrap();
    let Some((mut bench, queued)) = queue_frames(bench) else { return };
    assert!(bench.frontend.stop(1).is_err(), "the frontend has a reply although frames are in flight");
    bench.served.failure();
    (bench.net, bench.served, bench.frontend) = start_recorded(&bench, "tap2", &record);
    bench.frontend.start(&bench.queues[0], bench.queues[0].last_used_idx()).unwrap();
    // Until then frames are sent by the tap, and the others are not sent again.
    assert_tap_sends_until_released(&mut bench, queued);
    wait_until("the frames to be counted", WITHIN, || {
        Ok((bench.statistics(0).dropped(DropReason::Refused) == queued as u64).then_some(()))
    })
    .unwrap();
    assert!(bench.statistics(0).packets <= 1, "frames of the former process are sent again");
}

#[test]
fn chains_of_a_closed_socket_are_completed_when_its_queue_is_free() {
    let name = "chains_of_a_closed_socket_are_completed_when_its_queue_is_free";
    let Some((mut bench, queued)) = bench_with_queued_frames(name) else { return };
    // There are no completions for some seconds.
    bench.wait_for_mode(TransmitMode::Tap);
    // Until then frames go by the tap.
    let frame = assert_tap_sends_until_released(&mut bench, queued);
    // AF_XDP is tried again each second if there are frames to send.
    wait_until("the mode", WITHIN, || {
        bench.transmit(0, 0, &frame);
        bench.queues[0].publish();
        bench.wait_until_sent(0);
        Ok((bench.net.transmit_modes()[0] == TransmitMode::Copy).then_some(()))
    })
    .unwrap();
    assert_eq!(bench.statistics(0).dropped(DropReason::Refused), queued as u64);
}

/// Number of times that threads of the card's network have waited.
fn waits(bench: &Bench) -> u64 {
    let namespace = || std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    let wanted = bench.near.enter(namespace).unwrap();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
    let threads =
        threads.filter(|thread| std::fs::read_link(thread.join("ns/net")).is_ok_and(|net| net == wanted));
    let count = |thread: std::path::PathBuf| {
        let status = std::fs::read_to_string(thread.join("status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
    };
    threads.filter_map(count).sum()
}

/// The queue of a closed socket may be busy for long, as while the link is down.
#[test]
fn chains_of_a_closed_socket_are_not_polled_for() {
    let name = "chains_of_a_closed_socket_are_not_polled_for";
    let Some((bench, queued)) = bench_with_queued_frames(name) else { return };
    bench.wait_for_mode(TransmitMode::Tap);
    let before = waits(&bench);
    std::thread::sleep(Duration::from_secs(2));
    let during = waits(&bench) - before;
    assert_eq!(bench.statistics(0).pending, queued as u64, "the frames are in flight all the time");
    assert!((1..30).contains(&during), "{during} times in 2 s");
    release_queued_frames(&bench);
}

/// Even the queue of the pair that registered the UMEM.
#[test]
fn a_queue_is_free_once_its_own_pair_has_closed_its_socket() {
    let name = "a_queue_is_free_once_its_own_pair_has_closed_its_socket";
    let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
    bench.wait_for_sockets();
    bench.traffic(0, 32);
    bench.traffic(1, 32);
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Copy; 2]);
    // A balloon removes memory: the first pair notices while it sends, and falls back to the tap.
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(bench.memory.fd(), hole, 4 << 20, 1 << 20).unwrap();
    let frame = [&[0; VIRTIO][..], &[0x33; FRAME_BYTES]].concat();
    while bench.net.transmit_modes()[0] == TransmitMode::Copy {
        assert!(bench.statistics(0).packets < 10_000, "the removed memory is not noticed");
        (0..SLOTS).for_each(|slot| bench.transmit(0, slot, &frame));
        bench.queues[0].publish();
        bench.wait_until_sent(0);
    }
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Tap, TransmitMode::Copy]);
    // Another program can use its queue, and only that one.
    let card = |queue| {
        let made = bench.near.enter(|| {
            let taps = Taps::open(&format!("tap{}", 5 + queue), 1).unwrap();
            Net::with_xdp(
                taps,
                Some(Xdp::new("out0", queue, None).unwrap().with_copy_mode()),
                Options::default(),
            )
        });
        let net = Arc::new(made.unwrap());
        let (_served, mut frontend) = Served::start(&bench.near, &net);
        let features = negotiate(&mut frontend).unwrap();
        let memory = Arc::new(MemoryArena::new(1 << 20).unwrap());
        frontend.set_mem_table(Some(&memory)).unwrap();
        let mut ring = Queue::new(&memory, 1, QueueOptions { size: 16, features }).unwrap();
        frontend.start(&ring, 0).unwrap();
        let at = memory.alloc(frame.len() as u64, 8);
        memory.write(at, &frame);
        let len = u32::try_from(frame.len()).unwrap();
        assert!(at >= GUEST_BASE && ring.add(&[towline_frontend::QueueBuffer { guest: at, len }], &[], 0));
        ring.publish();
        ring.wait(WITHIN).unwrap();
        net.transmit_modes()[0]
    };
    assert_eq!((card(0), card(1)), (TransmitMode::Copy, TransmitMode::Tap));
    bench.traffic(1, 32);
}

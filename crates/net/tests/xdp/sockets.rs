//! Sockets that a manager opened, and interfaces without zero-copy.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::system::uname;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use towline_frontend::{Frontend, Queue, QueueOptions};
use towline_lab::{skip, wait_until};
use towline_net::{Net, Options, Taps, TransmitMode, Xdp};

use crate::bench::{Bench, SLOTS, VIRTIO, WITHIN, negotiate};
use crate::common::Served;

/// Replaces the card of a bench, and starts its rings. Returns the former card, which is still served.
fn replace_card(bench: &mut Bench, xdp: impl FnOnce() -> Xdp + Send) -> (Served, Frontend) {
    let pairs = bench.queues.len();
    let net = bench.near.enter(|| {
        Arc::new(Net::with_xdp(Taps::open("tap1", pairs).unwrap(), Some(xdp()), Options::default()))
    });
    let net = net.unwrap();
    let (served, frontend) = start(bench, &net);
    bench.net = net;
    let frontend = std::mem::replace(&mut bench.frontend, frontend);
    (std::mem::replace(&mut bench.served, served), frontend)
}

/// Ends the card of a bench, and has another one use a queue of the interface.
fn occupy(bench: &mut Bench, queue: u32) {
    let other = bench.near.enter(|| {
        let xdp = Xdp::new("out0", queue, None).unwrap().with_copy_mode();
        Arc::new(Net::with_xdp(Taps::open("tap2", 1).unwrap(), Some(xdp), Options::default()))
    });
    let other = other.unwrap();
    let (served, mut frontend) = Served::start(&bench.near, &other);
    drop(std::mem::replace(&mut bench.served, served));
    let features = negotiate(&mut frontend).unwrap();
    frontend.set_mem_table(Some(&bench.memory)).unwrap();
    let mut ring = Queue::new(&bench.memory, 1, QueueOptions { size: 16, features }).unwrap();
    frontend.start(&ring, 0).unwrap();
    bench.frontend = frontend;
    wait_until("the queue to be busy", WITHIN, || {
        ring.force_kick();
        Ok((other.transmit_modes()[0] == TransmitMode::Copy).then_some(()))
    })
    .unwrap();
}

fn start(bench: &mut Bench, net: &Arc<Net>) -> (Served, Frontend) {
    let (served, mut frontend) = Served::start(&bench.near, net);
    let features = negotiate(&mut frontend).unwrap();
    frontend.set_mem_table(Some(&bench.memory)).unwrap();
    for (index, queue) in bench.queues.iter_mut().enumerate() {
        let options = QueueOptions { size: 256, features };
        *queue = Queue::new(&bench.memory, 2 * u32::try_from(index).unwrap() + 1, options).unwrap();
        frontend.start(queue, 0).unwrap();
    }
    (served, frontend)
}

/// Sends frames by the tap or by AF_XDP, until the mode of the pair is this one.
fn send_until(bench: &mut Bench, pair: usize, mode: TransmitMode) {
    let frame = [&[0; VIRTIO][..], &[0x44; 700]].concat();
    wait_until("the mode", WITHIN, || {
        bench.transmit(pair, 0, &frame);
        bench.queues[pair].publish();
        bench.wait_until_sent(pair);
        Ok((bench.net.transmit_modes()[pair] == mode).then_some(()))
    })
    .unwrap();
}

/// Receives the rest of the packets that `send_until` has sent.
fn drop_received(bench: &Bench) {
    let mut bytes = vec![0; 1 << 16];
    while rustix::net::recv(&bench.receiver, &mut bytes[..], rustix::net::RecvFlags::DONTWAIT).is_ok() {}
}

fn sockets(bench: &Bench, count: usize) -> Vec<OwnedFd> {
    let open = || socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
    bench.near.enter(|| (0..count).map(|_| open()).collect()).unwrap()
}

/// Each pair has one socket, so each attempt has to use that of the last one.
#[test]
fn a_passed_socket_is_used_again_after_its_queue_was_busy() {
    let name = "a_passed_socket_is_used_again_after_its_queue_was_busy";
    for busy in [0, 1] {
        let Some(mut bench) = Bench::new(name, 2, |xdp| xdp) else { return };
        // Another program has one of the two queues.
        occupy(&mut bench, busy);
        let passed = sockets(&bench, 2);
        let occupant =
            replace_card(&mut bench, || Xdp::new("out0", 0, Some(passed)).unwrap().with_copy_mode());
        let (busy, free) = (busy as usize, 1 - busy as usize);
        send_until(&mut bench, free, TransmitMode::Copy);
        // After the first attempt to bind.
        send_until(&mut bench, busy, TransmitMode::Tap);
        drop(occupant);
        send_until(&mut bench, busy, TransmitMode::Copy);
        drop_received(&bench);
        bench.traffic(busy, 2 * SLOTS);
        bench.traffic(free, 2 * SLOTS);
    }
}

/// Removes CAP_NET_RAW from this thread, and so from those that it starts.
fn drop_raw_sockets() {
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::NET_RAW);
    sets.permitted.remove(CapabilitySet::NET_RAW);
    set_capabilities(None, sets).unwrap();
}

/// Returns true if any process can see which queues are bound (Linux 6.15).
fn queues_are_visible() -> bool {
    let release = uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(15))
}

/// A UMEM can be registered with a socket once, and is unusable when memory has changed.
#[test]
fn a_passed_socket_is_kept_when_memory_changes_while_its_queue_is_busy() {
    let name = "a_passed_socket_is_kept_when_memory_changes_while_its_queue_is_busy";
    for raw_sockets in [true, false] {
        if !raw_sockets && !queues_are_visible() {
            return skip(name, "without CAP_NET_RAW: it needs Linux 6.15");
        }
        let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
        occupy(&mut bench, 0);
        let passed = sockets(&bench, 1);
        if !raw_sockets {
            drop_raw_sockets();
        }
        let occupant =
            replace_card(&mut bench, || Xdp::new("out0", 0, Some(passed)).unwrap().with_copy_mode());
        for _ in 0..2 {
            // After an attempt to bind, with the former memory and the current one.
            send_until(&mut bench, 0, TransmitMode::Tap);
            let memory = Arc::clone(&bench.memory);
            bench.frontend.set_mem_table(Some(&memory)).unwrap();
        }
        drop(occupant);
        send_until(&mut bench, 0, TransmitMode::Copy);
        drop_received(&bench);
        bench.traffic(0, 2 * SLOTS);
    }
}

#[test]
fn frames_go_by_the_tap_where_there_is_no_zero_copy() {
    let name = "frames_go_by_the_tap_where_there_is_no_zero_copy";
    let Some(mut bench) = Bench::new(name, 1, |xdp| xdp) else { return };
    drop(replace_card(&mut bench, || Xdp::new("out0", 0, None).unwrap()));
    let frame = [&[0; VIRTIO][..], &[0x55; 700]].concat();
    (0..SLOTS).for_each(|slot| bench.transmit(0, slot, &frame));
    bench.queues[0].publish();
    bench.wait_until_sent(0);
    wait_until("the frames to be counted", WITHIN, || {
        let found = bench.statistics(0);
        Ok((found.packets + found.drops.iter().sum::<u64>() == SLOTS).then_some(()))
    })
    .unwrap();
    assert_eq!(bench.net.transmit_modes(), [TransmitMode::Tap]);
    assert_eq!(bench.statistics(0).referenced, 0);
}

//! The dirty log is exact: a page is marked after the last write to it. A frontend reads and clears the log
//! at every flush, and copies the marked pages, as a migration does. At the end its copy equals guest memory.
//!
//! Alone in its binary, as the hook for flushes is global.
#![allow(clippy::unwrap_used, reason = "a failure of a helper is a failure of its test")]

mod common;

use std::net::UdpSocket;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Served;
use proptest::prelude::*;
use towline_frontend::net::feature::MRG_RXBUF;
use towline_frontend::wire::feature::{EVENT_IDX, INDIRECT, LOG_ALL};
use towline_frontend::{GUEST_BASE, MemoryArena, Queue, QueueBuffer, QueueOptions};
use towline_lab::{Network, skip};
use towline_net::{Net, Options, Taps};
use towline_vhost_user::testing::on_log_flush;

const PAGE: u64 = 4096;
const MEMORY_BYTES: u64 = 48 << 20;
/// Guest memory of a word of the log. Buffers at this distance fill the cache of 32 words within a frame or
/// two.
const WORD_BYTES: u64 = 64 * PAGE;
const BUFFERS: u64 = 160;
const WITHIN: Duration = Duration::from_secs(60);

/// The copy at a migration's destination.
struct Destination {
    memory: Arc<MemoryArena>,
    log: MemoryArena,
    pages: Vec<Vec<u8>>,
}

impl Destination {
    fn sync(&mut self) {
        for page in self.log.take_dirty_pages() {
            let Some(at) = (page * PAGE).checked_sub(GUEST_BASE) else { continue };
            if at < MEMORY_BYTES {
                self.memory.read(page * PAGE, &mut self.pages[(at / PAGE) as usize]);
            }
        }
    }
}

/// Buffers and features of a guest, and the number of rounds in which it receives frames.
struct Case {
    receive_bytes: u32,
    spread: u64,
    features: u64,
    seed: u64,
    rounds: usize,
}

/// Card and sender of frames.
struct Host {
    network: Network,
    net: Arc<Net>,
    socket: UdpSocket,
}

fn assert_migrates(case: &Case, host: &Host) {
    let Host { network, net, socket } = host;
    let Case { receive_bytes, spread, features, seed, rounds } = *case;
    let mut random = fastrand::Rng::with_seed(seed);
    let (_served, mut frontend) = Served::start(network, net);
    let features = frontend.negotiate(features, features, 0).unwrap().features;
    let memory = Arc::new(MemoryArena::new(MEMORY_BYTES).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut queues =
        [0, 1].map(|index| Queue::new(&memory, index, QueueOptions { size: 256, features }).unwrap());
    queues.iter().for_each(|queue| frontend.start(queue, 0).unwrap());
    let stride = u64::from(receive_bytes).next_multiple_of(64) + spread;
    let buffers = memory.alloc(stride * BUFFERS, PAGE);
    // The log has a bit for each page from guest address 0 on.
    let log = MemoryArena::new((GUEST_BASE + MEMORY_BYTES) / PAGE / 8).unwrap();
    frontend.set_log(&log).unwrap();
    frontend.set_features(features | LOG_ALL).unwrap();
    queues.iter().for_each(|queue| frontend.set_vring_addr(queue, true).unwrap());
    let pages = (0..MEMORY_BYTES / PAGE).map(|page| memory.bytes(GUEST_BASE + page * PAGE, PAGE as usize));
    let copied =
        Arc::new(Mutex::new(Destination { memory: Arc::clone(&memory), log, pages: pages.collect() }));
    let at_flush = Arc::clone(&copied);
    on_log_flush(move || at_flush.lock().unwrap().sync());
    let mut order: Vec<u64> = (0..BUFFERS).collect();
    for _ in 0..rounds {
        random.shuffle(&mut order);
        for slot in &order {
            let buffer = QueueBuffer { guest: buffers + slot * stride, len: receive_bytes };
            assert!(queues[0].add(&[], &[buffer], *slot));
        }
        queues[0].publish();
        order.clear();
        // Frames of any length that fill half of the buffers.
        let mut left = BUFFERS * u64::from(receive_bytes) / 2;
        while left > 0 {
            let length = random.u64(1..=65_000).min(left);
            left -= length;
            let bytes: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            socket.send_to(&bytes, ("10.9.0.2", 9)).unwrap();
            let out = QueueBuffer { guest: buffers, len: 64 };
            if queues[1].add(&[out], &[], 0) {
                queues[1].publish();
            }
        }
        while order.len() < BUFFERS as usize / 2 && queues[0].wait(Duration::from_millis(200)).is_ok() {
            order.extend(std::iter::from_fn(|| queues[0].pop_used().unwrap()).map(|used| used.token));
        }
        while queues[1].in_flight() > 0 {
            queues[1].wait(WITHIN).unwrap();
            while queues[1].pop_used().unwrap().is_some() {}
        }
        order.extend(std::iter::from_fn(|| queues[0].pop_used().unwrap()).map(|used| used.token));
    }
    for ring in [0, 1] {
        frontend.stop(ring).unwrap();
    }
    let mut copied = copied.lock().unwrap();
    copied.sync();
    let areas = [queues[0].addresses().used, queues[1].addresses().used].map(|used| (used, PAGE));
    for (start, len) in areas.into_iter().chain([(buffers, stride * BUFFERS)]) {
        for page in (start - GUEST_BASE) / PAGE..(start + len - GUEST_BASE).div_ceil(PAGE) {
            let now = memory.bytes(GUEST_BASE + page * PAGE, PAGE as usize);
            let then = &copied.pages[page as usize];
            let differs = now.iter().zip(then).position(|(now, then)| now != then);
            assert_eq!(differs, None, "page {page} was written after its mark");
        }
    }
}

#[test]
fn pages_are_marked_after_the_last_write() {
    let name = "pages_are_marked_after_the_last_write";
    let network = match Network::new() {
        Ok(network) => network,
        Err(error) => return skip(name, &format!("no separate network: {error:#}")),
    };
    let taps = network.enter(|| Taps::open("tap0", 1)).unwrap().unwrap();
    for line in [
        "ip link set tap0 mtu 65521",
        "ip address add 10.9.0.1/24 dev tap0",
        "ip neigh add 10.9.0.2 lladdr 02:00:00:09:00:02 nud permanent dev tap0",
    ] {
        network.run(&line.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let socket = network.enter(|| UdpSocket::bind(("10.9.0.1", 9)).unwrap()).unwrap();
    socket.set_write_timeout(Some(WITHIN)).unwrap();
    let net = Arc::new(Net::new(taps, Options::default()));
    let host = Host { network, net, socket };
    // Long frames in more buffers than the log's cache has words, each with its own word of the log.
    let case =
        |seed| Case { receive_bytes: 1536, spread: WORD_BYTES - 1536, features: MRG_RXBUF, seed, rounds: 3 };
    (0..2).for_each(|seed| assert_migrates(&case(seed), &host));
    let shapes = (
        prop::sample::select(vec![256u32, 1536, 4096, 9000]),
        prop::sample::select(vec![0u64, 100, 3 * PAGE, WORD_BYTES]),
        prop::sample::select(vec![MRG_RXBUF, MRG_RXBUF | EVENT_IDX, MRG_RXBUF | EVENT_IDX | INDIRECT]),
        any::<u64>(),
    );
    let config = ProptestConfig { cases: 8, max_shrink_iters: 8, ..ProptestConfig::default() };
    proptest!(config, |((receive_bytes, spread, features, seed) in shapes)| {
        assert_migrates(&Case { receive_bytes, spread, features, seed, rounds: 2 }, &host);
    });
}

//! Hostile guests: invalid rings, and rings that change while they are read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use towline_frontend::{GUEST_BASE, MemoryArena, QueueBuffer, RingAddresses};

use crate::backend::{Log, Pair, SIZE};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn write_descriptor(memory: &MemoryArena, at: u64, guest: u64, len: u32, flags: u16, next: u16) {
    memory.write(at, &guest.to_le_bytes());
    memory.write(at + 8, &len.to_le_bytes());
    memory.write(at + 12, &flags.to_le_bytes());
    memory.write(at + 14, &next.to_le_bytes());
}

/// The first ring processes descriptor 0, as `write` writes it, which is logged as `fault`. The other ring
/// continues, and after a reset the first one too.
#[track_caller]
fn causes_fault(fault: &str, write: impl Fn(&MemoryArena, RingAddresses)) {
    let log = Log::new();
    let mut pair = Pair::start();
    pair.echo(0);
    write(&pair.memory, pair.rings[0].addresses());
    pair.rings[0].make_available(0);
    pair.rings[0].publish();
    pair.rings[0].force_kick();
    pair.wait_fault();
    (0..20).for_each(|_| pair.other_echoes());
    assert_eq!((log.count(fault), log.count("is broken")), (1, 1), "one line for one ring");
    pair.reset_first();
    pair.other_echoes();
    pair.end().unwrap();
}

#[test]
fn chains_with_loops_are_faults() {
    causes_fault("more than 16 descriptors, or a loop", |memory, addresses| {
        for index in 0..SIZE {
            let at = addresses.table + 16 * u64::from(index);
            write_descriptor(memory, at, GUEST_BASE, 8, NEXT, (index + 1) % SIZE);
        }
    });
    causes_fault("more than 4 descriptors, or a loop", |memory, addresses| {
        // An indirect table whose last descriptor links to its first.
        let table = GUEST_BASE + (1 << 19);
        (0..4).for_each(|at| {
            write_descriptor(memory, table + 16 * at, GUEST_BASE, 1, NEXT, (at as u16 + 1) % 4);
        });
        write_descriptor(memory, addresses.table, table, 64, INDIRECT, 0);
    });
    causes_fault("an indirect table within another", |memory, addresses| {
        // A table that contains itself.
        write_descriptor(memory, addresses.table, addresses.table, 16, INDIRECT, 0);
    });
}

#[test]
fn empty_and_oversized_buffers_are_faults() {
    let end = GUEST_BASE + (2 << 20);
    for (guest, len, fault) in [
        (GUEST_BASE, 0, "has length 0"),
        (GUEST_BASE, u32::MAX, "has more than 1073741824 bytes"),
        (GUEST_BASE, 1 << 30, "is not in the guest's memory"),
        (end - 4, 8, "is not in the guest's memory"),
        (u64::MAX - 3, 8, "is not in the guest's memory"),
        (0, 8, "is not in the guest's memory"),
    ] {
        causes_fault(fault, |memory, addresses| {
            write_descriptor(memory, addresses.table, guest, len, WRITE, 0);
        });
    }
}

#[test]
fn available_indices_that_jump_are_faults() {
    for jump in [SIZE + 1, 0x7fff, 0xffff] {
        let log = Log::new();
        let mut pair = Pair::start();
        pair.echo(0);
        let index = pair.rings[0].addresses().available + 2;
        let now = pair.memory.load_le16(index, Ordering::Relaxed);
        pair.memory.store_le16(index, now.wrapping_add(jump), Ordering::Release);
        pair.rings[0].force_kick();
        pair.wait_fault();
        pair.other_echoes();
        assert_eq!(log.count("its available index is"), 1);
        pair.reset_first();
        pair.end().unwrap();
    }
}

#[test]
fn overlapping_rings_affect_only_their_guest() {
    let _log = Log::new();
    let mut pair = Pair::start();
    // The first ring has the addresses of the second: its used entries are written to the other's ring, which
    // affects only their own driver.
    pair.frontend.stop(0).unwrap();
    pair.frontend.stop(1).unwrap();
    let (first, second) = pair.rings.split_at_mut(1);
    for (used, base) in [(second[0].addresses().available, 0), (first[0].addresses().table, 7)] {
        let addresses = first[0].addresses();
        let user = [addresses.table, used, addresses.available].map(|guest| pair.memory.user_addr(guest));
        let payload = [
            towline_frontend::wire::encode_u32_pair(0, 0),
            towline_frontend::wire::encode_u64s(&user),
            towline_frontend::wire::encode_u64s(&[0]),
        ];
        use towline_frontend::wire::RequestCode;
        pair.frontend.start(&first[0], base).unwrap();
        pair.frontend.request(RequestCode::SET_VRING_ADDR, &payload.concat(), &[]).unwrap();
        for _ in 0..40 {
            let back = QueueBuffer { guest: addresses.table, len: 64 };
            first[0].add(&[], &[back], 0);
            first[0].publish();
            first[0].force_kick();
        }
        pair.frontend.stop(0).unwrap();
    }
    pair.reset_first();
    pair.end().unwrap();
}

#[test]
fn buffers_may_overlap_the_log_and_the_rings() {
    let _log = Log::new();
    let mut pair = Pair::start();
    // The log is in the guest's own memory: every mark changes guest memory, and every used buffer changes
    // marks.
    pair.frontend.set_log(&pair.memory).unwrap();
    let logged = pair.features | towline_frontend::wire::feature::LOG_ALL;
    pair.frontend.set_features(logged).unwrap();
    let ring = &mut pair.rings[0];
    pair.frontend.set_vring_addr(ring, true).unwrap();
    let addresses = ring.addresses();
    for guest in [GUEST_BASE, addresses.table, addresses.available, addresses.used] {
        for _ in 0..SIZE {
            ring.add(&[QueueBuffer { guest, len: 64 }], &[QueueBuffer { guest, len: 64 }], 0);
            ring.publish();
            ring.force_kick();
        }
    }
    pair.frontend.set_features(pair.features).unwrap();
    pair.frontend.stop(0).unwrap();
    pair.frontend.stop(1).unwrap();
    pair.end().unwrap();
}

#[test]
fn a_flood_of_kicks_does_not_block_the_other_ring() {
    let _log = Log::new();
    let mut pair = Pair::start();
    let kick = pair.rings[0].kick_fd().try_clone_to_owned().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let flooding = Arc::clone(&over);
    let flood = std::thread::spawn(move || {
        while !flooding.load(Ordering::Relaxed) {
            let _ = rustix::io::write(&kick, &1u64.to_ne_bytes());
        }
    });
    // The same thread serves both rings; it serves the other one, and the session replies.
    for _ in 0..200 {
        pair.other_echoes();
    }
    let number = pair.frontend.number(towline_frontend::wire::RequestCode::GET_QUEUE_NUM).unwrap();
    assert_eq!(number, 2);
    pair.echo(0);
    over.store(true, Ordering::Relaxed);
    flood.join().unwrap();
    pair.end().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Another vCPU writes to the first ring while the device processes it.
    #[test]
    fn concurrently_modified_rings_do_not_affect_others(seed in any::<u64>()) {
        let _log = Log::new();
        let mut pair = Pair::start();
        let (memory, addresses) = (Arc::clone(&pair.memory), pair.rings[0].addresses());
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let scribbler = std::thread::spawn(move || {
            let mut state = seed | 1;
            while !stop.load(Ordering::Relaxed) {
                // xorshift; half of the words are small, so some of them are valid.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let (start, len) = [
                    (addresses.table, 16 * u64::from(SIZE)),
                    (addresses.available, 6 + 2 * u64::from(SIZE)),
                    (addresses.used, 6 + 8 * u64::from(SIZE)),
                ][(state % 3) as usize];
                let value = if state & 8 == 0 { (state >> 16) as u16 } else { (state >> 16) as u16 % SIZE };
                memory.store_le16(start + (state >> 32) % (len / 2) * 2, value, Ordering::Relaxed);
            }
        });
        for _ in 0..30 {
            for _ in 0..4 {
                let buffer = QueueBuffer { guest: GUEST_BASE + (1 << 19), len: 32 };
                pair.rings[0].add(&[buffer], &[buffer], 0);
            }
            pair.rings[0].publish();
            pair.rings[0].force_kick();
            pair.other_echoes();
        }
        // It can be stopped and started again.
        pair.frontend.stop(0).unwrap();
        let old = &pair.rings[0];
        pair.frontend.start(old, 3).unwrap();
        over.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        pair.reset_first();
        pair.other_echoes();
        pair.end().unwrap();
    }
}

//! Drivers that violate the specification: each violation is a fault with its name, after bounded work.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use towline_vhost_user::message::RegionInfo;
use towline_vhost_user::ring::{
    BATCH_SEGMENTS_MAX, CHAIN_BYTES_MAX, CHAIN_DESCRIPTORS_MAX, CHAIN_SEGMENTS_MAX,
};
use towline_vhost_user::{Batch, GuestMemory, Region, Ring, RingFault, features};

use crate::driver::*;

const BOTH: u64 = features::EVENT_IDX | features::INDIRECT_DESC;
const SIZE: u16 = 8;

/// Fault of a chain with these descriptors in the ring's table.
fn fault_of(descriptors: &[(u64, u32, u16, u16)], features: u64) -> RingFault {
    let mut driver = Driver::new(SIZE);
    for (index, (address, len, flags, next)) in (0..).zip(descriptors) {
        driver.write_descriptor(TABLE, index, Descriptor::new(*address, *len, *flags, *next));
    }
    driver.make_available(0);
    fault(&mut driver.ring(features).unwrap())
}

fn fault(ring: &mut Ring) -> RingFault {
    let mut batch = Batch::new();
    assert_eq!(ring.pop(&mut batch, 64), 0);
    // The ring stays faulted.
    assert_eq!(ring.pop(&mut batch, 64), 0);
    assert!(!ring.enable_notification_and_recheck());
    ring.fault().unwrap().clone()
}

const BUFFER_AT: u64 = GUEST + 0x4_0000;
const TABLE_AT: u64 = GUEST + 0x1_0000;

#[test]
fn invalid_chains_are_named() {
    let head = 0;
    let loops = RingFault::TooManyDescriptors { head, most: SIZE.into() };
    assert_eq!(fault_of(&[(BUFFER_AT, 1, NEXT, 1), (BUFFER_AT, 1, NEXT, 0)], BOTH), loops);
    assert_eq!(fault_of(&[(BUFFER_AT, 1, NEXT, 0)], BOTH), loops);
    assert_eq!(fault_of(&[(BUFFER_AT, 1, NEXT, 8)], BOTH), RingFault::Next { head, found: 8, size: 8 });
    assert_eq!(fault_of(&[(BUFFER_AT, 0, 0, 0)], BOTH), RingFault::EmptyDescriptor { head });
    assert_eq!(
        fault_of(&[(BUFFER_AT, 1, NEXT | WRITE, 1), (BUFFER_AT, 1, 0, 0)], BOTH),
        RingFault::DescriptorOrder { head }
    );
    let largest = RingFault::TooManyBytes { head };
    assert_eq!(fault_of(&[(BUFFER_AT, u32::MAX, 0, 0)], BOTH), largest);
    assert_eq!(fault_of(&[(BUFFER_AT, CHAIN_BYTES_MAX + 1, 0, 0)], BOTH), largest);
    assert_eq!(
        fault_of(&[(BUFFER_AT, 16, NEXT, 1), (BUFFER_AT, CHAIN_BYTES_MAX - 15, WRITE, 0)], BOTH),
        largest
    );
}

#[test]
fn buffers_outside_memory_are_named() {
    let end = GUEST + MEMORY_BYTES;
    for (guest, len) in [(0, 1), (GUEST - 1, 2), (end - 1, 2), (end, 1), (u64::MAX, 1), (u64::MAX - 7, 16)] {
        assert_eq!(fault_of(&[(guest, len, WRITE, 0)], BOTH), RingFault::Buffer { head: 0, guest, len });
    }
    let len = CHAIN_BYTES_MAX;
    assert_eq!(
        fault_of(&[(BUFFER_AT, len, 0, 0)], BOTH),
        RingFault::Buffer { head: 0, guest: BUFFER_AT, len }
    );
}

#[test]
fn invalid_indirect_tables_are_named() {
    let indirect = |why| RingFault::Indirect { head: 0, why };
    assert_eq!(
        fault_of(&[(TABLE_AT, 16, INDIRECT, 0)], 0),
        indirect("although the feature was not negotiated")
    );
    assert_eq!(fault_of(&[(TABLE_AT, 16, INDIRECT | NEXT, 1)], BOTH), indirect("with a next descriptor"));
    for len in [0, 15, 17] {
        assert_eq!(
            fault_of(&[(TABLE_AT, len, INDIRECT, 0)], BOTH),
            indirect("that ends within a descriptor")
        );
    }
    let most = CHAIN_DESCRIPTORS_MAX;
    for len in [0xffff_fff0, 16 * (u32::try_from(most).unwrap() + 1)] {
        assert_eq!(
            fault_of(&[(TABLE_AT, len, INDIRECT, 0)], BOTH),
            RingFault::TooManyDescriptors { head: 0, most }
        );
    }
    let guest = GUEST + MEMORY_BYTES - 16;
    assert_eq!(fault_of(&[(guest, 32, INDIRECT, 0)], BOTH), RingFault::Buffer { head: 0, guest, len: 32 });
}

/// Makes `heads` chains available, all with one indirect table of `descriptors` descriptors.
fn make_tables_available(driver: &mut Driver, heads: u16, descriptors: u16, address: u64, len: u32) {
    for index in 0..descriptors {
        let flags = if index + 1 < descriptors { NEXT } else { 0 };
        driver.write_descriptor(TABLE_AT - GUEST, index, Descriptor::new(address, len, flags, index + 1));
    }
    for head in 0..heads {
        driver.write_descriptor(
            TABLE,
            head,
            Descriptor::new(TABLE_AT, 16 * u32::from(descriptors), INDIRECT, 0),
        );
        driver.make_available(head);
    }
}

#[test]
fn a_batch_has_a_bounded_number_of_segments() {
    let (heads, descriptors) = (64, CHAIN_DESCRIPTORS_MAX as u16);
    let mut driver = Driver::new(heads);
    make_tables_available(&mut driver, heads, descriptors, BUFFER_AT, 1);
    let mut ring = driver.ring(BOTH).unwrap();
    let mut batch = Batch::new();
    let mut popped = 0;
    while popped < usize::from(heads) {
        let here = ring.pop(&mut batch, 256);
        let segments: usize = batch.chains().map(|chain| chain.readable().len()).sum();
        assert!(
            here > 0 && segments <= BATCH_SEGMENTS_MAX + CHAIN_SEGMENTS_MAX,
            "{here} chains, {segments} segments"
        );
        popped += here;
        batch.chains().for_each(|chain| ring.complete(chain, 0));
        // A worker that takes a short batch for an empty ring runs again.
        assert_eq!(ring.enable_notification_and_recheck(), popped < usize::from(heads), "after {popped}");
    }
}

#[test]
fn a_chain_with_too_many_segments_is_named() {
    let mut driver = Driver::new(SIZE);
    let half = MEMORY_BYTES / 2;
    let region = |at: u64| {
        let info =
            RegionInfo { guest_address: GUEST + at, size: half, user_address: USER + at, mmap_offset: at };
        Region::map(&info, driver.file.as_fd().try_clone_to_owned().unwrap()).unwrap()
    };
    let memory = Arc::new(GuestMemory::new(vec![region(0), region(half)]).unwrap());
    // Each buffer lies across the border of two regions.
    let fits = u16::try_from(CHAIN_SEGMENTS_MAX / 2).unwrap();
    make_tables_available(&mut driver, 1, fits, GUEST + half - 1, 2);
    let mut ring = Ring::new(driver.setup(BOTH), Arc::clone(&memory), 1).unwrap();
    assert_eq!(ring.pop(&mut Batch::new(), 1), 1);
    make_tables_available(&mut driver, 1, fits + 1, GUEST + half - 1, 2);
    let mut ring = Ring::new(driver.setup(BOTH), memory, 1).unwrap();
    assert_eq!(fault(&mut ring), RingFault::TooManySegments { head: 0 });
}

#[test]
fn nested_tables_and_loops_in_tables_are_named() {
    let within = |first: (u64, u32, u16, u16), second: (u64, u32, u16, u16)| {
        let mut driver = Driver::new(SIZE);
        for (index, (address, len, flags, next)) in [(0, first), (1, second)] {
            driver.write_descriptor(0x1_0000, index, Descriptor::new(address, len, flags, next));
        }
        driver.write_descriptor(TABLE, 0, Descriptor::new(TABLE_AT, 32, INDIRECT, 0));
        driver.make_available(0);
        fault(&mut driver.ring(BOTH).unwrap())
    };
    let plain = (BUFFER_AT, 1, 0, 0);
    assert_eq!(
        within((TABLE_AT, 16, INDIRECT, 0), plain),
        RingFault::Indirect { head: 0, why: "within another one" }
    );
    assert_eq!(within((BUFFER_AT, 1, NEXT, 0), plain), RingFault::TooManyDescriptors { head: 0, most: 2 });
    assert_eq!(within((BUFFER_AT, 1, NEXT, 2), plain), RingFault::Next { head: 0, found: 2, size: 2 });
    assert_eq!(
        within((BUFFER_AT, 1, NEXT, 1), (BUFFER_AT, 1, NEXT, 0)),
        RingFault::TooManyDescriptors { head: 0, most: 2 }
    );
}

#[test]
fn an_available_index_that_jumps_is_named() {
    for (found, last_avail_idx) in [(SIZE + 1, 0), (0xffff, 0), (0x8000, 0)] {
        let driver = Driver::new(SIZE);
        driver.put(AVAILABLE + 2, &u16::to_le_bytes(found));
        assert_eq!(
            fault(&mut driver.ring(BOTH).unwrap()),
            RingFault::AvailableIndex { found, most: SIZE, last_avail_idx }
        );
    }
    let mut driver = Driver::new(SIZE);
    driver.make_available(SIZE);
    assert_eq!(fault(&mut driver.ring(BOTH).unwrap()), RingFault::Head { found: SIZE, size: SIZE });
}

#[test]
fn a_chain_in_flight_cannot_be_made_available_again() {
    let mut driver = Driver::new(SIZE);
    driver.write_descriptor(TABLE, 3, Descriptor::new(BUFFER_AT, 1, 0, 0));
    driver.make_available(3);
    driver.make_available(3);
    let mut ring = driver.ring(BOTH).unwrap();
    let mut batch = Batch::new();
    // The first one is valid, and can still be completed.
    assert_eq!(ring.pop(&mut batch, 64), 1);
    assert_eq!(ring.fault(), Some(&RingFault::HeadInFlight { head: 3 }));
    ring.complete(batch.chain(0), 0);
    ring.publish();
    assert_eq!(driver.pop_used(), Some((3, 0)));
}

#[test]
fn a_ring_has_no_more_chains_in_flight_than_entries() {
    let mut driver = Driver::new(2);
    (0..2).for_each(|index| driver.write_descriptor(TABLE, index, Descriptor::new(BUFFER_AT, 1, 0, 0)));
    driver.make_available(0);
    driver.make_available(1);
    let mut ring = driver.ring(BOTH).unwrap();
    let mut batch = Batch::new();
    assert_eq!(ring.pop(&mut batch, 64), 2);
    driver.make_available(0);
    assert_eq!(ring.pop(&mut Batch::new(), 64), 0);
    assert_eq!(ring.fault(), Some(&RingFault::AvailableIndex { found: 3, most: 2, last_avail_idx: 2 }));
}

#[test]
fn a_ring_outside_memory_is_named() {
    let driver = Driver::new(SIZE);
    let with = |change: &dyn Fn(&mut towline_vhost_user::RingSetup)| {
        let mut setup = driver.setup(BOTH);
        change(&mut setup);
        Ring::new(setup, driver.memory(), 1).unwrap_err().to_string()
    };
    assert_eq!(with(&|setup| setup.size = 0), "its size is 0, expected a power of two up to 32768");
    assert_eq!(with(&|setup| setup.size = 6), "its size is 6, expected a power of two up to 32768");
    assert_eq!(with(&|setup| setup.size = 65536), "its size is 65536, expected a power of two up to 32768");
    let odd =
        "its used ring at user address 0x7f0000008002 (70 bytes, aligned to 4) is not in the guest's memory";
    assert_eq!(with(&|setup| setup.address.used = USER + USED + 2), odd);
    let end = with(&|setup| setup.address.available = USER + MEMORY_BYTES - 20);
    assert!(end.starts_with("its available ring at user address 0x7f000007ffec (22 bytes"), "{end}");
    let empty = Ring::new(driver.setup(BOTH), GuestMemory::default().into(), 1).unwrap_err().to_string();
    assert!(empty.starts_with("its descriptor table at"), "{empty}");
}

#[test]
fn overlapping_parts_of_a_ring_stay_within_bounds() {
    // The used ring overlaps the descriptor table: used entries are new descriptors.
    let mut driver = Driver::new(SIZE);
    let mut setup = driver.setup(BOTH);
    setup.address.used = setup.address.descriptors;
    let mut ring = Ring::new(setup, driver.memory(), 1).unwrap();
    driver.write_descriptor(TABLE, 7, Descriptor::new(BUFFER_AT, 8, WRITE, 0));
    let mut batch = Batch::new();
    for _ in 0..100 {
        driver.make_available(7);
        for chain in 0..ring.pop(&mut batch, 64) {
            ring.complete(batch.chain(chain), 8);
        }
        ring.publish();
    }
    assert!(ring.fault().is_some() || ring.statistics().chains == 100);
}

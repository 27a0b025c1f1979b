//! Hostile frontends: changes of features and memory at any time, requests in any order.

use proptest::collection::vec;
use proptest::prelude::*;
use towline_frontend::wire::{RegionInfo, RequestCode, encode_u32_pair, encode_u64s, feature};
use towline_frontend::{Error, Queue, QueueOptions};

use crate::backend::{Log, Pair, SIZE};

#[test]
fn features_change_only_while_no_ring_runs() {
    let _log = Log::new();
    let mut pair = Pair::start();
    for round in 0..40u64 {
        // While rings run, only the frontend's own bits may change.
        let other = pair.features ^ (1 << (round % 40));
        let outcome = pair.frontend.set_features(other);
        let frontends = [feature::LOG_ALL, feature::PROTOCOL_FEATURES].contains(&(pair.features ^ other));
        match outcome {
            Ok(()) => assert!(frontends, "{other:#x} was accepted while rings run"),
            Err(error) => assert!(matches!(error, Error::Reply { .. }), "{error}"),
        }
        pair.frontend.set_features(pair.features).unwrap();
        pair.echo(0);
        pair.other_echoes();
    }
    // With all rings stopped any offered features may change, and the rings use them.
    for features in [1 << 32, 1 << 32 | 1 << 29, 1 << 32 | 1 << 28, pair.features] {
        let features = features | 1 << 30;
        (0..2).for_each(|ring| assert!(pair.frontend.stop(ring).unwrap() <= 200));
        pair.frontend.set_features(features).unwrap();
        for index in 0..2 {
            let queue = Queue::new(&pair.memory, index, QueueOptions { size: SIZE, features }).unwrap();
            pair.frontend.start(&queue, 0).unwrap();
            pair.rings[index as usize] = queue;
        }
        pair.echo(0);
        pair.other_echoes();
    }
    pair.end().unwrap();
}

#[test]
fn removed_memory_is_a_fault_of_each_ring() {
    let log = Log::new();
    let mut pair = Pair::start();
    pair.echo(0);
    for round in 1..=5 {
        pair.rings.iter_mut().for_each(Queue::force_kick);
        pair.frontend.set_mem_table(None).unwrap();
        pair.rings.iter_mut().for_each(Queue::force_kick);
        pair.wait_fault();
        assert_eq!(log.count("is not in the guest's memory"), 2 * round, "a line for each ring");
        pair.frontend.set_mem_table(Some(&pair.memory)).unwrap();
        for index in 0..2 {
            pair.frontend.stop(index).unwrap();
            let options = QueueOptions { size: SIZE, features: pair.features };
            let queue = Queue::new(&pair.memory, index, options).unwrap();
            pair.frontend.start(&queue, 0).unwrap();
            pair.rings[index as usize] = queue;
        }
        pair.echo(0);
        pair.other_echoes();
    }
    pair.end().unwrap();
}

/// Part of the available ring that the used ring overlaps.
#[derive(Clone, Copy)]
enum Edge {
    Start,
    End,
}

/// Sets the addresses of the first ring so that its used ring overlaps its available ring.
fn overlap(pair: &mut Pair, edge: Edge) {
    let at = pair.rings[0].addresses();
    let used = match edge {
        // The used ring begins before the available ring, and ends in it or after it.
        Edge::Start => at.available - 4,
        // The last entry.
        Edge::End => at.available + 2 + 2 * u64::from(SIZE),
    } & !3;
    let user = [at.table, used, at.available].map(|guest| pair.memory.user_addr(guest));
    let payload = [encode_u32_pair(0, 0), encode_u64s(&user), encode_u64s(&[0])].concat();
    pair.frontend.request(RequestCode::SET_VRING_ADDR, &payload, &[]).unwrap();
}

/// Starts the first ring with the addresses that it has.
fn kick(pair: &mut Pair) {
    let (ring, index) = (&pair.rings[0], encode_u64s(&[0]));
    pair.frontend.request(RequestCode::SET_VRING_ERR, &index, &[ring.err_fd()]).unwrap();
    pair.frontend.request(RequestCode::SET_VRING_KICK, &index, &[ring.kick_fd()]).unwrap();
}

/// A completion is then an available chain too, so a device would never rest.
#[test]
fn a_used_ring_over_the_available_ring_is_refused_at_every_moment() {
    let log = Log::new();
    let mut pair = Pair::start();
    let mut reported = 0;
    for edge in [Edge::Start, Edge::End] {
        let moments: [fn(&mut Pair, Edge); 4] = [
            // Before the start.
            |pair, edge| {
                pair.frontend.stop(0).unwrap();
                overlap(pair, edge);
                kick(pair);
                pair.frontend.enable(0, true).unwrap();
            },
            // Between start and enable.
            |pair, edge| {
                pair.frontend.stop(0).unwrap();
                pair.frontend.enable(0, false).unwrap();
                pair.frontend.start_only(&pair.rings[0], 0).unwrap();
                overlap(pair, edge);
                pair.frontend.enable(0, true).unwrap();
            },
            // While it runs.
            |pair, edge| overlap(pair, edge),
            // After memory has changed twice: the ring was abandoned with the memory, and is started with
            // these addresses.
            |pair, edge| {
                pair.frontend.stop(0).unwrap();
                pair.frontend.set_mem_table(None).unwrap();
                overlap(pair, edge);
                pair.frontend.set_mem_table(Some(&pair.memory)).unwrap();
                kick(pair);
                pair.frontend.set_mem_table(Some(&pair.memory)).unwrap();
                pair.frontend.stop(1).unwrap();
                pair.rings[1] =
                    Queue::new(&pair.memory, 1, QueueOptions { size: SIZE, features: pair.features })
                        .unwrap();
                pair.frontend.start(&pair.rings[1], 0).unwrap();
            },
        ];
        for set in moments {
            set(&mut pair, edge);
            pair.wait_fault();
            reported += 1;
            assert_eq!(log.count("overlaps its available ring"), reported);
            pair.rings[0].force_kick();
            pair.other_echoes();
            pair.reset_first();
        }
    }
    pair.end().unwrap();
}

/// User addresses of a ring: descriptors, used ring, available ring.
fn user_addresses(pair: &Pair, ring: usize) -> [u64; 3] {
    let at = pair.rings[ring].addresses();
    [at.table, at.used, at.available].map(|guest| pair.memory.user_addr(guest))
}

fn set_addresses(pair: &mut Pair, ring: u32, user: [u64; 3]) -> Result<(), Error> {
    let payload = [encode_u32_pair(ring, 0), encode_u64s(&user), encode_u64s(&[0])].concat();
    pair.frontend.request(RequestCode::SET_VRING_ADDR, &payload, &[])
}

/// Two rings whose completions are each other's available chains would keep a device busy without the driver.
#[test]
fn a_used_ring_over_the_available_ring_of_another_is_refused() {
    let _log = Log::new();
    let mut pair = Pair::start();
    let [own, other] = [0, 1].map(|ring| user_addresses(&pair, ring));
    // While it runs: it stays at its former addresses.
    let crossed = [own[0], other[2] & !3, own[2]];
    assert!(set_addresses(&mut pair, 0, crossed).is_err(), "the used ring of a running ring");
    let crossed = [own[0], own[1], other[1]];
    assert!(set_addresses(&mut pair, 0, crossed).is_err(), "the available ring of a running ring");
    pair.echo(0);
    pair.other_echoes();
    // When it starts.
    let base = pair.frontend.stop(0).unwrap();
    set_addresses(&mut pair, 0, [own[0], other[2] & !3, own[2]]).unwrap();
    let (index, kick) = (encode_u64s(&[0]), pair.rings[0].kick_fd());
    assert!(pair.frontend.request(RequestCode::SET_VRING_KICK, &index, &[kick]).is_err(), "a start");
    pair.other_echoes();
    pair.frontend.start(&pair.rings[0], base).unwrap();
    pair.echo(0);
    pair.other_echoes();
    pair.end().unwrap();
}

/// Memory that is mapped twice has two addresses.
#[test]
fn rings_are_compared_by_the_bytes_of_their_memory() {
    let log = Log::new();
    let mut pair = Pair::start();
    let [own, other] = [0, 1].map(|ring| user_addresses(&pair, ring));
    let known = pair.memory.regions().next().unwrap();
    let again = RegionInfo { guest_address: 0x9000_0000, user_address: 0x1000_0000, ..known };
    let payload = [encode_u64s(&[0]), again.encode()].concat();
    pair.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[pair.memory.fd()]).unwrap();
    let second = |user: u64| user - known.user_address + again.user_address;
    assert!(set_addresses(&mut pair, 0, [own[0], second(other[2] & !3), own[2]]).is_err());
    pair.echo(0);
    set_addresses(&mut pair, 0, [own[0], second(own[2] & !3), own[2]]).unwrap();
    pair.wait_fault();
    assert_eq!(log.count("overlaps its available ring"), 1);
    pair.other_echoes();
    pair.end().unwrap();
}

#[test]
fn memory_slots_are_added_and_removed_while_rings_run() {
    let _log = Log::new();
    let mut pair = Pair::start();
    let other = towline_frontend::MemoryArena::new(1 << 16).unwrap();
    for at in 0..50u64 {
        let region = towline_frontend::wire::RegionInfo {
            guest_address: 0x8000_0000 + at * (1 << 16),
            size: 1 << 16,
            user_address: 0x1000_0000 + at * (1 << 16),
            mmap_offset: 0,
        };
        let payload = [encode_u64s(&[0]), region.encode()].concat();
        pair.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[other.fd()]).unwrap();
        // The same region again has no effect; an overlapping one is refused.
        pair.frontend.request(RequestCode::ADD_MEM_REG, &payload, &[other.fd()]).unwrap();
        let elsewhere =
            towline_frontend::wire::RegionInfo { user_address: region.user_address + (1 << 40), ..region };
        let elsewhere = [encode_u64s(&[0]), elsewhere.encode()].concat();
        let twice = pair.frontend.request(RequestCode::ADD_MEM_REG, &elsewhere, &[other.fd()]).unwrap_err();
        assert!(matches!(twice, Error::Reply { .. }), "{twice}");
        pair.echo(0);
        if at % 3 == 0 {
            pair.frontend.request(RequestCode::REM_MEM_REG, &payload, &[]).unwrap();
        }
        pair.other_echoes();
    }
    pair.end().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Requests in any order with any numbers, while rings run. The backend ends when its frontend
    /// disconnects.
    #[test]
    fn arbitrary_requests_leave_no_thread_behind(requests in vec((1..44u32, 0..4u32, 0..40u32, 0..3usize), 1..30)) {
        let _log = Log::new();
        let mut pair = Pair::start();
        for (code, first, second, fds) in requests {
            let fds = vec![pair.memory.fd(); fds];
            let payload = match code {
                9 => [encode_u32_pair(first, second), encode_u64s(&[u64::from(second) << 36; 4])].concat(),
                24 | 25 => [first.to_le_bytes(), second.to_le_bytes(), [0; 4]].concat(),
                _ => encode_u32_pair(first, second),
            };
            let bytes = towline_frontend::wire::acknowledged_request(RequestCode("any", code), &payload);
            let sent = pair.frontend.send(&bytes, RequestCode("any", code), &fds);
            if sent.is_err() {
                break;
            }
        }
        // Served or refused, but no thread is stuck.
        let _ = pair.end();
    }
}

//! Random guests over random channels with random faults: either both sides agree that it is done, or the
//! source keeps its guest and knows why. `TOWLINE_SEEDS=first..last` (or a count) runs others than the first
//! 2,000.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use fastrand::Rng;
use towline_channel::fault::Direction;
use towline_migration::{ChannelId, Error, Memory};

const SEEDS: u64 = 2000;
const NAMES: [&str; 4] = ["pc.ram", "vga.vram", "0000:00:02.0/rom", "pc.bios"];
/// Runs wait more than they work.
const THREADS: usize = 6;

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("TOWLINE_SEEDS") else { return 0..SEEDS };
    let number = |text: &str| text.trim().parse().expect("TOWLINE_SEEDS is a number or first..last");
    match text.split_once("..") {
        Some((first, last)) => number(first)..number(last),
        None => 0..number(&text),
    }
}

fn layer(rng: &mut Rng, stream: ChannelId) -> Layer {
    match rng.u8(0..4) {
        0 | 1 => {
            let direction = if rng.bool() { Direction::Send } else { Direction::Recv };
            let scale = match stream {
                ChannelId::Main => [20, 600, 30_000, 400_000],
                ChannelId::Lane(_) => [70, 1500, 30_000, 400_000],
            };
            let most = scale[rng.usize(0..4)];
            Layer::Cut(rng.u64(0..most), direction)
        }
        2 => Layer::Short(rng.usize(500..20_000), rng.u64(..)),
        _ => Layer::Delay(Duration::from_micros(rng.u64(0..300)), rng.u64(..)),
    }
}

fn faults(rng: &mut Rng, lanes: usize) -> Vec<Fault> {
    let count = [0, 1, 1, 2][rng.usize(0..4)];
    let fault = |_| {
        let side = if rng.bool() { Side::Source } else { Side::Destination };
        let stream = match rng.usize(0..=lanes) {
            0 => ChannelId::Main,
            lane => ChannelId::Lane(lane - 1),
        };
        Fault { side, stream, layer: layer(rng, stream) }
    };
    (0..count).map(fault).collect()
}

/// Returns whether it was done.
fn run(seed: u64) -> bool {
    let mut rng = Rng::with_seed(seed);
    let machine = MACHINES[rng.usize(0..3)];
    let lanes = [0, 1, 2, 4][rng.usize(0..4)];
    let kind = [Kind::Memory(rng.usize(100..100_000)), Kind::Unix, Kind::Tcp][rng.usize(0..3)];
    let pages: Vec<_> = NAMES[..rng.usize(1..=4)].iter().map(|&name| (name, rng.u64(1..60))).collect();
    let hops = if rng.u8(0..4) == 0 { 2 } else { 1 };
    let (guest, writer) = Writer::guest(machine, &pages, seed);
    let sink = if rng.bool() { empty(machine, &pages) } else { Arc::new(Memory::adopting(1 << 20)) };
    if rng.bool() {
        writer.run(&guest, seed, &writer);
    }
    let links: Vec<_> = (0..hops).map(|_| faults(&mut rng, lanes)).collect();
    let context = format!("seed {seed}: {machine}, {lanes} lanes, {kind:?}, {pages:?}, {links:?}");
    let is_main_cut = links
        .iter()
        .flatten()
        .any(|fault| matches!(fault, Fault { stream: ChannelId::Main, layer: Layer::Cut(..), .. }));
    let is_cut = links.iter().flatten().any(|fault| matches!(fault.layer, Layer::Cut(..)));
    let links = links.iter().map(|faults| link_with(kind, lanes, faults)).collect();
    let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
    let (stops, starts) = writer.counts();
    writer.end();
    match &outcome.source.result {
        Ok(()) => {
            assert!(outcome.destination.result.is_ok() && sink.is_committed(), "{context}: {outcome:?}");
            assert_eq!(difference(&guest, &sink), None, "{context}");
            assert_eq!((stops, starts), (1, 0), "{context}");
        }
        Err(error) => {
            assert!(is_cut && !matches!(error, Error::Cancelled | Error::Panicked), "{context}: {outcome:?}");
            assert_eq!(stops, starts, "{context}: {outcome:?}");
            // Of a whole migration only the last word can be lost, and only on the main channel.
            assert!(is_main_cut || outcome.destination.result.is_err(), "{context}: {outcome:?}");
        }
    }
    outcome.source.result.is_ok()
}

#[test]
fn either_it_is_done_or_the_source_has_its_guest() {
    let seeds = seeds();
    let (next, done, begun) = (AtomicU64::new(seeds.start), AtomicU64::new(0), Instant::now());
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    done.fetch_add(run(seed).into(), Ordering::Relaxed);
                }
            });
        }
    });
    println!("{} of {} were done, in {:?}", done.into_inner(), seeds.end - seeds.start, begun.elapsed());
}

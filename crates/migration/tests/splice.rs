//! Relays that splice: pages of a main channel and of lanes, between sockets.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use common::*;
use towline_channel::{ChannelExt, IoBuf, SendFlags};
use towline_migration::{ChannelId, Compression, Error, Memory, Pages, Relay, Session, Sink, outgoing};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::source::{RamOptions, Setup};
use towline_protocol::{BlockIndex, PageRef, RamBlock};

const BLOCKS: [(&str, u64); 3] = [("vga.rom", 1), ("vga.vram", 513), ("pc.ram", 1537)];

/// Migrates over links whose first one splits the main channel in many ways, and checks each outcome.
fn migrate_in_splits(further_links: usize, check: impl Fn(&Outcome)) {
    for (seed, most) in [(1, 3_000), (2, 9_000), (3, 70_000), (4, 1 << 20)] {
        for kind in [Kind::Unix, Kind::Tcp] {
            let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, seed);
            let sink = empty(MACHINES[0], &BLOCKS);
            writer.run(&guest, seed, &writer);
            let short =
                Fault { side: Side::Source, stream: ChannelId::Main, layer: Layer::Short(most, seed) };
            let further = (0..further_links).map(|_| link(kind, 0));
            let links = std::iter::once(link_with(kind, 0, &[short])).chain(further).collect();
            let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
            outcome.expect_success();
            assert_eq!(difference(&guest, &sink), None);
            check(&outcome);
        }
    }
}

/// The destination gets the same however the stream is split.
#[test]
fn every_split_of_a_main_channel_is_spliced_alike() {
    migrate_in_splits(1, |outcome| {
        let (relay, source) = (&outcome.relays[0].statistics, &outcome.source.statistics);
        assert!(relay.spliced_calls > 0, "{relay:?}");
        assert_eq!((relay.normal, relay.duplicate), (source.normal, source.duplicate));
        assert_eq!(relay.transferred, source.transferred);
    });
}

/// Into memory: most pages are received where they belong, however the stream is split.
#[test]
fn every_split_of_a_main_channel_arrives_in_place() {
    migrate_in_splits(0, |outcome| {
        let (source, found) = (&outcome.source.statistics, &outcome.destination.statistics);
        assert_eq!((found.normal, found.duplicate), (source.normal, source.duplicate));
        assert_eq!(found.transferred, source.transferred);
        assert!(found.vectored_calls > 0 && found.spliced_calls == 0, "{found:?}");
    });
}

/// A sink that takes pages from where they were received, as an image does.
struct Taker {
    memory: Arc<Memory>,
    pages: AtomicU64,
    /// Pages that came in runs of whole, aligned ones.
    in_runs: AtomicU64,
}

impl Sink for Taker {
    fn configuration(&self, configuration: &Configuration) -> Result<(), Error> {
        self.memory.configuration(configuration)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<(), Error> {
        Sink::blocks(&*self.memory, blocks)
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<(), Error> {
        let is_run =
            |slice: &&[u8]| slice.as_ptr().addr().is_multiple_of(PAGE) && slice.len().is_multiple_of(PAGE);
        let count = pages.offsets.len() as u64;
        self.pages.fetch_add(count, Ordering::Relaxed);
        if let [run] = pages.contents
            && is_run(run)
        {
            self.in_runs.fetch_add(count, Ordering::Relaxed);
        }
        self.memory.pages(stream, pages)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<(), Error> {
        self.memory.zero(stream, block, offsets)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<(), Error> {
        self.memory.current(page, content)
    }

    fn device_state(&self, state: DeviceState) -> Result<(), Error> {
        Sink::device_state(&*self.memory, state)
    }

    fn commit(&self) -> Result<(), Error> {
        self.memory.commit()
    }
}

/// Into a sink without memory for pages: most come in runs of whole pages, each by one call.
#[test]
fn a_main_channel_arrives_in_runs_of_whole_pages() {
    for seed in 1..4 {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, seed);
        // Without pages of zeros, whose records end a run.
        (0..BLOCKS[2].1).for_each(|page| guest.write(at(2, page * PAGE as u64), &[7; PAGE]));
        let memory = empty(MACHINES[0], &BLOCKS);
        let sink = Arc::new(Taker { memory, pages: 0.into(), in_runs: 0.into() });
        let outcome = migrate_over(vec![link(Kind::Unix, 0)], &guest, &sink, options(), &Arc::default());
        outcome.expect_success();
        assert_eq!(difference(&guest, &sink.memory), None);
        let [pages, in_runs] = [&sink.pages, &sink.in_runs].map(|count| count.load(Ordering::Relaxed));
        println!("{in_runs} of {pages} pages in runs");
        assert!(in_runs * 2 > pages, "{in_runs} of {pages} pages");
    }
}

#[test]
fn a_channel_without_a_descriptor_is_not_spliced() {
    let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
    let sink = empty(MACHINES[0], &BLOCKS);
    let links = vec![link(Kind::Unix, 0), link(Kind::Memory(100_000), 0)];
    let outcome = migrate_over(links, &guest, &sink, options(), &Arc::default());
    outcome.expect_success();
    assert_eq!(difference(&guest, &sink), None);
    let relay = &outcome.relays[0].statistics;
    assert_eq!((relay.spliced_calls, outcome.destination.statistics.vectored_calls), (0, 0), "{outcome:?}");
}

/// A stream whose last record names a page outside of its block, after `pages` others.
fn stream_out_of_range(pages: u64) -> Vec<u8> {
    let blocks = [RamBlock { name: "pc.ram".into(), length: pages * PAGE as u64, mapped: None }];
    let mut bytes = Vec::new();
    let setup = Setup::begin_with_return_path(&configuration(MACHINES[0]), &[], &mut bytes);
    let iterating = setup.write_ram_start(RamOptions { section_id: 2, barrier: None }, &blocks, &mut bytes);
    let mut part = iterating.open_part(&mut bytes);
    for page in 0..=pages {
        let page = PageRef { block: BlockIndex(0), offset: page * PAGE as u64 };
        part.records().page(page, &mut bytes);
        bytes.extend([9; PAGE]);
    }
    bytes
}

#[test]
fn a_record_outside_of_its_block_ends_the_migration_before_it_is_spliced() {
    for pages in [2, 40, 300] {
        let Link { source, destination } = link(Kind::Unix, 0);
        let next = link(Kind::Unix, 0);
        let stream = stream_out_of_range(pages);
        let writer = thread::spawn(move || {
            // The relay may end the connection before it has read everything.
            let _ = source.main.send_all(&[IoBuf::from(&stream[..])], SendFlags::empty());
            source
        });
        let sink = Arc::new(Memory::adopting(16 << 20));
        let end = {
            let sink = Arc::clone(&sink);
            thread::spawn(move || receive(next.destination, &*sink, &Arc::default(), Compression::None).0)
        };
        let session = Arc::<Session>::default();
        let relay = Relay::new(Arc::clone(&session), next.source, outgoing::LaneOptions::default()).unwrap();
        let (result, statistics) = receive(destination, &relay, &session, Compression::None);
        drop(relay);
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(error.to_string().contains("pc.ram"), "{error}");
        assert!(statistics.normal <= pages, "{statistics:?}");
        assert!(end.join().unwrap().is_err());
        drop(writer.join().unwrap());
    }
}

//! Guests whose memory the destination has in part: only the other blocks' pages are sent, or only they
//! arrive.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::*;
use fastrand::Rng;
use proptest::prelude::*;
use towline_channel::IoBuf;
use towline_migration::{
    Base, BasePresence, ChannelId, Compression, Error, Extent, ExtentKind, Guest, GuestWithPresentBlocks,
    Memory, Outgoing, Pages, Postcopy, Relay, Result, Session, Sink, SinkWithPresentBlocks, Statistics,
    outgoing, postcopy,
};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

const BLOCKS: [(&str, u64); 4] = [("pc.ram", 1537), ("vga.vram", 37), ("pc.bios", 513), ("vga.rom", 1)];

/// A sink that records what it gets, and keeps it in a memory.
struct Recording {
    memory: Arc<Memory>,
    lists: Mutex<Vec<Vec<RamBlock>>>,
    pages: Mutex<BTreeSet<(u32, u64)>>,
    /// Blocks of which a lane brought zero pages.
    zeros_of_lanes: Mutex<BTreeSet<u32>>,
}

impl Recording {
    fn new(machine: &str) -> Arc<Self> {
        let memory = empty(machine, &BLOCKS);
        Arc::new(Self {
            memory,
            lists: Mutex::default(),
            pages: Mutex::default(),
            zeros_of_lanes: Mutex::default(),
        })
    }

    fn record(&self, block: BlockIndex, offsets: &[u64]) {
        self.pages.lock().unwrap().extend(offsets.iter().map(|offset| (block.0, *offset)));
    }

    /// Fails unless it got the whole block list once, and pages of exactly the blocks that are not present.
    fn assert_got_all_but(&self, present: &[&str], guest: &Memory) {
        assert_eq!(*self.lists.lock().unwrap(), [guest.blocks().to_vec()]);
        let expected: BTreeSet<_> = (0..)
            .zip(guest.blocks())
            .filter(|(_, block)| !present.contains(&block.name.as_str()))
            .flat_map(|(index, block)| (0..block.length).step_by(PAGE).map(move |offset| (index, offset)))
            .collect();
        assert_eq!(*self.pages.lock().unwrap(), expected);
        assert_eq!(difference_outside(present, guest, &self.memory), None);
        let state = self.memory.take_device_state().unwrap();
        assert_eq!(state.bytes(), Guest::device_state(guest).unwrap());
        assert!(self.memory.is_committed());
    }
}

impl Sink for Recording {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        Sink::configuration(&*self.memory, configuration)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        self.lists.lock().unwrap().push(blocks.to_vec());
        Sink::blocks(&*self.memory, blocks)
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        self.record(pages.block, pages.offsets);
        self.memory.pages(stream, pages)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.record(block, offsets);
        if let ChannelId::Lane(_) = stream {
            self.zeros_of_lanes.lock().unwrap().insert(block.0);
        }
        self.memory.zero(stream, block, offsets)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()> {
        self.memory.current(page, content)
    }

    fn device_state(&self, state: DeviceState) -> Result<()> {
        Sink::device_state(&*self.memory, state)
    }

    fn commit(&self) -> Result<()> {
        self.memory.commit()
    }
}

/// As [`difference`], of the blocks that do not have these names.
fn difference_outside(present: &[&str], one: &Memory, other: &Memory) -> Option<String> {
    let (mut a, mut b) = ([0; PAGE], [0; PAGE]);
    for (index, block) in one.blocks().iter().enumerate() {
        if present.contains(&block.name.as_str()) {
            continue;
        }
        for offset in (0..block.length).step_by(PAGE) {
            one.read(at(index, offset), &mut a);
            other.read(at(index, offset), &mut b);
            if a != b {
                return Some(format!("page {offset:#x} of block {:?}", block.name));
            }
        }
    }
    None
}

fn bytes_outside(present: &[&str]) -> u64 {
    let others = BLOCKS.iter().filter(|(name, _)| !present.contains(name));
    others.map(|(_, pages)| pages * PAGE as u64).sum()
}

/// The blocks whose bits are set.
fn chosen(mask: usize) -> Vec<&'static str> {
    let is_set = |(index, _): &(usize, &(&str, u64))| mask >> index & 1 == 1;
    BLOCKS.iter().enumerate().filter(is_set).map(|(_, (name, _))| *name).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The guest writes everywhere while it is sent.
    #[test]
    fn pages_of_present_blocks_are_not_sent(mask in 0..16_usize, lanes in 0..3_usize, machine in 0..3_usize, seed: u64) {
        let (machine, present) = (MACHINES[machine], chosen(mask));
        let (memory, writer) = Writer::guest(machine, &BLOCKS, seed);
        writer.run(&memory, seed, &writer);
        let guest = Arc::new(GuestWithPresentBlocks::new(Arc::clone(&memory), present.clone()).unwrap());
        let sink = Recording::new(machine);
        let outcome = migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default());
        outcome.expect_success();
        sink.assert_got_all_but(&present, &memory);
        prop_assert_eq!(outcome.source.statistics.total, bytes_outside(&present));
    }

    /// A source that knows of no memory that is present sends all of it.
    #[test]
    fn pages_of_present_blocks_are_dropped_on_arrival(mask in 0..16_usize, lanes in 0..3_usize, machine in 0..3_usize, seed: u64) {
        let (machine, present) = (MACHINES[machine], chosen(mask));
        let (guest, writer) = Writer::guest(machine, &BLOCKS, seed);
        writer.run(&guest, seed, &writer);
        let recording = Recording::new(machine);
        let sink = Arc::new(SinkWithPresentBlocks::new(Arc::clone(&recording), present.clone()));
        migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default()).expect_success();
        recording.assert_got_all_but(&present, &guest);
        let all: u64 = BLOCKS.iter().map(|(_, pages)| pages).sum();
        prop_assert!(sink.dropped_pages() >= all - bytes_outside(&present) / PAGE as u64);
    }
}

/// A guest that is based on an image, and has written some pages.
#[derive(Debug)]
struct Based {
    memory: Arc<Memory>,
    written: Vec<Vec<Range<u64>>>,
}

impl Guest for Based {
    fn configuration(&self) -> &Configuration {
        Guest::configuration(&*self.memory)
    }

    fn blocks(&self) -> &[RamBlock] {
        Guest::blocks(&*self.memory)
    }

    fn difference(&self, block: BlockIndex) -> &[Range<u64>] {
        &self.written[block.index()]
    }

    fn extent(&self, page: PageRef) -> Extent {
        self.memory.extent(page)
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        Guest::memory(&*self.memory, page, length)
    }

    fn is_zero(&self, page: PageRef) -> bool {
        self.memory.is_zero(page)
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        Guest::device_state(&*self.memory)
    }
}

/// Runs of pages of a block, ascending and apart, of at least the lengths that packets have.
fn runs(rng: &mut Rng, pages: u64) -> Vec<Range<u64>> {
    let (mut runs, mut page) = (Vec::new(), rng.u64(0..4));
    while page < pages {
        let end = (page + rng.u64(1..200)).min(pages);
        runs.push(page * PAGE as u64..end * PAGE as u64);
        page = end + rng.u64(1..300);
    }
    runs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The destination has mapped what the guest is based on.
    #[test]
    fn only_the_difference_of_present_blocks_is_sent(mask in 0..16_usize, lanes in 0..3_usize, seed: u64) {
        let (memory, _) = Writer::guest(MACHINES[0], &BLOCKS, seed);
        let (mut rng, present, sink) = (Rng::with_seed(seed), chosen(mask), Recording::new(MACHINES[0]));
        let mut expected = BTreeSet::new();
        let mut guest = Based { memory: Arc::clone(&memory), written: Vec::new() };
        for (index, (name, pages)) in BLOCKS.iter().enumerate() {
            let is_present = present.contains(name);
            let mut content = vec![0; *pages as usize * PAGE];
            memory.read(at(index, 0), &mut content);
            let written = runs(&mut rng, *pages);
            if is_present {
                // The image, before the guest wrote.
                sink.memory.write(at(index, 0), &content);
                for run in &written {
                    let new: Vec<u8> = (run.start..run.end).map(|_| rng.u8(..)).collect();
                    memory.write(at(index, run.start), &new);
                }
            }
            let all = std::slice::from_ref(&(0..pages * PAGE as u64)).to_vec();
            for run in if is_present { &written } else { &all } {
                expected.extend(run.clone().step_by(PAGE).map(|offset| (index as u32, offset)));
            }
            guest.written.push(written);
        }
        let guest = Arc::new(guest);
        let sent = Arc::new(GuestWithPresentBlocks::new(Arc::clone(&guest), present).unwrap());
        migrate_over(vec![link(Kind::Unix, lanes)], &sent, &sink, options(), &Arc::default()).expect_success();
        prop_assert!(*sink.pages.lock().unwrap() == expected);
        prop_assert_eq!(difference_outside(&[], &memory, &sink.memory), None);
    }
}

/// An image, of which a guest has changed some pages.
#[derive(Debug)]
struct Stored {
    memory: Arc<Memory>,
    content: Vec<Vec<u8>>,
}

impl Stored {
    fn of(memory: &Arc<Memory>) -> Self {
        let content = BLOCKS.iter().enumerate().map(|(index, (_, pages))| {
            let mut content = vec![0; *pages as usize * PAGE];
            memory.read(at(index, 0), &mut content);
            content
        });
        Self { memory: Arc::clone(memory), content: content.collect() }
    }

    /// The image as a base, known by an id of each block.
    fn base(self: Arc<Self>, names: &[&str], presence: BasePresence) -> Base {
        let id = |name: &str| std::array::from_fn(|index| name.as_bytes().get(index).copied().unwrap_or(0));
        let blocks = names.iter().map(|name| ((*name).to_owned(), Some(id(name))));
        Base { guest: self, blocks: blocks.collect(), presence, check: Arc::new(|| Ok(())) }
    }
}

impl Guest for Stored {
    fn configuration(&self) -> &Configuration {
        Guest::configuration(&*self.memory)
    }

    fn blocks(&self) -> &[RamBlock] {
        Guest::blocks(&*self.memory)
    }

    fn extent(&self, page: PageRef) -> Extent {
        let at = page.offset as usize;
        let is_zero = self.content[page.block.index()][at..at + PAGE].iter().all(|byte| *byte == 0);
        Extent { pages: 1, kind: if is_zero { ExtentKind::Zero } else { ExtentKind::Data } }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        IoBuf::from(self.immutable(page, length).unwrap())
    }

    fn immutable(&self, page: PageRef, length: u64) -> Option<&[u8]> {
        let at = page.offset as usize;
        Some(&self.content[page.block.index()][at..at + length as usize])
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        Guest::device_state(&*self.memory)
    }
}

/// Changes some pages of each block, half of them to zeros; returns all that are not as before.
fn change(memory: &Memory, before: &Stored, rng: &mut Rng) -> BTreeSet<(u32, u64)> {
    let mut changed = BTreeSet::new();
    for (index, (_, pages)) in BLOCKS.iter().enumerate() {
        for offset in runs(rng, *pages).into_iter().flat_map(|run| run.step_by(PAGE)) {
            let mut new = [0; PAGE];
            if rng.bool() {
                rng.fill(&mut new);
            }
            memory.write(at(index, offset), &new);
            if new != before.content[index][offset as usize..][..PAGE] {
                changed.insert((index as u32, offset));
            }
        }
    }
    changed
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The source sends all pages; those that are equal to the image's do not arrive. On lanes no page comes as zeros, as QEMU skips these.
    #[test]
    fn only_what_differs_from_the_base_arrives(mask in 0..16_usize, lanes in 0..3_usize, machine in 0..3_usize, seed: u64) {
        let (machine, based, mut rng) = (MACHINES[machine], chosen(mask), Rng::with_seed(seed));
        let (guest, _) = Writer::guest(machine, &BLOCKS, seed);
        let image = Arc::new(Stored::of(&guest));
        let recording = Recording::new(machine);
        for (index, _) in BLOCKS.iter().enumerate().filter(|(_, (name, _))| based.contains(name)) {
            recording.memory.write(at(index, 0), &image.content[index]);
        }
        let changed = change(&guest, &image, &mut rng);
        let is_sent = |(index, _): &(u32, u64)| based.contains(&BLOCKS[*index as usize].0);
        let expected: BTreeSet<_> = changed.into_iter().filter(is_sent).collect();
        let sink = SinkWithPresentBlocks::new(Arc::clone(&recording), [""; 0]);
        let sink = Arc::new(sink.based_on(Arc::clone(&image).base(&based, BasePresence::Proven)));
        migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default()).expect_success();
        let arrived: BTreeSet<_> = recording.pages.lock().unwrap().iter().copied().filter(is_sent).collect();
        prop_assert_eq!(arrived, expected);
        prop_assert_eq!(difference_outside(&[], &guest, &recording.memory), None);
        prop_assert!(recording.zeros_of_lanes.lock().unwrap().iter().all(|index| !based.contains(&BLOCKS[*index as usize].0)));
    }

    /// A guest that writes while it is sent changes pages there and back.
    #[test]
    fn a_guest_that_writes_arrives_on_a_base_as_it_is(mask in 1..16_usize, lanes in 0..3_usize, seed: u64) {
        let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, seed);
        let image = Arc::new(Stored::of(&guest));
        let recording = Recording::new(MACHINES[0]);
        for (index, content) in image.content.iter().enumerate() {
            recording.memory.write(at(index, 0), content);
        }
        writer.run(&guest, seed, &writer);
        let sink = SinkWithPresentBlocks::new(Arc::clone(&recording), [""; 0]);
        let sink = Arc::new(sink.based_on(image.base(&chosen(mask), BasePresence::Proven)));
        migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default()).expect_success();
        prop_assert_eq!(difference_outside(&[], &guest, &recording.memory), None);
    }
}

/// The relay's destination has mapped some blocks of an image, and reports them.
#[test]
fn a_relay_leaves_out_what_its_destination_reports() {
    for reported in [&["pc.ram", "vga.rom"][..], &[]] {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 8);
        let image = Arc::new(Stored::of(&guest));
        let changed = change(&guest, &image, &mut Rng::with_seed(8));
        let recording = Recording::new(MACHINES[0]);
        for (index, content) in image.content.iter().enumerate() {
            recording.memory.write(at(index, 0), content);
        }
        let names: Vec<_> = BLOCKS.iter().map(|(name, _)| *name).collect();
        let there = SinkWithPresentBlocks::new(Arc::clone(&recording), [""; 0])
            .based_on(Arc::clone(&image).base(reported, BasePresence::Proven));
        let (first, second) = (link(Kind::Unix, 0), link(Kind::Unix, 0));
        let session = Arc::<Session>::default();
        let relay =
            Relay::new(Arc::clone(&session), second.source, outgoing::LaneOptions::default()).unwrap();
        let here = SinkWithPresentBlocks::new(&relay, [""; 0])
            .based_on(Arc::clone(&image).base(&names, BasePresence::IfReported));
        let (to, last) = (first.destination, second.destination);
        thread::scope(|scope| {
            let sent = scope.spawn(|| {
                let engine = Outgoing::new(Arc::default(), Arc::default(), options());
                engine.run(&first.source, &*guest)
            });
            let relayed = scope.spawn(|| receive(to, &here, &session, Compression::None));
            receive(last, &there, &Arc::default(), Compression::None).0.unwrap();
            relayed.join().unwrap().0.unwrap();
            sent.join().unwrap().unwrap();
        });
        assert_eq!(difference_outside(&[], &guest, &recording.memory), None);
        let is_reported = |index: u32| reported.contains(&BLOCKS[index as usize].0);
        let all = (0..)
            .zip(BLOCKS)
            .flat_map(|(index, (_, pages))| (0..pages).map(move |page| (index, page * PAGE as u64)));
        let expected: BTreeSet<_> =
            all.filter(|page| !is_reported(page.0) || changed.contains(page)).collect();
        assert!(*recording.pages.lock().unwrap() == expected);
        assert_eq!(here.dropped_pages() > 0, !reported.is_empty());
        assert_eq!(there.dropped_pages(), 0);
    }
}

/// Pages that were left out would be another image's: its source keeps the guest.
#[test]
fn a_base_that_was_changed_is_refused_before_the_source_is_acknowledged() {
    for based in [&["pc.ram"][..], &[]] {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 8);
        let image = Arc::new(Stored::of(&guest));
        let changed = || Err(Error::guest(std::io::Error::other("it was written")));
        let base = Base { check: Arc::new(changed), ..image.base(based, BasePresence::Proven) };
        let recording = Recording::new(MACHINES[0]);
        let sink = Arc::new(SinkWithPresentBlocks::new(recording, [""; 0]).based_on(base));
        let outcome = migrate_over(vec![link(Kind::Unix, 0)], &guest, &sink, options(), &Arc::default());
        assert_eq!(outcome.source.result.is_err(), !based.is_empty());
        assert_eq!(outcome.destination.result.is_err(), !based.is_empty());
    }
}

/// Pages are received straight into a memory, and never into what is present there.
#[test]
fn present_memory_is_not_received_into() {
    for lanes in [0, 2] {
        let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 3);
        let memory = empty(MACHINES[0], &BLOCKS);
        let mut rng = Rng::with_seed(9);
        let before: Vec<u8> = (0..1537 * PAGE).map(|_| rng.u8(..)).collect();
        memory.write(at(0, 0), &before);
        let sink = Arc::new(SinkWithPresentBlocks::new(Arc::clone(&memory), ["pc.ram"]));
        migrate_over(vec![link(Kind::Unix, lanes)], &guest, &sink, options(), &Arc::default())
            .expect_success();
        let mut after = vec![0; before.len()];
        memory.read(at(0, 0), &mut after);
        assert!(before == after, "present memory was written");
        assert_eq!(difference_outside(&["pc.ram"], &guest, &memory), None);
        assert!(sink.dropped_pages() >= 1537);
    }
}

/// The source sends all pages, because it cannot leave any out.
#[test]
fn a_relay_forwards_all_but_present_blocks() {
    for lanes in [0, 2] {
        let (guest, writer) = Writer::guest(MACHINES[0], &BLOCKS, 4);
        writer.run(&guest, 4, &writer);
        let recording = Recording::new(MACHINES[0]);
        let (first, second) = (link(Kind::Unix, lanes), link(Kind::Unix, lanes));
        let session = Arc::<Session>::default();
        let relay =
            Relay::new(Arc::clone(&session), second.source, outgoing::LaneOptions::default()).unwrap();
        let sink = SinkWithPresentBlocks::new(&relay, ["pc.ram"]);
        let (to, last) = (first.destination, second.destination);
        thread::scope(|scope| {
            let sent = scope.spawn(|| {
                let engine = Outgoing::new(Arc::default(), Arc::default(), options());
                engine.run(&first.source, &*guest)
            });
            let relayed = scope.spawn(|| receive(to, &sink, &session, Compression::None));
            receive(last, &*recording, &Arc::default(), Compression::None).0.unwrap();
            relayed.join().unwrap().0.unwrap();
            sent.join().unwrap().unwrap();
        });
        recording.assert_got_all_but(&["pc.ram"], &guest);
        assert!(sink.dropped_pages() >= 1537);
    }
}

#[test]
fn a_difference_to_a_dropped_page_can_be_decoded() {
    let memory = empty(MACHINES[0], &BLOCKS);
    let sink = SinkWithPresentBlocks::new(Arc::clone(&memory), ["pc.ram"]);
    Sink::blocks(&sink, memory.blocks()).unwrap();
    memory.write(at(0, 0), &[7; PAGE]);
    memory.write(at(1, 0), &[8; PAGE]);
    let mut content = [1; PAGE];
    sink.current(at(0, 0), &mut content).unwrap();
    assert_eq!(content, [0; PAGE]);
    sink.current(at(1, 0), &mut content).unwrap();
    assert_eq!(content, [8; PAGE]);
}

#[test]
fn a_block_that_the_guest_does_not_have_is_refused() {
    let expected = "the guest has no RAM block \"mem\", whose memory is reported as present at the destination; its blocks are pc.ram, vga.vram, \
                    pc.bios, vga.rom";
    let (guest, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
    let error = GuestWithPresentBlocks::new(&*guest, ["pc.ram", "mem"]).unwrap_err();
    assert_eq!(error.to_string(), expected);
    let sink = Arc::new(SinkWithPresentBlocks::new(Recording::new(MACHINES[0]), ["mem"]));
    let outcome =
        migrate_over(vec![link(Kind::Unix, 0)], &guest, &sink, outgoing::Options::default(), &Arc::default());
    assert_eq!(outcome.destination.result.unwrap_err().to_string(), expected);
    assert!(outcome.source.result.is_err());
}

#[test]
fn postcopy_refuses_present_memory() {
    let (memory, _) = Writer::guest(MACHINES[0], &BLOCKS, 1);
    let guest = GuestWithPresentBlocks::new(&*memory, ["pc.bios"]).unwrap();
    let options = postcopy::Options {
        max_bandwidth: None,
        answer_timeout: Duration::from_secs(5),
        working_set: Vec::new(),
        background: postcopy::Background::AtOnce,
    };
    let postcopy = Postcopy::new(&guest, &[4096; 4], options, Arc::<Statistics>::default());
    let Link { source, destination } = link(Kind::Unix, 0);
    let channels = postcopy::PostcopyChannels { main: source.main, preempt: None };
    let error = postcopy.offer(&Arc::default(), &channels).unwrap_err();
    assert!(matches!(&error, Error::PresentInPostcopy { block } if block == "pc.bios"), "{error}");
    drop(destination);
}

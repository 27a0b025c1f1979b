//! Synthetic guests over every number of lanes, and the detection of lost parts.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::*;
use towline_channel::{IoBuf, IoBufMut};
use towline_memload::{Backing, Checked, Shape, Synthetic, memfd};
use towline_migration::tracker::WriteProtect;
use towline_migration::{
    ChannelId, Compression, Error, Extent, Guest, Incoming, Memory, Outgoing, Pages, Result, Session, Sink,
    Statistics, incoming, outgoing,
};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

const LENGTH: u64 = 24 << 20;

fn can_track(test: &str) -> bool {
    match WriteProtect::of_shared() {
        Ok(_) => true,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {error}");
            false
        }
    }
}

fn busy(backing: Backing) -> Shape {
    let threads = NonZeroUsize::new(2).unwrap();
    Shape { dirty_rate: 60 << 20, threads, backing, ..Shape::of_length(LENGTH) }
}

fn checked() -> Checked {
    Checked::new(Memory::adopting(LENGTH), NonZeroUsize::new(2).unwrap())
}

/// Sends `guest` into `sink`: the result of each end.
fn send(
    guest: &dyn Guest,
    sink: &dyn Sink,
    lanes: usize,
    compression: Compression,
) -> (Result<()>, Result<()>) {
    let link = link(Kind::Tcp, lanes);
    let options = outgoing::Options { compression, ..options() };
    thread::scope(|scope| {
        let received = scope.spawn(move || {
            let end = link.destination;
            let connections = incoming::Connections::connected(end.main, &end.lanes, Duration::from_secs(5))?;
            let options = incoming::Options { compression, ..Default::default() };
            Incoming::new(Arc::<Session>::default(), Arc::<Statistics>::default(), options)
                .run(&connections, sink)
        });
        let engine = Outgoing::new(Arc::default(), Arc::default(), options);
        let sent = engine.run(&link.source, guest);
        drop(link.source);
        (sent, received.join().unwrap())
    })
}

#[test]
fn a_guest_that_writes_is_verified_page_by_page() {
    if !can_track("a_guest_that_writes_is_verified_page_by_page") {
        return;
    }
    for (lanes, backing, compression) in [
        (0, Backing::Private, Compression::None),
        (3, Backing::Private, Compression::None),
        (2, Backing::Memfd, Compression::None),
        (2, Backing::Private, Compression::Zstd { level: 1 }),
    ] {
        let source = Synthetic::new(busy(backing)).unwrap();
        let sink = checked();
        let (sent, received) = source.run(|guest| send(guest, &sink, lanes, compression)).unwrap();
        assert!(sent.is_ok() && received.is_ok(), "{lanes} {backing:?}: {sent:?} {received:?}");
        let outcome = sink.outcome();
        assert_eq!(outcome.verified_pages, Some(LENGTH / PAGE as u64));
        assert_eq!(outcome.writes, source.ledger().writes());
        assert!(outcome.writes > 0 && outcome.hashes.is_empty(), "{outcome:?}");
    }
}

#[test]
fn preallocated_memory_accepts_only_a_guest_of_its_size() {
    let take = |length: u64| {
        let file = memfd(LENGTH, Backing::Memfd).unwrap();
        let sink = Checked::new(Memory::adopting_into(file, LENGTH), NonZeroUsize::MIN);
        let source = Synthetic::new(Shape::of_length(length)).unwrap();
        source.run(|guest| send(guest, &sink, 1, Compression::None)).unwrap().1
    };
    take(LENGTH).unwrap();
    let text = take(LENGTH - 4096).unwrap_err().to_string();
    assert!(text.ends_with("give both sides the same size"), "{text}");
    let text = take(LENGTH + 4096).unwrap_err().to_string();
    assert!(text.contains(&format!("at most {LENGTH} are allowed here")), "{text}");
}

#[test]
fn hashes_are_reported_for_other_guests() {
    let (guest, _writer) = Writer::guest(MACHINES[0], &[("pc.bios", 3), ("pc.ram", 700)], 5);
    let sink = checked();
    let (sent, received) = send(&*guest, &sink, 2, Compression::None);
    assert!(sent.is_ok() && received.is_ok(), "{sent:?} {received:?}");
    let outcome = sink.outcome();
    assert_eq!(outcome.verified_pages, None);
    let mut content = vec![0; 3 * PAGE];
    guest.read(at(0, 0), &mut content);
    let names: Vec<_> = outcome.hashes.iter().map(|hash| (hash.name.as_str(), hash.length)).collect();
    assert_eq!(names, [("pc.bios", 3 * PAGE as u64), ("pc.ram", 700 * PAGE as u64)]);
    assert_eq!(outcome.hashes[0].blake3, blake3::hash(&content).to_string());
}

/// Changes memory when all of it has come.
struct Spoiled<'a>(&'a Checked, Spoil);

type Spoil = fn(&Memory);

impl Sink for Spoiled<'_> {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        self.0.configuration(configuration)
    }
    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        Sink::blocks(self.0, blocks)
    }
    fn buffer_for(&self, page: PageRef, length: u64) -> Option<IoBufMut<'_>> {
        self.0.buffer_for(page, length)
    }
    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        self.0.pages(stream, pages)
    }
    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.0.zero(stream, block, offsets)
    }
    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()> {
        self.0.current(page, content)
    }
    fn device_state(&self, state: DeviceState) -> Result<()> {
        (self.1)(self.0.memory());
        self.0.device_state(state)
    }
    fn commit(&self) -> Result<()> {
        self.0.commit()
    }
}

#[test]
fn a_wrong_page_is_named_and_the_source_keeps_its_guest() {
    let cases: [(Spoil, &str); 3] = [
        (
            |memory| memory.write(at(0, 300 * 4096 + 100), &[1]),
            "page 300 (at 0x12c000) of \"mem.ram\" is torn or damaged from byte 0x60 on; expected generation 0",
        ),
        (
            |memory| memory.write(at(0, 300 * 4096), &[0; PAGE]),
            "page 300 (at 0x12c000) of \"mem.ram\" is zero; expected generation 0",
        ),
        (
            |memory| {
                let mut content = [0; PAGE];
                memory.read(at(0, 41 * 4096), &mut content);
                memory.write(at(0, 300 * 4096), &content);
            },
            "page 300 (at 0x12c000) of \"mem.ram\" holds page 41; expected generation 0",
        ),
    ];
    let source = Synthetic::new(Shape { zero_percent: 0, ..Shape::of_length(LENGTH) }).unwrap();
    for (spoil, text) in cases {
        let sink = checked();
        let (sent, received) =
            source.run(|guest| send(guest, &Spoiled(&sink, spoil), 2, Compression::None)).unwrap();
        assert_eq!(received.unwrap_err().to_string(), text);
        assert!(matches!(sent, Err(Error::NotAcknowledged { .. })), "{sent:?}");
        assert!(!sink.memory().is_committed());
    }
}

/// A guest whose writes are not tracked.
struct Forgetful<'a> {
    guest: &'a dyn Guest,
    /// Becomes true when some were made after the first pass.
    until: &'a (dyn Fn() -> bool + Sync),
}

impl Guest for Forgetful<'_> {
    fn configuration(&self) -> &Configuration {
        self.guest.configuration()
    }
    fn blocks(&self) -> &[RamBlock] {
        self.guest.blocks()
    }
    fn extent(&self, page: PageRef) -> Extent {
        self.guest.extent(page)
    }
    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        self.guest.memory(page, length)
    }
    fn is_zero(&self, page: PageRef) -> bool {
        self.guest.is_zero(page)
    }
    fn harvest_dirty(&self, _report: &mut dyn FnMut(PageRef, u64)) -> Result<()> {
        while !(self.until)() {
            thread::yield_now();
        }
        Ok(())
    }
    fn stop(&self) -> Result<()> {
        self.guest.stop()
    }
    fn device_state(&self) -> Result<Vec<u8>> {
        self.guest.device_state()
    }
}

#[test]
fn writes_that_were_lost_are_found() {
    if !can_track("writes_that_were_lost_are_found") {
        return;
    }
    let source = Synthetic::new(Shape { zero_percent: 0, ..busy(Backing::Private) }).unwrap();
    let sink = checked();
    let sent_and_received = source.run(|guest| {
        // The writes between the first pass and the stop are lost.
        let begun = source.ledger().writes();
        let forgetful = Forgetful { guest, until: &|| source.ledger().writes() > begun + 2000 };
        send(&forgetful, &sink, 2, Compression::None)
    });
    let (sent, received) = sent_and_received.unwrap();
    let text = received.unwrap_err().to_string();
    assert!(text.contains("of \"mem.ram\" is stale: its generation") || text.contains("is torn"), "{text}");
    assert!(sent.is_err() && !sink.memory().is_committed());
}

//! Postcopy against a destination of the test's own, which accepts each page once, requests pages, and loses
//! its connections: every page comes once, with its content, prepared before it is read, over however many
//! connections.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::collections::HashSet;
use std::net::Shutdown;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Channel, ChannelExt, IoBuf, IoBufMut, SendFlags, pair};
use towline_migration::postcopy::{Background, Options, PostcopyChannels, Running};
use towline_migration::{Error, Extent, ExtentKind, Guest, Postcopy, Result, Session, Statistics};
use towline_protocol::configuration::Configuration;
use towline_protocol::postcopy::put_bitmap;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::{BlockIndex, PageRef, RamBlock, device_state};

const PAGE: usize = 4096;
const HUGE: u64 = 2 << 20;
/// Bytes that a guest prepares for a fault by default, and the maximum at once.
const UNIT: u64 = 64 << 10;
const RUN: u64 = 2 << 20;
/// Units around a fault that are prepared at the same time.
const PREFETCHERS: u64 = 8;
/// Bytes on the way between the two ends: little, so a cut leaves work undone.
const PIPE_BYTES: usize = 64 << 10;
const WITHIN: Duration = Duration::from_secs(60);

/// Pages of the three blocks, and the destination's page size of each.
const SHAPE: [(&str, u64, u64); 3] = [("pc.ram", 1500, 4096), ("huge", 2048, HUGE), ("rom", 5, 4096)];

/// Every fifth page is zero, every other identifies itself.
fn content(block: usize, page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    if page % 5 != 3 {
        bytes
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&(page << 8 | block as u64 | 1 << 40).to_le_bytes()));
    }
    bytes
}

/// A guest whose memory may be read only while it is prepared and not released.
struct Stored {
    configuration: Configuration,
    blocks: Vec<RamBlock>,
    memory: Vec<Vec<u8>>,
    prepared: Mutex<HashSet<(u32, u64)>>,
    unprepared: AtomicBool,
    outage: Outage,
}

/// Units of the first block that cannot be had for a time: to prepare one waits until `over`, and fails if it
/// began before.
#[derive(Default)]
struct Outage {
    units: Range<u64>,
    /// Units that wait.
    waiting: Mutex<HashSet<u64>>,
    over: Mutex<bool>,
    changed: Condvar,
}

impl Outage {
    fn wait(&self, page: PageRef) -> Result<()> {
        let unit = page.offset / UNIT;
        let mut over = self.over.lock().unwrap();
        if *over || page.block.0 > 0 || !self.units.contains(&unit) {
            return Ok(());
        }
        self.waiting.lock().unwrap().insert(unit);
        self.changed.notify_all();
        while !*over {
            over = self.changed.wait(over).unwrap();
        }
        Err(Error::guest(std::io::Error::other("an outage")))
    }

    /// Waits until every unit is waited for.
    fn wait_complete(&self) {
        let (mut over, deadline) = (self.over.lock().unwrap(), Instant::now() + WITHIN);
        while self.waiting.lock().unwrap().len() as u64 != self.units.end - self.units.start {
            assert!(Instant::now() < deadline, "only {:?} are waited for", self.waiting.lock().unwrap());
            over = self.changed.wait_timeout(over, WITHIN).unwrap().0;
        }
    }

    fn end(&self) {
        *self.over.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Stored {
    fn new() -> Self {
        let block = |&(name, pages, _): &(&str, u64, u64)| RamBlock {
            name: name.into(),
            length: pages * PAGE as u64,
            mapped: None,
        };
        let memory = |(index, &(_, pages, _)): (usize, &(&str, u64, u64))| {
            (0..pages).flat_map(|page| content(index, page)).collect()
        };
        Self {
            configuration: Configuration { machine_type: "pc-q35-10.0".into(), ..Configuration::default() },
            blocks: SHAPE.iter().map(block).collect(),
            memory: SHAPE.iter().enumerate().map(memory).collect(),
            prepared: Mutex::default(),
            unprepared: AtomicBool::new(false),
            outage: Outage::default(),
        }
    }
}

impl Guest for Stored {
    fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    fn extent(&self, page: PageRef) -> Extent {
        let is_zero = page.offset / PAGE as u64 % 5 == 3;
        Extent { pages: 1, kind: if is_zero { ExtentKind::Zero } else { ExtentKind::Data } }
    }

    fn prepare(&self, page: PageRef, length: u64) -> Result<()> {
        let end = page.offset + length;
        let is_whole = end.is_multiple_of(UNIT) || end == self.blocks[page.block.index()].length;
        assert!(
            page.offset.is_multiple_of(UNIT) && is_whole && page.offset / RUN == (end - 1) / RUN,
            "{page:?} {length}: whole units are prepared, within a run"
        );
        self.outage.wait(page)?;
        thread::sleep(Duration::from_micros(200));
        for unit in page.offset / UNIT..end.div_ceil(UNIT) {
            assert!(self.prepared.lock().unwrap().insert((page.block.0, unit)), "{page:?} {length} twice");
        }
        Ok(())
    }

    fn release(&self, page: PageRef, length: u64) {
        for unit in page.offset / UNIT..(page.offset + length).div_ceil(UNIT) {
            assert!(self.prepared.lock().unwrap().remove(&(page.block.0, unit)), "{page:?} {length}");
        }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        if !self.prepared.lock().unwrap().contains(&(page.block.0, page.offset / UNIT)) {
            self.unprepared.store(true, Ordering::Relaxed);
        }
        let start = page.offset as usize;
        IoBuf::from(&self.memory[page.block.index()][start..start + length as usize])
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        Ok(device_state::encode(&[("timer", 1, b"fields")]))
    }
}

/// State that outlives the destination's connections.
#[derive(Default)]
struct Destination {
    /// Each target page received in postcopy or ahead of it.
    received: Mutex<HashSet<(usize, u64)>>,
    changed: Condvar,
    runs: AtomicBool,
    done: AtomicBool,
    wrong: Mutex<Vec<String>>,
}

/// One connection's reading end.
struct Stream<'a> {
    channel: Arc<dyn Channel>,
    of: &'a Destination,
    last: Option<usize>,
}

type Broken = towline_channel::Error;

impl Stream<'_> {
    fn bytes(&self, count: usize) -> Result<Vec<u8>, Broken> {
        let mut bytes = vec![0; count];
        self.channel.recv_exact(&mut [IoBufMut::from(&mut bytes[..])])?;
        Ok(bytes)
    }

    fn number(&self, bytes: usize) -> Result<u64, Broken> {
        Ok(self.bytes(bytes)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn name(&self) -> Result<usize, Broken> {
        let length = self.number(1)? as usize;
        let name = String::from_utf8(self.bytes(length)?).unwrap();
        Ok(SHAPE.iter().position(|(known, ..)| *known == name).unwrap())
    }

    fn say(&self, message: &ReturnPathMessage, behind: &[u8]) -> Result<(), Broken> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        bytes.extend_from_slice(behind);
        self.channel.send_all(&[IoBuf::from(&bytes[..])], SendFlags::empty())
    }

    /// Requests a page. Returns false if the connection is lost.
    fn request(&self, block: usize, page: u64) -> bool {
        let (name, _, size) = SHAPE[block];
        let start = page * PAGE as u64 / size * size;
        let block = Some(name.into());
        self.say(&ReturnPathMessage::RequestPages { start, length: size as u32, block }, &[]).is_ok()
    }

    /// Waits for a page. Returns false if it does not come.
    fn wait_received(&self, block: usize, page: u64, is_over: &AtomicBool) -> bool {
        let mut received = self.of.received.lock().unwrap();
        while !received.contains(&(block, page)) {
            let (guard, waited) = self.of.changed.wait_timeout(received, WITHIN).unwrap();
            received = guard;
            if waited.timed_out() || is_over.load(Ordering::Acquire) {
                return false;
            }
        }
        true
    }

    /// The main channel, to its end.
    fn main(&mut self, is_new: bool) -> Result<(), Broken> {
        if is_new {
            self.bytes(8)?;
        }
        loop {
            match self.number(1)? {
                0 => {
                    self.of.done.store(true, Ordering::Release);
                    return self.say(&ReturnPathMessage::Shut(0), &[]);
                }
                7 => {
                    let length = self.number(4)? as usize;
                    self.bytes(length)?;
                }
                8 => self.command()?,
                1 => {
                    self.bytes(4 + 4 + 4 + 4)?;
                    let mut left = self.number(8)? & !0xfff;
                    while left > 0 {
                        let block = self.name()?;
                        left -= self.number(8)?;
                        if SHAPE[block].2 != PAGE as u64 {
                            assert_eq!(self.number(8)?, SHAPE[block].2);
                        }
                    }
                    assert_eq!(self.number(8)?, 0x10);
                    self.bytes(5)?;
                }
                2 | 3 => {
                    self.bytes(4)?;
                    self.records()?;
                    self.bytes(5)?;
                }
                other => panic!("section type {other}"),
            }
        }
    }

    fn command(&mut self) -> Result<(), Broken> {
        let (kind, length) = (self.number(2)?, self.number(2)? as usize);
        let data = self.bytes(length)?;
        match kind {
            2 => self.say(&ReturnPathMessage::Pong(u32::from_be_bytes(data[..4].try_into().unwrap())), &[]),
            3 => {
                assert_eq!(data, [[0, 0, 0, 0, 0, 0x20, 0x10, 0], [0, 0, 0, 0, 0, 0, 0x10, 0]].concat());
                Ok(())
            }
            7 => {
                let package = self.bytes(u32::from_be_bytes(data[..4].try_into().unwrap()) as usize)?;
                assert_eq!(package[..5], [8, 0, 4, 0, 0], "LISTEN begins it");
                assert_eq!(package[package.len() - 14..], [8, 0, 2, 0, 4, 0, 0, 0, 3, 8, 0, 5, 0, 0]);
                self.say(&ReturnPathMessage::Pong(3), &[])?;
                self.of.runs.store(true, Ordering::Release);
                Ok(())
            }
            9 => self.say(&ReturnPathMessage::ResumeAck(1), &[]),
            10 => {
                let name = std::str::from_utf8(&data[1..]).unwrap();
                let block = SHAPE.iter().position(|(known, ..)| *known == name).unwrap();
                let mut bits = vec![0_u8; SHAPE[block].1.div_ceil(8) as usize];
                for (of, page) in self.of.received.lock().unwrap().iter() {
                    if *of == block {
                        bits[(page / 8) as usize] |= 1 << (page % 8);
                    }
                }
                let mut behind = Vec::new();
                put_bitmap(&bits, &mut behind);
                self.say(&ReturnPathMessage::ReceivedBitmap(name.into()), &behind)
            }
            1 | 6 => Ok(()),
            other => panic!("command {other}"),
        }
    }

    /// Records until EOS. The pages of a huge page count when all of them have arrived, since they are placed
    /// together.
    fn records(&mut self) -> Result<(), Broken> {
        let mut huge = Vec::new();
        loop {
            let word = self.number(8)?;
            let (flags, offset) = (word & 0xfff, word & !0xfff);
            if flags == 0x10 {
                assert!(huge.is_empty(), "a huge page that was begun ends with the section");
                return Ok(());
            }
            let block = match (flags & 0x20 != 0, self.last) {
                (true, Some(block)) => block,
                (true, None) => panic!("CONTINUE without a block"),
                (false, _) => self.name()?,
            };
            self.last = Some(block);
            let page = offset / PAGE as u64;
            let found = match flags & !0x20 {
                8 => self.bytes(PAGE)?,
                2 => {
                    assert_eq!(self.number(1)?, 0);
                    vec![0; PAGE]
                }
                other => panic!("flags {other:#x}"),
            };
            if found != content(block, page) {
                self.of.wrong.lock().unwrap().push(format!("content of page {page} of {block}"));
            }
            let targets = SHAPE[block].2 / PAGE as u64;
            huge.push((block, page));
            let first = page / targets * targets;
            let wanted: Vec<_> = (first..first + huge.len() as u64).map(|page| (block, page)).collect();
            assert_eq!(huge, wanted, "the pages of a huge page come one after the other");
            if huge.len() as u64 == targets {
                self.place(std::mem::take(&mut huge));
            }
        }
    }

    fn place(&self, pages: Vec<(usize, u64)>) {
        let mut received = self.of.received.lock().unwrap();
        for page in pages {
            if !received.insert(page) {
                self.of.wrong.lock().unwrap().push(format!("{page:?} received twice"));
            }
        }
        self.of.changed.notify_all();
    }
}

/// Two ends of a pipe.
fn pipe() -> (Arc<dyn Channel>, Arc<dyn Channel>) {
    let (left, right) = pair(PIPE_BYTES);
    (Arc::new(left), Arc::new(right))
}

/// The guest's processor: requests random pages, one after the other, and waits for each.
fn ask(destination: &Destination, channel: &Arc<dyn Channel>, is_over: &AtomicBool, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let stream = Stream { channel: Arc::clone(channel), of: destination, last: None };
    let mut pages: Vec<(usize, u64)> = SHAPE
        .iter()
        .enumerate()
        .flat_map(|(block, shape)| (0..shape.1).map(move |page| (block, page)))
        .collect();
    random.shuffle(&mut pages);
    for (block, page) in pages.into_iter().take(400) {
        let is_received = destination.received.lock().unwrap().contains(&(block, page));
        if is_received || stream.request(block, page) && stream.wait_received(block, page, is_over) {
            continue;
        }
        return;
    }
}

/// One connection: serves it until it is done, or lost after `cut`.
fn connection<'p>(
    postcopy: &'p Postcopy<'p>,
    destination: &Destination,
    [is_new, preempt]: [bool; 2],
    cut: Option<Duration>,
    ask: impl FnOnce(&Arc<dyn Channel>, &AtomicBool) + Send,
) -> bool {
    let (near, far) = pipe();
    let (near_urgent, far_urgent) = pipe();
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let ends = [Arc::clone(&far), Arc::clone(&far_urgent)];
        let main = scope.spawn({
            let channel = Arc::clone(&far);
            // A connection that breaks ends the reading, wherever it is.
            move || drop(Stream { channel, of: destination, last: None }.main(is_new))
        });
        let urgent = scope.spawn({
            let channel = Arc::clone(&far_urgent);
            move || drop(Stream { channel, of: destination, last: None }.records())
        });
        let session = Arc::new(Session::default());
        let connect = || Ok(Arc::clone(&near_urgent));
        let link = PostcopyChannels { main: near, preempt: preempt.then_some(&connect) };
        let running: Running<'_> = if is_new {
            postcopy.offer(&session, &link).unwrap().run()
        } else {
            postcopy.recover(&session, &link).unwrap()
        };
        let asker = scope.spawn({
            let channel = Arc::clone(&far);
            move || ask(&channel, is_over)
        });
        let cutter = cut.map(|cut| {
            let ends = ends.clone();
            scope.spawn(move || {
                thread::sleep(cut);
                ends.iter().for_each(|end| end.shutdown(Shutdown::Both).unwrap());
            })
        });
        let served = running.serve();
        ends.iter().for_each(|end| end.shutdown(Shutdown::Both).unwrap());
        {
            // Not between an asker's look and its wait.
            let _received = destination.received.lock().unwrap();
            is_over.store(true, Ordering::Release);
        }
        destination.changed.notify_all();
        for thread in [Some(main), Some(urgent), Some(asker), cutter].into_iter().flatten() {
            thread.join().unwrap();
        }
        if let Err(lost) = &served {
            assert!(lost.had_loaded || !destination.runs.load(Ordering::Acquire) || cut.is_some(), "{lost}");
        }
        served.is_ok()
    })
}

fn options(working_set: Vec<(PageRef, u64)>, background: Background) -> Options {
    Options { max_bandwidth: None, answer_timeout: WITHIN, working_set, background }
}

fn new_postcopy(guest: &Stored, options: Options) -> Postcopy<'_> {
    let page_bytes: Vec<u64> = SHAPE.iter().map(|(_, _, bytes)| *bytes).collect();
    Postcopy::new(guest, &page_bytes, options, Arc::new(Statistics::default()))
}

fn restore(preempt: bool, cuts: usize, options: Options, seed: u64) {
    let (guest, destination) = (Stored::new(), Destination::default());
    let postcopy = new_postcopy(&guest, options);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut connections = 0;
    loop {
        let cut = (connections < cuts).then(|| Duration::from_micros(random.u64(0..8000)));
        let is_new = !destination.runs.load(Ordering::Acquire);
        let seed = random.u64(..);
        let ask = |channel: &_, is_over: &_| ask(&destination, channel, is_over, seed);
        let is_done = connection(&postcopy, &destination, [is_new, preempt], cut, ask);
        connections += 1;
        if is_done {
            break;
        }
        if !destination.runs.load(Ordering::Acquire) {
            // Lost before the guest ran: this destination is unusable.
            return;
        }
    }
    assert_complete(&postcopy, &guest, &destination, seed);
    if cuts == 0 {
        assert_eq!(*guest.prepared.lock().unwrap(), HashSet::new(), "all prepared units are released");
    }
}

/// The destination has every page once, with its content.
fn assert_complete(postcopy: &Postcopy<'_>, guest: &Stored, destination: &Destination, seed: u64) {
    assert!(destination.done.load(Ordering::Acquire));
    assert_eq!(*destination.wrong.lock().unwrap(), Vec::<String>::new(), "seed {seed}");
    let all: u64 = SHAPE.iter().map(|(_, pages, _)| pages).sum();
    assert_eq!(destination.received.lock().unwrap().len() as u64, all, "seed {seed}");
    assert!(!guest.unprepared.load(Ordering::Relaxed), "a page was read that was not prepared");
    assert_eq!(postcopy.remaining(), 0);
}

#[test]
fn every_page_comes_once_with_its_content() {
    for (seed, preempt, background) in [
        (1, false, Background::AtOnce),
        (2, true, Background::AtOnce),
        (3, false, Background::AfterFaults),
        (4, true, Background::AfterFaults),
    ] {
        restore(preempt, 0, options(Vec::new(), background), seed);
    }
}

/// All threads that prepare units around faults wait, and then fail.
#[test]
fn memory_around_a_fault_neither_delays_other_faults_nor_ends_the_guest() {
    let outage = Outage { units: 1..1 + PREFETCHERS, ..Outage::default() };
    let (guest, destination) = (Stored { outage, ..Stored::new() }, Destination::default());
    let postcopy = new_postcopy(&guest, options(Vec::new(), Background::AfterFaults));
    let pages = UNIT / PAGE as u64;
    let ask = |channel: &Arc<dyn Channel>, is_over: &AtomicBool| {
        let stream = Stream { channel: Arc::clone(channel), of: &destination, last: None };
        let fault = |page| stream.request(0, page) && stream.wait_received(0, page, is_over);
        assert!(fault(0));
        guest.outage.wait_complete();
        assert!(fault(40 * pages), "a fault elsewhere");
        assert!(stream.request(0, 2 * pages + 3));
        assert!(fault(80 * pages), "another one, beside one that waits");
        guest.outage.end();
        assert!(stream.wait_received(0, 2 * pages + 3, is_over), "it is fetched for the fault");
    };
    assert!(connection(&postcopy, &destination, [true, false], None, ask));
    assert_complete(&postcopy, &guest, &destination, 0);
}

#[test]
fn a_working_set_goes_ahead_and_is_not_sent_again() {
    let page = |block, page: u64| PageRef { block: BlockIndex(block), offset: page * PAGE as u64 };
    let set = vec![(page(0, 0), 8 * PAGE as u64), (page(0, 700), PAGE as u64), (page(1, 600), PAGE as u64)];
    restore(true, 0, options(set, Background::AtOnce), 3);
}

#[test]
fn a_postcopy_cut_at_any_moment_resumes() {
    let seeds = std::env::var("TOWLINE_SEEDS").map_or(12, |text| text.parse().unwrap());
    for seed in 0..seeds {
        let background = if seed % 4 < 2 { Background::AtOnce } else { Background::AfterFaults };
        restore(seed % 2 == 0, 3, options(Vec::new(), background), seed);
    }
}

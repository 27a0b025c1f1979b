//! Receives a guest into memory and compares it with its source's ledger, if it is a synthetic guest; for any
//! other the memory's hashes are reported.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::Serialize;
use towline_channel::IoBufMut;
use towline_channel::lock::lock;
use towline_migration::memory::Populated;
use towline_migration::{ChannelId, Error, Memory, Pages, Result, ReturnPathWriter, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::ledger::Ledger;
use crate::parts::find_in_parts;
use crate::pattern::{PAGE_BYTES, WrongPage};

/// Bytes hashed at a time.
const HASH_BYTES: usize = 1 << 20;

/// A [`Memory`] that is populated when the block list comes, and verified before the source is acknowledged.
#[derive(Debug)]
pub struct Checked {
    memory: Memory,
    threads: NonZeroUsize,
    outcome: Mutex<CheckOutcome>,
    started: Mutex<Option<Instant>>,
    /// Of a synthetic guest, once its device state has arrived.
    ledger: Mutex<Option<Ledger>>,
    checks: bool,
}

/// Result of the reception, also of a partial one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckOutcome {
    /// Statistics of populating the memory.
    pub populated: Option<Populated>,
    /// Time from the block list to the device state, in which all memory arrived and was populated.
    pub transfer_time: Duration,
    /// Of a synthetic guest: pages, all of which were compared.
    pub verified_pages: Option<u64>,
    /// Of a synthetic guest: how often its load had written a page.
    pub writes: u64,
    /// Of any other guest: its blocks.
    pub hashes: Vec<BlockHash>,
    /// Duration of comparing or hashing.
    pub check_time: Duration,
}

/// A RAM block as it arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockHash {
    /// Name of the block.
    pub name: String,
    /// Length of the block in bytes.
    pub length: u64,
    /// BLAKE3 hash of the content, as `b3sum` prints it.
    pub blake3: String,
}

/// The result in the event `completed`, with times in milliseconds.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ReceivedMemory {
    verified_pages: Option<u64>,
    pages_written_by_load: Option<u64>,
    transfer_time: u64,
    populate_time: Option<u64>,
    check_time: u64,
    blocks: Vec<BlockHash>,
}

impl From<CheckOutcome> for ReceivedMemory {
    fn from(outcome: CheckOutcome) -> Self {
        let milliseconds = |time: Duration| time.as_millis() as u64;
        Self {
            verified_pages: outcome.verified_pages,
            pages_written_by_load: outcome.verified_pages.map(|_| outcome.writes),
            transfer_time: milliseconds(outcome.transfer_time),
            populate_time: outcome.populated.map(|populated| milliseconds(populated.elapsed)),
            check_time: milliseconds(outcome.check_time),
            blocks: outcome.hashes,
        }
    }
}

impl Checked {
    /// Receives into `memory`, using `threads` threads to populate and compare it.
    pub fn new(memory: Memory, threads: NonZeroUsize) -> Self {
        let (outcome, started, ledger) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { memory, threads, outcome, started, ledger, checks: true }
    }

    /// Neither compares nor hashes: for a measurement of the transfer alone.
    #[must_use]
    pub fn without_check(self) -> Self {
        Self { checks: false, ..self }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The result so far.
    pub fn outcome(&self) -> CheckOutcome {
        lock(&self.outcome).clone()
    }

    /// Compares every page with the ledger.
    ///
    /// # Errors
    /// A page with wrong content, if any.
    fn compare(&self, ledger: &Ledger) -> Result<u64> {
        let pages = self.memory.blocks().iter().map(RamBlock::pages).sum();
        ledger.check_pages(pages).map_err(Error::guest)?;
        let wrong = find_in_parts(ledger.generations.len(), self.threads, |mut part| {
            part.find_map(|page| self.wrong_page(ledger, page))
        });
        wrong.map_or(Ok(pages), |wrong| Err(Error::guest(wrong)))
    }

    fn wrong_page(&self, ledger: &Ledger, page: usize) -> Option<WrongPage> {
        let (mut content, expected) = ([0; PAGE_BYTES], ledger.generations[page]);
        // A synthetic guest has one block.
        let at = PageRef { block: BlockIndex(0), offset: page as u64 * PAGE_SIZE };
        self.memory.read(at, &mut content);
        let content = ledger.pattern.wrong_content(page as u64, expected, &content)?;
        let block = self.memory.blocks()[0].name.clone();
        Some(WrongPage { block, page: page as u64, expected, content })
    }

    fn hashes(&self) -> Vec<BlockHash> {
        let mut bytes = vec![0; HASH_BYTES];
        let hash = |(index, block): (u32, &RamBlock)| {
            let mut hasher = blake3::Hasher::new();
            for offset in (0..block.length).step_by(HASH_BYTES) {
                let length = (block.length - offset).min(HASH_BYTES as u64) as usize;
                self.memory.read(PageRef { block: BlockIndex(index), offset }, &mut bytes[..length]);
                hasher.update(&bytes[..length]);
            }
            let (name, length) = (block.name.clone(), block.length);
            BlockHash { name, length, blake3: hasher.finalize().to_string() }
        };
        (0..).zip(self.memory.blocks()).map(hash).collect()
    }
}

impl Sink for Checked {
    fn configuration(&self, configuration: &Configuration) -> Result<()> {
        Sink::configuration(&self.memory, configuration)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> Result<()> {
        *lock(&self.started) = Some(Instant::now());
        Sink::blocks(&self.memory, blocks)?;
        let populated = self.memory.populate(self.threads)?;
        *lock(&self.outcome) = CheckOutcome { populated: Some(populated), ..CheckOutcome::default() };
        Ok(())
    }

    fn buffer_for(&self, page: PageRef, length: u64) -> Option<IoBufMut<'_>> {
        self.memory.buffer_for(page, length)
    }

    fn pages_received_in_place(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.memory.pages_received_in_place(stream, block, offsets)
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> Result<()> {
        self.memory.pages(stream, pages)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        self.memory.zero(stream, block, offsets)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> Result<()> {
        self.memory.current(page, content)
    }

    fn barrier(&self) -> Result<()> {
        self.memory.barrier()
    }

    fn section_start(&self, section: RamSection) -> Result<()> {
        self.memory.section_start(section)
    }

    fn section_end(&self, kind: SectionKind) -> Result<()> {
        self.memory.section_end(kind)
    }

    fn device_state(&self, state: DeviceState) -> Result<()> {
        let started = *lock(&self.started);
        lock(&self.outcome).transfer_time = started.map(|started| started.elapsed()).unwrap_or_default();
        if self.checks {
            *lock(&self.ledger) = Ledger::decode(&state).map_err(Error::guest)?;
        }
        self.memory.device_state(state)
    }

    fn commit(&self) -> Result<()> {
        if !self.checks {
            return self.memory.commit();
        }
        let started = Instant::now();
        let (verified_pages, writes, hashes) = match &*lock(&self.ledger) {
            Some(ledger) => (Some(self.compare(ledger)?), ledger.writes(), Vec::new()),
            None => (None, 0, self.hashes()),
        };
        let mut outcome = lock(&self.outcome);
        *outcome =
            CheckOutcome { verified_pages, writes, hashes, check_time: started.elapsed(), ..outcome.clone() };
        drop(outcome);
        self.memory.commit()
    }

    fn publish(&self) -> Result<()> {
        self.memory.publish()
    }

    fn return_path(&self, writer: ReturnPathWriter) {
        self.memory.return_path(writer);
    }
}

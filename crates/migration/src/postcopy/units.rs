//! Units of the guest's memory: each is prepared once before any of it is read, and given back when all of it was sent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use towline_protocol::PageRef;
use towline_protocol::postcopy::Block;

use super::UNIT_BYTES;
use crate::{Guest, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Untouched,
    /// Somebody does it.
    Preparing,
    Prepared,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Units {
    blocks: Vec<BlockUnits>,
    states: Mutex<Vec<Vec<State>>>,
    changed: Condvar,
}

#[derive(Debug)]
struct BlockUnits {
    length: u64,
    /// Bytes of each unit that were sent.
    sent: Vec<AtomicU64>,
}

impl Units {
    pub(super) fn new(blocks: &[Block]) -> Self {
        let count = |block: &Block| block.ram.length.div_ceil(UNIT_BYTES) as usize;
        let block_units = |block: &Block| BlockUnits {
            length: block.ram.length,
            sent: (0..count(block)).map(|_| AtomicU64::new(0)).collect(),
        };
        Self {
            blocks: blocks.iter().map(block_units).collect(),
            states: Mutex::new(blocks.iter().map(|block| vec![State::Untouched; count(block)]).collect()),
            changed: Condvar::new(),
        }
    }

    /// The unit that a page lies in.
    pub(super) fn of(&self, page: PageRef) -> (PageRef, u64) {
        let offset = page.offset / UNIT_BYTES * UNIT_BYTES;
        let length = UNIT_BYTES.min(self.blocks[page.block.index()].length - offset);
        (PageRef { offset, ..page }, length)
    }

    /// Has the guest prepare every unit that these bytes touch, once each: who comes second waits for who was first.
    pub(super) fn prepare(&self, guest: &dyn Guest, page: PageRef, length: u64) -> Result<()> {
        let end = page.offset + length;
        let mut at = page;
        while at.offset < end {
            let unit = self.of(at);
            if self.begin(unit.0) {
                let result = guest.prepare(unit.0, unit.1);
                self.set(unit.0, if result.is_ok() { State::Prepared } else { State::Untouched });
                result?;
            }
            at.offset = unit.0.offset + unit.1;
        }
        Ok(())
    }

    /// These bytes, of one run, were sent. Gives units back that went as a whole.
    pub(super) fn sent(&self, guest: &dyn Guest, page: PageRef, length: u64) {
        let end = page.offset + length;
        let mut at = page;
        while at.offset < end {
            let (unit, unit_length) = self.of(at);
            let bytes = (unit.offset + unit_length).min(end) - at.offset;
            let sent = &self.blocks[unit.block.index()].sent[(unit.offset / UNIT_BYTES) as usize];
            if sent.fetch_add(bytes, Ordering::AcqRel) + bytes == unit_length {
                guest.release(unit, unit_length);
            }
            at.offset = unit.offset + unit_length;
        }
    }

    /// Whether every byte was sent.
    pub(super) fn is_all_sent(&self) -> bool {
        let sent =
            |block: &BlockUnits| -> u64 { block.sent.iter().map(|sent| sent.load(Ordering::Acquire)).sum() };
        self.blocks.iter().all(|block| sent(block) == block.length)
    }

    /// After a lost connection nothing counts as sent that the destination has not; what is needed is prepared again, for it
    /// may have been given back. Nobody prepares meanwhile.
    pub(super) fn reset(&self, free_bytes: impl Fn(PageRef, u64) -> u64) {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states.iter_mut().flatten().for_each(|state| *state = State::Untouched);
        for (block, index) in self.blocks.iter().zip(0..) {
            for (sent, unit) in block.sent.iter().zip(0..) {
                let page = PageRef { block: towline_protocol::BlockIndex(index), offset: unit * UNIT_BYTES };
                let length = UNIT_BYTES.min(block.length - page.offset);
                sent.store(length - free_bytes(page, length), Ordering::Release);
            }
        }
    }

    /// True if the unit is the caller's to prepare; false when it is prepared.
    fn begin(&self, unit: PageRef) -> bool {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let state = &mut states[unit.block.index()][(unit.offset / UNIT_BYTES) as usize];
            match state {
                State::Prepared => return false,
                State::Untouched => {
                    *state = State::Preparing;
                    return true;
                }
                State::Preparing => {
                    states = self.changed.wait(states).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn set(&self, unit: PageRef, state: State) {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states[unit.block.index()][(unit.offset / UNIT_BYTES) as usize] = state;
        self.changed.notify_all();
    }
}

//! Changes of a ring between two batches, at the frontend's request, and its end.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::setup::{RingParts, RingStop};
use super::{ChainHead, INDEX, Ring, RingFault};
use crate::log::DirtyLog;
use crate::memory::GuestMemory;
use crate::message::VringAddress;

impl Ring {
    pub(crate) fn address(&self) -> VringAddress {
        self.address
    }

    /// The driver's available index, not checked.
    pub(crate) fn load_avail_idx(&self) -> u16 {
        self.parts.available.load_le16(INDEX, Ordering::Relaxed)
    }

    /// Returns true if the ring had never been used when it was started: its driver has just been
    /// initialised.
    pub(crate) fn is_fresh(&self) -> bool {
        self.last_avail_idx == 0 && self.used_idx == 0
    }

    /// Returns true while a dirty log from the frontend is awaited.
    pub(crate) fn is_log_awaited(&self) -> bool {
        self.dirty.switch.is_awaited()
    }

    /// Returns true if a part of the memory or of the log was replaced by zeros after a fault.
    pub(crate) fn has_lost_memory(&self) -> bool {
        self.memory.is_lost() || self.dirty.is_lost()
    }

    /// Translates the addresses of the ring again, in other memory or for other addresses.
    pub(crate) fn remap(&mut self, memory: Arc<GuestMemory>, address: VringAddress) -> Result<(), RingFault> {
        self.parts = RingParts::find(&memory, &address, self.size, self.event_index)?;
        self.memory = memory;
        self.address = address;
        self.recovery.remapped(&address);
        Ok(())
    }

    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        // The last notification by the former eventfd may have been lost.
        self.call_driver();
    }

    pub(crate) fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.dirty.set_log(log);
    }

    /// Ends the ring without returning its chains: its addresses are no longer in guest memory. Returns
    /// `last_avail_idx`.
    pub(crate) fn abandon(self) -> u16 {
        self.recovery.end();
        self.last_avail_idx
    }

    /// Stops the ring. Chains in flight are returned with length 0.
    pub(crate) fn stop(mut self) -> RingStop {
        let incomplete = self.incomplete();
        for index in &incomplete {
            self.stage(ChainHead { index: *index, epoch: self.epoch }, 0);
        }
        self.publish();
        self.recovery.end();
        if !self.event_index && self.parts.used.load_le16(0, Ordering::Relaxed) != 0 {
            self.store_used_flags(0);
        }
        self.flush_log();
        RingStop { base: self.last_avail_idx, incomplete: incomplete.len() }
    }
}

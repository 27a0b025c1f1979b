//! Settings of a card, and the state that its session and its workers share.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use towline_vhost_user::DeviceWord;

use crate::hold::{self, Hold};
use crate::pause::Pause;
use crate::statistics::{QueueStatistics, TransmitMode};
use crate::tap::{CarrierState, Taps};
use crate::xdp::Xdp;

/// Settings of a card.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Processors of the threads, assigned round-robin; the kernel chooses if empty.
    pub cpus: Vec<usize>,
    /// Maximum time of busy-polling while requests and replies alternate; 0 disables it.
    pub busy_poll: Duration,
    /// Disables migration: no dirty log is offered.
    pub unmigratable: bool,
    /// Migrates the state of the link and the counters with the guest; the destination's card needs the same
    /// setting.
    pub device_state: bool,
    /// Holds frames of the guest from the start on (output commit).
    pub hold: bool,
    /// Keeps for the next process if the link is down, and if frames are held, for which generation.
    pub word: Option<DeviceWord>,
}

/// State that the session and the workers share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) taps: Taps,
    pub(crate) xdp: Option<Arc<Xdp>>,
    pub(crate) options: Options,
    /// Features that the driver negotiated.
    pub(crate) features: AtomicU64,
    pub(super) link_up: AtomicBool,
    /// Statistics of each pair: receiving, transmitting. Threads add to them, once per batch.
    pub(crate) statistics: Vec<[Mutex<QueueStatistics>; 2]>,
    /// Current transmit mode of each pair.
    pub(crate) modes: Vec<Mutex<TransmitMode>>,
    /// Worker of each pair whose receive ring runs.
    pub(crate) receivers: Vec<Mutex<Option<u64>>>,
    /// Worker that has started the transmit ring, of each pair. Locked while it sends.
    pub(crate) transmitters: Vec<Mutex<Option<u64>>>,
    /// Frames of a guest between two hosts.
    pub(crate) pause: Pause,
    /// Frames whose release the guest's other host permits.
    pub(crate) hold: Hold,
    /// Number of workers.
    pub(crate) workers: AtomicUsize,
    /// Number of the next worker.
    pub(crate) next_worker: AtomicU64,
}

/// Bits of [`Options::word`]: the link is down; frames are held. The generation follows.
const LINK_DOWN: u64 = 1 << 0;
const HOLDS: u64 = 1 << 1;
const GENERATION_SHIFT: u32 = 2;

impl Options {
    fn word(&self) -> u64 {
        self.word.as_ref().map_or(0, DeviceWord::load)
    }

    /// Returns true unless the previous process had set the link down.
    pub(super) fn link_was_up(&self) -> bool {
        self.word() & LINK_DOWN == 0
    }

    /// Frames are held if the previous process held them. Without one that was ever told, the option decides.
    pub(super) fn first_hold(&self) -> Hold {
        let generation = NonZeroU64::new(self.word() >> GENERATION_SHIFT);
        let holds = if generation.is_some() { self.word() & HOLDS != 0 } else { self.hold };
        Hold::new(holds, generation)
    }
}

impl Shared {
    /// Keeps the state for the next process.
    pub(super) fn store_word(&self, state: &hold::State) {
        let Some(word) = &self.options.word else { return };
        let link = if self.link() == CarrierState::Up { 0 } else { LINK_DOWN };
        let holds = if self.hold.is_holding() { HOLDS } else { 0 };
        let generation = state.generation.map_or(0, NonZeroU64::get).min(u64::MAX >> GENERATION_SHIFT);
        word.store(link | holds | generation << GENERATION_SHIFT);
    }

    pub(crate) fn link(&self) -> CarrierState {
        if self.link_up.load(Relaxed) { CarrierState::Up } else { CarrierState::Down }
    }
}

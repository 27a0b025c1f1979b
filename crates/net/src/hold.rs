//! Output commit: frames of the guest are held until the state from which it sent them is safe on another host.
//!
//! ```text
//!   transmit rings ── copies ──► open epoch ── mark 5, while no transmit ring runs ──► epoch 5 ── release 5 ──► tap
//!                                    └──────────────────────────── pass ───────────────────────────────────────┘
//! ```
//! A copy completes its chain, so nothing of the guest's memory is used while its rings are stopped. Frames that it receives are not held.
//!
//! Out of scope: which state is safe, and which host has won; that is up to the program at the control socket.
//!
//! Limits: [`FRAMES_MAX`] frames and [`BYTES_MAX`] bytes. Further frames stay in the transmit ring.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::FRAME_BYTES_MAX;
use crate::lock::lock;
use crate::pause::Frame;
use crate::sys::tap_ring;
use crate::timer::Timer;

/// Maximum number of held frames.
const FRAMES_MAX: usize = 64 << 10;
/// Maximum of their bytes, beside those of a call that sends some.
const BYTES_MAX: usize = (64 << 20) - tap_ring::FRAMES_MAX * FRAME_BYTES_MAX;
/// Length of the virtio header of a held frame, the longest one: the driver may be another one when the frame is
/// sent.
pub(crate) const HEADER_BYTES: usize = 12;

/// Reason for which a request about held frames is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// Another program has won a later generation.
    #[error("generation {found} is stale: the card is held by generation {current}; end this program")]
    Stale {
        found: NonZeroU64,
        /// Generation of the last `hold`.
        current: NonZeroU64,
    },
    /// This generation has not held the card, or not in this process.
    #[error("generation {found} has not held this card: `hold` comes first")]
    NotHeld { found: NonZeroU64 },
    /// Frames are sent at once.
    #[error("the card passes its frames: `hold` comes first")]
    Passing,
    /// The guest may still send.
    #[error("ring {ring} runs: stop the guest before its epoch is marked")]
    Running { ring: usize },
    /// The number was used before.
    #[error("epoch {found} is marked already, or a later one: the last one is {last}")]
    NotNext { found: u64, last: u64 },
    /// This card has not marked the epoch.
    #[error("epoch {found} is not marked{}", .last.map_or_else(String::new, |last| format!(": the last one is {last}")))]
    NotMarked { found: u64, last: Option<u64> },
    /// A queue pair does not end its run.
    #[error("queue pair {pair} is still sending; try again")]
    Busy { pair: usize },
    /// The host's interface does not take frames.
    #[error(
        "{interface} has no room, {frames} frames are still held; check the interface below it, and try again"
    )]
    NoRoom { interface: String, frames: usize },
    /// The announcement of the guest was not sent, and no frame.
    #[error("cannot announce the guest: {0}; check that the interface is up, and try again")]
    Announcement(io::Error),
}

/// Held frames of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldStatus {
    /// False if frames are sent at once.
    pub is_holding: bool,
    /// Generation of the last `hold`.
    pub generation: Option<NonZeroU64>,
    /// Last epoch that was marked.
    pub epoch: Option<u64>,
    /// Number of held frames.
    pub frames: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Number of those in the open epoch.
    pub open_frames: usize,
    /// True while a transmit ring waits for room.
    pub is_full: bool,
}

/// Frames that wait for the end of their epoch, or for its release.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Changes while all transmit rings are locked.
    is_holding: AtomicBool,
    state: Mutex<State>,
    /// Locked by the thread that sends held frames.
    pub(crate) sending: Mutex<()>,
    /// Notified when the open epoch has its first frame, and when there is no room.
    waited: Condvar,
}

/// State of a [`Hold`].
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) generation: Option<NonZeroU64>,
    frames: VecDeque<Frame>,
    bytes: usize,
    /// Number of frames that were held before those in `frames`.
    taken: u64,
    /// Closed epochs with frames, in their order.
    epochs: VecDeque<Epoch>,
    last_epoch: Option<u64>,
    /// Timers of workers that wait for room.
    waiting: Vec<Arc<Timer>>,
}

#[derive(Debug, Clone, Copy)]
struct Epoch {
    number: u64,
    /// Number of frames up to its end since the card was started.
    end: u64,
}

/// Place of a pair's frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldPair<'a> {
    pub(crate) hold: &'a Hold,
    pub(crate) pair: usize,
    /// Fires once there is room again, for a worker that waits for it.
    pub(crate) timer: Option<&'a Arc<Timer>>,
}

impl Hold {
    pub(crate) fn new(is_holding: bool, generation: Option<NonZeroU64>) -> Self {
        let state = Mutex::new(State { generation, ..State::default() });
        let is_holding = AtomicBool::new(is_holding);
        Self { is_holding, state, sending: Mutex::default(), waited: Condvar::new() }
    }

    /// Returns true if frames are held.
    pub(crate) fn is_holding(&self) -> bool {
        self.is_holding.load(Relaxed)
    }

    /// Sets whether frames are held. The caller has locked all transmit rings.
    pub(crate) fn set_holding(&self, state: &mut State, holding: bool) {
        self.is_holding.store(holding, Relaxed);
        state.wake();
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn status(&self, state: &State) -> HoldStatus {
        HoldStatus {
            is_holding: self.is_holding(),
            generation: state.generation,
            epoch: state.last_epoch,
            frames: state.frames.len(),
            bytes: state.bytes,
            open_frames: state.open_frames(),
            is_full: !state.waiting.is_empty(),
        }
    }

    /// Returns the status as soon as the open epoch has a frame or a ring waits for room, or after `wait`.
    pub(crate) fn wait(&self, wait: Duration) -> HoldStatus {
        let is_quiet = |state: &mut State| state.open_frames() == 0 && state.waiting.is_empty();
        let waited = self.waited.wait_timeout_while(self.lock(), wait, is_quiet);
        let state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        self.status(&state)
    }

    /// Drops all frames: their guest is gone.
    pub(crate) fn forget(&self) {
        let mut state = self.lock();
        let (frames, bytes) = (state.frames.len(), state.bytes);
        if frames > 0 {
            tracing::warn!(
                frames,
                bytes,
                "dropped the held frames of a guest whose frontend has disconnected"
            );
            state.taken += frames as u64;
            (state.frames, state.bytes) = (VecDeque::new(), 0);
        }
        state.wake();
    }
}

impl HeldPair<'_> {
    /// Adds a frame to the open epoch. Returns false if there is no room.
    pub(crate) fn push(&self, bytes: Box<[u8]>) -> bool {
        let mut state = self.hold.lock();
        let has_room = state.frames.len() < FRAMES_MAX && state.bytes + bytes.len() <= BYTES_MAX;
        let is_first = state.open_frames() == 0;
        if has_room {
            state.bytes += bytes.len();
            state.frames.push_back(Frame { pair: self.pair, bytes });
        } else if let Some(timer) = self.timer
            && !state.waiting.iter().any(|waiting| Arc::ptr_eq(waiting, timer))
        {
            state.waiting.push(Arc::clone(timer));
        }
        if is_first || !has_room {
            self.hold.waited.notify_all();
        }
        has_room
    }
}

impl State {
    /// Has frames held for this generation. Those of a former one belong to its first epoch: which of them are safe is not known.
    pub(crate) fn hold(&mut self, generation: NonZeroU64) -> Result<(), HoldError> {
        match self.generation {
            Some(current) if generation < current => {
                return Err(HoldError::Stale { found: generation, current });
            }
            Some(current) if generation == current => return Ok(()),
            _ => {}
        }
        self.generation = Some(generation);
        self.epochs.clear();
        self.last_epoch = None;
        Ok(())
    }

    /// Refuses another generation than that of the last `hold`.
    pub(crate) fn check(&self, found: NonZeroU64) -> Result<(), HoldError> {
        match self.generation {
            Some(current) if found == current => Ok(()),
            Some(current) if found < current => Err(HoldError::Stale { found, current }),
            _ => Err(HoldError::NotHeld { found }),
        }
    }

    /// Closes the open epoch.
    pub(crate) fn mark(&mut self, number: u64) -> Result<(), HoldError> {
        if let Some(last) = self.last_epoch.filter(|last| number <= *last) {
            return Err(HoldError::NotNext { found: number, last });
        }
        self.last_epoch = Some(number);
        // One without frames ends where the former one does.
        if self.open_frames() > 0 {
            self.epochs.push_back(Epoch { number, end: self.taken + self.frames.len() as u64 });
        }
        Ok(())
    }

    /// Returns the end of the epochs up to this one.
    pub(crate) fn end(&self, found: u64) -> Result<u64, HoldError> {
        if self.last_epoch.is_none_or(|last| found > last) {
            return Err(HoldError::NotMarked { found, last: self.last_epoch });
        }
        Ok(self.epochs.iter().rev().find(|epoch| epoch.number <= found).map_or(0, |epoch| epoch.end))
    }

    /// Takes the next frames before `end`, those of one pair that one call can send.
    pub(crate) fn take(&mut self, end: u64) -> Vec<Frame> {
        // Not before what was taken last is sent, or put back.
        self.epochs.retain(|epoch| epoch.end > self.taken);
        let count = usize::try_from(end.saturating_sub(self.taken)).unwrap_or(usize::MAX);
        let pair = self.frames.front().map(|frame| frame.pair);
        let next = self.frames.iter().take(count.min(tap_ring::FRAMES_MAX));
        let count = next.take_while(|frame| Some(frame.pair) == pair).count();
        let taken: Vec<_> = self.frames.drain(..count).collect();
        self.bytes -= taken.iter().map(|frame| frame.bytes.len()).sum::<usize>();
        self.taken += count as u64;
        self.wake();
        taken
    }

    /// Returns frames that were taken last, and not sent. Returns the number of frames.
    pub(crate) fn put_back(&mut self, unsent: Vec<Frame>) -> usize {
        self.taken -= unsent.len() as u64;
        for frame in unsent.into_iter().rev() {
            self.bytes += frame.bytes.len();
            self.frames.push_front(frame);
        }
        self.frames.len()
    }

    fn open_frames(&self) -> usize {
        let closed = self.epochs.back().map_or(0, |epoch| epoch.end.saturating_sub(self.taken));
        self.frames.len() - usize::try_from(closed).expect("frames of closed epochs are held")
    }

    /// Wakes the workers that wait.
    fn wake(&mut self) {
        self.waiting.drain(..).for_each(|timer| timer.set(Duration::ZERO));
    }
}

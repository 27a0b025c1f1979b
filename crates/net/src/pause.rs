//! Frames that a tap receives while its guest goes from one host to another: after its rings have stopped here, and before the network
//! sends to the other host.
//!
//! ```text
//!   source       tap ── take, once the receive rings have stopped ──► kept ─┬─ a copy ──► the other host
//!                                                                           └─ the rings run again: the guest stays
//!   destination  the other host ── give ──► kept ──► the rings, once they run ──► only then frames of the tap here
//! ```
//! Frames are given to the rings that run, and a guest runs at one host: so it gets each of them at one. No message says where it is.
//!
//! Limits: [`FRAMES_MAX`] frames and [`BYTES_MAX`] bytes; more wait in the tap. Rings wait for [`HOLD_MAX`] for the last frame of the
//! other host.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, VecDeque};
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::FRAME_BYTES_MAX;
use crate::features;
use crate::lock::lock;
use crate::timer::Timer;

/// Maximum number of frames that are kept.
pub(crate) const FRAMES_MAX: usize = 16 << 10;
/// Maximum of their bytes.
const BYTES_MAX: usize = 16 << 20;
/// Bytes after which no further frame is added to [`PassedFrames::frames`].
const PASSED_BYTES_MAX: usize = 96 << 10;
/// Bytes before each of these frames: its pair and its length.
const HEAD_BYTES: usize = 2 + 4;
/// Time after which a party that has neither taken nor given frames is taken for ended. A host that is busy may take 10 s.
pub(crate) const LEASE: Duration = Duration::from_secs(12);
/// Time for which frames of the tap wait for those of the other host, from the start of the rings on.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// Frames on their way to the other host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedFrames {
    /// Number of the pause. A guest that went on in between has got the frames of the former ones.
    pub series: u64,
    /// True if no receive ring runs.
    pub is_stopped: bool,
    /// Features that the driver negotiated.
    pub features: u64,
    /// The next frames, each with its virtio header, after the index of its pair (`u16`) and its length (`u32`), little-endian.
    pub frames: Vec<u8>,
}

/// Reason for which frames are neither taken nor given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    /// Frames are taken from a card that waits for a guest itself.
    #[error("the card waits for a guest of another host")]
    Expected,
    /// It runs here already, or no longer waits.
    #[error("the card's guest runs, and waits for no frames")]
    NotAwaited,
    /// A length or a frame is not valid.
    #[error("the frames are damaged")]
    Damaged,
    /// There are too many.
    #[error("more than {FRAMES_MAX} frames or {BYTES_MAX} bytes")]
    TooMany,
}

/// Frames that no ring has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    is_active: AtomicBool,
    state: Mutex<State>,
    /// Notified after a receive ring has stopped.
    pub(crate) stopped: Condvar,
}

/// State of a [`Pause`].
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) role: Role,
    /// End of the lease.
    pub(crate) until: Option<Instant>,
    pub(crate) series: u64,
    pub(crate) frames: VecDeque<Frame>,
    bytes: usize,
}

/// Part of a card in a move.
#[derive(Debug, Default)]
pub(crate) enum Role {
    #[default]
    None,
    /// `taken` of the frames were taken. `has_stopped` is true from the first stop of this series on.
    Source {
        taken: usize,
        has_stopped: bool,
    },
    Destination(Arrival),
}

/// Frames of the other host at a destination.
#[derive(Debug, Default)]
pub(crate) struct Arrival {
    pub(crate) features: u64,
    /// True once the rings of the other host have stopped.
    pub(crate) has_stopped: bool,
    pub(crate) is_complete: bool,
    pub(crate) is_announced: bool,
    /// Time at which the first ring ran.
    started: Option<Instant>,
    /// Number of frames that were given, by their hash.
    given: HashMap<u64, usize>,
    /// Timers of the workers that wait.
    timers: Vec<Arc<Timer>>,
}

/// A frame with its virtio header.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) pair: usize,
    pub(crate) bytes: Box<[u8]>,
}

/// Frames of a pair that its ring gets before those that it reads from the tap next.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    pub(crate) frames: VecDeque<Box<[u8]>>,
    /// Frames of the tap that follow those of the other host.
    pub(crate) held: Vec<Box<[u8]>>,
}

/// Permission to give frames of the tap to a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TapGate {
    Open,
    /// They are kept until those of the other host are there.
    Held,
}

impl State {
    pub(crate) fn clear(&mut self, role: Role) {
        *self = Self { role, series: self.series, ..Self::default() };
    }

    pub(crate) fn has_expired(&self) -> bool {
        self.until.is_none_or(|until| until <= Instant::now())
    }

    pub(crate) fn has_room(&self) -> bool {
        self.frames.len() < FRAMES_MAX && self.bytes + FRAME_BYTES_MAX <= BYTES_MAX
    }

    pub(crate) fn push(&mut self, pair: usize, bytes: Box<[u8]>) {
        self.bytes += bytes.len();
        self.frames.push_back(Frame { pair, bytes });
    }

    /// Moves the frames of a pair.
    fn move_to(&mut self, pair: usize, to: &mut VecDeque<Box<[u8]>>) {
        let (own, others) = self.frames.drain(..).partition::<VecDeque<_>, _>(|frame| frame.pair == pair);
        self.frames = others;
        for Frame { bytes, .. } in own {
            self.bytes -= bytes.len();
            to.push_back(bytes);
        }
    }

    /// The frames from `taken` on that fit into one message, which are taken now.
    pub(crate) fn encode(&self, taken: &mut usize) -> Vec<u8> {
        let mut encoded = Vec::new();
        for Frame { pair, bytes } in self.frames.iter().skip(*taken) {
            if !encoded.is_empty() && encoded.len() + bytes.len() > PASSED_BYTES_MAX {
                break;
            }
            encoded.extend(u16::try_from(*pair).expect("at most 128 pairs").to_le_bytes());
            encoded.extend(u32::try_from(bytes.len()).expect("FRAME_BYTES_MAX at most").to_le_bytes());
            encoded.extend_from_slice(bytes);
            *taken += 1;
        }
        encoded
    }
}

impl Pause {
    /// Returns true if a ring that runs may have to take frames from here.
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Relaxed)
    }

    /// Has rings that run look for frames here.
    pub(crate) fn activate(&self) {
        self.is_active.store(true, Relaxed);
    }

    /// Returns true if frames that the tap receives while no ring runs are taken.
    pub(crate) fn is_source(&self) -> bool {
        let state = self.lock();
        matches!(state.role, Role::Source { .. }) && !state.has_expired()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn clear(&self, state: &mut State) {
        state.clear(Role::None);
        self.is_active.store(false, Relaxed);
    }

    /// Takes what a ring that stops has not delivered.
    pub(crate) fn keep(&self, pair: usize, frames: impl Iterator<Item = Box<[u8]>>) {
        let mut state = self.lock();
        frames.for_each(|frame| state.push(pair, frame));
        self.activate();
    }

    /// A receive ring has stopped.
    pub(crate) fn notify_stopped(&self) {
        // A waiter has not tested yet, or is woken.
        drop(self.lock());
        self.stopped.notify_all();
    }

    /// Another frontend may have another guest.
    pub(crate) fn forget(&self) {
        let mut state = self.lock();
        let is_over = match state.role {
            Role::None => false,
            Role::Source { .. } => true,
            Role::Destination(_) => state.has_expired(),
        };
        if is_over {
            state.series += 1;
            self.clear(&mut state);
        }
    }

    /// The guest has sent a frame, by which the network learns where it is.
    pub(crate) fn announce(&self) {
        if let Role::Destination(arrival) = &mut self.lock().role {
            arrival.is_announced = true;
        }
    }

    /// Gives a running ring the frames of its pair. `timer` fires when there are more, or the wait for them is over.
    pub(crate) fn join(
        &self,
        pair: usize,
        now_features: u64,
        backlog: &mut Backlog,
        timer: &Arc<Timer>,
    ) -> TapGate {
        let mut state = self.lock();
        let (has_expired, now) = (state.has_expired(), Instant::now());
        match &mut state.role {
            Role::None => {}
            // The guest goes on here.
            Role::Source { taken, has_stopped } => {
                *taken = 0;
                state.series += u64::from(std::mem::take(has_stopped));
                state.move_to(pair, &mut backlog.frames);
                self.is_active.store(!state.frames.is_empty(), Relaxed);
            }
            Role::Destination(_) if has_expired => self.clear(&mut state),
            Role::Destination(arrival) => {
                timer.clear();
                let until = *arrival.started.get_or_insert(now) + HOLD_MAX;
                let is_known = arrival.timers.iter().any(|known| Arc::ptr_eq(known, timer));
                if !is_known {
                    arrival.timers.push(Arc::clone(timer));
                }
                let holds = !arrival.is_complete && now < until;
                if holds {
                    timer.set(until - now);
                } else {
                    backlog.held.retain(|frame| !arrival.forget_copy(frame));
                }
                let is_alike = features::of_received_frames(arrival.features ^ now_features) == 0;
                let before = backlog.frames.len();
                state.move_to(pair, &mut backlog.frames);
                if !is_alike {
                    // Earlier frames are from the card's own tap, or were accepted before and wait for buffers.
                    backlog.frames.truncate(before);
                }
                return if holds { TapGate::Held } else { TapGate::Open };
            }
        }
        TapGate::Open
    }
}

impl Arrival {
    /// Returns true until its rings may have got its frames.
    pub(crate) fn is_expected(&self) -> bool {
        !self.is_complete && self.started.is_none_or(|started| started.elapsed() < HOLD_MAX)
    }

    /// Notes frames that are given, and has the workers look for them.
    pub(crate) fn note(&mut self, frames: &[Frame]) {
        let header_bytes = features::header_bytes(self.features);
        for frame in frames.iter().take(FRAMES_MAX.saturating_sub(self.given.len())) {
            *self.given.entry(hash(&frame.bytes, header_bytes)).or_default() += 1;
        }
        self.timers.iter().for_each(|timer| timer.set(Duration::ZERO));
    }

    /// A frame to several hosts, or to one that no switch knows, was received here too: each copy that was given counts once.
    fn forget_copy(&mut self, frame: &[u8]) -> bool {
        let hash = hash(frame, features::header_bytes(self.features));
        let given = self.given.get_mut(&hash).filter(|given| **given > 0);
        given.is_some_and(|given| {
            *given -= 1;
            true
        })
    }
}

/// Hash of a frame without its virtio header.
fn hash(frame: &[u8], header_bytes: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    frame[header_bytes.min(frame.len())..].hash(&mut hasher);
    hasher.finish()
}

/// Splits [`PassedFrames::frames`].
pub(crate) fn decode(passed: &PassedFrames) -> Result<Vec<Frame>, PassError> {
    let (mut bytes, mut frames) = (&passed.frames[..], Vec::new());
    let lengths = features::header_bytes(passed.features)..FRAME_BYTES_MAX;
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() {
        let [pair_0, pair_1, length @ ..] = *head;
        let length = u32::from_le_bytes(length) as usize;
        let (frame, rest) = rest.split_at_checked(length).ok_or(PassError::Damaged)?;
        if !lengths.contains(&length) {
            return Err(PassError::Damaged);
        }
        frames.push(Frame { pair: u16::from_le_bytes([pair_0, pair_1]).into(), bytes: frame.into() });
        bytes = rest;
    }
    if bytes.is_empty() { Ok(frames) } else { Err(PassError::Damaged) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_counts_once_whatever_its_virtio_header() {
        let features = features::MRG_RXBUF;
        let frame = |header: u8, contents: &[u8]| [&[header; 12][..], contents].concat();
        let given =
            [frame(0, b"who has"), frame(0, b"who has")].map(|bytes| Frame { pair: 0, bytes: bytes.into() });
        let mut arrival = Arrival { features, ..Arrival::default() };
        arrival.note(&given);
        let copies = [(1, &b"who has"[..]), (0, b"another"), (0, b"who has"), (0, b"who has")]
            .map(|(header, contents)| arrival.forget_copy(&frame(header, contents)));
        assert_eq!(copies, [true, false, true, false]);
    }
}

//! Output commit: when held frames are sent, as the program at the control socket decides.
//!
//! Locks, in this order: of the thread that sends held frames, of all transmit rings, of the frames.

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towline_channel::IoBuf;
use towline_vhost_user::BackendError;

use super::Net;
use super::pair::TRANSMIT;
use super::shared::Shared;
use crate::hold::{HEADER_BYTES, HeldPair, HoldError, HoldStatus};
use crate::lock::lock;
use crate::rarp;
use crate::statistics::BatchCounters;
use crate::tap::{FrameFormat, TapContext};
use crate::transmit::send_held;

/// Time for a worker to end a run. Its first one by AF_XDP may wait for the queue.
const RUN_WITHIN: Duration = Duration::from_secs(5);
const RUN_INTERVAL: Duration = Duration::from_micros(50);
/// Time for which a tap may have no room for held frames, in all: workers may wait for this.
const ROOM_WITHIN: Duration = Duration::from_secs(1);

impl Net {
    /// Holds frames of the guest from now on, for this generation. Those of a former generation are still held.
    ///
    /// # Errors
    /// [`HoldError::Stale`], [`HoldError::Busy`].
    pub fn hold(&self, generation: NonZeroU64) -> Result<HoldStatus, HoldError> {
        let shared = &*self.shared;
        let _sending = lock(&shared.hold.sending);
        let _transmitters = shared.lock_transmitters()?;
        let mut state = shared.hold.lock();
        state.hold(generation)?;
        shared.hold.set_holding(&mut state, true);
        shared.store_word(&state);
        Ok(shared.hold.status(&state))
    }

    /// Closes the open epoch under this number, above that of the last one, while no transmit ring runs.
    ///
    /// # Errors
    /// [`HoldError`].
    pub fn mark(&self, generation: NonZeroU64, epoch: u64) -> Result<HoldStatus, HoldError> {
        let shared = &*self.shared;
        let transmitters = shared.lock_transmitters()?;
        let mut state = shared.hold.lock();
        state.check(generation)?;
        if !shared.hold.is_holding() {
            return Err(HoldError::Passing);
        }
        if let Some(pair) = transmitters.iter().position(|transmitter| transmitter.is_some()) {
            return Err(HoldError::Running { ring: 2 * pair + TRANSMIT });
        }
        state.mark(epoch)?;
        Ok(shared.hold.status(&state))
    }

    /// Sends the frames of the epochs up to this one, in their order.
    ///
    /// # Errors
    /// [`HoldError`]. Frames that were not sent are still held.
    pub fn release(&self, generation: NonZeroU64, epoch: u64) -> Result<HoldStatus, HoldError> {
        let shared = &*self.shared;
        let _sending = lock(&shared.hold.sending);
        let state = shared.hold.lock();
        state.check(generation)?;
        let end = state.end(epoch)?;
        drop(state);
        shared.send_up_to(end)?;
        Ok(shared.hold.status(&shared.hold.lock()))
    }

    /// Sends all held frames, and holds no more. Announces a guest with this address first.
    ///
    /// # Errors
    /// [`HoldError`]. Frames that were not sent are still held.
    pub fn pass(&self, generation: NonZeroU64, announced: Option<[u8; 6]>) -> Result<HoldStatus, HoldError> {
        let shared = &*self.shared;
        let _sending = lock(&shared.hold.sending);
        shared.hold.lock().check(generation)?;
        let _transmitters = shared.lock_transmitters()?;
        if let Some(mac) = announced {
            shared.announce(mac).map_err(HoldError::Announcement)?;
        }
        shared.send_up_to(u64::MAX)?;
        let mut state = shared.hold.lock();
        shared.hold.set_holding(&mut state, false);
        shared.store_word(&state);
        Ok(shared.hold.status(&state))
    }

    /// Returns the number of held frames, as soon as the open epoch has some or a ring waits for room, or after `wait`.
    pub fn held(&self, wait: Duration) -> HoldStatus {
        self.shared.hold.wait(wait)
    }
}

impl Shared {
    /// Announces the guest, in the open epoch if frames are held.
    pub(super) fn send_announcement(&self, mac: [u8; 6]) -> Result<(), BackendError> {
        let failed = |error: HoldError| BackendError::temporary(error.to_string());
        let _transmitter = lock_by(&self.transmitters[0], Instant::now() + RUN_WITHIN)
            .ok_or_else(|| failed(HoldError::Busy { pair: 0 }))?;
        if !self.hold.is_holding() {
            return Ok(self.announce(mac)?);
        }
        let bytes = [&[0; HEADER_BYTES][..], &rarp::frame(mac)].concat();
        let held = HeldPair { hold: &self.hold, pair: 0, timer: None };
        let is_held = held.push(bytes.into_boxed_slice());
        let no_room = || BackendError::temporary("too many frames are held, the guest is not announced");
        is_held.then_some(()).ok_or_else(no_room)
    }

    fn announce(&self, mac: [u8; 6]) -> io::Result<()> {
        let header = [0; HEADER_BYTES];
        let header = &header[..self.format().header_bytes];
        self.taps.queues()[0].write(&[IoBuf::from(header), IoBuf::from(&rarp::frame(mac))])?;
        self.pause.announce();
        Ok(())
    }

    /// Sends frames until that many have been taken. What the tap has no room for stays held.
    fn send_up_to(&self, end: u64) -> Result<(), HoldError> {
        let mut room = ROOM_WITHIN;
        loop {
            let mut frames = self.hold.lock().take(end);
            let Some(pair) = frames.first().map(|frame| frame.pair) else { return Ok(()) };
            // Another one only if the guest has disabled the pair since.
            let queues = self.taps.queues();
            let queue = Some(&queues[pair]).filter(|queue| queue.is_attached()).unwrap_or(&queues[0]);
            let tap = TapContext { queue, format: self.format(), link: self.link() };
            let mut counted = BatchCounters::default();
            let unsent = frames.split_off(send_held(&frames, tap, &mut counted));
            lock(&self.statistics[pair][TRANSMIT]).add(&counted.since);
            if unsent.is_empty() {
                continue;
            }
            let frames = self.hold.lock().put_back(unsent);
            let (begun, within) = (Instant::now(), Timespec::try_from(room).ok());
            if room.is_zero() || poll(&mut [PollFd::new(queue, PollFlags::OUT)], within.as_ref()) == Ok(0) {
                return Err(HoldError::NoRoom { interface: self.taps.name().to_owned(), frames });
            }
            room = room.saturating_sub(begun.elapsed());
        }
    }

    /// Format of the driver's frames.
    fn format(&self) -> FrameFormat {
        FrameFormat::of(self.features.load(Relaxed))
    }

    /// Waits until no worker sends, and keeps them from it.
    fn lock_transmitters(&self) -> Result<Vec<MutexGuard<'_, Option<u64>>>, HoldError> {
        let deadline = Instant::now() + RUN_WITHIN;
        let locked = self.transmitters.iter().enumerate();
        locked.map(|(pair, ring)| lock_by(ring, deadline).ok_or(HoldError::Busy { pair })).collect()
    }
}

/// Locks what a worker has during a run.
fn lock_by<T>(mutex: &Mutex<T>, deadline: Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => thread::sleep(RUN_INTERVAL),
        }
    }
}

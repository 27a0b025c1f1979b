//! Frames of a guest that goes to another host: taken from the tap, and given to the card.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towline_channel::IoBufMut;

use super::Net;
use super::shared::Shared;
use crate::FRAME_BYTES_MAX;
use crate::lock::lock;
use crate::pause::{Arrival, Frame, LEASE, PassError, PassedFrames, Role, State, decode};
use crate::tap::CarrierState;

impl Net {
    /// Returns what the tap has received since the receive rings have stopped, for the host that the guest goes to, as soon as there
    /// is some, or after `wait`, less than a second. None are returned while a ring runs. The card keeps a copy, which the rings get if
    /// they run again.
    ///
    /// # Errors
    /// [`PassError::Expected`]: it waits for a guest itself.
    pub fn take_frames(&self, wait: Duration) -> Result<PassedFrames, PassError> {
        let shared = &*self.shared;
        let pause = &shared.pause;
        let mut state = pause.lock();
        match state.role {
            Role::Source { .. } => {}
            Role::Destination(ref arrival) if arrival.is_expected() && !state.has_expired() => {
                return Err(PassError::Expected);
            }
            _ => state.clear(Role::Source { taken: 0, has_stopped: false }),
        }
        state.until = Some(Instant::now() + LEASE);
        let waited = pause.stopped.wait_timeout_while(state, wait, |_| shared.receives());
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let is_all_taken = matches!(state.role, Role::Source { taken, .. } if taken == state.frames.len());
        if is_all_taken && !shared.receives() {
            let has_room = state.has_room();
            drop(state);
            shared.wait_for_frames(wait, has_room);
            state = pause.lock();
        }
        let is_stopped = shared.read_stopped(&mut state);
        let (series, features) = (state.series, shared.features.load(Relaxed));
        let mut frames = Vec::new();
        if let (true, &Role::Source { mut taken, .. }) = (is_stopped, &state.role) {
            frames = state.encode(&mut taken);
            state.role = Role::Source { taken, has_stopped: true };
        }
        Ok(PassedFrames { series, is_stopped, features, frames })
    }

    /// Drops those copies, once the guest runs at the other host.
    pub fn drop_frames(&self) {
        self.shared.pause.clear(&mut self.shared.pause.lock());
    }

    /// Takes frames from the guest's former host, which it gets before those of the tap. The first call, without any, precedes the
    /// guest; `is_last` ends the wait for more: if no ring runs then, the guest does not come. Returns true once the guest has sent a
    /// frame here.
    ///
    /// # Errors
    /// [`PassError`].
    pub fn give_frames(&self, passed: &PassedFrames, is_last: bool) -> Result<bool, PassError> {
        let shared = &*self.shared;
        let frames = decode(passed)?;
        let mut state = shared.pause.lock();
        let receives = shared.receives();
        let is_awaited = matches!(state.role, Role::Destination(_)) && !state.has_expired();
        if !is_awaited && receives {
            return Err(PassError::NotAwaited);
        }
        if is_last && !receives {
            shared.pause.clear(&mut state);
            return Ok(false);
        }
        if !is_awaited || (state.series != passed.series && !is_last) {
            state.clear(Role::Destination(Arrival::default()));
            state.series = passed.series;
        }
        state.until = Some(Instant::now() + LEASE);
        shared.pause.activate();
        let State { role: Role::Destination(arrival), .. } = &mut *state else {
            return Err(PassError::NotAwaited);
        };
        if !arrival.is_expected() {
            return Err(PassError::NotAwaited);
        }
        if !frames.is_empty() {
            arrival.features = passed.features;
        }
        // Until now the other host's rings have taken what both taps have received.
        if passed.is_stopped && !std::mem::replace(&mut arrival.has_stopped, true) && !receives {
            shared.taps.discard();
        }
        arrival.is_complete |= is_last;
        arrival.note(&frames);
        let is_announced = arrival.is_announced;
        for Frame { pair, bytes } in frames {
            if !state.has_room() {
                return Err(PassError::TooMany);
            }
            // A pair that this card does not have is not used by the guest either.
            state.push(pair.min(shared.receivers.len() - 1), bytes);
        }
        Ok(is_announced)
    }
}

impl Shared {
    /// Returns true while a receive ring runs.
    fn receives(&self) -> bool {
        self.receivers.iter().any(|pair| lock(pair).is_some())
    }

    /// Waits for frames of the tap.
    fn wait_for_frames(&self, wait: Duration, has_room: bool) {
        let reads_any = has_room && self.link() == CarrierState::Up;
        let reads = self.taps.queues().iter().filter(|queue| reads_any && queue.is_attached());
        let mut fds: Vec<_> = reads.map(|queue| PollFd::new(queue, PollFlags::IN)).collect();
        let wait = Timespec::try_from(wait).expect("less than a second");
        let _ = poll(&mut fds, Some(&wait));
    }

    /// Reads what the tap has, unless a receive ring runs. Returns true if none does.
    fn read_stopped(&self, state: &mut State) -> bool {
        // Held meanwhile: a ring that starts now reads the tap afterwards.
        let receivers: Vec<_> = self.receivers.iter().map(lock).collect();
        if receivers.iter().any(|receiver| receiver.is_some()) {
            return false;
        }
        self.pause.activate();
        let mut buffer = vec![0; FRAME_BYTES_MAX];
        for (pair, queue) in self.taps.queues().iter().enumerate() {
            while self.link() == CarrierState::Up && queue.is_attached() && state.has_room() {
                let Ok(length) = queue.read(&mut [IoBufMut::from(&mut *buffer)]) else { break };
                state.push(pair, buffer[..length].into());
            }
        }
        true
    }
}

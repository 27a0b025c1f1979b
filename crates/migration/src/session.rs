//! One migration's threads, tied together: the lanes' barrier, and the first error.
//!
//! ```text
//!   lane threads   arrive() ──┐ wait …              ┌── continue
//!   main thread               lead(f): all here? f() ┘
//!   any thread                fail(error): stored if first, every channel shut down, all threads woken
//! ```
//!
//! A thread that blocks in a system call is woken by its channel's shutdown, one at the barrier by the
//! condition variable, so an error anywhere ends the migration at once; but for the lanes of a source, which
//! are seen out ([`Connections::refuse`](crate::incoming::Connections::refuse) has the reason). Out of scope:
//! what the error means for the guest.

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use towline_channel::Channel;

use crate::gate::{Commit, LinkState, NoGate, SwitchoverGate};
use crate::heartbeat::silence_max;
use crate::lock::lock;
use crate::{Error, Result, Tuning};

/// Interval at which a waiter checks whether the migration failed.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The wait for a listener after a failure. The failure has shut its channel down, so it ends by itself, once it
/// has read what was received before: an acknowledgement, for instance. Where it gets no processor, that takes
/// long; only a channel that cannot be shut down never ends.
#[derive(Debug, Default)]
pub(crate) struct LastWords {
    /// These and not time: while this process is stopped, none passes.
    polls: u32,
    polled: Option<Instant>,
}

impl LastWords {
    /// Half a minute.
    const POLLS_MAX: u32 = 1500;

    /// Counts a poll. Returns true if the listener is not waited for any longer.
    pub(crate) fn are_over(&mut self) -> bool {
        // A message ends a wait early.
        if self.polled.is_none_or(|polled| polled.elapsed() >= POLL_INTERVAL) {
            (self.polls, self.polled) = (self.polls + 1, Some(Instant::now()));
        }
        self.polls > Self::POLLS_MAX
    }
}

/// State shared by the threads of one migration.
#[derive(Debug, Default)]
pub struct Session {
    /// A thread that panics leaves counters and a list, all consistent at each step.
    state: Mutex<State>,
    changed: Condvar,
    failed: AtomicBool,
    finished: AtomicBool,
    tuning: OnceLock<Tuning>,
    gate: OnceLock<Arc<dyn SwitchoverGate>>,
    /// True if a destination that runs the guest on its own was sent the last bytes.
    committed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    error: Option<Error>,
    channels: Vec<Arc<dyn Channel>>,
    /// An incoming migration's main channel.
    upstream: Option<Arc<dyn Channel>>,
    arrived: usize,
    /// Lanes whose connection ended; a barrier cannot be reached with one of them.
    gone: Vec<usize>,
    /// An incoming migration's lanes, which a failure does not shut down at once: their threads see them out.
    lanes: Vec<Arc<dyn Channel>>,
    generation: u64,
    /// No further barrier comes.
    closed: bool,
}

/// Result of waiting at a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// All have arrived: continue.
    GoOn,
    /// The stream is complete, so there are no further barriers: stop.
    Closed,
}

impl Session {
    /// Sets the `tuning` that changes limits during the migration; only the first one is used.
    pub fn set_tuning(&self, tuning: &Tuning) {
        self.tuning.get_or_init(|| tuning.clone());
    }

    /// The changed settings.
    pub fn tuning(&self) -> &Tuning {
        self.tuning.get_or_init(Tuning::default)
    }

    /// Sets the `gate` that is called at the points of no return; only the first one is used.
    pub fn set_gate(&self, gate: Arc<dyn SwitchoverGate>) {
        self.gate.get_or_init(|| gate);
    }

    /// The gate, or one that lets everything pass.
    pub(crate) fn gate(&self) -> &dyn SwitchoverGate {
        self.gate.get().map_or(&NoGate, Arc::as_ref)
    }

    pub(crate) fn silence_max(&self) -> Duration {
        silence_max(self.gate().peer_timeout())
    }

    /// Asks the gate before the last bytes are sent.
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the gate refuses.
    pub(crate) fn commit(&self, run_state: Option<&str>) -> Result<()> {
        let _state = lock(&self.state);
        self.check()?;
        match self.gate().commit(run_state) {
            Commit::Refused => return Err(Error::Cancelled),
            Commit::Reversible => {}
            Commit::Final => self.committed.store(true, Ordering::Release),
        }
        Ok(())
    }

    /// Asks the gate before the source is acknowledged, which completes the migration there.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the migration failed before, [`Error::SourceGone`] if the gate refuses.
    pub(crate) fn acknowledge(&self, run_state: Option<&str>, source: &dyn Channel) -> Result<()> {
        let _state = lock(&self.state);
        self.check()?;
        let link = crate::gate::probe_link(source);
        if !self.gate().acknowledge(run_state, link) {
            return Err(match link {
                LinkState::Open => Error::Cancelled,
                LinkState::Closed | LinkState::Reset => Error::SourceGone { peer: source.peer().to_owned() },
            });
        }
        self.finished.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns true if the source must be acknowledged although the migration failed with `error`.
    pub(crate) fn must_acknowledge_after(&self, error: &Error) -> bool {
        self.is_committed() && self.gate().must_acknowledge_after(error)
    }

    fn is_committed(&self) -> bool {
        self.committed.load(Ordering::Acquire)
    }

    /// As [`Self::watch`], of an incoming migration's main channel: it outlives a failure after
    /// [`Commit::Final`].
    pub(crate) fn watch_upstream(&self, channel: &Arc<dyn Channel>) {
        let mut state = lock(&self.state);
        if self.is_failed() {
            shut(channel.as_ref());
        }
        state.upstream = Some(Arc::clone(channel));
    }

    /// Has `channel` shut down when the migration fails.
    pub fn watch(&self, channel: &Arc<dyn Channel>) {
        let mut state = lock(&self.state);
        if self.is_failed() {
            shut(channel.as_ref());
        }
        state.channels.push(Arc::clone(channel));
    }

    /// Ends the migration with `error`, unless it failed before or is finished. Returns true for the first
    /// error. The outcome is the result of the migration's `run`: the destination's acknowledgement may have
    /// been on its way.
    pub fn fail(&self, error: Error) -> bool {
        let mut state = lock(&self.state);
        if self.is_finished() || self.is_failed() {
            return false;
        }
        tracing::debug!(%error, "migration fails");
        state.error = Some(error);
        self.shut_all(&state);
        true
    }

    /// The guest is safe at the destination: from here on connections end because they are done with.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the migration failed before; it stays failed.
    pub fn finish(&self) -> Result<()> {
        let _state = lock(&self.state);
        self.check()?;
        self.finished.store(true, Ordering::Release);
        Ok(())
    }

    /// True from [`Self::finish`] on.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// True from the first [`Self::fail`] on.
    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// [`Error::Cancelled`] if the migration failed; the reason is kept for the end of the run.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_failed() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// The run succeeded, regardless of later errors: forgets the channels.
    pub(crate) fn succeed(&self) {
        let mut state = lock(&self.state);
        self.finished.store(true, Ordering::Release);
        *state = State::default();
    }

    /// The run failed: shuts every channel down and forgets it. Returns the first error, which is `error` if
    /// no thread had one before.
    pub(crate) fn end(&self, error: Error) -> Error {
        let mut state = lock(&self.state);
        self.shut_all(&state);
        std::mem::take(&mut *state).error.unwrap_or(error)
    }

    /// Fails the migration if the thread that holds the result panics, so the others do not wait for it.
    pub(crate) fn guard(&self) -> SessionGuard<'_> {
        SessionGuard(self)
    }

    /// A lane is at its barrier: waits until the main thread releases all.
    pub(crate) fn arrive(&self) -> Result<Released> {
        let mut state = lock(&self.state);
        let generation = state.generation;
        state.arrived += 1;
        self.changed.notify_all();
        while state.generation == generation {
            self.check()?;
            if state.closed {
                return Ok(Released::Closed);
            }
            state = self.wait(state);
        }
        Ok(Released::GoOn)
    }

    /// The main thread: waits until `lanes` lanes have arrived, does `work`, and releases them.
    pub(crate) fn lead(&self, lanes: usize, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = lock(&self.state);
        while state.arrived < lanes {
            self.check()?;
            if let Some(&lane) = state.gone.first() {
                return Err(Error::lane(lane)(Error::LaneEnded));
            }
            state = self.wait(state);
        }
        drop(state);
        work()?;
        let mut state = lock(&self.state);
        state.arrived = 0;
        state.generation += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// The main thread: no further barrier comes.
    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    /// True from [`Self::close`] on.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// A lane's connection ended without outstanding data: no further barrier can be reached.
    pub(crate) fn leave(&self, lane: usize) {
        lock(&self.state).gone.push(lane);
        self.changed.notify_all();
    }

    /// An incoming migration's lane.
    pub(crate) fn watch_lane(&self, lane: &Arc<dyn Channel>) {
        lock(&self.state).lanes.push(Arc::clone(lane));
    }

    /// After a failure: waits until every lane has left, at most this long, and shuts down the others.
    pub(crate) fn see_out(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        while state.gone.len() < state.lanes.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.lanes.iter().for_each(|lane| shut(lane.as_ref()));
    }

    fn shut_all(&self, state: &State) {
        self.failed.store(true, Ordering::Release);
        let upstream = state.upstream.iter().filter(|_| !self.is_committed());
        for channel in state.channels.iter().chain(upstream) {
            shut(channel.as_ref());
        }
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Session::guard`].
#[derive(Debug)]
pub(crate) struct SessionGuard<'a>(&'a Session);

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::Panicked);
            lock(&self.0.state).lanes.iter().for_each(|lane| shut(lane.as_ref()));
        }
    }
}

fn shut(channel: &dyn Channel) {
    if let Err(error) = channel.shutdown(Shutdown::Both) {
        tracing::debug!(peer = channel.peer(), %error, "shutdown");
    }
}

/// A recorder of received bytes whose thread gets no processor for longer than a second.
#[cfg(test)]
struct Starved;

/// A channel of this session that is read late, and its peer.
#[cfg(test)]
pub(crate) fn starved(session: &Session) -> (Arc<dyn Channel>, towline_channel::UnixChannel) {
    let (near, far) = towline_channel::UnixChannel::pair().unwrap();
    let recorder = Box::new(std::io::sink());
    let near = towline_channel::fault::Capture::new(Box::new(near), recorder, Box::new(Starved));
    let near: Arc<dyn Channel> = Arc::new(near);
    session.watch(&near);
    (near, far)
}

#[cfg(test)]
impl std::io::Write for Starved {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        std::thread::sleep(Duration::from_millis(1500));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

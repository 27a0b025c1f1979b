//! Whether a lease is held, and what may only be sent while it is.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::clock::Clock;
use super::fault::Fault;
use super::{Error, LEASE_GAP_MAX, Result};

/// What the owner of a lease knows about it. Once lost it stays lost.
#[derive(Debug)]
pub(super) struct Hold {
    /// The prefix, for errors.
    store: String,
    clock: Clock,
    state: Mutex<State>,
    /// How a lease before this one was lost.
    gap: OnceLock<String>,
    fault: Option<Fault>,
}

#[derive(Debug)]
enum State {
    Held {
        /// When the last successful renewal was sent, by [`Clock::now`]: the store saw it later, never earlier.
        renewed: Duration,
    },
    Lost {
        why: String,
    },
}

impl Hold {
    /// Of a lease whose creation was sent at `begun`.
    pub(super) fn new(store: String, clock: Clock, begun: Duration, fault: Option<Fault>) -> Self {
        Self { store, clock, state: Mutex::new(State::Held { renewed: begun }), gap: OnceLock::new(), fault }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the lease was held without a gap since its creation, so that no other process has taken it for a dead one's.
    ///
    /// # Errors
    /// [`Error::Lost`], from then on for ever.
    pub(super) fn check(&self) -> Result<()> {
        let mut state = self.lock();
        if let State::Held { renewed } = *state {
            let gap = self.clock.now().saturating_sub(renewed);
            if gap < LEASE_GAP_MAX {
                return Ok(());
            }
            let why = format!(
                "it was not renewed for {} s, which is more than {} s: the store did not answer, or this process or host was suspended",
                gap.as_secs(),
                LEASE_GAP_MAX.as_secs()
            );
            if self.fault == Some(Fault::GapHeals) {
                return Err(Error::Lost { store: self.store.clone(), why });
            }
            *state = State::Lost { why };
        }
        match &*state {
            State::Held { .. } => Ok(()),
            State::Lost { why } => Err(Error::Lost { store: self.store.clone(), why: why.clone() }),
        }
    }

    /// A renewal that was sent at `begun` has succeeded.
    pub(super) fn renewed(&self, begun: Duration) {
        // A gap that ends now is one too.
        if self.check().is_ok() || self.fault == Some(Fault::GapHeals) {
            *self.lock() = State::Held { renewed: begun };
        }
    }

    /// The lease is not in the store any more.
    pub(super) fn lose(&self, why: String) {
        let mut state = self.lock();
        if matches!(*state, State::Held { .. }) {
            *state = State::Lost { why };
        }
    }

    /// Another lease, whose creation was sent at `begun`, takes the place of the lost one.
    pub(super) fn replace(&self, begun: Duration) {
        let before = std::mem::replace(&mut *self.lock(), State::Held { renewed: begun });
        if let State::Lost { why } = before {
            self.gap.get_or_init(|| why);
        }
    }

    /// How the lease, or one that it took the place of, was lost; `None` if one was held all the time.
    pub(super) fn gap(&self) -> Option<String> {
        match self.check() {
            Err(Error::Lost { why, .. }) => Some(why),
            _ => self.gap.get().cloned(),
        }
    }
}

/// Stops requests that change something while the lease of who sends them is not held. Each attempt passes it, so that one that is
/// repeated after the host was suspended does not arrive behind the lease's end.
#[derive(Debug, Clone, Default)]
pub(super) struct Gate(Arc<OnceLock<Arc<Hold>>>);

impl Gate {
    /// From now on everything depends on this lease.
    pub(super) fn depend_on(&self, hold: &Arc<Hold>) {
        // A store is opened for one operation, which has one lease.
        let _ = self.0.set(Arc::clone(hold));
    }

    /// Whether a request may be sent.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub(super) fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |hold| hold.check())
    }
}

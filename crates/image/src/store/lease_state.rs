//! State of a lease, and the guard of requests that require it.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use towline_channel::lock::lock;

use super::fault::StoreBug;
use super::runtime::Clock;
use super::{Error, LEASE_GAP_MAX, Result};

/// The owner's view of its lease. A lost lease stays lost.
#[derive(Debug)]
pub(super) struct LeaseState {
    /// Prefix of the lease, for errors.
    store: String,
    clock: Clock,
    state: Mutex<State>,
    /// Reason for which an earlier lease was lost.
    past_loss: OnceLock<String>,
    fault: Option<StoreBug>,
}

#[derive(Debug)]
enum State {
    Held {
        /// Time at which the last successful renewal was sent, by [`Clock::now`]; never later than the
        /// store's.
        renewed: Duration,
    },
    Lost {
        why: String,
    },
}

impl LeaseState {
    /// State of a lease whose creation was sent at `sent_at`.
    pub(super) fn new(store: String, clock: Clock, sent_at: Duration, fault: Option<StoreBug>) -> Self {
        Self {
            store,
            clock,
            state: Mutex::new(State::Held { renewed: sent_at }),
            past_loss: OnceLock::new(),
            fault,
        }
    }

    /// Checks that the lease was renewed without a gap since its creation, so no process considered its owner
    /// dead.
    ///
    /// # Errors
    /// [`Error::Lost`], in this and all later calls.
    pub(super) fn check(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let why = match &*state {
            State::Lost { why } => why.clone(),
            State::Held { renewed } => {
                let gap = self.clock.now().saturating_sub(*renewed);
                if gap < LEASE_GAP_MAX {
                    return Ok(());
                }
                format!(
                    "it was not renewed for {} s, which is more than {} s: the store did not respond, or this process or host was suspended",
                    gap.as_secs(),
                    LEASE_GAP_MAX.as_secs()
                )
            }
        };
        if self.fault != Some(StoreBug::GapHeals) {
            *state = State::Lost { why: why.clone() };
        }
        Err(Error::Lost { store: self.store.clone(), why })
    }

    /// Records a successful renewal that was sent at `sent_at`.
    pub(super) fn mark_renewed(&self, sent_at: Duration) {
        // A renewal does not end a gap that was too long.
        if self.check().is_ok() || self.fault == Some(StoreBug::GapHeals) {
            *lock(&self.state) = State::Held { renewed: sent_at };
        }
    }

    /// Records that the lease is no longer in the store.
    pub(super) fn mark_lost(&self, why: String) {
        let mut state = lock(&self.state);
        if matches!(*state, State::Held { .. }) {
            *state = State::Lost { why };
        }
    }

    /// Records that another lease, whose creation was sent at `sent_at`, replaces the lost one.
    pub(super) fn mark_replaced(&self, sent_at: Duration) {
        let before = std::mem::replace(&mut *lock(&self.state), State::Held { renewed: sent_at });
        if let State::Lost { why } = before {
            self.past_loss.get_or_init(|| why);
        }
    }

    /// Reason for which this lease, or an earlier one, was lost; `None` if there was a lease all the time.
    pub(super) fn loss(&self) -> Option<String> {
        match self.check() {
            Err(Error::Lost { why, .. }) => Some(why),
            _ => self.past_loss.get().cloned(),
        }
    }
}

/// Blocks modifying requests once the sender's lease is lost. Every attempt is checked, so one that is
/// retried after the host was suspended does not arrive after the lease's end.
#[derive(Debug, Clone, Default)]
pub(super) struct LeaseGuard(Arc<OnceLock<Arc<LeaseState>>>);

impl LeaseGuard {
    /// Sets the lease that all modifying requests require.
    pub(super) fn require(&self, lease_state: &Arc<LeaseState>) {
        // A store is opened for one operation, which has one lease.
        let _ = self.0.set(Arc::clone(lease_state));
    }

    /// Checks that a modifying request may be sent.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub(super) fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |lease_state| lease_state.check())
    }
}

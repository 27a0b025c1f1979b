//! The transmitting half of a pair with AF_XDP: has a link if one can be had, and the tap if not.

use std::os::fd::AsFd as _;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use towline_vhost_user::{BackendError, Batch, Head, Memory, Ring};

use super::Xdp;
use super::link::{Link, Trouble};
use super::socket::Mode;
use super::timer::Timer;
use crate::device::Shared;
use crate::receive::Line;
use crate::statistics::{DropReason, Tally};
use crate::transmit::Transmitter;

/// After trouble that may pass.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long a queue is waited for that may be on its way to be free; the guest waits as well.
const FREE_WITHIN: Duration = Duration::from_secs(2);
/// How long frames may take that are under way when the process ends.
const END_WITHIN: Duration = Duration::from_secs(1);

/// How long a queue may take to be free after its socket was closed with chains under way, where the guest waits for them.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);
/// Between two looks whether it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
const LOOK_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// See the module.
pub(crate) struct Sender {
    pair: usize,
    shared: Arc<Shared>,
    batch: Batch,
    link: Option<Link>,
    /// Chains of a socket that was closed before the kernel was done with them: the device may read them until the queue is free.
    leaving: Vec<Head>,
    /// When it is looked at next.
    look_at: Instant,
    timer: Timer,
    failed: Option<Failed>,
    /// What was said last of why there is none, so that it is said once.
    said: String,
}

/// What is known of the pair's queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    /// Nothing of the guest's is with a closed socket.
    Free,
    /// Something may be.
    Taken,
    /// As `Taken`; only another socket that is bound will tell.
    Unknown,
}

/// An attempt that failed.
struct Failed {
    memory: Weak<Memory>,
    /// When it is worth another; never, if it is none before the memory changes.
    again: Option<Instant>,
}

impl Sender {
    pub(crate) fn new(pair: usize, shared: Arc<Shared>) -> std::io::Result<Self> {
        let (timer, batch) = (Timer::new()?, Batch::new());
        let (leaving, look_at) = (Vec::new(), Instant::now());
        Ok(Self {
            pair,
            shared,
            batch,
            link: None,
            leaving,
            look_at,
            timer,
            failed: None,
            said: String::new(),
        })
    }

    /// Sends for one turn. True if there may be more.
    pub(crate) fn run(
        &mut self,
        ring: &mut Ring,
        line: Line<'_>,
        tally: &mut Tally,
        transmitter: &mut Transmitter,
    ) -> bool {
        self.timer.clear();
        match self.settle(Some(ring), tally) {
            Queue::Free => self.attach(ring, tally),
            Queue::Taken => self.timer.arm(false),
            Queue::Unknown => {
                self.timer.arm(false);
                self.attach(ring, tally);
            }
        }
        let Some(link) = &mut self.link else {
            let before = tally.packets;
            let more = transmitter.run(ring, line, tally);
            tally.copied += tally.packets - before;
            return more;
        };
        transmitter.blocked = false;
        let before = link.ledger.descriptors();
        match link.run(ring, line, tally, (&mut self.batch, &mut transmitter.blocked)) {
            Ok(more) => {
                let left = link.ledger.descriptors();
                tally.pending = link.ledger.heads().into();
                if left > 0 {
                    self.timer.arm(left < before);
                }
                more
            }
            Err(trouble) => {
                self.detach(Some(ring), tally, &trouble);
                true
            }
        }
    }

    /// The guest's queue does not run; what was sent before comes back all the same.
    pub(crate) fn rest(&mut self, mut ring: Option<&mut Ring>, tally: &mut Tally) {
        self.timer.clear();
        if self.settle(ring.as_deref_mut(), tally) != Queue::Free {
            self.timer.arm(false);
        }
        let Some(link) = &mut self.link else { return };
        match link.call().and_then(|()| link.reap(ring.as_deref_mut())) {
            Ok(came) => {
                tally.pending = link.ledger.heads().into();
                if link.ledger.descriptors() > 0 {
                    self.timer.arm(came);
                }
            }
            Err(trouble) => self.detach(ring.as_deref(), tally, &trouble),
        }
    }

    /// Waits for what the guest's queue is about to be stopped with. What does not come back in time is given up: its socket is closed,
    /// and it goes back when the device cannot read it any more.
    ///
    /// # Errors
    /// That the device still may, a second later.
    pub(crate) fn drain(
        &mut self,
        mut ring: Option<&mut Ring>,
        tally: &mut Tally,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        if let Some(link) = &mut self.link {
            match link.drain(ring.as_deref_mut(), deadline, true) {
                Ok(true) => tally.pending = 0,
                Ok(false) => {
                    let left = link.ledger.heads();
                    tracing::warn!(pair = self.pair, left, "frames are not sent yet, and given up");
                    self.close(tally);
                }
                Err(trouble) => self.detach(ring.as_deref(), tally, &trouble),
            }
        }
        self.part(ring, tally)
    }

    /// The guest's memory goes: waits for what is under way, and unpins it.
    ///
    /// # Errors
    /// As [`Sender::drain`].
    pub(crate) fn release(
        &mut self,
        mut ring: Option<&mut Ring>,
        tally: &mut Tally,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        self.batch.clear();
        if let Some(link) = &mut self.link {
            if let Err(trouble) = link.drain(ring.as_deref_mut(), deadline, false) {
                tracing::warn!(pair = self.pair, %trouble, "AF_XDP");
            }
            self.close(tally);
        }
        self.part(ring, tally)
    }

    /// What it waits for, beside the tap.
    pub(crate) fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        self.timer.is_armed().then(|| self.timer.as_fd())
    }

    /// Sees to a link for the ring's memory, if one can be had now.
    fn attach(&mut self, ring: &mut Ring, tally: &mut Tally) {
        let memory = Arc::clone(ring.memory());
        if self.link.as_ref().is_some_and(|link| link.is_of(&memory)) {
            return;
        }
        self.close(tally);
        let same = |failed: &Failed| std::ptr::eq(failed.memory.as_ptr(), Arc::as_ptr(&memory));
        if let Some(failed) = self.failed.as_ref().filter(|failed| same(failed))
            && failed.again.is_none_or(|again| Instant::now() < again)
        {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let Some(xdp) = &shared.xdp else { return };
        // The one that had the queue may have been ours, and takes its time.
        let waits = self.failed.is_none() && self.leaving.is_empty();
        let patience = if waits { FREE_WITHIN } else { Duration::ZERO };
        let begun = Instant::now();
        match xdp.link((self.pair, shared.taps.queues().len()), &memory, patience) {
            Ok(None) => {}
            Ok(Some(link)) => {
                let took_ms = begun.elapsed().as_millis();
                tracing::info!(pair = self.pair, interface = xdp.name(), mode = ?link.mode(), took_ms, "AF_XDP");
                self.mode(link.mode());
                (self.link, self.failed) = (Some(link), None);
                self.said.clear();
                // Who has the queue now has it after all others.
                self.back(Some(ring), tally);
            }
            Err(error) => {
                // These may pass: a queue that somebody has, an interface that is down or gone.
                let passes = matches!(
                    error.raw_os_error(),
                    Some(libc::EBUSY | libc::ENETDOWN | libc::ENXIO | libc::ENODEV | libc::EAGAIN)
                );
                let hint = match error.raw_os_error() {
                    Some(libc::ENOBUFS | libc::ENOMEM) => {
                        "; the guest's memory is pinned: raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity)"
                    }
                    Some(libc::EINVAL) => "; has the interface so many queues?",
                    Some(libc::EFAULT) => "; memory in a file on disk cannot be pinned, a memfd can",
                    _ => "",
                };
                self.fails(&memory, passes, &format!("{error}{hint}"));
            }
        }
    }

    /// The link is of no use: what was under way is given up, and frames go by the tap for a while.
    fn detach(&mut self, ring: Option<&Ring>, tally: &mut Tally, trouble: &Trouble) {
        let memory = ring.map_or_else(Arc::default, |ring| Arc::clone(ring.memory()));
        self.close(tally);
        self.fails(&memory, !matches!(trouble, Trouble::Discarded), &trouble.to_string());
    }

    fn fails(&mut self, memory: &Arc<Memory>, passes: bool, why: &str) {
        let again = passes.then(|| Instant::now() + TRY_AGAIN_AFTER);
        self.failed = Some(Failed { memory: Arc::downgrade(memory), again });
        if self.said != why {
            tracing::warn!(pair = self.pair, "AF_XDP is not used, frames go by the tap: {why}");
            why.clone_into(&mut self.said);
        }
    }

    /// Closes the socket. What was under way stays so until the queue is free.
    fn close(&mut self, tally: &mut Tally) {
        let Some(link) = self.link.take() else { return };
        self.mode(Mode::Tap);
        self.leaving.extend(link.close());
        self.look_at = Instant::now();
        tally.pending = self.leaving.len() as u64;
    }

    /// Looks whether the queue is free that a socket was closed on, from time to time, and gives back what it had.
    fn settle(&mut self, ring: Option<&mut Ring>, tally: &mut Tally) -> Queue {
        if self.leaving.is_empty() {
            return Queue::Free;
        }
        let now = Instant::now();
        if now < self.look_at {
            return Queue::Taken;
        }
        self.look_at = now + LOOK_INTERVAL;
        let Some(xdp) = &self.shared.xdp else { return Queue::Free };
        match xdp.is_free(self.pair) {
            Ok(false) => Queue::Taken,
            Ok(true) => {
                self.back(ring, tally);
                Queue::Free
            }
            Err(error) => {
                tracing::debug!(pair = self.pair, %error, "nobody can say whether the queue is free");
                Queue::Unknown
            }
        }
    }

    /// The device reads nothing of what a closed socket had.
    fn back(&mut self, ring: Option<&mut Ring>, tally: &mut Tally) {
        let heads = std::mem::take(&mut self.leaving);
        let Some(ring) = ring.filter(|_| !heads.is_empty()) else { return };
        tally.pending = 0;
        for head in heads {
            tally.drop(DropReason::Refused);
            ring.complete_head(head);
        }
        ring.publish();
    }

    /// Waits until nothing is with a closed socket.
    fn part(&mut self, mut ring: Option<&mut Ring>, tally: &mut Tally) -> Result<(), BackendError> {
        let until = Instant::now() + CLOSED_WITHIN;
        while !self.leaving.is_empty() && self.settle(ring.as_deref_mut(), tally) != Queue::Free {
            if Instant::now() >= until {
                let (left, name) = (self.leaving.len(), self.shared.xdp.as_ref().map_or("", Xdp::name));
                return Err(BackendError::new(format!(
                    "{name} may still send {left} of its frames, as its queue is not free {} s after the socket was closed; \
                     look at the link and the driver of {name}, or another program has the queue",
                    CLOSED_WITHIN.as_secs()
                )));
            }
            let _ = poll(&mut [], Some(&LOOK_PAUSE));
        }
        Ok(())
    }

    fn mode(&self, mode: Mode) {
        self.shared.modes[self.pair].store(mode as u8, Relaxed);
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The rings are gone; what they gave shall still be sent.
        if let Some(link) = &mut self.link
            && let Err(trouble) = link.drain(None, Instant::now() + END_WITHIN, false)
        {
            tracing::debug!(%trouble, "AF_XDP");
        }
        if !self.leaving.is_empty() || self.link.as_ref().is_some_and(|link| link.ledger.heads() > 0) {
            self.shared.left[self.pair].store(true, Relaxed);
        }
        // The mode stays what it was: who asks now asks what happened.
    }
}

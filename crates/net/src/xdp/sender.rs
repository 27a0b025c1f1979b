//! The transmitting half of a pair with AF_XDP: has a link if one can be had, and the tap if not.

use std::os::fd::AsFd as _;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use towline_vhost_user::{Batch, Memory, Ring};

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

/// See the module.
pub(crate) struct Sender {
    pair: usize,
    shared: Arc<Shared>,
    batch: Batch,
    link: Option<Link>,
    timer: Timer,
    failed: Option<Failed>,
    /// What was said last of why there is none, so that it is said once.
    said: String,
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
        Ok(Self { pair, shared, batch, link: None, timer, failed: None, said: String::new() })
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
        self.attach(ring, tally);
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
        let Some(link) = &mut self.link else { return };
        match link.call().and_then(|()| link.reap(ring.as_deref_mut())) {
            Ok(came) => {
                tally.pending = link.ledger.heads().into();
                if link.ledger.descriptors() > 0 {
                    self.timer.arm(came);
                }
            }
            Err(trouble) => self.detach(ring, tally, &trouble),
        }
    }

    /// Waits for what the guest's queue is about to be stopped with; what does not come back is given up.
    pub(crate) fn drain(&mut self, mut ring: Option<&mut Ring>, tally: &mut Tally, deadline: Instant) {
        let Some(link) = &mut self.link else { return };
        match link.drain(ring.as_deref_mut(), deadline, true) {
            Ok(true) => tally.pending = 0,
            Ok(false) => {
                tracing::warn!(
                    pair = self.pair,
                    left = link.ledger.heads(),
                    "frames are not sent yet, and given up"
                );
                self.close(ring, tally);
            }
            Err(trouble) => self.detach(ring, tally, &trouble),
        }
    }

    /// The guest's memory goes: waits for what is under way, and unpins it.
    pub(crate) fn release(&mut self, mut ring: Option<&mut Ring>, tally: &mut Tally, deadline: Instant) {
        self.batch.clear();
        let Some(link) = &mut self.link else { return };
        if let Err(trouble) = link.drain(ring.as_deref_mut(), deadline, false) {
            tracing::warn!(pair = self.pair, %trouble, "AF_XDP");
        }
        self.close(ring, tally);
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
        self.close(Some(ring), tally);
        let same = |failed: &Failed| std::ptr::eq(failed.memory.as_ptr(), Arc::as_ptr(&memory));
        if let Some(failed) = self.failed.as_ref().filter(|failed| same(failed))
            && failed.again.is_none_or(|again| Instant::now() < again)
        {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let Some(xdp) = &shared.xdp else { return };
        // The one that had the queue may have been ours, and takes its time.
        let patience = if self.failed.is_none() { FREE_WITHIN } else { Duration::ZERO };
        let begun = Instant::now();
        match xdp.link((self.pair, shared.taps.queues().len()), &memory, patience) {
            Ok(None) => {}
            Ok(Some(link)) => {
                let took_ms = begun.elapsed().as_millis();
                tracing::info!(pair = self.pair, interface = xdp.name(), mode = ?link.mode(), took_ms, "AF_XDP");
                self.mode(link.mode());
                (self.link, self.failed) = (Some(link), None);
                self.said.clear();
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
    fn detach(&mut self, ring: Option<&mut Ring>, tally: &mut Tally, trouble: &Trouble) {
        let memory = ring.as_ref().map_or_else(Arc::default, |ring| Arc::clone(ring.memory()));
        self.close(ring, tally);
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

    fn close(&mut self, ring: Option<&mut Ring>, tally: &mut Tally) {
        let Some(link) = self.link.take() else { return };
        self.mode(Mode::Tap);
        tally.pending = 0;
        let heads = link.close();
        let Some(ring) = ring else { return };
        for head in heads {
            tally.drop(DropReason::Refused);
            ring.complete_head(head);
        }
        ring.publish();
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
        // The mode stays what it was: who asks now asks what happened.
    }
}

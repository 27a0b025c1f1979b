//! A pair's end of a queue of the interface: frames go, and come back.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use towline_vhost_user::{Batch, Chain, Head, Memory, Ring};

use super::arena::{Arena, Chunk};
use super::budget::Budget;
use super::ledger::{FRAMES_MAX, Ledger, tagged};
use super::plan::{Limits, Piece, Reference};
use super::socket::{CHUNK_BYTES, COMPLETIONS, Mode, Socket};
use super::umem::Umem;
use crate::receive::Line;
use crate::statistics::{DropReason, Tally};
use crate::sys::span::Section;
use crate::transmit;

/// Frames that are taken, and shown to the kernel, together.
const FRAMES_A_BATCH: usize = 64;
/// Batches in one turn; then the other direction, and the session, have theirs.
const BATCHES_A_TURN: usize = 4;
/// Descriptors of a packet that the kernel copies: as many as it has fragments (`MAX_SKB_FRAGS`).
const COPIED_DESCRIPTORS: usize = 17;
/// How long nothing may come back before the socket is given up.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// Between two looks for completions when all that is left to do is to wait for them.
const DRAIN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };

/// See the module.
#[derive(Debug)]
pub(super) struct Link {
    // Before what it uses: unmapped and closed first.
    pub(super) socket: Socket,
    pub(super) umem: Arc<Umem>,
    pub(super) section: Section,
    pub(super) arena: Arena,
    pub(super) ledger: Ledger<Head>,
    pub(super) budget: Budget,
    pub(super) limits: Limits,
    /// The longest frame that the interface takes.
    pub(super) frame_bytes_max: usize,
    /// When something came back last, or there was nothing to wait for.
    alive: Instant,
    /// Whether it is time to look at the guest's memory.
    looks: bool,
    pub(super) draft: Draft,
}

/// A frame in the making. Kept for its room.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) descriptors: Vec<(u64, u32, u32)>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) pieces: Vec<Piece>,
    pub(super) references: Vec<Reference>,
    /// A frame, and a packet of it, that are copied.
    pub(super) frame: Vec<u8>,
    pub(super) packet: Vec<u8>,
}

/// What a frame in the making came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drafted {
    /// Descriptors that point into the guest's memory.
    Referring,
    /// Descriptors into the arena only: the guest has its buffers back at once.
    Copied,
    /// There is no room, for now.
    Full,
    /// It is for the tap.
    Tap,
    /// It is longer than what the interface takes.
    TooLong,
}

/// Why a link is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("the kernel does not send: {0}")]
    Refused(io::Error),
    #[error("a completion of nothing that was sent")]
    Stranger,
    #[error("nothing came back for {} s ({invalid} descriptors were invalid)", STUCK_AFTER.as_secs())]
    Stuck { invalid: u64 },
    #[error(
        "the guest's memory is taken away under it (balloon, page reporting); AF_XDP needs a guest without these"
    )]
    Discarded,
}

impl Link {
    /// A link over a bound socket: for this pair, of a driver that takes so many descriptors.
    pub(super) fn new(
        umem: Arc<Umem>,
        socket: Socket,
        (pair, zero_copy_descriptors): (usize, usize),
        frame_bytes_max: usize,
    ) -> io::Result<Self> {
        let section = Section::take(&umem.span, pair);
        let section = section.ok_or_else(|| io::Error::other("its arena is in use still"))?;
        let descriptors = match (socket.gathers, socket.zero_copy) {
            (false, _) => 1,
            (true, false) => COPIED_DESCRIPTORS,
            (true, true) => zero_copy_descriptors,
        };
        let limits = Limits {
            bytes: CHUNK_BYTES - umem.metadata_bytes,
            crosses: !socket.zero_copy,
            before: umem.metadata_bytes.into(),
            descriptors,
        };
        Ok(Self {
            socket,
            umem,
            section,
            arena: Arena::new(),
            ledger: Ledger::new(),
            budget: Budget::default(),
            limits,
            frame_bytes_max,
            alive: Instant::now(),
            looks: false,
            draft: Draft::default(),
        })
    }

    pub(super) fn mode(&self) -> Mode {
        if self.socket.zero_copy { Mode::ZeroCopy } else { Mode::Copy }
    }

    /// Whether it was made for this memory.
    pub(super) fn is_of(&self, memory: &Arc<Memory>) -> bool {
        self.umem.is_of(memory)
    }

    /// Sends for one turn. True if there may be more; what the tap has no room for is said in `blocked`.
    pub(super) fn run(
        &mut self,
        ring: &mut Ring,
        line: Line<'_>,
        tally: &mut Tally,
        (batch, blocked): (&mut Batch, &mut bool),
    ) -> Result<bool, Trouble> {
        self.reap(Some(&mut *ring))?;
        for _ in 0..BATCHES_A_TURN {
            let taken = ring.pop(batch, FRAMES_A_BATCH);
            let mut sent = taken;
            for (index, chain) in batch.chains().enumerate() {
                if !self.send(chain, ring, line, (&mut *tally, &mut *blocked)) {
                    sent = index;
                    break;
                }
            }
            ring.rewind(batch, sent);
            self.socket.transmit.publish();
            self.call()?;
            let came = self.reap(Some(&mut *ring))?;
            ring.publish();
            if std::mem::take(&mut self.looks) && !self.umem.is_whole() {
                return Err(Trouble::Discarded);
            }
            if taken == 0 {
                ring.set_notification(true);
                return Ok(false);
            }
            if sent < taken {
                ring.set_notification(false);
                return Ok(came && !*blocked);
            }
        }
        Ok(true)
    }

    /// Sends one frame. False if there is no room for it.
    fn send(
        &mut self,
        chain: Chain<'_>,
        ring: &mut Ring,
        line: Line<'_>,
        (tally, blocked): (&mut Tally, &mut bool),
    ) -> bool {
        let frame_bytes = (chain.readable_bytes() as usize).saturating_sub(line.format.header_bytes);
        // Half of a ring may be away, and what comes then is copied, so that a slow device does not take all.
        let most = u32::from(ring.size() / 2).min(u32::from(FRAMES_MAX) / 2);
        let mut drafted = self.draft(chain, line.format.header_bytes, self.ledger.heads() < most);
        if drafted == Drafted::Full && self.ledger.descriptors() == 0 {
            drafted = Drafted::Tap;
        }
        let referring = drafted == Drafted::Referring;
        match drafted {
            Drafted::Full => return false,
            Drafted::Tap => {
                let before = tally.packets;
                if !transmit::frame(chain, line, &mut Vec::new(), tally) {
                    *blocked = true;
                    return false;
                }
                tally.copied += tally.packets - before;
                ring.complete(chain, 0);
            }
            Drafted::TooLong => {
                tally.drop(DropReason::TooLong);
                ring.complete(chain, 0);
            }
            Drafted::Referring | Drafted::Copied => {
                self.commit(referring.then(|| chain.head()));
                if !referring {
                    ring.complete(chain, 0);
                }
                tally.packets += 1;
                tally.bytes += frame_bytes as u64;
                tally.referenced += u64::from(referring);
                let zero_copy = referring && self.socket.zero_copy;
                *(if zero_copy { &mut tally.zero_copy } else { &mut tally.copied }) += 1;
            }
        }
        self.looks |= self.budget.frame();
        true
    }

    /// Writes the descriptors of the draft, for which there is room.
    fn commit(&mut self, head: Option<Head>) {
        let count = u32::try_from(self.draft.descriptors.len()).expect("it was compared with the ring");
        if self.ledger.descriptors() == 0 {
            self.alive = Instant::now();
        }
        let tag = self.ledger.enter(count, head, &self.draft.chunks);
        let tag = tag.expect("there was room for a frame");
        for (address, len, options) in self.draft.descriptors.drain(..) {
            self.socket.transmit.push(tagged(address, tag), len, options);
        }
        self.draft.chunks.clear();
    }

    /// Whether a draft of so many descriptors may be committed.
    pub(super) fn has_room(&mut self, descriptors: usize) -> bool {
        let count = u32::try_from(descriptors).unwrap_or(u32::MAX);
        self.ledger.has_room()
            && count <= self.socket.transmit.room()
            && count <= COMPLETIONS - self.ledger.descriptors()
    }

    /// Has the kernel send what it was shown, as far as it can now.
    pub(super) fn call(&mut self) -> Result<(), Trouble> {
        loop {
            let waiting = self.socket.transmit.waiting();
            let wanted = !self.socket.zero_copy || self.socket.transmit.wants_a_call();
            if waiting == 0 || !wanted {
                return Ok(());
            }
            if let Err(error) = self.socket.call() {
                match error.raw_os_error() {
                    // As many as it does at a time, or as it has room for.
                    Some(libc::EAGAIN | libc::EINTR) => {}
                    Some(libc::EBUSY | libc::ENOBUFS | libc::ENOMEM) => self.budget.error(),
                    _ => return Err(Trouble::Refused(error)),
                }
            }
            if self.socket.zero_copy || self.socket.transmit.waiting() >= waiting {
                return Ok(());
            }
        }
    }

    /// Takes back what the kernel is done with; without a ring, for nobody. True if there was something.
    pub(super) fn reap(&mut self, mut ring: Option<&mut Ring>) -> Result<bool, Trouble> {
        let (ledger, arena) = (&mut self.ledger, &mut self.arena);
        let mut known = true;
        let taken = self.socket.completion.take(|address| {
            let done = |head| {
                if let Some(ring) = &mut ring {
                    ring.complete_head(head);
                }
            };
            known &= ledger.back(address, |chunk| arena.free(chunk), done);
        });
        if !known {
            return Err(Trouble::Stranger);
        }
        if taken > 0 || ledger.descriptors() == 0 {
            self.alive = Instant::now();
        } else if self.alive.elapsed() > STUCK_AFTER {
            return Err(Trouble::Stuck { invalid: self.socket.invalid() });
        }
        Ok(taken > 0)
    }

    /// Waits until nothing is under way, or the deadline; with `heads` only for what is the guest's. True if all came back.
    pub(super) fn drain(
        &mut self,
        mut ring: Option<&mut Ring>,
        deadline: Instant,
        heads: bool,
    ) -> Result<bool, Trouble> {
        loop {
            self.call()?;
            self.reap(ring.as_deref_mut())?;
            let left = if heads { self.ledger.heads() } else { self.ledger.descriptors() };
            if left == 0 || Instant::now() >= deadline {
                return Ok(left == 0);
            }
            // Nothing tells of completions. A signal only makes it look sooner.
            let _ = poll(&mut [], Some(&DRAIN_INTERVAL));
        }
    }

    /// Closes the socket, and unpins what no other pair has pinned; what had not come back, which the device may still read.
    pub(super) fn close(self) -> impl Iterator<Item = Head> {
        self.ledger.abandon()
    }
}

//! A bound socket of a queue pair: sends frames, and completes their chains.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use towline_vhost_user::{Batch, Chain, ChainHead, GuestMemory, Next, Ring};

use super::error_budget::ErrorBudget;
use super::frame_builder::{BuildOutcome, FrameBuilder, GuestReferences};
use super::in_flight::{FRAMES_MAX, InFlightFrames, tagged};
use super::references::{DescriptorLimits, PageCrossing};
use super::socket::{CHUNK_BYTES, COMPLETION_ENTRIES, XdpSocket};
use super::timer::CompletionProgress;
use super::umem::Umem;
use crate::statistics::{BatchCounters, CopyReason, DropReason, TransmitMode};
use crate::sys::umem_mapping::ArenaSection;
use crate::tap::TapContext;
use crate::transmit::{Sent, send_frame};

/// Frames that are popped, and published to the kernel, together.
const FRAMES_PER_BATCH: usize = 64;
/// Maximum number of batches in one run; then the other direction and the session have theirs.
const BATCHES_PER_RUN: usize = 4;
/// Maximum number of descriptors of a packet that the kernel copies: its fragments (`MAX_SKB_FRAGS`).
const COPY_DESCRIPTORS_MAX: usize = 17;
/// Time without completions after which the socket is abandoned.
const STALLED_AFTER: Duration = Duration::from_secs(5);
/// Polling interval of the completion ring.
const DRAIN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };

/// See the module.
#[derive(Debug)]
pub(super) struct TxQueue {
    // Before the memory that it uses: unmapped and closed first.
    socket: XdpSocket,
    umem: Arc<Umem>,
    builder: FrameBuilder,
    pub(super) in_flight: InFlightFrames<ChainHead>,
    budget: ErrorBudget,
    references: GuestReferences,
    crossing: PageCrossing,
    /// Time of the last completion, or of the last moment without frames in flight.
    last_progress: Instant,
    /// True if guest memory and the kernel's counters must be checked after this batch.
    check: bool,
}

/// Error after which a queue is unusable.
#[derive(Debug, thiserror::Error)]
pub(super) enum TxError {
    #[error("the kernel does not send: {0}")]
    Send(io::Error),
    #[error("the kernel completed a descriptor that was not in flight")]
    UnknownCompletion,
    #[error("no completions for {} s", STALLED_AFTER.as_secs())]
    Stalled,
    #[error("the kernel discarded {invalid} descriptors as invalid")]
    Invalid { invalid: u64, crossing: PageCrossing },
    #[error(
        "pages were removed from the guest's memory (balloon, page reporting); AF_XDP needs a guest without these devices"
    )]
    MemoryRemoved,
}

/// Result of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct TxRun {
    pub(super) next: Next,
    /// True if a frame waits for room in the tap.
    pub(super) tap_full: bool,
}

/// Properties of a queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueOptions {
    /// Maximum number of descriptors of a packet if the socket is in zero-copy mode.
    pub(super) zero_copy_descriptors: usize,
    /// Page boundaries that a descriptor may cross then.
    pub(super) zero_copy_crossing: PageCrossing,
    /// Permission to refer to guest memory then.
    pub(super) zero_copy_references: GuestReferences,
    /// Maximum length of a frame of the interface.
    pub(super) frame_bytes_max: usize,
}

/// Frames for whose completion a drain waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainScope {
    /// Frames that refer to guest memory.
    Chains,
    /// All.
    Everything,
}

impl TxQueue {
    /// A queue of a pair, with a bound socket.
    pub(super) fn new(
        umem: Arc<Umem>,
        socket: XdpSocket,
        pair: usize,
        options: &QueueOptions,
    ) -> io::Result<Self> {
        let section = ArenaSection::acquire(&umem.mapping, pair);
        let section = section.ok_or_else(|| io::Error::other("the pair's arena is still in use"))?;
        let descriptors = match (socket.scatter_gather, socket.zero_copy) {
            (false, _) => 1,
            (true, false) => COPY_DESCRIPTORS_MAX,
            (true, true) => options.zero_copy_descriptors,
        };
        let crossing = if socket.zero_copy { options.zero_copy_crossing } else { PageCrossing::Any };
        let limits = DescriptorLimits {
            bytes: CHUNK_BYTES - umem.metadata_bytes,
            crossing,
            headroom: umem.metadata_bytes.into(),
            descriptors,
        };
        // In copy mode the kernel copies each frame, so another copy never pays.
        let references =
            if socket.zero_copy { options.zero_copy_references } else { GuestReferences::Allowed };
        Ok(Self {
            socket,
            references,
            crossing,
            builder: FrameBuilder::new(Arc::clone(&umem), section, limits, options.frame_bytes_max),
            umem,
            in_flight: InFlightFrames::new(),
            budget: ErrorBudget::default(),
            last_progress: Instant::now(),
            check: false,
        })
    }

    pub(super) fn mode(&self) -> TransmitMode {
        if self.socket.zero_copy { TransmitMode::ZeroCopy } else { TransmitMode::Copy }
    }

    /// Returns true if this memory is registered.
    pub(super) fn is_of(&self, memory: &Arc<GuestMemory>) -> bool {
        self.umem.is_of(memory)
    }

    /// Sends up to [`BATCHES_PER_RUN`] batches.
    pub(super) fn run(
        &mut self,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
        batch: &mut Batch,
    ) -> Result<TxRun, TxError> {
        self.reap(Some(&mut *ring))?;
        for _ in 0..BATCHES_PER_RUN {
            let popped = ring.pop(batch, FRAMES_PER_BATCH);
            let (mut sent, mut tap_full) = (popped, false);
            for (index, chain) in batch.chains().enumerate() {
                let outcome = self.send(chain, ring, tap, counted);
                if outcome != Sent::Done {
                    (sent, tap_full) = (index, outcome == Sent::TapFull);
                    break;
                }
            }
            ring.rewind(batch, sent);
            self.socket.tx.publish();
            self.wake_up()?;
            let progress = self.reap(Some(&mut *ring))?;
            ring.publish();
            if std::mem::take(&mut self.check) {
                self.check()?;
            }
            if popped == 0 {
                ring.set_notification(true);
                return Ok(TxRun { next: Next::Wait, tap_full });
            }
            if sent < popped {
                ring.set_notification(false);
                let again = progress == CompletionProgress::Some && !tap_full;
                return Ok(TxRun { next: if again { Next::Again } else { Next::Wait }, tap_full });
            }
        }
        Ok(TxRun { next: Next::Again, tap_full: false })
    }

    /// Sends one frame: by this queue, or by the tap if it is not supported here.
    fn send(
        &mut self,
        chain: Chain<'_>,
        ring: &mut Ring,
        tap: TapContext<'_>,
        counted: &mut BatchCounters,
    ) -> Sent {
        let virtio_bytes = tap.format.header_bytes;
        let frame_bytes = (chain.readable_bytes() as usize).saturating_sub(virtio_bytes);
        let outcome = self.build(chain, virtio_bytes, self.references(ring.size()));
        if matches!(outcome, BuildOutcome::Referenced | BuildOutcome::Copied(_)) {
            self.commit((outcome == BuildOutcome::Referenced).then(|| chain.head()));
        }
        match outcome {
            BuildOutcome::NoRoom => return Sent::QueueFull,
            BuildOutcome::Unsupported => {
                let before = counted.since.packets;
                if !send_frame(chain, tap, counted) {
                    return Sent::TapFull;
                }
                counted.add_copies(CopyReason::Tap, counted.since.packets - before);
                ring.complete(chain, 0);
            }
            BuildOutcome::TooLong => {
                counted.add_drop(DropReason::TooLong);
                ring.complete(chain, 0);
            }
            BuildOutcome::Referenced => {
                counted.add_frame(frame_bytes);
                counted.since.referenced += 1;
                if self.socket.zero_copy {
                    counted.since.zero_copy += 1;
                } else {
                    counted.add_copies(CopyReason::CopyMode, 1);
                }
            }
            BuildOutcome::Copied(reason) => {
                ring.complete(chain, 0);
                counted.add_frame(frame_bytes);
                counted.add_copies(reason, 1);
            }
        }
        self.check |= self.budget.count_frame();
        Sent::Done
    }

    /// Decides if a frame may refer to guest memory.
    fn references(&self, ring_size: u16) -> GuestReferences {
        // At most half of the ring is in flight, further frames are copied: a slow network card does not hold
        // all chains.
        let chains_max = u32::from(ring_size / 2).min(u32::from(FRAMES_MAX) / 2);
        if self.in_flight.heads >= chains_max {
            GuestReferences::Forbidden(CopyReason::InFlight)
        } else if self.budget.is_exceeded() {
            GuestReferences::Forbidden(CopyReason::Errors)
        } else {
            self.references
        }
    }

    /// Builds the descriptors of a frame, and checks that the rings have room for them.
    fn build(&mut self, chain: Chain<'_>, virtio_bytes: usize, references: GuestReferences) -> BuildOutcome {
        let mut outcome = self.builder.build(chain, virtio_bytes, references);
        let built = matches!(outcome, BuildOutcome::Referenced | BuildOutcome::Copied(_));
        if built && !self.has_room(self.builder.descriptors.len()) {
            self.builder.discard();
            outcome = BuildOutcome::NoRoom;
        }
        // With nothing in flight there will not be more room.
        if outcome == BuildOutcome::NoRoom && self.in_flight.descriptors == 0 {
            outcome = BuildOutcome::Unsupported;
        }
        outcome
    }

    /// Writes the descriptors that were built to the TX ring.
    fn commit(&mut self, head: Option<ChainHead>) {
        let count = u32::try_from(self.builder.descriptors.len()).expect("`has_room` has compared it");
        if self.in_flight.descriptors == 0 {
            self.last_progress = Instant::now();
        }
        let tag = self.in_flight.insert(count, head, &self.builder.chunks);
        let tag = tag.expect("`has_room` has found room for a frame");
        for descriptor in self.builder.descriptors.drain(..) {
            let address = tagged(descriptor.offset, tag);
            self.socket.tx.push(address, descriptor.len, descriptor.options);
        }
        self.builder.chunks.clear();
    }

    /// Returns true if the rings have room for this number of descriptors.
    fn has_room(&mut self, descriptors: usize) -> bool {
        let count = u32::try_from(descriptors).unwrap_or(u32::MAX);
        self.in_flight.has_room()
            && count <= self.socket.tx.free()
            && count <= COMPLETION_ENTRIES - self.in_flight.descriptors
    }

    /// Makes the kernel send the published descriptors, as many as it can now.
    pub(super) fn wake_up(&mut self) -> Result<(), TxError> {
        loop {
            let unconsumed = self.socket.tx.unconsumed();
            let needed = !self.socket.zero_copy || self.socket.tx.needs_wakeup();
            if unconsumed == 0 || !needed {
                return Ok(());
            }
            if let Err(error) = self.socket.wake_up() {
                match error.raw_os_error() {
                    // It sends a limited number at a time, or has no room.
                    Some(libc::EAGAIN | libc::EINTR) => {}
                    Some(libc::EBUSY | libc::ENOBUFS | libc::ENOMEM) => self.budget.count_error(),
                    _ => return Err(TxError::Send(error)),
                }
            }
            if self.socket.zero_copy || self.socket.tx.unconsumed() >= unconsumed {
                return Ok(());
            }
        }
    }

    /// Processes completions. Their chains are completed if there is a ring.
    pub(super) fn reap(&mut self, mut ring: Option<&mut Ring>) -> Result<CompletionProgress, TxError> {
        let (in_flight, builder) = (&mut self.in_flight, &mut self.builder);
        let mut known = true;
        let completions = self.socket.completion.consume(|address| {
            let complete = |head| {
                if let Some(ring) = &mut ring {
                    ring.complete_head(head);
                }
            };
            known &= in_flight.remove(address, |chunk| builder.free(chunk), complete);
        });
        if !known {
            return Err(TxError::UnknownCompletion);
        }
        if completions > 0 || in_flight.descriptors == 0 {
            self.last_progress = Instant::now();
        } else if self.last_progress.elapsed() > STALLED_AFTER {
            self.check()?;
            return Err(TxError::Stalled);
        }
        Ok(if completions > 0 { CompletionProgress::Some } else { CompletionProgress::None })
    }

    /// Checks that the kernel reads all descriptors, from the guest's present memory.
    fn check(&self) -> Result<(), TxError> {
        if !self.umem.is_intact() {
            return Err(TxError::MemoryRemoved);
        }
        match self.socket.invalid_descriptors() {
            0 => Ok(()),
            // They are not completed: their chains are in flight until the socket is closed.
            invalid => Err(TxError::Invalid { invalid, crossing: self.crossing }),
        }
    }

    /// Waits until no frame of the scope is in flight. Returns false at the deadline.
    pub(super) fn drain(
        &mut self,
        mut ring: Option<&mut Ring>,
        deadline: Instant,
        scope: DrainScope,
    ) -> Result<bool, TxError> {
        loop {
            self.wake_up()?;
            self.reap(ring.as_deref_mut())?;
            let left = match scope {
                DrainScope::Chains => self.in_flight.heads,
                DrainScope::Everything => self.in_flight.descriptors,
            };
            if left == 0 {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            // No event reports completions. A signal only shortens the interval.
            let _ = poll(&mut [], Some(&DRAIN_INTERVAL));
        }
    }

    /// Closes the socket, and unpins memory that no other pair uses. Returns the chains that are in flight,
    /// which the network card may still read.
    pub(super) fn close(self) -> impl Iterator<Item = ChainHead> {
        self.in_flight.into_heads()
    }
}

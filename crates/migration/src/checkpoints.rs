//! Checkpoints of a running QEMU, which is the primary of COLO: its guest is stopped for milliseconds each.
//!
//! ```text
//!   QEMU ── socket ──► take() ──► CheckpointSink      1 thread: REQUEST · REPLY · mark · pages, devices · LOADED
//!                                   CheckpointQueue ──► a thread that sends checkpoints elsewhere
//! ```
//!
//! QEMU requests a checkpoint at its interval (`x-checkpoint-delay`), and its guest runs until the reply:
//! [`CheckpointSink::buffer`] decides when that is. From then on the guest is stopped until
//! [`CheckpointSink::put`] returns, so neither `mark` nor `put` may wait for a network; and QEMU 11 holds its
//! global lock while it sends memory, so its monitor does not reply if these bytes are not received.
//!
//! However this ends, the primary's guest may be stopped until `x-colo-lost-heartbeat`, which only its monitor
//! takes. Out of scope: that, and the first copy ([`Incoming::run_first_copy`](crate::Incoming::run_first_copy)).

mod pass_on;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use towline_channel::{Channel, ChannelExt, IoBuf, IoBufMut, RecvFlags, SendFlags};
use towline_protocol::colo::{Awaits, Checkpoint, CheckpointBuffer, FirstCopy, Progress};

pub use pass_on::{pass_on, pass_on_first_copy};

use crate::lock::lock;
use crate::{ChannelId, Error, Pages, Result, Sink};

/// Maximum number of pages that a [`Sink`] is given at once.
const BATCH_PAGES_MAX: usize = 256;

/// The consumer of checkpoints. An error of any method ends [`take`].
pub trait CheckpointSink {
    /// Returns memory for the next checkpoint. The guest runs until it returns.
    ///
    /// # Errors
    /// No further checkpoint is wanted.
    fn buffer(&mut self) -> Result<CheckpointBuffer>;

    /// Marks the end of the output that belongs to this checkpoint. The guest is stopped and its devices are quiet:
    /// all that it has sent is past them, and what it sends from [`Self::put`] on belongs to the next one.
    ///
    /// # Errors
    /// The mark was not set; the checkpoint is not taken.
    fn mark(&mut self, number: u64) -> Result<()>;

    /// Takes the checkpoint, which is whole. The guest runs on when it returns.
    ///
    /// # Errors
    /// It cannot be kept.
    fn put(&mut self, checkpoint: Checkpoint) -> Result<()>;
}

/// Takes checkpoints until the primary ends, `channel` is shut down, or `sink` fails. Call it when the
/// primary's monitor reports the migration as `colo`.
///
/// # Errors
/// Always: the reason of the end. [`Error::Ended`]: the primary has closed the connection, and only its monitor
/// knows whether its guest was shut down.
pub fn take(channel: &dyn Channel, first: FirstCopy, sink: &mut dyn CheckpointSink) -> Result<Infallible> {
    let mut out = Vec::new();
    let mut waiting = first.ready(&mut out);
    loop {
        send(channel, &mut out)?;
        let requested = receive(channel, waiting)?;
        let stopping = requested.reply(sink.buffer()?, &mut out);
        send(channel, &mut out)?;
        let stopped = receive(channel, stopping)?;
        sink.mark(stopped.number())?;
        let (checkpoint, next) = receive(channel, stopped.marked())?.loaded(&mut out);
        if let Err(error) = sink.put(checkpoint) {
            // It is not kept, and its guest runs on.
            let _ = send(channel, &mut out);
            return Err(error);
        }
        waiting = next;
    }
}

fn send(channel: &dyn Channel, out: &mut Vec<u8>) -> Result<()> {
    let message = mem::take(out);
    Ok(channel.send_all(&[IoBuf::from(&message[..])], SendFlags::empty())?)
}

fn receive<S: Awaits>(channel: &dyn Channel, mut state: S) -> Result<S::Next> {
    loop {
        let received = channel.recv(&mut [IoBufMut::from(state.room())], RecvFlags::empty())?;
        if received == 0 {
            return Err(Error::Ended { peer: channel.peer().to_owned(), awaiting: state.awaits() });
        }
        match state.received(received).map_err(Error::protocol(channel.peer()))? {
            Progress::Awaits(same) => state = same,
            Progress::Reached(next) => return Ok(next),
        }
    }
}

/// Writes the memory of a checkpoint to a guest that has all checkpoints before it. Its device state is the
/// caller's to keep.
///
/// # Errors
/// A page cannot be written. The memory is that of no checkpoint then.
pub fn apply(checkpoint: &Checkpoint, sink: &dyn Sink) -> Result<()> {
    let pages: Vec<_> = checkpoint.pages().collect();
    let alike =
        pages.chunk_by(|(a, content), (b, next)| a.block == b.block && content.is_some() == next.is_some());
    for batch in alike.flat_map(|run| run.chunks(BATCH_PAGES_MAX)) {
        let block = batch[0].0.block;
        let offsets: Vec<u64> = batch.iter().map(|(page, _)| page.offset).collect();
        match batch.iter().map(|&(_, content)| content).collect::<Option<Vec<_>>>() {
            Some(contents) => {
                sink.pages(ChannelId::Main, &Pages { block, offsets: &offsets, contents: &contents })?;
            }
            None => sink.zero(ChannelId::Main, block, &offsets)?,
        }
    }
    Ok(())
}

/// Checkpoints on their way from the thread that takes them to one that sends them, with a fixed number of
/// buffers: a sender that is late delays the next checkpoint, never the guest. It is for one [`take`], which
/// loses the buffer of a checkpoint that it does not complete.
#[derive(Debug)]
pub struct CheckpointQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState {
    free: Vec<CheckpointBuffer>,
    whole: VecDeque<Checkpoint>,
    /// A checkpoint should not wait for its time.
    is_requested: bool,
    is_closed: bool,
}

impl CheckpointQueue {
    /// A queue with these buffers. With two, one checkpoint is taken while the one before it is sent.
    pub fn new(buffers: Vec<CheckpointBuffer>) -> Self {
        let state =
            QueueState { free: buffers, whole: VecDeque::new(), is_requested: false, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a free buffer: for [`CheckpointSink::buffer`].
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the queue is closed.
    pub fn buffer(&self) -> Result<CheckpointBuffer> {
        self.wait_for(|state| state.free.pop())
    }

    /// Waits until `latest`, or for a [`Self::request`] and until `earliest`.
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the queue is closed.
    pub fn wait_until_due(&self, earliest: Instant, latest: Instant) -> Result<()> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return Err(Error::Cancelled);
            }
            let due = if state.is_requested { earliest } else { latest };
            let left = due.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Requests a checkpoint.
    pub fn hasten(&self) {
        lock(&self.state).is_requested = true;
        self.changed.notify_all();
    }

    /// Requests a checkpoint, and waits until its output is marked ([`Self::marked`]).
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the queue is closed.
    pub fn request(&self) -> Result<()> {
        self.hasten();
        self.wait_for(|state| (!state.is_requested).then_some(()))
    }

    /// The output of a checkpoint is marked: for [`CheckpointSink::mark`].
    pub fn marked(&self) {
        lock(&self.state).is_requested = false;
        self.changed.notify_all();
    }

    /// Adds a checkpoint, without waiting: for [`CheckpointSink::put`].
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the queue is closed.
    pub fn put(&self, checkpoint: Checkpoint) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(Error::Cancelled);
        }
        state.whole.push_back(checkpoint);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next checkpoint.
    ///
    /// # Errors
    /// [`Error::Cancelled`]: the queue is closed. Checkpoints that it still has are lost.
    pub fn next(&self) -> Result<Checkpoint> {
        self.wait_for(|state| state.whole.pop_front())
    }

    /// Gives the buffer of a checkpoint back, which is not needed any more.
    pub fn release(&self, checkpoint: Checkpoint) {
        lock(&self.state).free.push(checkpoint.into_buffer());
        self.changed.notify_all();
    }

    /// Returns true if it is closed.
    pub fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// Ends all waits, now and later.
    pub fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }

    fn wait_for<T>(&self, find: impl Fn(&mut QueueState) -> Option<T>) -> Result<T> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return Err(Error::Cancelled);
            }
            if let Some(found) = find(&mut state) {
                return Ok(found);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

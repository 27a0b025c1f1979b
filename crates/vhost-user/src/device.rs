//! What a device is: numbers and features, what it answers to the frontend, and workers that serve its queues.

use std::error::Error;
use std::fmt;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use crate::features::ProtocolFeatures;
use crate::worker::Queues;

/// A device behind a vhost-user socket. Shared by the thread that answers the frontend, which makes every call here,
/// and whoever watches it; the queues are served by its [`Worker`]s.
///
/// Rings, memory, the dirty log and their features ([`features::OURS`](crate::features::OURS)) are the crate's.
pub trait Device: Send + Sync {
    /// What messages and threads are called after, in at most ten letters.
    fn name(&self) -> &str;

    /// How many queues it has, at most [`QUEUES_MAX`](crate::QUEUES_MAX).
    fn queue_count(&self) -> usize;

    /// What `GET_QUEUE_NUM` is answered: queues, but for a network card pairs, which is how QEMU compares it.
    fn queue_number(&self) -> usize {
        self.queue_count()
    }

    /// How many queues beside each other one worker serves: 2 where a thread has a receive and a transmit queue.
    fn queues_per_worker(&self) -> usize {
        1
    }

    /// Whether what the driver makes available to this queue is completed, and goes nowhere, while the frontend has the
    /// queue disabled: packets to be sent. By default a disabled queue rests, as one with buffers to receive into does.
    fn discards(&self, queue: usize) -> bool {
        let _ = queue;
        false
    }

    /// Whether chains are published in the order in which they were taken where no record of them outlives this process, so
    /// that the used index tells the next one where to go on. Not for a device that keeps some for long while it is done
    /// with others.
    fn keeps_order(&self) -> bool {
        false
    }

    /// Its own virtio features, of which the driver takes some.
    fn features(&self) -> u64;

    /// Its own protocol features, of [`ProtocolFeatures::BY_DEVICE`]; the calls that belong to them are made only when
    /// the frontend takes them.
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
    }

    /// The driver has taken these of all features. Comes before any queue runs, also on a migration's destination, and
    /// again when the driver starts anew.
    ///
    /// # Errors
    /// That it cannot be, in words for the frontend's log; the connection ends.
    fn acknowledge(&self, features: u64) -> Result<(), Refusal> {
        let _ = features;
        Ok(())
    }

    /// Makes the worker of the queues from `index * queues_per_worker` on, when a frontend connects.
    ///
    /// # Errors
    /// That something it needs is not there; the connection ends.
    fn worker(&self, index: usize) -> Result<Box<dyn Worker>, Refusal>;

    /// The whole of its configuration space, at most [`CONFIG_BYTES_MAX`](crate::message::CONFIG_BYTES_MAX) bytes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The driver (or, if `migrated`, the frontend of a migration's destination) writes its configuration space.
    ///
    /// # Errors
    /// That this part is not to be written.
    fn write_config(&self, offset: usize, bytes: &[u8], migrated: bool) -> Result<(), Refusal> {
        let _ = (offset, bytes, migrated);
        Err(Refusal::new("its configuration cannot be written"))
    }

    /// After a migration: tell the network where this address is now.
    ///
    /// # Errors
    /// That it could not be told.
    fn send_rarp(&self, mac: [u8; 6]) -> Result<(), Refusal> {
        let _ = mac;
        Err(Refusal::new("it has no network"))
    }

    /// The frontend's MTU in bytes.
    ///
    /// # Errors
    /// That such packets do not fit.
    fn set_mtu(&self, mtu: u16) -> Result<(), Refusal> {
        let _ = mtu;
        Err(Refusal::new("it has no network"))
    }

    /// Whether a guest may run here before its memory has come: postcopy's destination. Not for a device that hands memory
    /// to hardware or pins it.
    fn allows_postcopy(&self) -> bool {
        true
    }

    /// Whether its guest can be migrated; if not, the frontend is not offered the dirty log, and QEMU says no.
    fn is_migratable(&self) -> bool {
        true
    }

    /// Everything as before the first driver. No queue runs.
    fn reset(&self) {}

    /// Its state for a migration, when no queue runs. For those who offer
    /// [`DEVICE_STATE`](ProtocolFeatures::DEVICE_STATE).
    ///
    /// # Errors
    /// That it cannot be saved now.
    fn save(&self) -> Result<Vec<u8>, Refusal> {
        Err(Refusal::new("it has no state"))
    }

    /// Takes over the state that the same device of another process saved, before any queue runs.
    ///
    /// # Errors
    /// That it cannot be taken; the device is as it was before.
    fn load(&self, state: &[u8]) -> Result<(), Refusal> {
        let _ = state;
        Err(Refusal::new("it has no state"))
    }

    /// What stands for all that a migration needs to know of it: kind, features, limits. Opaque to everybody but the same
    /// kind of device, which is asked with [`Device::accepts`].
    ///
    /// # Errors
    /// That it cannot migrate.
    fn migration_version(&self) -> Result<String, Refusal> {
        Err(Refusal::new("it cannot be migrated"))
    }

    /// Whether a guest of a device with this [`Device::migration_version`] could go on here.
    ///
    /// # Errors
    /// Why not.
    fn accepts(&self, source: &str) -> Result<(), Refusal> {
        let _ = source;
        Err(Refusal::new("it cannot be migrated"))
    }
}

/// Serves some queues, on a thread of its own, while a frontend is connected.
pub trait Worker: Send {
    /// Does what there is to do without waiting: takes chains, completes them. Called when a queue was kicked, when
    /// something of [`Worker::poll`] is ready, and when the frontend changed something.
    fn run(&mut self, queues: &mut Queues<'_>) -> Next;

    /// A queue has been started, before the next [`Worker::run`]. `fresh`: by a driver that has not used it before; else
    /// it goes on where it stood, here or in another process.
    fn started(&mut self, queue: usize, fresh: bool) {
        let _ = (queue, fresh);
    }

    /// What else than its queues it waits for.
    fn poll<'w>(&'w self, fds: &mut Vec<PollFd<'w>>) {
        let _ = fds;
    }

    /// What became of the descriptors of [`Worker::poll`], in their order, before the next [`Worker::run`].
    fn polled(&mut self, events: &[PollFlags]) {
        let _ = events;
    }

    /// Before a queue is stopped: completes what was taken from it and is still under way, until the deadline at most.
    /// What is left then goes back empty.
    ///
    /// # Errors
    /// That somebody outside of this process may still access chains of the queue, and who. None of them goes back to the
    /// guest: the connection ends without an answer, and the queue goes on from its record or its used index, as after the
    /// death of the process.
    fn drain(&mut self, queue: usize, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), Refusal> {
        let _ = (queue, queues, deadline);
        Ok(())
    }

    /// Before the guest's memory changes: ends what uses it without the rings knowing (a device of the host's that reads it
    /// by itself), by the deadline, and clears the batches that it keeps ([`Batch::clear`](crate::Batch::clear)): each of them
    /// keeps the former memory mapped. What is not completed then was under way in memory that is no longer there.
    ///
    /// # Errors
    /// As [`Worker::drain`]: the connection ends.
    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), Refusal> {
        let _ = (queues, deadline);
        Ok(())
    }
}

/// What a worker wants after a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// To wait until there is something to do.
    Wait,
    /// To go on at once; it stopped only to let others have a turn, or waits awake. Drivers need not wake it.
    Again,
}

/// Why a device does not do something, in words that name the thing and the way out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    reason: String,
    /// It may pass: others give descriptors or memory back.
    exhausted: bool,
    /// It passes by itself.
    passes: bool,
}

/// Whether the kernel has no descriptor or no memory left.
pub(crate) fn is_exhausted(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

impl Refusal {
    /// Whether the reason is that the kernel has no descriptor or no memory left: it was made of such an error.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.exhausted
    }

    /// Whether it was made by [`Refusal::for_now`].
    pub(crate) fn passes(&self) -> bool {
        self.passes
    }

    /// A refusal of [`Device::worker`] that passes: the connection is closed, and the next one may be served. Where there can be no
    /// other connection, it is tried again each second.
    pub fn for_now(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), exhausted: false, passes: true }
    }

    /// A refusal with this reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), exhausted: false, passes: false }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for Refusal {}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Self {
        Self { exhausted: is_exhausted(&error), passes: false, reason: error.to_string() }
    }
}

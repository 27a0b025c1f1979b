//! Interface of a virtio device: its features, its replies to the frontend, and the workers of its queues.

use std::time::Instant;

pub use crate::backend_error::BackendError;
use crate::features::ProtocolFeatures;
use crate::poll::{PollFlags, PollSet};
use crate::worker::Queues;

/// A device behind a vhost-user socket. The thread of the connection makes every call here; the queues are
/// served by [`Worker`]s. The value is shared with the program that monitors the device.
///
/// The crate itself implements rings, guest memory, the dirty log, and their features
/// ([`features::COMMON`](crate::features::COMMON)).
pub trait Device: Send + Sync {
    /// Name of the device in messages and of its threads, of at most ten letters.
    fn name(&self) -> &str;

    /// Number of queues, at most [`QUEUES_MAX`](crate::QUEUES_MAX).
    fn queue_count(&self) -> usize;

    /// Reply to `GET_QUEUE_NUM`: the number of queues, but of queue pairs for a network card, as QEMU
    /// expects.
    fn reported_queue_num(&self) -> usize {
        self.queue_count()
    }

    /// Number of adjacent queues that one worker serves: 2 if a thread has a receive and a transmit queue.
    fn queues_per_worker(&self) -> usize {
        1
    }

    /// Returns true if chains of this queue are completed and their contents dropped while the frontend has
    /// the queue disabled, as is required of transmit queues. By default a disabled queue is not processed,
    /// as is required of receive queues.
    fn drops_while_disabled(&self, queue: usize) -> bool {
        let _ = queue;
        false
    }

    /// Returns true if chains are published in the order in which they were popped when no record of them
    /// outlives this process, so the used index is the next process's `last_avail_idx`. Unsuitable for a
    /// device that keeps some chains for long while it completes others.
    fn completes_in_order(&self) -> bool {
        false
    }

    /// The device's own virtio features, which are offered to the driver.
    fn features(&self) -> u64;

    /// The device's own protocol features, of [`ProtocolFeatures::BY_DEVICE`]. Calls that belong to one of
    /// them are made only if the frontend accepted it.
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
    }

    /// Sets the features that the driver accepted. Called before any queue runs, also on a migration's
    /// destination, and again when a driver starts over.
    ///
    /// # Errors
    /// If the device cannot work with them; the connection ends.
    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        let _ = features;
        Ok(())
    }

    /// Creates the worker of the queues from `index * queues_per_worker` on, when a frontend connects.
    ///
    /// # Errors
    /// If a resource is missing; the connection ends.
    fn worker(&self, index: usize) -> Result<Box<dyn Worker>, BackendError>;

    /// The whole configuration space, at most [`CONFIG_BYTES_MAX`](crate::message::CONFIG_BYTES_MAX) bytes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Writes to the configuration space.
    ///
    /// # Errors
    /// If this part is read-only.
    fn write_config(&self, offset: usize, bytes: &[u8], source: ConfigSource) -> Result<(), BackendError> {
        let _ = (offset, bytes, source);
        Err(BackendError::new("its configuration cannot be written"))
    }

    /// Announces the guest's address in the network after a migration.
    ///
    /// # Errors
    /// If the announcement cannot be sent.
    fn send_rarp(&self, mac: [u8; 6]) -> Result<(), BackendError> {
        let _ = mac;
        Err(BackendError::new("it has no network"))
    }

    /// Sets the guest's MTU in bytes.
    ///
    /// # Errors
    /// If such packets do not fit.
    fn set_mtu(&self, mtu: u16) -> Result<(), BackendError> {
        let _ = mtu;
        Err(BackendError::new("it has no network"))
    }

    /// Returns true if a second frontend may connect while the first one has the device, and have it once the
    /// rings of the first one are stopped: the next QEMU of a guest whose QEMU is replaced. Both have workers
    /// of all queues, of which those of one frontend have rings.
    fn allows_standby(&self) -> bool {
        false
    }

    /// Returns true if a guest may run here before its memory has arrived (destination of a postcopy
    /// migration). False for a device that pins memory or has hardware access it.
    fn allows_postcopy(&self) -> bool {
        true
    }

    /// Returns true if the guest can be migrated. If not, the dirty log is not offered, and QEMU refuses to
    /// migrate.
    fn is_migratable(&self) -> bool {
        true
    }

    /// Restores the state before the first driver. No queue runs.
    fn reset(&self) {}

    /// Saves the device's state for a migration. No queue runs. Requires
    /// [`DEVICE_STATE`](ProtocolFeatures::DEVICE_STATE).
    ///
    /// # Errors
    /// If it cannot be saved now.
    fn save(&self) -> Result<Vec<u8>, BackendError> {
        Err(BackendError::new("it has no state"))
    }

    /// Loads the state that the same device saved in another process, before any queue runs.
    ///
    /// # Errors
    /// If the state is not accepted; the device is unchanged then.
    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        let _ = state;
        Err(BackendError::new("it has no state"))
    }

    /// Summary of everything that a migration depends on: kind, features, limits. Opaque to all but devices
    /// of the same kind, which compare it in [`Device::accepts`].
    ///
    /// # Errors
    /// If the device cannot be migrated.
    fn migration_version(&self) -> Result<String, BackendError> {
        Err(BackendError::new("it cannot be migrated"))
    }

    /// Checks that a guest of a device with this [`Device::migration_version`] could continue here.
    ///
    /// # Errors
    /// The difference that prevents it.
    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let _ = source;
        Err(BackendError::new("it cannot be migrated"))
    }
}

/// Origin of a write to the configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigSource {
    /// The guest's driver.
    Driver,
    /// The frontend of a migration's destination.
    Migration,
}

/// Serves some queues on a separate thread while a frontend is connected.
pub trait Worker: Send {
    /// Processes the queues without waiting: pops chains and completes them. Called after a kick, after an
    /// event of [`Worker::poll`], and after a change by the frontend.
    fn run(&mut self, queues: &mut Queues<'_>) -> Next;

    /// Called when a queue was started, before the next [`Worker::run`]. `fresh` is true if its driver has
    /// not used it before; otherwise the queue resumes where it was stopped, here or in another process.
    fn started(&mut self, queue: usize, fresh: bool) {
        let _ = (queue, fresh);
    }

    /// Called when a queue was stopped, before the frontend has the reply.
    fn stopped(&mut self, queue: usize) {
        let _ = queue;
    }

    /// Adds the descriptors that the worker waits for besides its queues.
    fn poll<'w>(&'w self, fds: &mut PollSet<'w>) {
        let _ = fds;
    }

    /// Events of the descriptors of [`Worker::poll`], in their order, before the next [`Worker::run`].
    fn on_ready(&mut self, events: &[PollFlags]) {
        let _ = events;
    }

    /// Called before a queue is stopped: completes its chains in flight, by the deadline. Chains that remain
    /// are returned to the driver with length 0.
    ///
    /// # Errors
    /// If hardware, the kernel or another process may still access chains of the queue. None of them is
    /// returned to the guest then: the connection ends without a reply, and the queue resumes from its record
    /// or its used index, as after the process was killed.
    fn drain(
        &mut self,
        queue: usize,
        queues: &mut Queues<'_>,
        deadline: Instant,
    ) -> Result<(), BackendError> {
        let _ = (queue, queues, deadline);
        Ok(())
    }

    /// Called before the guest's memory changes: ends accesses that bypass the rings (a device that reads
    /// guest memory directly), by the deadline, and clears the batches that the worker keeps
    /// ([`Batch::clear`](crate::Batch::clear)), since each keeps the former memory mapped. Chains that are
    /// not completed then refer to memory that is gone.
    ///
    /// # Errors
    /// As [`Worker::drain`]; the connection ends.
    fn release(&mut self, queues: &mut Queues<'_>, deadline: Instant) -> Result<(), BackendError> {
        let _ = (queues, deadline);
        Ok(())
    }
}

/// Result of [`Worker::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Wait until there is an event.
    Wait,
    /// Run again at once: there is more to do, or the worker busy-polls. Drivers need not kick it.
    Again,
}

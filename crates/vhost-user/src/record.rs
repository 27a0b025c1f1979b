//! The in-flight record: chains that a device's rings have popped and not published yet, in memory that
//! outlives the process.
//!
//! ```text
//!   0     header: "TOWLINEQ", version, queues, heads per queue, a word for the device            a page
//!   4096  queue 0: running, entries, addresses, published, publishing │ a word for each head     4096 + 8 × 32768 bytes
//!         queue 1 …
//! ```
//! The word of a head is 0 while the driver owns the head, otherwise the sequence number with which the head
//! was popped. Heads are popped in the order of the available ring, so the next process's `last_avail_idx` is
//! the number of published chains plus the number of marked heads; it resubmits the marked heads first. Each
//! step is one store, and the record is valid between any two of them:
//!
//! ```text
//!   pop        the head's word is set                     (published + marked is last_avail_idx)
//!   publish    publishing = used + n │ used entries │ used index │ words of these heads = 0 │ published = publishing
//! ```
//! A used index that equals `published` means that no batch was published since. If it equals `publishing`,
//! the words of the last used entries may not be cleared yet. With any other used index the ring is not the
//! recorded one, and the record is discarded.
//!
//! The record contains no guest data and no addresses of this process. All words are little-endian. The
//! format is private to this crate; a change increments [`VERSION`].

mod error;
mod layout;
mod queue;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, flock, ftruncate,
    memfd_create,
};
use rustix::io::Errno;

pub use error::RecordError;
use layout::{PAGE, VERSION};
pub(crate) use queue::QueueRecord;

use crate::QUEUES_MAX;
use crate::ring::RING_SIZE_MAX;
use crate::sys::{Area, Mapping, inherited};

/// Name of the record in the file descriptor store of a service manager.
pub const RECORD_FD_NAME: &str = "towline-state";

const MAGIC: u64 = u64::from_le_bytes(*b"TOWLINEQ");
/// Offsets in the header.
const VERSION_AND_QUEUES: usize = 8;
const HEADS: usize = 16;
const DEVICE: usize = 24;
/// Size of a queue's part: a page, and the words of its heads.
const QUEUE_BYTES: usize = PAGE + 8 * RING_SIZE_MAX as usize;

/// In-flight record of all queues of one device.
#[derive(Debug)]
pub struct InFlightRecord {
    mapping: Arc<Mapping>,
    queues: usize,
    durable: bool,
}

impl InFlightRecord {
    /// A record that ends with this process. It serves frontends that reconnect.
    ///
    /// # Errors
    /// [`RecordError::Io`], [`RecordError::Queues`].
    pub fn new(queues: usize) -> Result<Self, RecordError> {
        let failed = |errno: Errno| RecordError::Io { name: RECORD_FD_NAME.to_owned(), source: errno.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(RECORD_FD_NAME, flags).map_err(failed)?;
        ftruncate(&fd, Self::bytes(queues, RECORD_FD_NAME)?).map_err(failed)?;
        let mut record = Self::map(fd.into(), queues, RECORD_FD_NAME)?;
        record.durable = false;
        // A process that receives the descriptor cannot truncate it.
        fcntl_add_seals(record.as_fd(), SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        Ok(record)
    }

    /// Opens the record in this file, or creates it if the file is empty. `name` identifies it in messages.
    ///
    /// # Errors
    /// If it is in use by another process, is not a record, has another version or number of queues, or is
    /// damaged, or if the file system has no space for all of it.
    pub fn open(fd: OwnedFd, queues: usize, name: &str) -> Result<Self, RecordError> {
        let file = File::from(fd);
        lock(&file, name)?;
        let bytes = Self::bytes(queues, name)?;
        let failed = |source: std::io::Error| RecordError::Io { name: name.to_owned(), source };
        let found = file.metadata().map_err(failed)?.len();
        if found == 0 || found == bytes {
            // A store into a hole of a full file system would raise SIGBUS.
            match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
                Err(Errno::OPNOTSUPP) => ftruncate(&file, bytes).map_err(|errno| failed(errno.into()))?,
                reserved => reserved.map_err(|errno| {
                    let (name, source) = (name.to_owned(), errno.into());
                    RecordError::Space { name, bytes, source }
                })?,
            }
        }
        Self::map(file, queues, name)
    }

    /// Maps a record. Its owner may truncate the file, which ends the record and not the process.
    fn map(file: File, queues: usize, name: &str) -> Result<Self, RecordError> {
        let expected = Self::bytes(queues, name)?;
        let failed = |source| RecordError::Io { name: name.to_owned(), source };
        let has = file.metadata().map_err(failed)?.len();
        if has < PAGE as u64 {
            return Err(RecordError::NotARecord { name: name.to_owned() });
        }
        let mapping = Mapping::guarded(file.into(), 0, has)
            .map_err(|error| failed(std::io::Error::other(error.to_string())))?;
        let record = Self { mapping: Arc::new(mapping), queues, durable: true };
        record.check(name, has, expected)?;
        Ok(record)
    }

    /// Length of a record.
    fn bytes(queues: usize, name: &str) -> Result<u64, RecordError> {
        if (1..=QUEUES_MAX).contains(&queues) {
            return Ok((PAGE + QUEUE_BYTES * queues) as u64);
        }
        Err(RecordError::Queues { name: name.to_owned(), found: queues, expected: QUEUES_MAX })
    }

    /// Opens the record that the service manager stored for this process under the name [`RECORD_FD_NAME`];
    /// `None` if it has stored none.
    ///
    /// # Errors
    /// As [`InFlightRecord::open`].
    pub fn from_service_manager(queues: usize) -> Result<Option<Self>, RecordError> {
        let Some(index) = inherited::names().iter().position(|name| name == RECORD_FD_NAME) else {
            return Ok(None);
        };
        let name = "in the service manager's store";
        let fd = inherited::take_fd(index)
            .map_err(|errno| RecordError::Io { name: name.to_owned(), source: errno.into() })?;
        let file = File::from(fd);
        lock(&file, name)?;
        Self::map(file, queues, name).map(Some)
    }

    /// Declares that the record outlives this process, because its descriptor is stored elsewhere.
    #[must_use]
    pub fn into_durable(self) -> Self {
        Self { durable: true, ..self }
    }

    /// A word of the record for the device; 0 in a new record.
    pub fn device_word(&self) -> DeviceWord {
        DeviceWord(self.area(DEVICE, size_of::<u64>()))
    }

    fn check(&self, name: &str, found: u64, expected: u64) -> Result<(), RecordError> {
        let header = self.area(0, PAGE);
        let name = || name.to_owned();
        let queues = u64::try_from(self.queues).expect("at most 256");
        match header.load_64(0, Acquire) {
            MAGIC => {}
            // Just created, or its process died before the header was complete.
            0 if found == expected => {
                header.store_64(VERSION_AND_QUEUES, u64::from(VERSION) | queues << 32, Relaxed);
                header.store_64(HEADS, RING_SIZE_MAX.into(), Relaxed);
                header.store_64(0, MAGIC, Release);
            }
            _ => return Err(RecordError::NotARecord { name: name() }),
        }
        let word = header.load_64(VERSION_AND_QUEUES, Relaxed);
        let (version, recorded) = (word & u64::from(u32::MAX), word >> 32);
        if version != u64::from(VERSION) {
            return Err(RecordError::Version { name: name(), found: version });
        }
        if recorded != queues {
            let found = usize::try_from(recorded).unwrap_or(usize::MAX);
            return Err(RecordError::Queues { name: name(), found, expected: self.queues });
        }
        if header.load_64(HEADS, Relaxed) != u64::from(RING_SIZE_MAX) {
            return Err(RecordError::NotARecord { name: name() });
        }
        if found != expected {
            return Err(RecordError::Length { name: name(), found, expected });
        }
        for index in 0..self.queues {
            self.queue(index).check().map_err(|what| RecordError::Damaged { name: name(), index, what })?;
        }
        Ok(())
    }

    /// Part of one queue.
    pub(crate) fn queue(&self, index: usize) -> QueueRecord {
        assert!(index < self.queues, "queue {index} of a record of {}", self.queues);
        QueueRecord::new(self.area(PAGE + QUEUE_BYTES * index, QUEUE_BYTES), self.durable)
    }

    fn area(&self, start: usize, len: usize) -> Area {
        Area::new(&self.mapping, start as u64, len, 8).expect("the length of the file was checked")
    }
}

/// Locks the file of a record, which one process has at a time.
fn lock(file: &File, name: &str) -> Result<(), RecordError> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(RecordError::InUse { name: name.to_owned() }),
        locked => locked.map_err(|errno| RecordError::Io { name: name.to_owned(), source: errno.into() }),
    }
}

/// A word of a record in which a device keeps state for its next process.
#[derive(Debug, Clone)]
pub struct DeviceWord(Area);

impl DeviceWord {
    /// Loads the word.
    pub fn load(&self) -> u64 {
        self.0.load_64(0, Acquire)
    }

    /// Stores the word.
    pub fn store(&self, value: u64) {
        self.0.store_64(0, value, Release);
    }
}

impl AsFd for InFlightRecord {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mapping.file().0.as_fd()
    }
}

#[cfg(test)]
mod tests;

//! What a device's rings have taken and not given back, kept where it outlives the process that did.
//!
//! ```text
//!   0     header: "TOWLINEQ", version, queues, heads a queue                             a page
//!   4096  queue 0: runs, entries, addresses, given, giving │ a word for each head        4096 + 8 × 32768 bytes
//!         queue 1 …
//! ```
//! A head's word is 0 while the head is the driver's, else the number by which heads were taken in order. Chains are taken
//! in the available ring's order, so where the next process goes on taking is what was given back plus what is marked; what
//! is marked it takes first. Each step is one store, and between any two of them the record says what is true:
//!
//! ```text
//!   take       the head's word is set                     (given + marked is where the available ring goes on)
//!   publish    giving = used + n │ used entries │ used index │ the words of these heads = 0 │ given = giving
//! ```
//! A used index that equals `given` means that nothing was published since, one that equals `giving` that the words of the
//! last entries of the used ring may not be cleared yet; any other one that the ring is another one, and then the record is
//! of no use and goes.
//!
//! What it is not: nothing of the guest's data, no addresses in memory of this process. All words are little-endian. The
//! format is of this crate alone; [`VERSION`] moves when it changes.

mod error;
mod queue;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fs::{FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, flock, ftruncate, memfd_create};
use rustix::io::Errno;

pub use error::RecordError;
pub(crate) use queue::QueueRecord;

use crate::QUEUES_MAX;
use crate::ring::RING_SIZE_MAX;
use crate::sys::{Area, Mapping, inherited};

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// The name of the record in a service manager's store of descriptors.
pub const STORED: &str = "towline-state";

const MAGIC: u64 = u64::from_le_bytes(*b"TOWLINEQ");
const PAGE: usize = 4096;
/// In the header, in bytes.
const VERSION_AND_QUEUES: usize = 8;
const HEADS: usize = 16;
/// Of each queue: a page and its words.
const QUEUE_BYTES: usize = PAGE + 8 * RING_SIZE_MAX as usize;

/// The record of all queues of one device.
#[derive(Debug)]
pub struct Record {
    mapping: Arc<Mapping>,
    queues: usize,
    durable: bool,
}

impl Record {
    /// A record of this process: for frontends that come and go while it lives.
    ///
    /// # Errors
    /// [`RecordError::Io`], [`RecordError::Queues`].
    pub fn new(queues: usize) -> Result<Self, RecordError> {
        let failed = |errno: Errno| RecordError::Io { name: STORED.to_owned(), source: errno.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(STORED, flags).map_err(failed)?;
        let mut record = Self::open(fd, queues, STORED)?;
        record.durable = false;
        // Nobody who is handed it can cut it short under us.
        fcntl_add_seals(record.as_fd(), SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        Ok(record)
    }

    /// The record in this file, which is made if the file is empty. `name` is what messages call it.
    ///
    /// # Errors
    /// That it is in use by another process, is none, of another version, for another number of queues, or damaged.
    pub fn open(fd: OwnedFd, queues: usize, name: &str) -> Result<Self, RecordError> {
        if !(1..=QUEUES_MAX).contains(&queues) {
            return Err(RecordError::Queues { name: name.to_owned(), found: queues, expected: QUEUES_MAX });
        }
        let failed = |source| RecordError::Io { name: name.to_owned(), source };
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(RecordError::InUse { name: name.to_owned() }),
            locked => locked.map_err(|errno| failed(errno.into()))?,
        }
        let expected = (PAGE + QUEUE_BYTES * queues) as u64;
        let file = File::from(fd);
        let found = file.metadata().map_err(failed)?.len();
        if found == 0 {
            ftruncate(&file, expected).map_err(|errno| failed(errno.into()))?;
        } else if found < PAGE as u64 {
            return Err(RecordError::NoRecord { name: name.to_owned() });
        }
        let has = file.metadata().map_err(failed)?.len();
        let mapping = Mapping::new(file.into(), 0, has)
            .map_err(|error| failed(std::io::Error::other(error.to_string())))?;
        let record = Self { mapping: Arc::new(mapping), queues, durable: true };
        record.check(name, has, expected)?;
        Ok(record)
    }

    /// The record that the service manager kept in its store for this process, under the name [`STORED`]; `None` if it has
    /// none.
    ///
    /// # Errors
    /// As [`Record::open`].
    pub fn from_service_manager(queues: usize) -> Result<Option<Self>, RecordError> {
        let Some(index) = inherited::names().iter().position(|name| name == STORED) else { return Ok(None) };
        let name = "in the service manager's store";
        let fd = inherited::take(index)
            .map_err(|errno| RecordError::Io { name: name.to_owned(), source: errno.into() })?;
        Self::open(fd, queues, name).map(Some)
    }

    /// So that the next process finds it: where this descriptor is kept, the record is.
    #[must_use]
    pub fn kept(self) -> Self {
        Self { durable: true, ..self }
    }

    /// Nobody keeps it: it goes with this process.
    pub(crate) fn forgotten(self) -> Self {
        Self { durable: false, ..self }
    }

    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    fn check(&self, name: &str, found: u64, expected: u64) -> Result<(), RecordError> {
        let header = self.area(0, PAGE);
        let name = || name.to_owned();
        let queues = u64::try_from(self.queues).expect("at most 256");
        match header.load_64(0, Acquire) {
            MAGIC => {}
            // Who made it died before it was one; or it was made just now.
            0 if found == expected => {
                header.store_64(VERSION_AND_QUEUES, u64::from(VERSION) | queues << 32, Relaxed);
                header.store_64(HEADS, RING_SIZE_MAX.into(), Relaxed);
                header.store_64(0, MAGIC, Release);
            }
            _ => return Err(RecordError::NoRecord { name: name() }),
        }
        let both = header.load_64(VERSION_AND_QUEUES, Relaxed);
        let (version, recorded) = (both & u64::from(u32::MAX), both >> 32);
        if version != u64::from(VERSION) {
            return Err(RecordError::Version { name: name(), found: version });
        }
        if recorded != queues {
            let found = usize::try_from(recorded).unwrap_or(usize::MAX);
            return Err(RecordError::Queues { name: name(), found, expected: self.queues });
        }
        if header.load_64(HEADS, Relaxed) != u64::from(RING_SIZE_MAX) {
            return Err(RecordError::NoRecord { name: name() });
        }
        if found != expected {
            return Err(RecordError::Length { name: name(), found, expected });
        }
        for index in 0..self.queues {
            self.queue(index).check().map_err(|what| RecordError::Damaged { name: name(), index, what })?;
        }
        Ok(())
    }

    /// The part of one queue.
    pub(crate) fn queue(&self, index: usize) -> QueueRecord {
        assert!(index < self.queues, "queue {index} of a record of {}", self.queues);
        QueueRecord::new(self.area(PAGE + QUEUE_BYTES * index, QUEUE_BYTES), self.durable)
    }

    fn area(&self, start: usize, len: usize) -> Area {
        Area::new(&self.mapping, start as u64, len, 8).expect("the file is as long as its header says")
    }
}

impl AsFd for Record {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mapping.file().0.as_fd()
    }
}

#[cfg(test)]
mod tests;

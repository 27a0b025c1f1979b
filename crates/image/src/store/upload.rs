//! Sends chunks: each once, unless the store has it, and several concurrently.
//!
//! Hashing and compression run in the calling thread, which only waits if too many requests are in flight.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use object_store::ObjectMeta;
use tokio::sync::Semaphore;
use towline_channel::Cancel;
use towline_channel::lock::lock;
use towline_migration::{Guest as _, Snapshot, parallel};
use towline_protocol::RamBlock;

use super::access::Store;
use super::images;
use super::lease::Lease;
use super::objects::WriteMode;
use super::{CHUNK_BYTES, Error, REQUESTS_MAX, Result, chunk};
use crate::checksum::hash_chunk;
use crate::index::{Index, IndexContents};
use crate::location::Location;
use crate::{ChunkHash, Existing, Image, Origin, Uploaded};

/// Maximum number of the store's chunks that are remembered, at 32 bytes each; others are looked up one by
/// one.
const KNOWN_MAX: usize = 4 << 20;
/// Maximum number of threads that hash and compress.
const THREADS_MAX: usize = 8;

/// An image that is being uploaded.
#[derive(Debug)]
pub(super) struct Upload {
    store: Arc<Store>,
    /// Name of the image, for messages.
    pub(super) image: String,
    key: String,
    existing: Existing,
    in_flight: Arc<InFlight>,
    uploaded: Mutex<Uploaded>,
    known: Mutex<Known>,
    /// Limits requests to a store in a directory: it has few threads, and requests queued for them cannot be
    /// cancelled.
    slots: Option<Arc<Semaphore>>,
    /// Requests that have not started are dropped.
    is_cancelled: Arc<AtomicBool>,
    lease: Lease,
}

/// Set before the lease is dropped, whose removal would wait for all queued requests.
impl Drop for Upload {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Known {
    /// Chunks that are in the store or being sent.
    names: HashSet<[u8; 32]>,
    /// The store has more chunks than are remembered.
    is_incomplete: bool,
}

/// Requests in flight, shared with the threads that wait for them.
#[derive(Debug, Default)]
struct InFlight {
    state: Mutex<InFlightState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InFlightState {
    count: usize,
    failed: Option<Error>,
}

impl Upload {
    /// Creates the lease and lists the store. All checks that may refuse the upload are done here.
    pub(super) fn begin(image: &Location, existing: Existing, cancel: Cancel) -> Result<Self> {
        if !image.scheme().is_writable() {
            let text = format!(
                "{image}: http:// and https:// are read-only: store it at s3://, gs://, az:// or store:"
            );
            return Err(Error::Location { text });
        }
        let key = images::key(image)?;
        let store = Store::open(&image.parent(), Some(cancel))?;
        Self::begin_in(store, image.to_string(), key, existing)
    }

    /// As [`Self::begin`], in an open store.
    pub(super) fn begin_in(
        store: Arc<Store>,
        image: String,
        key: String,
        existing: Existing,
    ) -> Result<Self> {
        if existing == Existing::Refuse && store.find(&key)?.is_some() {
            return Err(Error::Exists { image });
        }
        let lease = Lease::upload(&store, &key)?;
        let mut known = Known::default();
        store.list(chunk::DIRECTORY, &mut |object| {
            // A crash may leave an empty object in a directory.
            match chunk::name(&store.key(&object)).filter(|_| object.size > 0) {
                Some(_) if known.names.len() >= KNOWN_MAX => known.is_incomplete = true,
                Some(name) => {
                    known.names.insert(name);
                }
                None => {}
            }
            Ok(())
        })?;
        let (in_flight, uploaded, known) = (Arc::default(), Mutex::default(), Mutex::new(known));
        let (slots, is_cancelled) = (store.file_slots(), Arc::default());
        Ok(Self { store, image, key, existing, in_flight, uploaded, known, slots, is_cancelled, lease })
    }

    /// Statistics of the upload so far.
    pub(super) fn uploaded(&self) -> Uploaded {
        *lock(&self.uploaded)
    }

    /// Sends a chunk (`None`: zeros) unless the store has it, and returns its name.
    pub(super) fn store_chunk(&self, bytes: Option<&[u8]>) -> Result<ChunkHash> {
        let hash = bytes.map_or(ChunkHash::Zero, hash_chunk);
        let (ChunkHash::Data(name), Some(bytes)) = (hash, bytes) else {
            lock(&self.uploaded).zero_chunks += 1;
            return Ok(hash);
        };
        if self.is_known(name)? {
            lock(&self.uploaded).known_chunks += 1;
            return Ok(hash);
        }
        let object = chunk::compress(bytes);
        self.reserve_request()?;
        let mut uploaded = lock(&self.uploaded);
        uploaded.sent_chunks += 1;
        uploaded.sent_bytes += object.len() as u64;
        uploaded.sent_memory_bytes += bytes.len() as u64;
        drop(uploaded);
        let put = self.store.put(&chunk::key(&name), object, WriteMode::Replace);
        let in_flight = Arc::clone(&self.in_flight);
        let (slots, is_cancelled) = (self.slots.clone(), Arc::clone(&self.is_cancelled));
        self.store.runtime.spawn(async move {
            let _slot = match slots {
                Some(slots) => slots.acquire_owned().await.ok(),
                None => None,
            };
            let result = if is_cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { put.await };
            let mut state = lock(&in_flight.state);
            state.count -= 1;
            if let Err(error) = result {
                state.failed.get_or_insert(error);
            }
            drop(state);
            in_flight.changed.notify_all();
        });
        Ok(hash)
    }

    /// Stores other bytes than memory, in chunks.
    pub(super) fn store_bytes(&self, bytes: &[u8]) -> Result<Vec<ChunkHash>> {
        bytes.chunks(CHUNK_BYTES as usize).map(|bytes| self.store_chunk(Some(bytes))).collect()
    }

    /// Waits until all chunks are in the store.
    pub(super) fn flush(&self) -> Result<()> {
        match self.at_most_in_flight(0)?.failed.take() {
            // Without a lease no request is sent, so its loss is the reason.
            Some(error) => self.lease.state().check().and(Err(error)),
            None => Ok(()),
        }
    }

    /// Publishes the image. All chunks that `index` references are in the store.
    pub(super) fn publish(&self, index: &Index) -> Result<()> {
        let bytes = index.encode();
        let bytes = bytes.map_err(|why| Error::Index { image: self.image.clone(), why })?.into();
        images::publish(&self.store, &self.lease, &self.key, &bytes, self.existing)
    }

    /// Returns true if the chunk is in the store or being sent; else the caller must send it.
    fn is_known(&self, name: [u8; 32]) -> Result<bool> {
        let is_incomplete = {
            let mut known = lock(&self.known);
            if !known.names.insert(name) {
                return Ok(true);
            }
            known.is_incomplete
        };
        let is_whole = |found: ObjectMeta| found.size > 0;
        Ok(is_incomplete && self.store.find(&chunk::key(&name))?.is_some_and(is_whole))
    }

    /// Waits until no more requests than these are in flight, or one has failed.
    fn at_most_in_flight(&self, count: usize) -> Result<MutexGuard<'_, InFlightState>> {
        let InFlight { state: mutex, changed } = &*self.in_flight;
        let mut state = lock(mutex);
        while state.count > count && state.failed.is_none() {
            self.store.check_cancelled()?;
            state = self.store.runtime.wait_for_change(changed, mutex, state);
        }
        Ok(state)
    }

    /// Waits until another request may be sent. [`Error::Cancelled`] if one has failed, whose error [`Self::flush`] returns.
    fn reserve_request(&self) -> Result<()> {
        let mut state = self.at_most_in_flight(REQUESTS_MAX - 1)?;
        self.store.check_cancelled()?;
        if state.failed.is_some() {
            return Err(Error::Cancelled);
        }
        state.count += 1;
        Ok(())
    }
}

/// Number of threads that hash and compress.
pub(super) fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get).min(THREADS_MAX)
}

/// Stores an image file directly from its mapping. `progress` receives the bytes of each chunk.
///
/// # Errors
/// The store or the image failed. Nothing is visible then, and the next attempt finds the chunks that were
/// sent.
pub fn store_image(
    image: &Image,
    to: &Location,
    existing: Existing,
    cancel: &Cancel,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(Snapshot, Uploaded)> {
    let upload = Upload::begin(to, existing, cancel.clone())?;
    let index = upload_image(&upload, image, progress)?;
    upload.publish(&index)?;
    Ok((image.qemu_load_statistics(), upload.uploaded()))
}

/// Uploads the chunks of an image file; returns its index, which is not published.
pub(super) fn upload_image(upload: &Upload, image: &Image, progress: &(dyn Fn(u64) + Sync)) -> Result<Index> {
    let blocks = image.ram_blocks();
    let chunks: Vec<_> = image.chunks(CHUNK_BYTES).collect();
    let send = |&(page, length)| {
        let bytes = image.content(page, length).map_err(|error| Error::Image(Box::new(error)))?;
        let hash = upload.store_chunk(bytes.as_deref())?;
        progress(length);
        Ok((page, hash))
    };
    let device_state = image.devices().bytes();
    let sent = parallel::for_each(&chunks, threads(), || send)
        .and_then(|sent| Ok((sent, upload.store_bytes(device_state)?)));
    let (sent, device_state_names) = match sent {
        // A request that failed is the reason.
        Err(Error::Cancelled) => return upload.flush().and(Err(Error::Cancelled)),
        sent => sent?,
    };
    upload.flush()?;
    let zeros = |block: &RamBlock| vec![ChunkHash::Zero; block.length.div_ceil(CHUNK_BYTES) as usize];
    let mut names: Vec<_> = blocks.iter().map(zeros).collect();
    for (page, hash) in sent {
        names[page.block.index()][(page.offset / CHUNK_BYTES) as usize] = hash;
    }
    let from = Origin { source: format!("image {}", image.path().display()), ..Origin::default() };
    let origin = image.manifest().map_or(from, |manifest| manifest.origin.clone());
    Ok(Index::new(IndexContents {
        configuration: image.configuration(),
        section_id: image.ram_section_id(),
        origin: &origin.with_run_state(image.devices()),
        chunk_bytes: CHUNK_BYTES,
        blocks,
        names,
        device_state,
        device_state_names,
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// An upload into a store in a directory.
    fn upload(directory: &tempfile::TempDir) -> Upload {
        let location: Location = format!("store:{}/a", directory.path().display()).parse().unwrap();
        Upload::begin(&location, Existing::Refuse, Cancel::new().unwrap()).unwrap()
    }

    #[test]
    fn an_empty_object_is_not_a_chunk_of_a_store_with_more_chunks_than_are_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let (bytes, upload) = ([7; 4096], upload(&directory));
        let object = directory.path().join(chunk::key(&hash_chunk(&bytes).data().unwrap()));
        std::fs::create_dir_all(object.parent().unwrap()).unwrap();
        std::fs::write(&object, b"").unwrap();
        lock(&upload.known).is_incomplete = true;
        upload.store_chunk(Some(&bytes)).unwrap();
        upload.flush().unwrap();
        assert!(object.metadata().unwrap().len() > 0);
    }

    #[test]
    fn the_reason_of_a_failed_upload_is_the_request_that_failed() {
        let (directory, place) = (tempfile::tempdir().unwrap(), crate::testing::directory());
        let (path, upload) = (place.path().join("a"), upload(&directory));
        crate::testing::TestGuest::new(3, 1).store(&path, Existing::Refuse, None).unwrap();
        let image = Image::open(&path).unwrap();
        // No object can be put there.
        std::fs::write(directory.path().join(chunk::DIRECTORY), b"").unwrap();
        let error = upload_image(&upload, &image, &|_| {}).unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
    }
}

//! Stores an incoming guest: a [`Sink`] that becomes chunks and an index.
//!
//! ```text
//!   pages ──► spool ──► chunk with all its pages ──► hash · compress · send      worker threads, in the background
//!   commit    chunks that changed since then, device state · wait until all are stored
//!   publish   the index
//! ```
//!
//! The source, which only learns of success after [`Sink::publish`], keeps its guest if anything fails.
//! Chunks that were sent stay in the store: the next attempt does not send them again, or they are collected
//! as garbage.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use towline_channel::Cancel;
use towline_migration::{ChannelId, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::RamSection;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::spool::{ChunkNumber, Spool};
use super::upload::{Upload, first_error, threads};
use super::{CHUNK_BYTES, Error, Result};
use crate::index::{Index, IndexContents};
use crate::location::Location;
use crate::lock::lock;
use crate::page_runs::page_runs;
use crate::stream_items::{Missing, StreamItems};
use crate::{Existing, Origin, Uploaded};

/// A guest that is being stored.
#[derive(Debug)]
pub struct StoreWriter {
    origin: Origin,
    upload: Arc<Upload>,
    items: StreamItems,
    blocks: OnceLock<Vec<RamBlock>>,
    spool: OnceLock<Arc<Spool>>,
    queue: Arc<Queue>,
    workers: Mutex<Vec<JoinHandle<Result<()>>>>,
    /// Index whose chunks are all stored.
    index: Mutex<Option<Index>>,
    published: AtomicBool,
}

/// Queue of chunks to be sent.
#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    chunks: VecDeque<ChunkNumber>,
    /// No more chunks are added; workers return after the last one.
    is_closed: bool,
    /// A worker failed, or the writer was dropped.
    is_aborted: bool,
}

impl StoreWriter {
    /// Creates the lease of an upload and lists the store.
    ///
    /// # Errors
    /// The store is unreachable or refuses access; the image exists and must not be replaced.
    pub fn create(to: &Location, existing: Existing, origin: Origin, cancel: &Cancel) -> Result<Self> {
        let upload = Arc::new(Upload::begin(to, existing, cancel.clone())?);
        Ok(Self {
            origin,
            upload,
            items: StreamItems::default(),
            blocks: OnceLock::new(),
            spool: OnceLock::new(),
            queue: Arc::default(),
            workers: Mutex::default(),
            index: Mutex::default(),
            published: AtomicBool::new(false),
        })
    }

    /// The image, as in the messages of errors.
    pub fn image(&self) -> &str {
        self.upload.image()
    }

    /// Returns true once the index is written: a failure after that leaves the image in the store.
    pub fn is_published(&self) -> bool {
        self.published.load(Ordering::Relaxed)
    }

    /// Statistics of the upload so far.
    pub fn uploaded(&self) -> Uploaded {
        self.upload.uploaded()
    }

    fn order_error(&self, what: &'static str) -> Error {
        Error::Order { image: self.upload.image().into(), what }
    }

    fn spool(&self) -> Result<&Arc<Spool>> {
        self.spool.get().ok_or_else(|| self.order_error("pages arrived before the block list"))
    }

    fn begin(&self, blocks: &[RamBlock]) -> Result<()> {
        let spool = Arc::new(Spool::new(blocks)?);
        self.start_workers(&spool)?;
        self.blocks.get_or_init(|| blocks.to_vec());
        self.spool.get_or_init(|| spool);
        Ok(())
    }

    fn start_workers(&self, spool: &Arc<Spool>) -> Result<()> {
        let mut workers = lock(&self.workers);
        for _ in 0..threads() {
            let (queue, upload, spool) =
                (Arc::clone(&self.queue), Arc::clone(&self.upload), Arc::clone(spool));
            let worker = thread::Builder::new().name("upload".into()).spawn(move || {
                let result = send_queued(&queue, &upload, &spool);
                if result.is_err() {
                    queue.abort();
                }
                result
            });
            workers.push(worker.map_err(|why| Error::Host { what: "upload threads", why })?);
        }
        Ok(())
    }

    /// Joins the workers.
    fn join(&self) -> Result<()> {
        let workers = std::mem::take(&mut *lock(&self.workers));
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        first_error(results.collect()).map(drop)
    }

    fn store_pages(&self, pages: &Pages<'_>) -> Result<()> {
        let spool = self.spool()?;
        let mut complete = Vec::new();
        for run in page_runs(pages) {
            for (offset, slice) in run.slices() {
                spool.write(pages.block, offset, slice, &mut |number| complete.push(number))?;
            }
        }
        self.queue.add(&complete);
        self.check_workers()
    }

    /// A failure of the store ends the migration with the next pages, not only at its end.
    fn check_workers(&self) -> Result<()> {
        if self.queue.lock().is_aborted { Err(self.join().err().unwrap_or(Error::Cancelled)) } else { Ok(()) }
    }

    fn store_zero(&self, block: BlockIndex, offsets: &[u64]) -> Result<()> {
        let spool = self.spool()?;
        let mut complete = Vec::new();
        for &offset in offsets {
            spool.zero(block, offset, &mut |number| complete.push(number))?;
        }
        self.queue.add(&complete);
        Ok(())
    }

    fn complete(&self) -> Result<()> {
        let spool = self.spool()?;
        self.queue.close();
        self.join()?;
        // Chunks that changed after they were sent, or were not complete. No more pages arrive.
        self.queue.reopen(spool.stale());
        self.start_workers(spool)?;
        self.join()?;
        let missing = |Missing(what)| self.order_error(what);
        let state = self.items.take_device_state().map_err(missing)?;
        let device_state_names = self.upload.store_bytes(state.bytes())?;
        self.upload.flush()?;
        let index = Index::new(IndexContents {
            configuration: self.items.configuration().map_err(missing)?,
            section_id: self.items.section_id().map_err(missing)?,
            origin: &self.origin.clone().with_run_state(&state),
            chunk_bytes: CHUNK_BYTES,
            blocks: self.blocks.get().map_or(&[], Vec::as_slice),
            names: spool.names(),
            device_state: state.bytes(),
            device_state_names,
        });
        *lock(&self.index) = Some(index);
        Ok(())
    }

    fn publish_index(&self) -> Result<()> {
        let index = lock(&self.index).take();
        self.upload.publish(&index.ok_or_else(|| self.order_error("the image was not committed"))?)
    }
}

impl Drop for StoreWriter {
    fn drop(&mut self) {
        self.queue.abort();
        // The workers hold references to the upload, whose lease must be removed with it. Their error was
        // reported, or another one is.
        let _ = self.join();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    fn add(&self, chunks: &[ChunkNumber]) {
        if !chunks.is_empty() {
            self.lock().chunks.extend(chunks);
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Queues the last chunks.
    fn reopen(&self, chunks: Vec<ChunkNumber>) {
        self.lock().chunks = chunks.into();
        self.changed.notify_all();
    }

    fn abort(&self) {
        self.lock().is_aborted = true;
        self.changed.notify_all();
    }

    /// The next chunk; `None` after the last one.
    fn next(&self) -> Option<ChunkNumber> {
        let mut state = self.lock();
        loop {
            if state.is_aborted {
                return None;
            }
            if let Some(number) = state.chunks.pop_front() {
                return Some(number);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Sends queued chunks until the queue is closed.
fn send_queued(queue: &Queue, upload: &Upload, spool: &Spool) -> Result<()> {
    let mut buffer = Vec::new();
    while let Some(number) = queue.next() {
        spool.store_chunk(number, &mut buffer, |bytes| upload.store_chunk(bytes))?;
    }
    Ok(())
}

impl Sink for StoreWriter {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.items.set_configuration(configuration);
        Ok(())
    }

    fn section_start(&self, section: RamSection) -> towline_migration::Result<()> {
        self.items.add_section(section);
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        self.begin(blocks).map_err(Error::into_migration)
    }

    fn pages(&self, _stream: ChannelId, pages: &Pages<'_>) -> towline_migration::Result<()> {
        self.store_pages(pages).map_err(Error::into_migration)
    }

    fn zero(&self, _stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> towline_migration::Result<()> {
        self.store_zero(block, offsets).map_err(Error::into_migration)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        let mut read = || self.spool()?.current(page.block, page.offset, content);
        read().map_err(Error::into_migration)
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        self.items.set_device_state(state);
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        self.complete().map_err(Error::into_migration)
    }

    fn publish(&self) -> towline_migration::Result<()> {
        self.publish_index().map_err(Error::into_migration)?;
        self.published.store(true, Ordering::Relaxed);
        Ok(())
    }
}

//! Storing a guest that arrives: a [`Sink`] that becomes chunks and an index.
//!
//! ```text
//!   pages ──► spool ──► a chunk has all its pages ──► hash · compress · send      threads of ours, in the background
//!   commit    chunks that changed since, device state · wait until all are there
//!   publish   the index
//! ```
//!
//! The source, which hears of success only after [`Sink::publish`], keeps its guest if anything fails. What was sent stays in the
//! store: the next try does not send it again, and as garbage it can be removed.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use towline_channel::Cancel;
use towline_migration::{Pages, Sink, Stream};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::RamSection;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::location::Location;
use super::spool::{Number, Spool};
use super::upload::{Upload, first_reason, threads};
use super::{CHUNK_BYTES, Error, Result};
use crate::began::Began;
use crate::index::{Contents, Index};
use crate::writer::Slices;
use crate::{Existing, Origin, Uploaded};

/// A guest that is being stored.
#[derive(Debug)]
pub struct StoreWriter {
    origin: Origin,
    upload: Arc<Upload>,
    began: Began,
    blocks: OnceLock<Vec<RamBlock>>,
    spool: OnceLock<Arc<Spool>>,
    queue: Arc<Queue>,
    workers: Mutex<Vec<JoinHandle<Result<()>>>>,
    device_state: Mutex<Option<DeviceState>>,
    /// Everything that it names is there.
    index: Mutex<Option<Index>>,
}

/// Chunks to be sent.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    chunks: VecDeque<Number>,
    /// No more come; workers end with the last.
    is_closed: bool,
    /// Somebody failed, or nobody wants it any more.
    is_given_up: bool,
}

impl StoreWriter {
    /// Begins an image, and asks the store what it has.
    ///
    /// # Errors
    /// The store cannot be reached or refuses; the image exists already and is not to be replaced.
    pub fn create(to: &Location, existing: Existing, origin: Origin, cancel: &Cancel) -> Result<Self> {
        let upload = Arc::new(Upload::begin(to, existing, cancel.clone())?);
        Ok(Self {
            origin,
            upload,
            began: Began::default(),
            blocks: OnceLock::new(),
            spool: OnceLock::new(),
            queue: Arc::default(),
            workers: Mutex::default(),
            device_state: Mutex::default(),
            index: Mutex::default(),
        })
    }

    /// What was sent so far.
    pub fn tally(&self) -> Uploaded {
        self.upload.tally()
    }

    fn order(&self, what: &'static str) -> Error {
        Error::Order { image: self.upload.image().into(), what }
    }

    fn spool(&self) -> Result<&Arc<Spool>> {
        self.spool.get().ok_or_else(|| self.order("pages came before the block list"))
    }

    fn begin(&self, blocks: &[RamBlock]) -> Result<()> {
        let spool = Arc::new(Spool::new(blocks)?);
        self.start_workers(&spool)?;
        self.blocks.get_or_init(|| blocks.to_vec());
        self.spool.get_or_init(|| spool);
        Ok(())
    }

    fn start_workers(&self, spool: &Arc<Spool>) -> Result<()> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..threads() {
            let (queue, upload, spool) =
                (Arc::clone(&self.queue), Arc::clone(&self.upload), Arc::clone(spool));
            let worker = thread::Builder::new().name("upload".into()).spawn(move || {
                let result = send_all(&queue, &upload, &spool);
                if result.is_err() {
                    queue.give_up();
                }
                result
            });
            workers.push(worker.map_err(|why| Error::Host { what: "threads that upload", why })?);
        }
        Ok(())
    }

    /// Waits for the workers' end.
    fn join(&self) -> Result<()> {
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        first_reason(results.collect()).map(drop)
    }

    fn store_pages(&self, pages: &Pages<'_>) -> Result<()> {
        let spool = self.spool()?;
        let mut complete = Vec::new();
        let mut contents = Slices::new(pages.contents);
        let page = towline_protocol::ram::PAGE_SIZE;
        for run in pages.offsets.chunk_by(|first, second| first + page == *second) {
            let mut offset = run[0];
            for slice in contents.take(run.len() * page as usize) {
                spool.write(pages.block, offset, slice, &mut |number| complete.push(number))?;
                offset += slice.len() as u64;
            }
        }
        self.queue.add(&complete);
        self.check()
    }

    /// A store that fails ends the migration when the next pages come, not at its end.
    fn check(&self) -> Result<()> {
        match self.queue.lock().is_given_up {
            true => Err(self.join().err().unwrap_or(Error::Cancelled)),
            false => Ok(()),
        }
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

    fn finish(&self) -> Result<()> {
        let spool = self.spool()?;
        self.queue.close();
        self.join()?;
        // What came again since it was sent, or in part only. Nothing comes any more.
        self.queue.reopen(spool.stale());
        self.start_workers(spool)?;
        self.join()?;
        let state = self.device_state.lock().unwrap_or_else(PoisonError::into_inner).take();
        let state = state.ok_or_else(|| self.order("no device state came"))?;
        let device_state_names = self.upload.bring_all(state.bytes())?;
        self.upload.settle()?;
        let configuration = self.began.configuration().ok_or_else(|| self.order("no configuration came"))?;
        let section = self.began.section().ok_or_else(|| self.order("no section began"))?;
        let was_running = state.run_state().map(|state| state == "running");
        let index = Index::new(Contents {
            configuration,
            section_id: section.id,
            origin: &Origin { was_running, ..self.origin.clone() },
            chunk_bytes: CHUNK_BYTES,
            blocks: self.blocks.get().map_or(&[], Vec::as_slice),
            names: spool.names(),
            device_state: state.bytes(),
            device_state_names,
        });
        *self.index.lock().unwrap_or_else(PoisonError::into_inner) = Some(index);
        Ok(())
    }

    fn show(&self) -> Result<()> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.upload.publish(&index.ok_or_else(|| self.order("the image is not complete"))?)
    }
}

impl Drop for StoreWriter {
    fn drop(&mut self) {
        self.queue.give_up();
        // They may hold the upload, whose sign is to go with it; why they failed has been told, or is told by others.
        let _ = self.join();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, chunks: &[Number]) {
        if !chunks.is_empty() {
            self.lock().chunks.extend(chunks);
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// With these, which are all.
    fn reopen(&self, chunks: Vec<Number>) {
        self.lock().chunks = chunks.into();
        self.changed.notify_all();
    }

    fn give_up(&self) {
        self.lock().is_given_up = true;
        self.changed.notify_all();
    }

    /// The next chunk; `None` when there are no more.
    fn next(&self) -> Option<Number> {
        let mut waiting = self.lock();
        loop {
            if waiting.is_given_up {
                return None;
            }
            if let Some(number) = waiting.chunks.pop_front() {
                return Some(number);
            }
            if waiting.is_closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A worker's life.
fn send_all(queue: &Queue, upload: &Upload, spool: &Spool) -> Result<()> {
    let mut buffer = Vec::new();
    while let Some(number) = queue.next() {
        spool.finish(number, &mut buffer, |bytes| upload.bring(bytes))?;
    }
    Ok(())
}

impl Sink for StoreWriter {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.began.set_configuration(configuration);
        Ok(())
    }

    fn section_start(&self, section: RamSection) -> towline_migration::Result<()> {
        self.began.add_section(section);
        Ok(())
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        self.begin(blocks).map_err(guest)
    }

    fn pages(&self, _stream: Stream, pages: &Pages<'_>) -> towline_migration::Result<()> {
        self.store_pages(pages).map_err(guest)
    }

    fn zero(&self, _stream: Stream, block: BlockIndex, offsets: &[u64]) -> towline_migration::Result<()> {
        self.store_zero(block, offsets).map_err(guest)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        let mut read = || self.spool()?.current(page.block, page.offset, content);
        read().map_err(guest)
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        *self.device_state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        Ok(())
    }

    fn commit(&self) -> towline_migration::Result<()> {
        self.finish().map_err(guest)
    }

    fn publish(&self) -> towline_migration::Result<()> {
        self.show().map_err(guest)
    }
}

fn guest(error: Error) -> towline_migration::Error {
    match error {
        Error::Cancelled => towline_migration::Error::Cancelled,
        error => towline_migration::Error::guest(crate::Error::Store(error)),
    }
}

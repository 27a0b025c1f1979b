//! Stores an incoming guest: a [`Sink`] that becomes an image file on this host, and then chunks and an
//! index.
//!
//! ```text
//!   pages     ──► the image file ([`spool`](super::spool)), at the rate of its disk
//!   commit    the file is durable                              from here on the source may run its guest
//!   upload    chunks of the file ──► hash · compress · send    ([`super::upload`])
//!   publish   the index · remove the file
//! ```
//!
//! A source that is resumed does not wait for the store: its guest is stopped for as long as a file takes.
//! Where the source cannot be given its guest back (a stream), [`Sink::commit`] returns only after the
//! upload, and the source keeps its guest until then. A file that could not be uploaded stays, since it is a
//! complete image; and so do the chunks that were sent, which the next attempt does not send again.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use towline_channel::Cancel;
use towline_channel::lock::lock;
use towline_migration::{ChannelId, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::RamSection;
use towline_protocol::device_state::DeviceState;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::upload::{Upload, upload_image};
use super::{Error, Result, spool};
use crate::index::Index;
use crate::location::Location;
use crate::{Existing, Image, ImageWriter, Origin, Uploaded};

/// A guest that is being stored.
#[derive(Debug)]
pub struct StoreWriter {
    upload: Upload,
    file: ImageWriter,
    /// The source is acknowledged before the upload.
    is_deferred: AtomicBool,
    /// Bytes of memory that are not uploaded yet; 0 before the upload.
    remaining: AtomicU64,
    /// The image file whose chunks are all stored, and its index.
    sent: Mutex<Option<(Image, Index)>>,
    published: AtomicBool,
}

impl StoreWriter {
    /// Creates the lease of an upload, lists the store, and creates the image file.
    ///
    /// # Errors
    /// The store is unreachable or refuses access; the image exists and must not be replaced; there is no
    /// directory for the file, or the directory is in memory.
    pub fn create(to: &Location, existing: Existing, origin: Origin, cancel: &Cancel) -> Result<Self> {
        let upload = Upload::begin(to, existing, cancel.clone())?;
        let file = spool::create(&upload.image, origin)?;
        let (is_deferred, published) = (AtomicBool::new(false), AtomicBool::new(false));
        let (remaining, sent) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { upload, file, is_deferred, remaining, sent, published })
    }

    /// Leaves the upload to [`Self::publish_with`]: [`Sink::commit`] returns as soon as the image file is
    /// durable.
    pub fn defer_upload(&self) {
        self.is_deferred.store(true, Ordering::Relaxed);
    }

    /// The image, as in the messages of errors.
    pub fn image(&self) -> &str {
        &self.upload.image
    }

    /// Returns true once the index is written: a failure after that leaves the image in the store.
    pub fn is_published(&self) -> bool {
        self.published.load(Ordering::Relaxed)
    }

    /// The complete image file of a guest that is not in the store.
    pub fn kept_file(&self) -> Option<&Path> {
        (self.file.is_published() && !self.is_published()).then(|| self.file.path())
    }

    /// Statistics of the upload so far.
    pub fn uploaded(&self) -> Uploaded {
        self.upload.uploaded()
    }

    /// Bytes of the guest's memory; 0 before its block list.
    pub fn memory_bytes(&self) -> u64 {
        self.file.memory_bytes()
    }

    /// Bytes of memory that are still to be uploaded; `None` unless an upload is active.
    pub fn upload_remaining(&self) -> Option<u64> {
        Some(self.remaining.load(Ordering::Relaxed)).filter(|&remaining| remaining > 0)
    }

    /// Uploads the committed guest and publishes it. `progress` receives the bytes of each chunk.
    ///
    /// # Errors
    /// The image is not in the store; [`Self::kept_file`] is its file, if that is complete.
    pub fn publish_with(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let sent = lock(&self.sent).take();
        let (image, index) = sent.map_or_else(|| self.send(progress), Ok)?;
        self.upload.publish(&index)?;
        self.published.store(true, Ordering::Relaxed);
        if let Err(error) = spool::remove(&image) {
            tracing::warn!(%error, path = %self.file.path().display(), "the uploaded file is not removed");
        }
        Ok(())
    }

    /// Completes the image file and uploads it.
    fn send(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<(Image, Index)> {
        let failed = |error: crate::Error| Error::Image(Box::new(error));
        Sink::publish(&self.file).map_err(Error::from_migration)?;
        let image = Image::open(self.file.path()).map_err(failed)?;
        let total = image.ram_blocks().iter().map(|block| block.length).sum();
        self.remaining.store(total, Ordering::Relaxed);
        let count = |bytes| {
            self.remaining.fetch_sub(bytes, Ordering::Relaxed);
            progress(bytes);
        };
        let index = upload_image(&self.upload, &image, &count)?;
        Ok((image, index))
    }
}

impl Sink for StoreWriter {
    fn configuration(&self, configuration: &Configuration) -> towline_migration::Result<()> {
        self.file.configuration(configuration)
    }

    fn section_start(&self, section: RamSection) -> towline_migration::Result<()> {
        self.file.section_start(section)
    }

    fn blocks(&self, blocks: &[RamBlock]) -> towline_migration::Result<()> {
        spool::check_room(self.file.path(), blocks)?;
        self.file.blocks(blocks)
    }

    fn pages(&self, stream: ChannelId, pages: &Pages<'_>) -> towline_migration::Result<()> {
        self.file.pages(stream, pages)
    }

    fn zero(&self, stream: ChannelId, block: BlockIndex, offsets: &[u64]) -> towline_migration::Result<()> {
        self.file.zero(stream, block, offsets)
    }

    fn current(&self, page: PageRef, content: &mut [u8]) -> towline_migration::Result<()> {
        self.file.current(page, content)
    }

    fn device_state(&self, state: DeviceState) -> towline_migration::Result<()> {
        self.file.device_state(state)
    }

    fn commit(&self) -> towline_migration::Result<()> {
        self.file.commit()?;
        if !self.is_deferred.load(Ordering::Relaxed) {
            *lock(&self.sent) = Some(self.send(&|_| {})?);
        }
        Ok(())
    }

    fn publish(&self) -> towline_migration::Result<()> {
        Ok(self.publish_with(&|_| {})?)
    }
}

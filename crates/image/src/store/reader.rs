//! Reads an image from a store, as a [`Guest`] for the engine.
//!
//! ```text
//!   prepare ─► fetch its chunks, prefetch the following ─► decompress · compare with the name ─► own memory ─► memory()
//! ```
//!
//! Needed chunks are requested at once, regardless of other requests in flight; prefetching follows the order
//! in which pages are prepared. Memory prepared by a thread stays until the same thread prepares other pages
//! or, with postcopy, until it is released.
//!
//! Every byte is compared with a hash before it is used, with and without `--verify`. Limits: [`CACHE_BYTES`]
//! of memory, some more with many lanes (2 MiB each), and [`PREFETCH_BYTES`] in flight.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use towline_channel::lock::lock;
use towline_channel::{Cancel, IoBuf};
use towline_migration::{Extent, ExtentKind, Guest, RamMapping, parallel};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::access::Store;
use super::cache::{Acquired, Cache, ChunkNumber, FetchLimits};
use super::images::{self, UnopenedImage};
use super::lease::Lease;
use super::runtime::Started;
use super::upload::threads;
use super::{
    CACHE_BYTES, ChunkPosition, Error, MissingChunkCause, PREFETCH_BYTES, REQUESTS_MAX, Result, chunk,
};
use crate::index::Index;
use crate::location::Location;
use crate::{ChunkHash, PageCount, StoredGuest};

/// Needed chunks are requested regardless of others.
const UNLIMITED: FetchLimits = FetchLimits { chunks: usize::MAX, requests: usize::MAX };

/// An open image in a store.
#[derive(Debug)]
pub struct StoredImage {
    image: LeasedImage,
    index: Index,
    /// Copied from the index.
    configuration: Configuration,
    blocks: Vec<RamBlock>,
    device_state: DeviceState,
    index_bytes: u64,
    /// Number of the first chunk of each block.
    first_chunks: Vec<ChunkNumber>,
    /// Reserved memory of each block, of which only resident chunks are allocated; `None` for a block without
    /// pages.
    memory: Vec<Option<RamMapping>>,
    cache: Arc<Cache>,
    /// True if prepared memory stays until it is released.
    retains_until_release: bool,
}

/// An image in a store.
#[derive(Debug)]
struct LeasedImage {
    name: String,
    /// Protects the chunks that the index references; or the reason for which there is no lease.
    lease: Result<Lease, String>,
    store: Arc<Store>,
}

impl LeasedImage {
    fn missing(&self, name: &[u8; 32], position: ChunkPosition) -> Error {
        let absence = match &self.lease {
            Err(why) => MissingChunkCause::Unleased { why: why.clone() },
            Ok(lease) => match lease.state().loss() {
                None => MissingChunkCause::Leased,
                Some(why) => MissingChunkCause::LeaseLost { why },
            },
        };
        let chunk = self.store.object_name(&chunk::key(name));
        Error::Missing { image: self.name.clone(), position, chunk, absence }
    }

    fn damaged(&self, name: &[u8; 32], position: ChunkPosition, why: String) -> Error {
        let chunk = self.store.object_name(&chunk::key(name));
        Error::Damaged { image: self.name.clone(), position, chunk, why }
    }

    /// Waits for the device state, and checks it.
    fn device_state(&self, index: &Index, requested: ChunkRequests) -> Result<DeviceState> {
        let (length, hash) = index.device_state();
        let objects = self.store.finish(requested)?;
        let mut bytes = Vec::with_capacity(length as usize);
        for (name, object) in index.device_state_names().iter().zip(objects) {
            let left = index.chunk_bytes.min(length - bytes.len() as u64);
            let ChunkHash::Data(name) = name else {
                bytes.resize(bytes.len() + left as usize, 0);
                continue;
            };
            let position = ChunkPosition { block: None, offset: bytes.len() as u64 };
            let Some(object) = object else { return Err(self.missing(name, position)) };
            let part = chunk::decompress(&object, name, left);
            bytes.extend(part.map_err(|why| self.damaged(name, position, why))?);
        }
        let wrong = |why: String| Error::DeviceState { image: self.name.clone(), why };
        let found = crate::manifest::Digest::of(&bytes);
        if found != hash {
            return Err(wrong(format!("its BLAKE3 is {found}, the index says {hash}")));
        }
        DeviceState::parse(&bytes).map_err(|error| wrong(error.to_string()))
    }
}

impl UnopenedImage {
    /// Protects the chunks by a lease and fetches the device state, at the same time.
    ///
    /// # Errors
    /// [`Error::Changed`]: the image was replaced or removed in between. Or it is damaged, or the store is unreachable or refuses access.
    pub fn open(self) -> Result<StoredImage> {
        let requested = request_device_state(&self.store, &self.index);
        let lease = self.lease()?;
        let Self { store, image: name, index, bytes, .. } = self;
        let image = LeasedImage { name, lease, store };
        let device_state = image.device_state(&index, requested)?;
        let blocks = index.blocks();
        let (mut first_chunks, mut next) = (Vec::with_capacity(blocks.len()), 0);
        let mut memory = Vec::with_capacity(blocks.len());
        for (number, block) in (0..).map(BlockIndex).zip(&blocks) {
            first_chunks.push(next);
            next += index.chunk_names(number).len();
            let reserved = |length| {
                let what = "address space for the guest's memory";
                RamMapping::reserved(length).map_err(|why| Error::Host { what, why })
            };
            memory.push(match block.length {
                0 => None,
                length => Some(reserved(length as usize)?),
            });
        }
        Ok(StoredImage {
            image,
            configuration: index.configuration(),
            index,
            blocks,
            device_state,
            index_bytes: bytes.len() as u64,
            first_chunks,
            memory,
            cache: Arc::default(),
            retains_until_release: false,
        })
    }
}

/// Chunks of a prefix that were fetched and compared with their names and lengths.
#[derive(Debug, Default)]
pub struct VerifiedChunks(Mutex<HashSet<([u8; 32], u64)>>);

impl VerifiedChunks {
    fn contains(&self, name: [u8; 32], length: u64) -> bool {
        lock(&self.0).contains(&(name, length))
    }

    fn insert(&self, name: [u8; 32], length: u64) {
        lock(&self.0).insert((name, length));
    }
}

impl StoredImage {
    /// Fetches and checks the index and the device state. `cancel` ends every wait for the store.
    ///
    /// # Errors
    /// The image does not exist or is damaged, or the store is unreachable or refuses access.
    pub fn open(location: &Location, cancel: Option<Cancel>) -> Result<Self> {
        let store = Store::open(&location.parent(), cancel)?;
        Self::open_in(&store, &location.to_string(), &images::key(location)?)
    }

    /// As [`Self::open`], in an open store.
    pub(super) fn open_in(store: &Arc<Store>, image: &str, key: &str) -> Result<Self> {
        for _ in 0..images::ATTEMPTS_MAX {
            match UnopenedImage::read_in(Arc::clone(store), image.into(), key.into())?.open() {
                Err(Error::Changed { .. }) => {}
                opened => return opened,
            }
        }
        Err(Error::Changed { object: store.object_name(key) })
    }

    /// For postcopy: keeps prepared memory until [`Guest::release`], for any thread, and no wait for it can
    /// be cancelled, since the running guest needs it.
    #[must_use]
    pub fn retained_until_release(mut self) -> Self {
        self.retains_until_release = true;
        self.image.store.ignore_cancellation();
        self
    }

    /// Fetches all chunks and compares them with their names; `progress` receives the bytes of each.
    ///
    /// # Errors
    /// The first missing or damaged chunk.
    pub fn verify(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        self.verify_unknown(&VerifiedChunks::default(), progress)
    }

    /// As [`Self::verify`], except for chunks that another image of the same prefix was verified with.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn verify_unknown(&self, known: &VerifiedChunks, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let numbers: Vec<_> = self.data_chunks().collect();
        // More threads than processors: some fetch while others compare.
        let count = REQUESTS_MAX.min(4 * threads());
        let verify = |&(block, index)| {
            let (name, length, position) = self.chunk(block, index);
            let Some(name) = name.filter(|name| !known.contains(*name, length)) else { return Ok(()) };
            let object = self.image.store.get(&chunk::key(&name), chunk::object_bytes_max(length))?;
            let object = object.ok_or_else(|| self.image.missing(&name, position.clone()))?;
            chunk::decompress(&object, &name, length)
                .map_err(|why| self.image.damaged(&name, position, why))?;
            known.insert(name, length);
            progress(length);
            Ok(())
        };
        parallel::for_each(&numbers, count, || verify).map(drop)
    }

    /// A notice for the user if no lease protects the image's chunks because this process has no write
    /// permission.
    pub fn notice(&self) -> Option<String> {
        let why = self.image.lease.as_ref().err()?;
        Some(format!(
            "{} is read without a lease ({why}): garbage collection does not know of this reader, so the image must not be replaced \
             or removed until it has finished; for a lease, read it with credentials that may also write objects below readers/ of its \
             prefix (docs/store.md)",
            self.image.name
        ))
    }

    /// Index of the image.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Length of the index in the store.
    pub fn index_bytes(&self) -> u64 {
        self.index_bytes
    }

    /// Numbers of a block's pages in stored chunks and in chunks of zeros; the former may include zero pages.
    pub fn count_pages(&self, block: BlockIndex) -> PageCount {
        let length = self.blocks[block.index()].length;
        let bytes = self.index.chunk_bytes;
        let stored = |(index, name): (usize, &ChunkHash)| match name {
            ChunkHash::Zero => 0,
            ChunkHash::Data(_) => bytes.min(length - index as u64 * bytes),
        };
        let stored: u64 = self.index.chunk_names(block).iter().enumerate().map(stored).sum();
        PageCount { plain: stored / PAGE_SIZE, zero: (length - stored) / PAGE_SIZE }
    }

    fn data_chunks(&self) -> impl Iterator<Item = (BlockIndex, usize)> + '_ {
        (0..).map(BlockIndex).take(self.blocks.len()).flat_map(|block| {
            let names = self.index.chunk_names(block).iter().enumerate();
            names.filter(|(_, name)| **name != ChunkHash::Zero).map(move |(index, _)| (block, index))
        })
    }

    /// Name of a chunk unless it is zero, its length and position.
    fn chunk(&self, block: BlockIndex, index: usize) -> (Option<[u8; 32]>, u64, ChunkPosition) {
        let held = &self.blocks[block.index()];
        let offset = index as u64 * self.index.chunk_bytes;
        let name = self.index.chunk_names(block)[index].data();
        let position = ChunkPosition { block: Some(held.name.clone()), offset };
        (name, self.index.chunk_bytes.min(held.length - offset), position)
    }

    fn number(&self, block: BlockIndex, index: usize) -> ChunkNumber {
        self.first_chunks[block.index()] + index
    }

    /// Block and index of the chunk with this number.
    fn chunk_at(&self, number: ChunkNumber) -> (BlockIndex, usize) {
        // Blocks without chunks have the same first chunk as the next block; the last of these is the right
        // one.
        let block = self.first_chunks.partition_point(|&first| first <= number) - 1;
        (BlockIndex(u32::try_from(block).expect("bounded by BLOCKS_MAX")), number - self.first_chunks[block])
    }

    /// Requests a chunk unless it is present or in flight, or a limit is reached. Returns true if it was
    /// requested.
    fn request_chunk(&self, block: BlockIndex, index: usize, limits: FetchLimits) -> bool {
        let (name, length, position) = self.chunk(block, index);
        let number = self.number(block, index);
        let Some(name) = name.filter(|_| self.cache.claim(number, limits)) else { return false };
        let get = self.image.store.objects.get(&chunk::key(&name), chunk::object_bytes_max(length));
        let (cache, missing) = (Arc::clone(&self.cache), self.image.missing(&name, position));
        self.image.store.runtime.spawn(async move {
            let result = get.await.and_then(|found| found.ok_or(missing));
            cache.fetched(number, result.map(|(bytes, _)| bytes));
        });
        true
    }

    /// Prefetches the following chunks.
    fn prefetch(&self, block: BlockIndex, end: usize) {
        let limit = (PREFETCH_BYTES / self.index.chunk_bytes) as usize;
        // Bounded by the number of chunks that may be prefetched, since skipping zeros costs time too.
        let (mut block, mut index) = (block, end);
        for _ in 0..limit {
            while index >= self.index.chunk_names(block).len() {
                (block, index) = (BlockIndex(block.0 + 1), 0);
                if block.index() >= self.blocks.len() {
                    return;
                }
            }
            self.request_chunk(block, index, FetchLimits { chunks: limit, requests: REQUESTS_MAX });
            index += 1;
        }
    }

    /// Waits until a chunk is in memory and pins it for this thread.
    fn fetch(&self, block: BlockIndex, index: usize) -> Result<()> {
        let (Some(name), length, position) = self.chunk(block, index) else { return Ok(()) };
        let thread = (!self.retains_until_release).then(|| thread::current().id());
        let number = self.number(block, index);
        let check_cancelled = || self.image.store.check_cancelled();
        let object = loop {
            self.request_chunk(block, index, UNLIMITED);
            match self.cache.acquire(thread, number, &self.image.store.runtime, &check_cancelled) {
                Ok(None) => {}
                Ok(Some(Acquired::Resident)) => return Ok(()),
                Ok(Some(Acquired::MustFill(object))) => break object,
                // The lease may have been lost since the request was sent.
                Err(Error::Missing { .. }) => return Err(self.image.missing(&name, position)),
                Err(error) => return Err(error),
            }
        };
        match chunk::decompress(&object, &name, length) {
            Ok(bytes) => self.memory_of(block).span().write(position.offset as usize, &bytes),
            Err(why) => {
                self.cache.fill_failed(number);
                return Err(self.image.damaged(&name, position, why));
            }
        }
        self.cache.filled(thread, number);
        Ok(())
    }

    /// The memory of a block that has chunks.
    fn memory_of(&self, block: BlockIndex) -> &RamMapping {
        self.memory[block.index()].as_ref().expect("a block with pages has memory")
    }

    pub(super) fn prepare_chunks(&self, page: PageRef, length: u64) -> Result<()> {
        let chunk_bytes = self.index.chunk_bytes;
        let limit = (CACHE_BYTES / chunk_bytes) as usize;
        if !self.retains_until_release {
            self.cache.release_thread(thread::current().id(), limit, |number| self.evict(number));
        }
        let mut chunks = self.chunks_of(page, length);
        for index in chunks.clone() {
            self.request_chunk(page.block, index, UNLIMITED);
        }
        // With explicit release the caller has its own prefetching threads.
        if !self.retains_until_release {
            self.prefetch(page.block, chunks.end);
        }
        chunks.try_for_each(|index| self.fetch(page.block, index))
    }

    /// Chunks that these bytes are in.
    fn chunks_of(&self, page: PageRef, length: u64) -> Range<usize> {
        let chunk_bytes = self.index.chunk_bytes;
        (page.offset / chunk_bytes) as usize..(page.offset + length).div_ceil(chunk_bytes) as usize
    }

    /// Deallocates the memory of a chunk.
    fn evict(&self, number: ChunkNumber) {
        let (block, index) = self.chunk_at(number);
        let (_, length, position) = self.chunk(block, index);
        self.memory_of(block).discard(position.offset as usize, length as usize);
    }
}

impl StoredGuest for StoredImage {
    fn name(&self) -> String {
        self.image.name.clone()
    }

    fn devices(&self) -> &DeviceState {
        &self.device_state
    }

    fn origin(&self) -> Option<&crate::Origin> {
        Some(&self.index.origin)
    }
}

impl Guest for StoredImage {
    fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    fn ram_section_id(&self) -> u32 {
        self.index.section_id
    }

    fn extent(&self, page: PageRef) -> Extent {
        let (names, chunk_bytes) = (self.index.chunk_names(page.block), self.index.chunk_bytes);
        let first = (page.offset / chunk_bytes) as usize;
        let is_zero = |name: &ChunkHash| *name == ChunkHash::Zero;
        let alike = names[first..].iter().take_while(|name| is_zero(name) == is_zero(&names[first])).count();
        let end = ((first + alike) as u64 * chunk_bytes).min(self.blocks[page.block.index()].length);
        let kind = if is_zero(&names[first]) { ExtentKind::Zero } else { ExtentKind::Unknown };
        Extent { pages: (end - page.offset) / PAGE_SIZE, kind }
    }

    /// A chunk is fetched as a whole.
    fn unit_bytes(&self) -> u64 {
        self.index.chunk_bytes
    }

    fn request(&self, page: PageRef, length: u64) {
        for index in self.chunks_of(page, length) {
            self.request_chunk(page.block, index, UNLIMITED);
        }
    }

    fn prepare(&self, page: PageRef, length: u64) -> towline_migration::Result<()> {
        Ok(self.prepare_chunks(page, length)?)
    }

    fn release(&self, page: PageRef, length: u64) {
        if self.retains_until_release {
            let numbers = self.chunks_of(page, length).map(|index| self.number(page.block, index));
            self.cache.release(numbers, |number| self.evict(number));
        }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        for index in self.chunks_of(page, length) {
            let is_zero = self.index.chunk_names(page.block)[index] == ChunkHash::Zero;
            let here = is_zero || self.cache.is_resident(self.number(page.block, index));
            assert!(here, "pages must be prepared by the thread that sends them");
        }
        self.memory_of(page.block).span().io_buf(page.offset as usize, length as usize)
    }

    /// A page that is not resident may have content.
    fn is_zero(&self, page: PageRef) -> bool {
        let index = (page.offset / self.index.chunk_bytes) as usize;
        self.cache.is_resident(self.number(page.block, index))
            && self.memory_of(page.block).span().is_zero(page.offset as usize, PAGE_SIZE as usize)
    }

    fn device_state(&self) -> towline_migration::Result<Vec<u8>> {
        Ok(self.device_state.bytes().to_vec())
    }
}

/// Requests for chunks, in order; `None` for a chunk of zeros or one that does not exist.
type ChunkRequests = Started<Result<Vec<Option<Bytes>>>>;

/// Requests the chunks of the device state, up to [`REQUESTS_MAX`] at the same time.
fn request_device_state(store: &Store, index: &Index) -> ChunkRequests {
    let (length, _) = index.device_state();
    let request = |(number, name): (usize, &ChunkHash)| {
        let left = index.chunk_bytes.min(length - number as u64 * index.chunk_bytes);
        let limit = chunk::object_bytes_max(left);
        let get = name.data().map(|name| store.objects.get(&chunk::key(&name), limit));
        async move {
            match get {
                Some(get) => Ok(get.await?.map(|(bytes, _)| bytes)),
                None => Ok(None),
            }
        }
    };
    let requests: Vec<_> = index.device_state_names().iter().enumerate().map(request).collect();
    store.runtime.begin(stream::iter(requests).buffered(REQUESTS_MAX).try_collect())
}

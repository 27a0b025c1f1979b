//! A running guest's memory, mapped by its VMM: the source of a VMM's migration.
//!
//! ```text
//!   VMM: maps memory, runs vCPUs in it ──► Span ──┐
//!        its hooks stop and start them ───────────┼─► SourceMemory ──► Outgoing
//!   DirtyTracker: what they write ────────────────┘
//! ```
//!
//! The memory is only read, and never as a slice: it may change at any time until `stop` has returned. For
//! the other end, and for memory that only this process writes by [`crate::Memory::write`], there is
//! [`crate::Memory`].
//!
//! Limits: pages of 4 KiB; the mapping must not change while a migration runs. Writes that the tracker cannot
//! see are reported by [`SourceMemory::mark_dirty`]. Reading untouched shared memory allocates it.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;

use towline_channel::IoBuf;
use towline_protocol::configuration::Configuration;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{PageRef, RamBlock};

use crate::dirty::DirtyMap;
use crate::lock::lock;
use crate::memory::{checked_block, offset_in_block};
use crate::sys::Span;
use crate::tracker::DirtyTracker;
use crate::{Extent, ExtentKind, Guest, MemoryError, Result};

/// Maximum number of pages examined for one extent: those of a unit that is sent.
const EXTENT_PAGES_MAX: u64 = 512;

/// A block of a live guest.
#[derive(Debug, Clone, Copy)]
pub struct LiveBlock<'a> {
    /// Name of the block on the wire, QEMU's idstr (`pc.ram`).
    pub name: &'a str,
    /// Where its memory is: whole pages.
    pub span: Span<'a>,
}

/// Work of the embedder's.
type Hook<'a> = Box<dyn Fn() -> Result<()> + Send + Sync + 'a>;
type DeviceStateHook<'a> = Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync + 'a>;

/// Guest memory mapped by a VMM, as the source of a migration.
pub struct SourceMemory<'a> {
    configuration: Configuration,
    blocks: Vec<RamBlock>,
    spans: Vec<Span<'a>>,
    tracker: Box<dyn DirtyTracker + 'a>,
    /// Pages that were never touched, as the tracker reported when it began.
    untouched: DirtyMap,
    /// Pages whose writes the tracker did not see.
    marked: DirtyMap,
    device_state: Mutex<Option<Vec<u8>>>,
    on_stop: Option<Hook<'a>>,
    on_start: Option<Hook<'a>>,
    on_device_state: Option<DeviceStateHook<'a>>,
}

impl<'a> SourceMemory<'a> {
    /// A guest with these blocks, in this order, whose writes are tracked by `tracker`.
    ///
    /// # Errors
    /// A block has an invalid length, place or name.
    pub fn new(
        configuration: Configuration,
        blocks: &[LiveBlock<'a>],
        tracker: impl DirtyTracker + 'a,
    ) -> Result<Self, MemoryError> {
        let (mut names, mut checked) = (BTreeSet::new(), Vec::new());
        for LiveBlock { name, span } in blocks {
            checked.push(checked_block(name, span.length() as u64, &mut names)?);
            if !(span.address() as u64).is_multiple_of(PAGE_SIZE) {
                return Err(MemoryError::Alignment { block: (*name).to_owned(), found: span.address() });
            }
        }
        let spans = blocks.iter().map(|block| block.span).collect();
        let blocks = checked;
        Ok(Self {
            configuration,
            untouched: DirtyMap::new(&blocks),
            marked: DirtyMap::new(&blocks),
            blocks,
            spans,
            tracker: Box::new(tracker),
            device_state: Mutex::default(),
            on_stop: None,
            on_start: None,
            on_device_state: None,
        })
    }

    /// Sets the callbacks that stop the guest for its last pass, and start it again if the migration fails
    /// after that. After `stop` has returned, nothing writes to the memory, devices included.
    #[must_use]
    pub fn with_hooks(
        mut self,
        stop: impl Fn() -> Result<()> + Send + Sync + 'a,
        start: impl Fn() -> Result<()> + Send + Sync + 'a,
    ) -> Self {
        self.on_stop = Some(Box::new(stop));
        self.on_start = Some(Box::new(start));
        self
    }

    /// Calls `device_state` for the device state ([`towline_protocol::device_state::DeviceState::bytes`])
    /// when the guest is stopped, unless one is set.
    #[must_use]
    pub fn with_device_state(
        mut self,
        device_state: impl Fn() -> Result<Vec<u8>> + Send + Sync + 'a,
    ) -> Self {
        self.on_device_state = Some(Box::new(device_state));
        self
    }

    /// Sets the device state that goes with the memory
    /// ([`towline_protocol::device_state::DeviceState::bytes`]); at the latest when `stop` returns.
    pub fn set_device_state(&self, bytes: Vec<u8>) {
        *lock(&self.device_state) = Some(bytes);
    }

    /// Marks `length` bytes from `at` on as written (or discarded) in a way that the tracker does not see: by
    /// a device, by another process, through another mapping. Call it after the write.
    ///
    /// # Panics
    /// If it is not within the block.
    pub fn mark_dirty(&self, at: PageRef, length: u64) {
        self.marked.mark(at, length);
    }

    fn span(&self, page: PageRef) -> &Span<'a> {
        &self.spans[page.block.index()]
    }
}

impl Guest for SourceMemory<'_> {
    fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    fn start_tracking(&self) -> Result<()> {
        self.untouched.harvest(&mut |_, _| {});
        self.tracker.start(&self.spans, &mut |page, length| self.untouched.mark(page, length))?;
        Ok(())
    }

    fn stop_tracking(&self) -> Result<()> {
        // Pages that are not tracked may be dirty.
        self.untouched.harvest(&mut |_, _| {});
        Ok(self.tracker.stop(&self.spans)?)
    }

    fn extent(&self, page: PageRef) -> Extent {
        let (pages, is_untouched) = self.untouched.alike(page, EXTENT_PAGES_MAX);
        Extent { pages, kind: if is_untouched { ExtentKind::Zero } else { ExtentKind::Unknown } }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        let length = usize::try_from(length).expect("within a block that is mapped here");
        self.span(page).io_buf(offset_in_block(page), length)
    }

    fn is_zero(&self, page: PageRef) -> bool {
        self.span(page).is_zero(offset_in_block(page), PAGE_SIZE as usize)
    }

    fn harvest_dirty(&self, report: &mut dyn FnMut(PageRef, u64)) -> Result<()> {
        let mut report = |page, length| {
            self.untouched.unmark(page, length);
            report(page, length);
        };
        self.marked.harvest(&mut report);
        Ok(self.tracker.harvest(&self.spans, &mut report)?)
    }

    fn stop(&self) -> Result<()> {
        self.on_stop.as_ref().map_or(Ok(()), |stop| stop())
    }

    fn start(&self) -> Result<()> {
        self.on_start.as_ref().map_or(Ok(()), |start| start())
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        let state = lock(&self.device_state).clone();
        match (state, &self.on_device_state) {
            (Some(state), _) => Ok(state),
            (None, Some(ask)) => ask(),
            (None, None) => Err(MemoryError::NoDeviceState.into()),
        }
    }
}

impl fmt::Debug for SourceMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceMemory").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

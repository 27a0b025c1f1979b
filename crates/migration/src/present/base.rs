//! Memory at the destination that was an image's: which of its pages are something else.

use std::collections::BTreeMap;
use std::fmt;
use std::slice;
use std::sync::Arc;

use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::Result;
use crate::dirty::DirtyMap;
use crate::guest::{BaseId, ExtentKind, Guest, Pages};

const PAGE: usize = PAGE_SIZE as usize;
/// Content of a zero page.
pub(super) const ZERO_PAGE: &[u8] = &[0; PAGE];

/// Blocks of an image that the destination's memory is before any page arrives, or may be.
#[derive(Clone)]
pub struct Base {
    /// The image.
    pub guest: Arc<dyn Guest + Send>,
    /// Its blocks, by name, each with its id if it has one.
    pub blocks: BTreeMap<String, Option<BaseId>>,
    /// Knowledge of the destination.
    pub presence: BasePresence,
    /// Refuses an image that was changed since then, before the source is acknowledged.
    pub check: Arc<dyn Fn() -> Result<()> + Send + Sync>,
}

/// Knowledge that the memory of a destination is an image's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BasePresence {
    /// It is.
    Proven,
    /// It is for the blocks that it reports ([`Sink::bases`](crate::Sink::bases)).
    IfReported,
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Base").field("presence", &self.presence).finish_non_exhaustive()
    }
}

/// A block of an image, and the pages of it that were sent.
pub(super) struct BaseBlock {
    image: Arc<dyn Guest + Send>,
    block: BlockIndex,
    /// Pages that are not zero in the image. This map and the next one have this block only.
    has_content: DirtyMap,
    /// Pages that were forwarded: the destination has other ones than the image's.
    sent: DirtyMap,
}

impl fmt::Debug for BaseBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BaseBlock").field("block", &self.block).finish_non_exhaustive()
    }
}

impl BaseBlock {
    /// The image's block of this name and length.
    pub(super) fn of(image: &Arc<dyn Guest + Send>, of: &RamBlock) -> Option<Self> {
        let is_it = |block: &RamBlock| (&block.name, block.length) == (&of.name, of.length);
        let index = image.blocks().iter().position(is_it)?;
        let block = BlockIndex(u32::try_from(index).ok()?);
        let (has_content, sent) = (DirtyMap::new(slice::from_ref(of)), DirtyMap::new(slice::from_ref(of)));
        let mut offset = 0;
        while offset < of.length {
            let extent = image.extent(PageRef { block, offset });
            let length = extent.pages * PAGE_SIZE;
            if extent.kind != ExtentKind::Zero {
                has_content.mark(only(offset), length);
            }
            offset += length;
        }
        Some(Self { image: Arc::clone(image), block, has_content, sent })
    }

    /// The pages that the destination does not have, each with its content. It will have them.
    pub(super) fn changed<'a>(&self, pages: &Pages<'a>) -> (Vec<u64>, Vec<&'a [u8]>) {
        let contents = pages.contents.iter().flat_map(|slice| slice.chunks(PAGE));
        let changed = pages.offsets.iter().copied().zip(contents);
        changed.filter(|(offset, content)| self.replaces(*offset, content)).unzip()
    }

    /// The pages of which the destination has another content than zeros. It will have zeros.
    pub(super) fn zeroed(&self, offsets: &[u64]) -> Vec<u64> {
        offsets.iter().copied().filter(|offset| self.replaces(*offset, ZERO_PAGE)).collect()
    }

    /// Returns true if the page must be sent, and records that it is.
    fn replaces(&self, offset: u64, content: &[u8]) -> bool {
        let page = only(offset);
        let is_same = || {
            let of_image = if self.has_content.is_marked(page) { self.page(offset) } else { Some(ZERO_PAGE) };
            of_image == Some(content)
        };
        if !self.sent.is_marked(page) && is_same() {
            return false;
        }
        self.sent.mark(page, PAGE_SIZE);
        true
    }

    fn page(&self, offset: u64) -> Option<&[u8]> {
        self.image.immutable(PageRef { block: self.block, offset }, PAGE_SIZE)
    }
}

/// A page in a map of one block.
fn only(offset: u64) -> PageRef {
    PageRef { block: BlockIndex(0), offset }
}

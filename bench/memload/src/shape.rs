//! Parameters of a synthetic guest.

use std::num::NonZeroUsize;

use towline_protocol::ram::PAGE_SIZE;

use crate::pattern::Pattern;

/// Parameters of a synthetic guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of memory, a multiple of 4096.
    pub length: u64,
    /// Decides the content of all pages, and which are written.
    pub seed: u64,
    /// Percentage of pages that are zero, at any time.
    pub zero_percent: u8,
    /// Bytes of memory that are written in a second, in whole pages; 0: none, and nothing is tracked.
    pub dirty_rate: u64,
    /// Threads that write. A page is always written by the same one.
    pub threads: NonZeroUsize,
    /// Where the memory is.
    pub backing: Backing,
}

/// Where a synthetic guest's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Private memory, in transparent huge pages where they are available.
    #[default]
    Private,
    /// A shared memfd, as VMMs use it for vhost-user.
    Memfd,
    /// A shared memfd in reserved huge pages of 2 MiB.
    HugeTlb,
}

impl Shape {
    /// A guest of this size, a quarter of it zero, without load.
    pub fn of_length(length: u64) -> Self {
        let (threads, backing) = (NonZeroUsize::MIN, Backing::Private);
        Self { length, seed: 1, zero_percent: 25, dirty_rate: 0, threads, backing }
    }

    pub(crate) fn pages(&self) -> usize {
        usize::try_from(self.length / PAGE_SIZE).expect("within a block that is mapped here")
    }

    pub(crate) fn pattern(&self) -> Pattern {
        Pattern { seed: self.seed, zero_percent: self.zero_percent }
    }
}

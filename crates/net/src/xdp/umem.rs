//! The guest's memory, and an arena for each pair, as one range of addresses that the kernel pins (UMEM).
//!
//! ```text
//!   [arena 0][arena 1] … [region with huge pages] … [region with small ones] …
//! ```
//! Regions need not lie in their order; they are beside each other, as a hole cannot be pinned. One whose pages cannot be put
//! there (an odd offset in its file) stays outside, and what is sent from it is copied.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::fstatfs;
use towline_vhost_user::{GuestRange, Memory};

use super::arena::SECTION_BYTES;
use super::plan::Piece;
use crate::sys::span::Span;

const PAGE_BYTES: u64 = 4096;
/// `HUGETLBFS_MAGIC`.
const HUGE_PAGES: i64 = 0x9584_58f6;

/// Memory that is pinned, as long as a socket uses it.
#[derive(Debug)]
pub(crate) struct Umem {
    pub(super) span: Arc<Span>,
    memory: Arc<Memory>,
    /// By region of the memory.
    regions: Vec<Option<Home>>,
    /// The sockets that are bound. Each pair's has what is pinned for itself, so that a queue is free when its own socket is
    /// closed; another pair's shares it from any of them.
    bound: Mutex<Vec<Arc<OwnedFd>>>,
    /// Bytes of metadata before each descriptor's data; 0 if the kernel has none.
    pub(super) metadata_bytes: u32,
    /// Whether packets may be of several descriptors; known once a socket is bound.
    pub(super) gathers: AtomicBool,
    /// How much each file held when it was pinned.
    blocks: Vec<u64>,
}

/// A socket that is bound: nobody else keeps it open.
#[derive(Debug)]
pub(super) struct Bound {
    fd: Arc<OwnedFd>,
    umem: Arc<Umem>,
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.umem.sockets().retain(|fd| !Arc::ptr_eq(fd, &self.fd));
    }
}

/// Where a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Home {
    at: u64,
    page: u64,
}

/// What is known of a region.
#[derive(Debug, Clone, Copy)]
struct Shape {
    size: u64,
    offset: u64,
    page: u64,
}

/// Where everything goes.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    homes: Vec<Option<Home>>,
    align: u64,
    len: u64,
}

impl Umem {
    /// Maps it; `register` has a socket pin it, told whether all of the guest's is in huge pages, and says how many bytes of
    /// metadata it has.
    pub(super) fn new(
        memory: &Arc<Memory>,
        pairs: usize,
        register: impl FnOnce(&Span, bool) -> io::Result<u32>,
    ) -> io::Result<Self> {
        let own = SECTION_BYTES * pairs;
        let shapes = memory.regions().iter().map(|region| {
            let (file, offset) = region.file();
            Ok(Shape { size: region.size(), offset, page: page_bytes(file)? })
        });
        let shapes = shapes.collect::<io::Result<Vec<Shape>>>()?;
        let layout = lay(own as u64, &shapes);
        let bytes =
            |bytes: u64| usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM));
        let mut span = Span::new(bytes(layout.len)?, own, bytes(layout.align)?, SECTION_BYTES)?;
        for (home, region) in layout.homes.iter().zip(memory.regions()) {
            if let Some(home) = home {
                let (file, offset) = region.file();
                span.place(bytes(home.at)?, file, offset, bytes(region.size())?)?;
            }
        }
        let huge = shapes.iter().all(|shape| shape.page > PAGE_BYTES);
        let metadata_bytes = register(&span, huge)?;
        let blocks = memory.regions().iter().map(|region| blocks(region.file().0)).collect();
        let (memory, span) = (Arc::clone(memory), Arc::new(span));
        let (gathers, bound) = (AtomicBool::new(false), Mutex::default());
        Ok(Self { span, memory, regions: layout.homes, bound, metadata_bytes, gathers, blocks })
    }

    /// A socket is bound. Closed with what is returned.
    pub(super) fn enter(self: &Arc<Self>, fd: OwnedFd) -> Bound {
        let (fd, umem) = (Arc::new(fd), Arc::clone(self));
        umem.sockets().push(Arc::clone(&fd));
        Bound { fd, umem }
    }

    /// Does something with a socket that is bound, which stays so meanwhile. `None` if there is none any more.
    pub(super) fn with_bound<T>(&self, act: impl FnOnce(&OwnedFd) -> T) -> Option<T> {
        self.sockets().first().map(|fd| act(fd))
    }

    fn sockets(&self) -> MutexGuard<'_, Vec<Arc<OwnedFd>>> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is of this memory.
    pub(super) fn is_of(&self, memory: &Arc<Memory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// A part of the guest's memory, in here.
    pub(super) fn piece(&self, place: GuestRange) -> Piece {
        let home = self.regions.get(place.region).copied().flatten();
        let page = home.map_or(PAGE_BYTES, |home| home.page);
        Piece { at: home.map(|home| home.at + place.offset), len: place.len, page }
    }

    /// Whether all of the guest's memory is still what was pinned. What a balloon, or page reporting, has taken away is pinned
    /// as it was, and what the guest gets instead is not seen from here.
    pub(super) fn is_whole(&self) -> bool {
        let now = self.memory.regions().iter().map(|region| blocks(region.file().0));
        now.zip(&self.blocks).all(|(now, then)| now >= *then)
    }
}

fn blocks(file: &File) -> u64 {
    // Of a file that cannot be asked nothing was taken.
    file.metadata().map_or(u64::MAX, |metadata| metadata.blocks())
}

fn page_bytes(file: &File) -> io::Result<u64> {
    let found = fstatfs(file)?;
    Ok(if found.f_type == HUGE_PAGES { found.f_bsize.cast_unsigned() } else { PAGE_BYTES })
}

/// Regions with larger pages come first: as all lengths are multiples of their pages, each begins at a multiple of its own.
fn lay(own: u64, shapes: &[Shape]) -> Layout {
    let fits = |shape: &Shape| {
        shape.page.is_power_of_two()
            && shape.size.is_multiple_of(shape.page)
            && shape.offset.is_multiple_of(shape.page)
    };
    let mut order: Vec<usize> = (0..shapes.len()).filter(|index| fits(&shapes[*index])).collect();
    order.sort_by_key(|index| std::cmp::Reverse(shapes[*index].page));
    let align = order.first().map_or(PAGE_BYTES, |index| shapes[*index].page);
    let (mut homes, mut at) = (vec![None; shapes.len()], own);
    for index in order {
        homes[index] = Some(Home { at, page: shapes[index].page });
        at = at.saturating_add(shapes[index].size);
    }
    Layout { homes, align, len: at }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_lie_beside_each_other() {
        let (small, huge) = (PAGE_BYTES, 2 << 20);
        let shapes = [
            Shape { size: 0xa0000, offset: 0, page: small },
            Shape { size: 8 << 20, offset: 2 << 20, page: huge },
            Shape { size: 0x1800, offset: 0, page: small },
            Shape { size: 0x2000, offset: 0x800, page: small },
            Shape { size: 0x3000, offset: 0x1000, page: small },
        ];
        let own = 0x81000;
        let behind = own + (8 << 20);
        let home = |at, page| Some(Home { at, page });
        let homes = vec![home(behind, small), home(own, huge), None, None, home(behind + 0xa0000, small)];
        assert_eq!(lay(own, &shapes), Layout { homes, align: huge, len: behind + 0xa3000 });
        assert_eq!(lay(own, &[]), Layout { homes: vec![], align: small, len: own });
    }
}

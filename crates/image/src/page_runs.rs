//! Pages of a packet as runs that are consecutive in their block.

use towline_migration::Pages;
use towline_protocol::ram::PAGE_SIZE;

/// Consecutive pages of a block.
#[derive(Debug)]
pub(crate) struct PageRun<'a> {
    /// Byte offset of the first page in the block.
    pub(crate) offset: u64,
    /// Number of pages.
    pub(crate) pages: u64,
    /// Content of the pages, in one or more slices.
    pub(crate) contents: Vec<&'a [u8]>,
}

impl<'a> PageRun<'a> {
    /// The slices with their byte offsets in the block.
    pub(crate) fn slices(&self) -> impl Iterator<Item = (u64, &'a [u8])> {
        let mut next = self.offset;
        self.contents.iter().map(move |slice| {
            let offset = next;
            next += slice.len() as u64;
            (offset, *slice)
        })
    }
}

/// Splits the pages into runs.
pub(crate) fn page_runs<'a>(pages: &Pages<'a>) -> impl Iterator<Item = PageRun<'a>> {
    let mut contents = Slices { left: pages.contents, consumed: 0 };
    pages.offsets.chunk_by(|first, second| first + PAGE_SIZE == *second).map(move |run| PageRun {
        offset: run[0],
        pages: run.len() as u64,
        contents: contents.take(run.len() * PAGE_SIZE as usize),
    })
}

/// A list of slices that is consumed from the front.
struct Slices<'a> {
    left: &'a [&'a [u8]],
    /// Bytes consumed of the first slice.
    consumed: usize,
}

impl<'a> Slices<'a> {
    fn take(&mut self, length: usize) -> Vec<&'a [u8]> {
        let mut slices = Vec::new();
        let mut missing = length;
        while let (Some(first), 1..) = (self.left.first(), missing) {
            let rest = &first[self.consumed..];
            let part = &rest[..rest.len().min(missing)];
            slices.push(part);
            missing -= part.len();
            self.consumed += part.len();
            if self.consumed == first.len() {
                (self.left, self.consumed) = (&self.left[1..], 0);
            }
        }
        slices
    }
}

#[cfg(test)]
mod tests {
    use towline_protocol::BlockIndex;

    use super::*;

    #[test]
    fn runs_are_cut_where_offsets_or_slices_end() {
        let page = PAGE_SIZE as usize;
        let content: Vec<u8> = (0..4 * page).map(|at| (at / page) as u8).collect();
        let (first, second) = content.split_at(page);
        let offsets = [0, PAGE_SIZE, 5 * PAGE_SIZE, 6 * PAGE_SIZE];
        let pages = Pages { block: BlockIndex(0), offsets: &offsets, contents: &[first, second] };
        let runs: Vec<_> = page_runs(&pages).collect();
        assert_eq!((runs[0].offset, runs[0].pages, runs[1].offset, runs[1].pages), (0, 2, 5 * PAGE_SIZE, 2));
        assert_eq!([&runs[0].contents.concat()[..], &runs[1].contents.concat()].concat(), content);
        let slices: Vec<_> = runs[0].slices().map(|(offset, slice)| (offset, slice.len())).collect();
        assert_eq!(slices, [(0, page), (PAGE_SIZE, page)]);
    }
}

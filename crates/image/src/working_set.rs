//! Pages that restored guests requested: a small file beside the image, `IMAGE.working-set.json`, that
//! shortens the waits of the next instant restore.
//!
//! A working set contains runs of pages in the order of the guests' requests. It is not part of the image and
//! changes with each restore, so the manifest does not cover it; a wrong working set only costs time. It is
//! bound to its image by a hash of device state and block list, and has a hash of its runs: a damaged one is
//! ignored. Limits: [`RUNS_MAX`] runs.

use std::collections::HashSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use crate::atomic_file::{Existing, write_sidecar};
use crate::manifest::Digest;
use crate::regular_file::open_regular;
use crate::sidecar::check_part;

const FORMAT: &str = "towline working set";
const VERSION: u32 = 1;
/// Maximum number of runs; later requests are not recorded.
pub const RUNS_MAX: usize = 1 << 15;
/// Maximum length of the file.
const BYTES_MAX: u64 = 4 << 20;

/// Working set of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkingSet {
    path: PathBuf,
    guest: Digest,
    runs: Vec<(PageRef, u64)>,
}

/// Format of the file: a run is its block's index, its first page and its number of pages.
#[derive(Debug, Serialize, Deserialize)]
struct WorkingSetFile {
    format: String,
    version: u32,
    guest: Digest,
    runs: Vec<(u32, u64, u64)>,
    /// The BLAKE3 of the runs; the first versions had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blake3: Option<Digest>,
}

/// Path of the working set of an image.
pub(crate) fn path_beside(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".working-set.json");
    path.into()
}

impl WorkingSet {
    /// Loads the working set of `image`; empty if there is none for this guest.
    pub fn load(image: &Path, blocks: &[RamBlock], device_state: &[u8]) -> Self {
        let (path, guest) = (path_beside(image), guest(blocks, device_state));
        let runs = match read(&path) {
            Some(stored) if stored.guest == guest => valid_runs(&stored.runs, blocks),
            _ => Vec::new(),
        };
        Self { path, guest, runs }
    }

    /// Recorded memory in order of the requests: first page and length in bytes.
    pub fn runs(&self) -> &[(PageRef, u64)] {
        &self.runs
    }

    /// Appends pages in the order of their requests. Returns true if any of them was not recorded yet.
    pub fn add(&mut self, pages: &[PageRef]) -> bool {
        let each = |&(page, length): &(PageRef, u64)| {
            (0..length)
                .step_by(PAGE_SIZE as usize)
                .map(move |at| PageRef { offset: page.offset + at, ..page })
        };
        let mut known: HashSet<PageRef> = self.runs.iter().flat_map(each).collect();
        let mut grown = false;
        for &page in pages {
            if !known.insert(page) {
                continue;
            }
            let is_full = self.runs.len() == RUNS_MAX;
            match self.runs.last_mut() {
                Some((run, length)) if run.block == page.block && run.offset + *length == page.offset => {
                    *length += PAGE_SIZE;
                }
                _ if is_full => break,
                _ => self.runs.push((page, PAGE_SIZE)),
            }
            grown = true;
        }
        grown
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// The file cannot be created, or another file has its name.
    pub fn store(&self) -> Result<(), crate::atomic_file::Error> {
        let run =
            |&(page, length): &(PageRef, u64)| (page.block.0, page.offset / PAGE_SIZE, length / PAGE_SIZE);
        check_part(&self.path, "a working set", |head| {
            head.windows(FORMAT.len()).any(|part| part == FORMAT.as_bytes())
        })?;
        let (format, runs): (_, Vec<_>) = (FORMAT.into(), self.runs.iter().map(run).collect());
        let blake3 = Some(hash(&runs));
        let stored = WorkingSetFile { format, version: VERSION, guest: self.guest, runs, blake3 };
        let text = serde_json::to_vec(&stored).expect("numbers and a hash");
        write_sidecar(&self.path, &text, Existing::Replace)
    }
}

/// Identity of the guest.
fn guest(blocks: &[RamBlock], device_state: &[u8]) -> Digest {
    let blocks: Vec<_> = blocks.iter().map(|block| RamBlock { mapped: None, ..block.clone() }).collect();
    Digest::identity(b"working set", &blocks, Digest::of(device_state))
}

/// Reads the file; an invalid one is ignored.
fn read(path: &Path) -> Option<WorkingSetFile> {
    let file = open_regular(path, OFlags::empty()).ok()??;
    let mut text = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut text).ok()?;
    let stored: WorkingSetFile = serde_json::from_slice(&text).ok()?;
    let is_intact = stored.blake3.is_none_or(|blake3| blake3 == hash(&stored.runs));
    (stored.format == FORMAT && stored.version == VERSION && is_intact).then_some(stored)
}

/// The hash of runs.
fn hash(runs: &[(u32, u64, u64)]) -> Digest {
    let bytes = |&(block, page, pages): &(u32, u64, u64)| {
        [&block.to_le_bytes()[..], &page.to_le_bytes(), &pages.to_le_bytes()].concat()
    };
    Digest::of(&runs.iter().flat_map(bytes).collect::<Vec<u8>>())
}

/// The runs that are within their block, and together not longer than all blocks: each page is recorded once.
fn valid_runs(stored: &[(u32, u64, u64)], blocks: &[RamBlock]) -> Vec<(PageRef, u64)> {
    let mut left: u64 = blocks.iter().map(RamBlock::pages).sum();
    let run = |&(block, page, pages): &(u32, u64, u64)| {
        let all = blocks.get(block as usize)?.pages();
        let is_within = pages > 0 && page.checked_add(pages).is_some_and(|end| end <= all);
        let first = PageRef { block: BlockIndex(block), offset: page.checked_mul(PAGE_SIZE)? };
        left = left.checked_sub(pages).filter(|_| is_within)?;
        Some((first, pages * PAGE_SIZE))
    };
    stored.iter().take(RUNS_MAX).filter_map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(pages: u64) -> RamBlock {
        RamBlock { name: "pc.ram".into(), length: pages * PAGE_SIZE, mapped: None }
    }

    fn page(index: u64) -> PageRef {
        PageRef { block: BlockIndex(0), offset: index * PAGE_SIZE }
    }

    #[test]
    fn requests_are_recorded_for_the_next_restore_of_the_same_guest() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("guest.img");
        let blocks = [block(100)];
        let mut set = WorkingSet::load(&image, &blocks, b"devices");
        assert_eq!(set.runs(), []);
        assert!(set.add(&[page(7), page(8), page(3), page(7), page(99)]));
        assert!(!set.add(&[page(8), page(3)]));
        set.store().unwrap();
        let expected = [(page(7), 2 * PAGE_SIZE), (page(3), PAGE_SIZE), (page(99), PAGE_SIZE)];
        assert_eq!(WorkingSet::load(&image, &blocks, b"devices").runs(), expected);
        assert_eq!(WorkingSet::load(&image, &blocks, b"others").runs(), []);
        assert_eq!(WorkingSet::load(&image, &[block(101)], b"devices").runs(), []);
    }

    #[test]
    fn invalid_runs_and_damaged_files_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("guest.img");
        let blocks = [block(100)];
        let guest = guest(&blocks, b"devices");
        let path = directory.path().join("guest.img.working-set.json");
        let text =
            |runs: &str| format!(r#"{{"format":"{FORMAT}","version":1,"guest":"{guest}","runs":[{runs}]}}"#);
        for text in [
            "{".into(),
            text("[0,99,2]"),
            text("[1,0,1]"),
            text("[0,18446744073709551615,2]"),
            text("[0,0,0]"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(WorkingSet::load(&image, &blocks, b"devices").runs(), []);
        }
        std::fs::write(&path, text("[0,0,60],[0,10,60],[0,60,40]")).unwrap();
        let once = [(page(0), 60 * PAGE_SIZE), (page(60), 40 * PAGE_SIZE)];
        assert_eq!(
            WorkingSet::load(&image, &blocks, b"devices").runs(),
            once,
            "more pages than the guest has"
        );
        std::fs::write(&path, text("[0,98,2]")).unwrap();
        assert_eq!(WorkingSet::load(&image, &blocks, b"devices").runs(), [(page(98), 2 * PAGE_SIZE)]);
    }
}

//! FlippedBit bits in an image or its sidecars: each is detected by `--verify`, or does not change what a
//! guest receives.
//!
//! `TOWLINE_SOAK_FLIPS` (`cargo xtask soak image-flips`) is the number of random bits.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use towline_migration::Guest;
use towline_protocol::mapped_ram::bitmap_bytes;
use towline_protocol::{BlockIndex, PageRef};

use crate::checksum::CHUNK_BYTES;
use crate::crash_tests::unseal;
use crate::index::{Index, IndexContents};
use crate::manifest::{Digest, sidecar_path};
use crate::sidecar::staged_path;
use crate::testing::{LENGTHS, PAGE, TestGuest, delivered};
use crate::{ChunkHash, Error, Existing, Image, Origin, WorkingSet};

/// Effect of a flipped bit.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    DetectedByOpen(String),
    DetectedByVerify(String),
    /// The delivered content is unchanged.
    Harmless,
}

/// An image and its delivered content.
struct Subject {
    image: PathBuf,
    delivered: Digest,
}

impl Subject {
    fn new(image: PathBuf) -> Self {
        let delivered = verified(&image).unwrap();
        Self { image, delivered }
    }

    /// Flips a bit, verifies the image, and flips the bit back. Panics if changed content would be delivered.
    fn flip(&self, file: &Path, bit: u64) -> Effect {
        let flipped = FlippedBit::new(file, bit);
        let found = match verified(&self.image) {
            Err(VerifyError::Open(error)) => Effect::DetectedByOpen(error.to_string()),
            Err(VerifyError::Verify(error)) => Effect::DetectedByVerify(error.to_string()),
            Ok(delivered) => {
                assert_eq!(delivered, self.delivered, "bit {bit} of {} is not found", file.display());
                Effect::Harmless
            }
        };
        drop(flipped);
        found
    }
}

struct FlippedBit {
    file: File,
    bit: u64,
}

impl FlippedBit {
    fn new(path: &Path, bit: u64) -> Self {
        let flipped = Self { file: File::options().read(true).write(true).open(path).unwrap(), bit };
        flipped.flip();
        flipped
    }

    fn flip(&self) {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, self.bit / 8).unwrap();
        self.file.write_all_at(&[byte[0] ^ 1 << (self.bit % 8)], self.bit / 8).unwrap();
    }
}

impl Drop for FlippedBit {
    fn drop(&mut self) {
        self.flip();
    }
}

#[derive(Debug)]
enum VerifyError {
    Open(Error),
    Verify(Error),
}

/// Content delivered by an image that opens and verifies.
fn verified(path: &Path) -> Result<Digest, VerifyError> {
    let image = Image::open(path).map_err(VerifyError::Open)?;
    image.verify(1, &|_| {}).map_err(VerifyError::Verify)?;
    // Also by `prepare`, chunk by chunk, as a copy does.
    let image = image.verify_on_read().map_err(VerifyError::Verify)?;
    for (index, length) in LENGTHS.into_iter().enumerate() {
        for offset in (0..length).step_by(CHUNK_BYTES as usize) {
            let page = PageRef { block: BlockIndex(index as u32), offset };
            image.prepare(page, CHUNK_BYTES.min(length - offset)).unwrap();
        }
    }
    Ok(delivered(&image))
}

/// Offsets of the parts of an image.
struct Parts {
    head: u64,
    bitmap: u64,
    bitmap_bytes: u64,
    seal: u64,
    pages: u64,
    memory_end: u64,
    device_state: u64,
    end: u64,
}

impl Parts {
    fn of(path: &Path) -> Self {
        let image = Image::open(path).unwrap();
        let [first, last] = image.ram_blocks() else { panic!("two blocks") };
        let (mapped, last_mapped) = (first.mapped.unwrap(), last.mapped.unwrap());
        let bytes = bitmap_bytes(first.length, mapped.page_size);
        Self {
            head: mapped.bitmap_offset,
            bitmap: mapped.bitmap_offset,
            bitmap_bytes: bytes,
            seal: mapped.bitmap_offset + bytes,
            pages: mapped.pages_offset,
            memory_end: last_mapped.end(last.length),
            device_state: image.device_state_offset(),
            end: image.length(),
        }
    }
}

fn stored() -> (TempDir, PathBuf) {
    let directory = crate::testing::directory();
    let path = directory.path().join("guest.img");
    TestGuest::new(11, 1).store(&path, Existing::Refuse, None).unwrap();
    (directory, path)
}

#[test]
fn every_flipped_bit_of_a_bitmap_is_detected() {
    let (_directory, path) = stored();
    let (subject, parts) = (Subject::new(path.clone()), Parts::of(&path));
    for bit in 0..parts.bitmap_bytes * 8 {
        let found = subject.flip(&path, parts.bitmap * 8 + bit);
        let Effect::DetectedByVerify(text) = &found else { panic!("bit {bit}: {found:?}") };
        assert!(text.contains("block \"b0\": the BLAKE3 of its page bitmap is "), "{text}");
    }
}

/// Manifests of the first versions have no hashes of bitmaps. The delivered content and the page counts are
/// compared nevertheless.
#[test]
fn every_flipped_bit_of_a_bitmap_is_detected_in_an_image_of_the_first_version() {
    let (_directory, path) = stored();
    unseal(&path);
    let (subject, parts) = (Subject::new(path.clone()), Parts::of(&path));
    assert!(!Image::open(&path).unwrap().is_sealed());
    for bit in 0..parts.bitmap_bytes * 8 {
        let found = subject.flip(&path, parts.bitmap * 8 + bit);
        let Effect::DetectedByVerify(text) = &found else { panic!("bit {bit}: {found:?}") };
        assert!(text.contains("block \"b0\": its page bitmap has "), "{text}");
    }
    // One page less and another one more: only the delivered memory differs.
    let _gone = FlippedBit::new(&path, parts.bitmap * 8);
    let _come = FlippedBit::new(&path, parts.bitmap * 8 + 2);
    let error = Image::open(&path).unwrap().verify(1, &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("block \"b0\", chunk 0"), "{error}");
}

#[test]
fn every_flipped_bit_of_header_seal_memory_end_and_device_state_is_detected() {
    let (_directory, path) = stored();
    let (subject, parts) = (Subject::new(path.clone()), Parts::of(&path));
    let seal_end = parts.seal + crate::seal::BYTES as u64;
    for range in [0..parts.head, parts.seal..seal_end, parts.memory_end..parts.end] {
        for bit in range.start * 8..range.end * 8 {
            let found = subject.flip(&path, bit);
            assert_ne!(found, Effect::Harmless, "bit {bit} ({:#x})", bit / 8);
        }
    }
    assert!(parts.device_state > parts.memory_end);
    // The bytes between seal and pages are not read.
    for byte in [seal_end, parts.pages - 1] {
        assert_eq!(subject.flip(&path, byte * 8), Effect::Harmless);
    }
}

#[test]
fn every_flipped_bit_of_a_manifest_is_detected() {
    let (_directory, path) = stored();
    let (subject, manifest) = (Subject::new(path.clone()), sidecar_path(&path));
    for bit in 0..std::fs::metadata(&manifest).unwrap().len() * 8 {
        let found = subject.flip(&manifest, bit);
        assert!(matches!(found, Effect::DetectedByOpen(_)), "bit {bit}: {found:?}");
    }
    // Also while it is staged.
    std::fs::rename(&manifest, staged_path(&path)).unwrap();
    let found = subject.flip(&staged_path(&path), 8 * 100);
    assert!(
        matches!(&found, Effect::DetectedByVerify(text) if text.contains("there is no manifest")),
        "{found:?}"
    );
}

#[test]
fn a_flipped_bit_of_a_page_is_detected_if_the_page_is_delivered() {
    let (_directory, path) = stored();
    let (subject, parts) = (Subject::new(path.clone()), Parts::of(&path));
    for (page, is_delivered) in [(0, true), (1, true), (2, false), (300, true), (511, false), (512, true)] {
        let found = subject.flip(&path, (parts.pages + page * PAGE as u64 + 77) * 8 + 3);
        match &found {
            Effect::DetectedByVerify(text) => {
                let at = format!("chunk {}", page / 512);
                assert!(is_delivered && text.contains(&at), "{text}");
            }
            found => assert!(!is_delivered && *found == Effect::Harmless, "page {page}: {found:?}"),
        }
    }
}

#[test]
fn the_files_of_a_chain_are_verified_where_they_are_read() {
    let (directory, base) = stored();
    let path = directory.path().join("next.img");
    let mut guest = TestGuest::new(11, 1);
    guest.pages[0].2 ^= 0xff;
    guest.store(&path, Existing::Refuse, Some(&base)).unwrap();
    let subject = Subject::new(path.clone());
    let parts = Parts::of(&base);
    // The second chunk is read from the base, the first from the increment.
    let found = subject.flip(&base, (parts.pages + CHUNK_BYTES) * 8);
    assert!(
        matches!(&found, Effect::DetectedByVerify(text) if text.contains("guest.img: block \"b0\", chunk 1")),
        "{found:?}"
    );
    assert_eq!(subject.flip(&base, parts.pages * 8), Effect::Harmless);
    let manifest = sidecar_path(&base);
    for bit in 0..std::fs::metadata(&manifest).unwrap().len() * 8 {
        assert_ne!(subject.flip(&manifest, bit), Effect::Harmless);
    }
}

fn working_set(path: &Path) -> WorkingSet {
    let state = TestGuest::new(11, 1).device_state();
    WorkingSet::load(path, &TestGuest::blocks(), state.bytes())
}

fn working_set_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(".working-set.json");
    path.into()
}

#[test]
fn every_flipped_bit_of_a_working_set_is_detected() {
    let (_directory, path) = stored();
    let mut set = working_set(&path);
    let page = |index: u64| PageRef { block: BlockIndex(0), offset: index * PAGE as u64 };
    set.add(&[page(3), page(4), page(1), page(300)]);
    set.store().unwrap();
    assert_eq!(working_set(&path).runs().len(), 3);
    let file = working_set_path(&path);
    for bit in 0..std::fs::metadata(&file).unwrap().len() * 8 {
        let _flipped = FlippedBit::new(&file, bit);
        let found = working_set(&path);
        assert!(found.runs().is_empty() || found == set, "bit {bit}: {:?}", found.runs());
    }
}

#[test]
fn every_flipped_bit_of_an_index_is_detected() {
    let guest = TestGuest::new(11, 1);
    let state = guest.device_state();
    let names = |length: u64| vec![ChunkHash::Data([7; 32]); length.div_ceil(CHUNK_BYTES) as usize];
    let index = Index::new(IndexContents {
        configuration: &towline_protocol::configuration::Configuration::default(),
        section_id: 2,
        origin: &Origin::default(),
        chunk_bytes: CHUNK_BYTES,
        blocks: &TestGuest::blocks(),
        names: LENGTHS.map(names).to_vec(),
        device_state: state.bytes(),
        device_state_names: vec![ChunkHash::Data([8; 32])],
    });
    let mut bytes = index.encode().unwrap();
    let mut harmless = 0;
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        match Index::parse(&bytes) {
            Ok(found) => {
                assert_eq!(found, index, "bit {bit} is not found");
                harmless += 1;
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    // Some bits of a compressed frame have no meaning.
    assert!(harmless < 16, "{harmless} of {}", bytes.len() * 8);
}

/// Soak test: random bits of the files of a chain, each file and each part equally often.
#[test]
fn bits_at_random() {
    let count =
        std::env::var("TOWLINE_SOAK_FLIPS").ok().and_then(|text| text.parse().ok()).unwrap_or(200_u64);
    let seed = std::env::var("TOWLINE_SOAK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (directory, base) = stored();
    let path = directory.path().join("next.img");
    let mut guest = TestGuest::new(11, 1);
    guest.pages[0].2 ^= 0xff;
    guest.store(&path, Existing::Refuse, Some(&base)).unwrap();
    let subject = Subject::new(path.clone());
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut opening, mut verifying, mut harmless) = (0, 0, 0);
    for _ in 0..count {
        let image = [&path, &base][random.usize(..2)];
        let parts = Parts::of(image);
        let (file, range) = match random.u8(..8) {
            0 => (image.clone(), 0..parts.head),
            1 => (image.clone(), parts.bitmap..parts.seal + crate::seal::BYTES as u64),
            2 => (image.clone(), parts.memory_end..parts.end),
            3 => (image.clone(), 0..parts.end),
            4 | 5 => (image.clone(), parts.pages..parts.memory_end),
            _ => {
                let manifest = sidecar_path(image);
                let length = std::fs::metadata(&manifest).unwrap().len();
                (manifest, 0..length)
            }
        };
        match subject.flip(&file, random.u64(range.start * 8..range.end * 8)) {
            Effect::DetectedByOpen(_) => opening += 1,
            Effect::DetectedByVerify(_) => verifying += 1,
            Effect::Harmless => harmless += 1,
        }
    }
    assert_eq!(subject.delivered, verified(&path).unwrap(), "every bit was flipped back");
    println!(
        "{count} bits (seed {seed}): {opening} found by opening, {verifying} by verifying, {harmless} change nothing that is delivered"
    );
}

#[test]
fn delivered_memory_equals_stored_memory() {
    let (_directory, path) = stored();
    let (image, memory) = (Image::open(&path).unwrap(), TestGuest::new(11, 1).memory());
    for (block, memory) in memory.iter().enumerate() {
        for offset in (0..memory.len()).step_by(PAGE) {
            let page = PageRef { block: BlockIndex(block as u32), offset: offset as u64 };
            assert!(image.immutable(page, PAGE as u64).unwrap() == &memory[offset..][..PAGE], "{page:?}");
        }
    }
}

/// Truncating an image while it is read is an error and raises no signal.
#[test]
fn an_image_truncated_while_it_is_open_is_an_error() {
    for cut in [0, 4096, 1 << 20, (1 << 20) + 4096] {
        let (_directory, path) = stored();
        let image = Image::open(&path).unwrap();
        let copied = Image::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
        let error = image.verify(2, &|_| {}).unwrap_err();
        assert!(matches!(&error, Error::Lost { found, .. } if *found == cut), "{cut}: {error}");
        // Also without --verify: the device state, which a destination receives last, is refused.
        for (index, block) in copied.ram_blocks().iter().enumerate() {
            let page = PageRef { block: BlockIndex(index as u32), offset: 0 };
            assert!(!copied.immutable(page, block.length).unwrap().is_empty());
        }
        let error = Guest::device_state(&copied).unwrap_err().to_string();
        assert!(error.contains("it was truncated while it was in use"), "{error}");
    }
}

//! Chains compared with a model: every image reads as the guest was when it was stored.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use towline_image::checksum::CHUNK_BYTES;
use towline_image::{Error, Existing, Image, ImageWriter, LAYERS_MAX, Origin};
use towline_migration::{ChannelId, ExtentKind, Guest, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

const PAGE: usize = PAGE_SIZE as usize;
/// A block of three chunks and a short one, and a block of one page.
const LENGTHS: [u64; 2] = [3 * CHUNK_BYTES + 5 * PAGE_SIZE, PAGE_SIZE];

/// One device section, EOF and the description.
fn device_state() -> DeviceState {
    let device = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x02\x01\x02\x7e\0\0\0\x03";
    let devices =
        json!([{ "name": "timer", "instance_id": 0, "vmsd_name": "timer", "version": 2, "fields": [] }]);
    let description = json!({ "page_size": PAGE_SIZE, "devices": devices }).to_string();
    let length = u32::try_from(description.len()).unwrap().to_be_bytes();
    DeviceState::parse(&[&device[..], &[0, 6], &length, description.as_bytes()].concat()).unwrap()
}

fn blocks() -> Vec<RamBlock> {
    let block = |(index, length): (usize, &u64)| RamBlock {
        name: format!("b{index}"),
        length: *length,
        mapped: None,
    };
    LENGTHS.iter().enumerate().map(block).collect()
}

/// The memory of a guest, by block.
#[derive(Clone)]
struct Model(Vec<Vec<u8>>);

impl Model {
    fn new() -> Self {
        Self(LENGTHS.iter().map(|&length| vec![0; length as usize]).collect())
    }

    fn write(&mut self, random: &mut fastrand::Rng, pages: usize) {
        for _ in 0..pages {
            let at = PAGE * random.usize(..LENGTHS[0] as usize / PAGE);
            let fill = if random.u8(..4) == 0 { 0 } else { random.u8(..) };
            self.0[0][at..at + PAGE].fill(fill);
        }
    }

    /// Number of chunks that differ from the other's and are not zero.
    fn changed(&self, other: &Self) -> usize {
        let chunks = |model: &Self| -> Vec<Vec<u8>> {
            model.0.iter().flat_map(|block| block.chunks(CHUNK_BYTES as usize).map(<[u8]>::to_vec)).collect()
        };
        let differs = |(one, other): &(Vec<u8>, Vec<u8>)| one != other && one.iter().any(|byte| *byte != 0);
        chunks(self).into_iter().zip(chunks(other)).filter(differs).count()
    }

    /// Stores the guest, with pages in any order and some of them twice.
    fn store(
        &self,
        path: &Path,
        base: Option<&Path>,
        random: &mut fastrand::Rng,
    ) -> Result<ImageWriter, Error> {
        let writer = ImageWriter::create(path, Existing::Refuse, Origin::default())?;
        let writer = match base {
            Some(base) => writer.based_on(base)?,
            None => writer,
        };
        writer
            .configuration(&Configuration { machine_type: "pc-q35-10.0".into(), ..Default::default() })
            .unwrap();
        writer.section_start(RamSection { kind: SectionKind::Start, id: 2 }).unwrap();
        writer.blocks(&blocks()).unwrap();
        for (index, memory) in self.0.iter().enumerate() {
            let block = BlockIndex(u32::try_from(index).unwrap());
            let mut order: Vec<usize> = (0..memory.len() / PAGE).collect();
            random.shuffle(&mut order);
            let again: Vec<usize> = order.iter().copied().filter(|_| random.u8(..8) == 0).collect();
            for (times, page) in
                order.into_iter().map(|page| (0, page)).chain(again.into_iter().map(|page| (1, page)))
            {
                let (content, offset) = (&memory[page * PAGE..][..PAGE], (page * PAGE) as u64);
                // A page that arrives twice may have other content first.
                let early = [0xee; PAGE];
                let content = if times == 0 && random.u8(..8) == 0 { &early[..] } else { content };
                put(&writer, block, offset, content);
            }
            for (page, content) in memory.chunks(PAGE).enumerate() {
                put(&writer, block, (page * PAGE) as u64, content);
            }
        }
        writer.device_state(device_state()).unwrap();
        writer.commit().unwrap();
        writer.publish().unwrap();
        Ok(writer)
    }

    /// Checks the image chunk by chunk and page by page.
    fn assert_is(&self, path: &Path) {
        let image = Image::open(path).unwrap().verify_on_read().unwrap();
        let bytes = AtomicUsize::new(0);
        let count = |length| {
            bytes.fetch_add(length as usize, Ordering::Relaxed);
        };
        image.verify(2, &count).unwrap();
        assert_eq!(bytes.into_inner() as u64, LENGTHS.iter().sum::<u64>());
        for (index, memory) in self.0.iter().enumerate() {
            let block = BlockIndex(u32::try_from(index).unwrap());
            for at in (0..memory.len()).step_by(CHUNK_BYTES as usize) {
                let length = memory.len().min(at + CHUNK_BYTES as usize) - at;
                let page = PageRef { block, offset: at as u64 };
                image.prepare(page, length as u64).unwrap();
                let found = image.immutable(page, length as u64).unwrap();
                assert!(
                    found == &memory[at..at + length],
                    "block {index}, byte {at:#x} of {}",
                    path.display()
                );
            }
            for (page, content) in memory.chunks(PAGE).enumerate() {
                let page = PageRef { block, offset: (page * PAGE) as u64 };
                let is_zero = image.extent(page).kind == ExtentKind::Zero;
                assert!(!is_zero || content.iter().all(|byte| *byte == 0), "{page:?}");
            }
        }
    }
}

fn put(writer: &ImageWriter, block: BlockIndex, offset: u64, content: &[u8]) {
    if content.iter().all(|byte| *byte == 0) {
        writer.zero(ChannelId::Main, block, &[offset]).unwrap();
    } else {
        let pages = Pages { block, offsets: &[offset], contents: &[content] };
        writer.pages(ChannelId::Main, &pages).unwrap();
    }
}

#[test]
fn every_image_of_a_chain_reads_as_the_guest_was() {
    for seed in 0..3 {
        let directory = tempfile::tempdir().unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut models = vec![Model::new()];
        models[0].write(&mut random, 600);
        let path = |link: usize| directory.path().join(format!("{link}.img"));
        models[0].store(&path(0), None, &mut random).unwrap();
        for link in 1..5 {
            let mut model = models[link - 1].clone();
            // Sometimes without any change.
            let pages = random.usize(..4);
            model.write(&mut random, pages);
            let writer = model.store(&path(link), Some(&path(link - 1)), &mut random).unwrap();
            let increment = writer.increment().unwrap();
            assert_eq!(increment.stored, model.changed(&models[link - 1]), "seed {seed}, link {link}");
            let held = std::fs::metadata(path(link)).unwrap().blocks() * 512;
            assert!(
                held <= increment.stored as u64 * CHUNK_BYTES + (256 << 10),
                "{held} bytes for {increment:?}"
            );
            models.push(model);
        }
        for (link, model) in models.iter().enumerate() {
            model.assert_is(&path(link));
        }
        let image = Image::open(&path(4)).unwrap();
        let read: usize = image.layers().map(|layer| layer.chunks).sum();
        assert_eq!(read, models[4].changed(&Model::new()), "each chunk is read from one file");
    }
}

#[test]
fn a_base_is_identified_by_its_content() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let path = |name: &str| directory.path().join(name);
    let mut model = Model::new();
    model.write(&mut random, 50);
    model.store(&path("base"), None, &mut random).unwrap();
    model.store(&path("next"), Some(&path("base")), &mut random).unwrap();
    let base = |error: Result<Image, Error>| error.err().unwrap();
    // An image with the same content is the same base.
    std::fs::rename(path("base"), path("first")).unwrap();
    model.store(&path("base"), None, &mut random).unwrap();
    model.assert_is(&path("next"));
    std::fs::remove_file(path("base")).unwrap();
    let missing = base(Image::open(&path("next")));
    assert!(matches!(&missing, Error::BaseUnusable { base, .. } if *base == path("base")), "{missing}");
    model.0[1].fill(7);
    model.store(&path("base"), None, &mut random).unwrap();
    let other = base(Image::open(&path("next")));
    assert!(matches!(&other, Error::OtherBase { base, .. } if *base == path("base")), "{other}");
    // A smaller block is another guest.
    let writer = ImageWriter::create(&path("small"), Existing::Refuse, Origin::default()).unwrap();
    let writer = writer.based_on(&path("base")).unwrap();
    writer.configuration(&Configuration::default()).unwrap();
    writer.section_start(RamSection { kind: SectionKind::Start, id: 2 }).unwrap();
    let mut blocks = blocks();
    blocks[0].length -= PAGE_SIZE;
    let error = writer.blocks(&blocks).unwrap_err().to_string();
    assert!(error.contains("another guest, or another memory size"), "{error}");
}

#[test]
fn the_length_of_a_chain_is_limited() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = fastrand::Rng::with_seed(2);
    let path = |link: usize| directory.path().join(format!("{link}.img"));
    let model = Model::new();
    model.store(&path(0), None, &mut random).unwrap();
    for link in 1..LAYERS_MAX {
        model.store(&path(link), Some(&path(link - 1)), &mut random).unwrap();
    }
    model.assert_is(&path(LAYERS_MAX - 1));
    let error = model.store(&path(99), Some(&path(LAYERS_MAX - 1)), &mut random).err().unwrap();
    assert!(matches!(error, Error::ChainTooLong { limit: LAYERS_MAX, .. }), "{error}");
    assert!(!path(99).exists());
    let own = ImageWriter::create(&path(1), Existing::Replace, Origin::default()).unwrap();
    let error = own.based_on(&path(3)).err().unwrap();
    assert!(matches!(&error, Error::OwnBase { base, .. } if *base == path(1)), "{error}");
    let below: Vec<_> = (0..3).rev().map(path).collect();
    assert_eq!(towline_image::base_paths(&path(3)), below, "bases named in its manifests");
    assert!(towline_image::base_paths(&path(0)).is_empty());
}

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::{Barrier, Mutex};
use std::time::Duration;

use towline_channel::{Cancel, gather};
use towline_migration::{ChannelId, ExtentKind, Guest, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::{self, DeviceState};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

use super::{
    CACHE_BYTES, CHUNK_BYTES, Catalog, Error, Garbage, IfInUse, Location, StoreWriter, StoredImage,
    UnopenedImage, VerifiedChunks, readers, remove_image,
};
use crate::index::{INDEX_BYTES_MAX, Index, IndexContents};
use crate::{Existing, Origin, StoredGuest as _};

const PAGE: usize = PAGE_SIZE as usize;

fn blocks(lengths: &[u64]) -> Vec<RamBlock> {
    let block = |(index, &length)| RamBlock { name: format!("block{index}"), length, mapped: None };
    lengths.iter().enumerate().map(block).collect()
}

fn location(directory: &tempfile::TempDir) -> Location {
    format!("store:{}/vm/a", directory.path().display()).parse().unwrap()
}

/// Stores this memory.
fn store(location: &Location, memory: &[Vec<u8>], random: &mut fastrand::Rng) {
    let writer = write(location, Existing::Refuse, memory, random);
    writer.commit().unwrap();
    writer.publish().unwrap();
}

/// Writes this memory page by page in random order, some pages with other content first.
fn write(
    location: &Location,
    existing: Existing,
    memory: &[Vec<u8>],
    random: &mut fastrand::Rng,
) -> StoreWriter {
    let writer = StoreWriter::create(location, existing, Origin::default(), &Cancel::new().unwrap()).unwrap();
    let lengths: Vec<u64> = memory.iter().map(|block| block.len() as u64).collect();
    let machine_type = "pc-q35-10.0".to_owned();
    writer.configuration(&Configuration { machine_type, ..Configuration::default() }).unwrap();
    writer.section_start(RamSection { id: 2, kind: SectionKind::Start }).unwrap();
    writer.blocks(&blocks(&lengths)).unwrap();
    let mut pages: Vec<(usize, usize)> = Vec::new();
    for (block, memory) in memory.iter().enumerate() {
        pages.extend((0..memory.len() / PAGE).map(|page| (block, page)));
    }
    let put = |block: usize, page: usize, bytes: &[u8]| {
        let (block, offsets) = (BlockIndex(block as u32), [(page * PAGE) as u64]);
        if bytes.iter().all(|&byte| byte == 0) {
            writer.zero(ChannelId::Main, block, &offsets).unwrap();
        } else {
            let pages = Pages { block, offsets: &offsets, contents: &[bytes] };
            writer.pages(ChannelId::Main, &pages).unwrap();
        }
    };
    for &(block, page) in pages.iter().filter(|_| random.bool()) {
        put(block, page, &[7; PAGE]);
    }
    random.shuffle(&mut pages);
    for (block, page) in pages {
        put(block, page, &memory[block][page * PAGE..][..PAGE]);
    }
    let state = device_state::encode(&[("device", 1, &[1, 2, 3])]);
    writer.device_state(DeviceState::parse(&state).unwrap()).unwrap();
    writer
}

fn memory(lengths: &[usize], random: &mut fastrand::Rng) -> Vec<Vec<u8>> {
    let mut of_length = |&length: &usize| {
        let mut bytes = vec![0; length];
        for page in bytes.chunks_exact_mut(PAGE) {
            if random.u8(..) < 180 {
                random.fill(page);
            }
        }
        // Also whole chunks of zeros.
        bytes.iter_mut().skip(CHUNK_BYTES as usize).take(CHUNK_BYTES as usize).for_each(|byte| *byte = 0);
        bytes
    };
    lengths.iter().map(&mut of_length).collect()
}

#[test]
fn pages_stored_in_any_order_are_read_in_any_order() {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let mut random = fastrand::Rng::with_seed(5);
    let chunk = CHUNK_BYTES as usize;
    let memory = memory(&[5 * chunk + PAGE, PAGE, 40 * chunk], &mut random);
    store(&location, &memory, &mut random);
    let image = StoredImage::open(&location, None).unwrap();
    assert_eq!(image.device_state().unwrap(), device_state::encode(&[("device", 1, &[1, 2, 3])]));
    image.verify(&|_| {}).unwrap();
    let units: Mutex<Vec<(u32, u64)>> = Mutex::default();
    for (block, held) in image.blocks().iter().enumerate() {
        let offsets = (0..held.length).step_by(2 << 20);
        units.lock().unwrap().extend(offsets.map(|offset| (block as u32, offset)));
    }
    random.shuffle(&mut units.lock().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let Some((block, offset)) = units.lock().unwrap().pop() else { return };
                    let expected = &memory[block as usize];
                    let length = (expected.len() as u64 - offset).min(2 << 20);
                    read(&image, PageRef { block: BlockIndex(block), offset }, length, expected);
                }
            });
        }
    });
}

/// Reads and checks pages as a lane does.
fn read(image: &StoredImage, page: PageRef, length: u64, expected: &[u8]) {
    image.prepare(page, length).unwrap();
    let mut bytes = vec![1; length as usize];
    assert_eq!(gather(&[image.memory(page, length)], &mut bytes), bytes.len());
    assert!(bytes == expected[page.offset as usize..][..bytes.len()], "{page:?}");
    let mut at = page.offset;
    while at < page.offset + length {
        let here = PageRef { offset: at, ..page };
        let extent = image.extent(here);
        assert!(extent.pages > 0 && at + extent.pages * PAGE_SIZE <= expected.len() as u64);
        let is_zero = expected[at as usize..][..PAGE].iter().all(|&byte| byte == 0);
        match extent.kind {
            ExtentKind::Zero => assert!(is_zero),
            ExtentKind::Unknown => assert_eq!(image.is_zero(here), is_zero),
            ExtentKind::Data => panic!("a store has no page bitmap"),
        }
        at += PAGE_SIZE;
    }
}

#[test]
fn memory_beyond_the_cache_is_evicted_and_fetched_again() {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let length = CACHE_BYTES as usize + 64 * CHUNK_BYTES as usize;
    let mut memory = vec![vec![0; length]];
    for (index, page) in memory[0].chunks_exact_mut(PAGE).enumerate() {
        page[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
    }
    let mut random = fastrand::Rng::with_seed(6);
    store(&location, &memory, &mut random);
    let image = StoredImage::open(&location, None).unwrap();
    for offset in (0..length as u64).step_by(2 << 20).chain([0, 2 << 20]) {
        read(&image, PageRef { block: BlockIndex(0), offset }, 2 << 20, &memory[0]);
    }
}

/// Memory without pages of zeros.
fn filled(lengths: &[usize], random: &mut fastrand::Rng) -> Vec<Vec<u8>> {
    let mut of_length = |&length: &usize| {
        let mut bytes = vec![0; length];
        random.fill(&mut bytes);
        bytes
    };
    lengths.iter().map(&mut of_length).collect()
}

/// A store in a directory with an image of one page.
fn stored_page(seed: u64) -> (tempfile::TempDir, Location, fastrand::Rng) {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let mut random = fastrand::Rng::with_seed(seed);
    store(&location, &filled(&[PAGE], &mut random), &mut random);
    (directory, location, random)
}

/// Paths of all objects of a store in a directory.
fn objects(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { &mut left } else { &mut found }.push(path);
        }
    }
    found.sort();
    found
}

/// All that the image delivers (header, blocks, memory and device state), or the error.
fn delivered(location: &Location) -> Result<Vec<Vec<u8>>, Error> {
    let image = StoredImage::open(location, None)?;
    image.verify(&|_| {})?;
    let mut parts =
        vec![image.configuration().machine_type.clone().into_bytes(), image.device_state().unwrap()];
    parts.push(vec![image.ram_section_id() as u8]);
    for (number, block) in image.blocks().iter().enumerate() {
        let page = PageRef { block: BlockIndex(number as u32), offset: 0 };
        image.prepare_chunks(page, block.length)?;
        let mut bytes = vec![0; block.length as usize];
        gather(&[image.memory(page, block.length)], &mut bytes);
        parts.extend([block.name.clone().into_bytes(), bytes]);
    }
    Ok(parts)
}

/// Maximum number of flipped bits per object, spread over it.
const FLIPS_MAX: usize = 100;

#[test]
fn a_flipped_bit_of_any_object_is_found_or_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let mut random = fastrand::Rng::with_seed(8);
    let chunk = CHUNK_BYTES as usize;
    store(&location, &filled(&[PAGE, chunk + PAGE], &mut random), &mut random);
    // Remove chunks that changed after they were sent.
    Garbage::remove(&location.parent(), Duration::ZERO, None, &mut |_| {}).unwrap();
    let expected = delivered(&location).unwrap();
    let objects = objects(directory.path());
    // The index, the chunks of two blocks and that of the device state.
    assert_eq!(objects.len(), 5, "{objects:?}");
    for object in objects {
        let whole = std::fs::read(&object).unwrap();
        let (bits, mut found) = (8 * whole.len(), 0);
        let step = bits.div_ceil(FLIPS_MAX).max(1);
        for bit in (0..bits).step_by(step) {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&object, bytes).unwrap();
            match delivered(&location) {
                // Some bits of zstd's frame have no meaning.
                Ok(parts) => assert!(parts == expected, "bit {bit} of {}", object.display()),
                Err(Error::Index { .. } | Error::Damaged { .. } | Error::DeviceState { .. }) => found += 1,
                Err(error) => panic!("bit {bit} of {}: {error}", object.display()),
            }
        }
        assert!(found * 100 >= bits.div_ceil(step) * 90, "{}: only {found} found", object.display());
        // Truncated, and with an additional byte.
        for bytes in [&whole[..whole.len() - 1], b"".as_slice(), &[&whole[..], b"x"].concat()] {
            std::fs::write(&object, bytes).unwrap();
            let error = delivered(&location).unwrap_err();
            let is_named = matches!(error, Error::Index { .. } | Error::Damaged { .. });
            assert!(is_named, "{} with {} bytes: {error}", object.display(), bytes.len());
        }
        std::fs::write(&object, &whole).unwrap();
    }
    assert!(delivered(&location).unwrap() == expected);
}

#[test]
fn an_upload_that_ends_leaves_the_file_of_a_newer_one_of_the_same_image() {
    let directory = tempfile::tempdir().unwrap();
    let (location, mut random) = (location(&directory), fastrand::Rng::with_seed(16));
    let mut write_page = || {
        let writer = write(&location, Existing::Replace, &filled(&[PAGE], &mut random), &mut random);
        writer.defer_upload();
        writer.commit().unwrap();
        writer
    };
    let first = write_page();
    let [first_uploads, second_uploads, first_ended] = [(); 3].map(|()| Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let while_uploading = |_| {
                first_uploads.wait();
                second_uploads.wait();
            };
            first.publish_with(&while_uploading).unwrap();
            first_ended.wait();
        });
        first_uploads.wait();
        let second = write_page();
        let while_uploading = |_| {
            second_uploads.wait();
            first_ended.wait();
            assert!(second.kept_file().unwrap().exists());
        };
        second.publish_with(&while_uploading).unwrap();
    });
}

#[test]
fn a_second_collection_is_refused_and_names_the_first() {
    let (directory, location, _) = stored_page(9);
    std::fs::remove_file(directory.path().join("vm/a.towline")).unwrap();
    let prefix = location.parent();
    let mut others = Vec::new();
    let removed = Garbage::remove(&prefix, Duration::ZERO, None, &mut |_| {
        // During the first collection.
        others.push(Garbage::remove(&prefix, Duration::ZERO, None, &mut |_| {}).unwrap_err().to_string());
        others.push(
            StoreWriter::create(&location, Existing::Refuse, Origin::default(), &Cancel::new().unwrap())
                .unwrap_err()
                .to_string(),
        );
    });
    assert_eq!(removed.unwrap().objects.len(), others.len() / 2);
    let owner = format!("garbage is being removed there by process {} of host", std::process::id());
    assert!(others.len() >= 4 && others.iter().all(|error| error.contains(&owner)), "{others:?}");
    assert!(objects(directory.path()).is_empty());
}

#[test]
fn an_image_that_is_read_is_removed_only_if_its_chunks_may_stay() {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let mut random = fastrand::Rng::with_seed(10);
    let memory = filled(&[40 * PAGE], &mut random);
    store(&location, &memory, &mut random);
    Garbage::remove(&location.parent(), Duration::ZERO, None, &mut |_| {}).unwrap();
    let reader = StoredImage::open(&location, None).unwrap();
    assert_eq!(reader.notice(), None);
    let found = readers(&location, None).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    let error = remove_image(&location, IfInUse::Refuse, None).unwrap_err();
    assert!(error.to_string().contains(&found[0].description), "{error}");
    assert_eq!(remove_image(&location, IfInUse::KeepChunks, None).unwrap(), found);
    let prefix = location.parent();
    let collected = Garbage::remove(&prefix, Duration::ZERO, None, &mut |_| {}).unwrap();
    assert_eq!(
        (collected.kept.chunks, collected.kept_for.len(), collected.objects.len()),
        (2, 1, 0),
        "{collected:?}"
    );
    read(&reader, PageRef { block: BlockIndex(0), offset: 0 }, 40 * PAGE_SIZE, &memory[0]);
    // Removed by another program, without a copy of the index: all chunks are kept while it is read.
    std::fs::remove_dir_all(directory.path().join("vm/retired")).unwrap();
    let collected = Garbage::remove(&prefix, Duration::ZERO, None, &mut |_| {}).unwrap();
    assert_eq!((collected.kept.chunks, collected.objects.len()), (2, 0), "{collected:?}");
    drop(reader);
    Garbage::remove(&prefix, Duration::ZERO, None, &mut |_| {}).unwrap();
    assert!(objects(directory.path()).is_empty());
    assert!(matches!(remove_image(&location, IfInUse::KeepChunks, None), Err(Error::NoImage { .. })));
}

#[test]
fn an_image_that_is_replaced_after_its_index_was_read_is_not_opened() {
    let (directory, location, mut random) = stored_page(12);
    let (unopened, same) =
        (UnopenedImage::read(&location, None).unwrap(), UnopenedImage::read(&location, None).unwrap());
    assert_eq!(*same.open().unwrap().index(), unopened.index);
    std::fs::remove_file(directory.path().join("vm/a.towline")).unwrap();
    let memory = filled(&[PAGE], &mut random);
    store(&location, &memory, &mut random);
    assert!(matches!(unopened.open(), Err(Error::Changed { .. })));
    // Its lease is gone, and the image that has the name now can be read.
    assert_eq!(readers(&location, None).unwrap(), []);
    let image = StoredImage::open(&location, None).unwrap();
    read(&image, PageRef { block: BlockIndex(0), offset: 0 }, PAGE_SIZE, &memory[0]);
}

#[test]
fn an_object_that_is_too_long_is_an_error_of_its_own() {
    let (directory, location, _) = stored_page(15);
    let vm = directory.path().join("vm");
    // Without allocating its blocks.
    std::fs::File::create(vm.join("0.towline")).unwrap().set_len(INDEX_BYTES_MAX + 1).unwrap();
    let lease = vm.join(format!("readers/{}", "5".repeat(32)));
    std::fs::create_dir_all(vm.join("readers")).unwrap();
    std::fs::write(lease, [b' '; 5000]).unwrap();
    let reader = StoredImage::open(&location, None).unwrap();
    let catalog = Catalog::read(&location.parent(), None).unwrap();
    assert_eq!(catalog.images.len(), 2, "{catalog:?}");
    let error = catalog.images[0].summary.as_ref().unwrap_err();
    assert!(error.contains("vm/0.towline: it has more than"), "{error}");
    assert_eq!(catalog.images[1].summary.as_ref().unwrap().missing, 0);
    assert_eq!((catalog.images[0].readers.len(), catalog.images[1].readers.len()), (0, 1));
    assert_eq!(readers(&location, None).unwrap().len(), 1);
    // Its chunks are unknown.
    Garbage::find(&location.parent(), Duration::ZERO, None).unwrap_err();
    drop(reader);
}

#[test]
fn a_chunk_that_another_image_was_verified_with_has_to_have_the_length_of_this_one() {
    let (directory, location, _) = stored_page(14);
    let whole = StoredImage::open(&location, None).unwrap();
    // An index whose block has the same chunk, and another length.
    let blocks = blocks(&[2 * PAGE_SIZE]);
    let name = whole.index().chunk_names(BlockIndex(0)).to_vec();
    let index = Index::new(IndexContents {
        configuration: whole.configuration(),
        section_id: 2,
        origin: &whole.index().origin,
        chunk_bytes: CHUNK_BYTES,
        blocks: &blocks,
        names: vec![name],
        device_state: whole.devices().bytes(),
        device_state_names: whole.index().device_state_names().to_vec(),
    });
    let other = location.parent().image("b").unwrap();
    std::fs::write(directory.path().join("vm/b.towline"), index.encode().unwrap()).unwrap();
    let known = VerifiedChunks::default();
    whole.verify_unknown(&known, &|_| {}).unwrap();
    let error = StoredImage::open(&other, None).unwrap().verify_unknown(&known, &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

/// Modification time of an object two hours ago.
fn age(object: &std::path::Path) {
    let old = std::time::SystemTime::now() - Duration::from_secs(7200);
    std::fs::File::options().write(true).open(object).unwrap().set_modified(old).unwrap();
}

#[test]
fn a_collection_keeps_every_object_that_is_not_of_towline() {
    let (directory, location, _) = stored_page(12);
    let prefix = directory.path().join("vm");
    let (hash, id) = ("5".repeat(64), "5".repeat(32));
    let mut foreign = Vec::new();
    for name in ["notes", &hash[1..], &format!("{hash}.txt"), &format!("x/{hash}"), &"A".repeat(64)] {
        foreign.push(format!("retired/{name}"));
    }
    for kind in ["uploads", "readers", "collections"] {
        for name in ["0", "report.pdf", &hash, &format!("+{}", &id[1..]), &format!("2026/{id}")] {
            foreign.push(format!("{kind}/{name}"));
        }
    }
    // Another prefix, whose name is that of a directory of this one.
    foreign.push("readers/b.towline".to_owned());
    foreign.push(format!("readers/chunks/55/{hash}.zst"));
    foreign.push(format!("readers/readers/{id}"));
    let stale = [format!("retired/{hash}"), format!("uploads/{id}"), format!("readers/{id}")];
    for key in foreign.iter().chain(&stale) {
        let object = prefix.join(key);
        std::fs::create_dir_all(object.parent().unwrap()).unwrap();
        std::fs::write(&object, key).unwrap();
        age(&object);
    }
    let removed = Garbage::remove(&location.parent(), Duration::ZERO, None, &mut |_| {}).unwrap();
    let mut keys: Vec<_> = removed.objects.into_iter().map(|object| object.key).collect();
    keys.sort();
    let mut expected = stale.to_vec();
    expected.sort();
    assert_eq!(keys, expected);
    for key in &foreign {
        assert_eq!(&std::fs::read_to_string(prefix.join(key)).unwrap(), key);
    }
    assert_eq!(readers(&location, None).unwrap(), []);
    remove_image(&location, IfInUse::Refuse, None).unwrap();
}

#[test]
fn chunks_of_an_index_with_any_name_are_kept() {
    let (directory, location, _) = stored_page(13);
    for name in ["a~1", "a#b", "50%", "50%25", "é", "a b", "a*?"] {
        let index = directory.path().join(format!("vm/{name}.towline"));
        std::fs::rename(directory.path().join("vm/a.towline"), &index).unwrap();
        let found = Garbage::remove(&location.parent(), Duration::ZERO, None, &mut |_| {}).unwrap();
        assert_eq!((found.images, found.used.chunks, found.objects.len()), (1, 2, 0), "{name}: {found:?}");
        let catalog = Catalog::read(&location.parent(), None).unwrap();
        assert_eq!((catalog.images.len(), catalog.used.chunks), (1, 2), "{name}: {catalog:?}");
        assert_eq!(catalog.images[0].name, name);
        assert_eq!(catalog.images[0].summary.as_ref().unwrap().missing, 0);
        std::fs::rename(&index, directory.path().join("vm/a.towline")).unwrap();
    }
}

#[test]
fn a_catalog_counts_own_chunks_and_live_readers() {
    let directory = tempfile::tempdir().unwrap();
    let location = location(&directory);
    let prefix = location.parent();
    let mut random = fastrand::Rng::with_seed(11);
    let chunk = CHUNK_BYTES as usize;
    let mut memory = filled(&[chunk, chunk], &mut random);
    store(&location, &memory, &mut random);
    memory[1] = filled(&[chunk], &mut random).remove(0);
    store(&prefix.image("b").unwrap(), &memory, &mut random);
    let reader = StoredImage::open(&location, None).unwrap();
    let catalog = Catalog::read(&prefix, None).unwrap();
    let names: Vec<_> = catalog.images.iter().map(|image| image.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    for image in &catalog.images {
        let summary = image.summary.as_ref().unwrap();
        // Two blocks and the device state.
        assert_eq!((summary.chunks.chunks, summary.own.chunks, summary.missing), (3, 1, 0), "{image:?}");
        assert!(summary.index_bytes > 0 && summary.own.bytes > CHUNK_BYTES / 2, "{image:?}");
    }
    assert_eq!(catalog.used.chunks, 4);
    let numbers: Vec<_> = catalog.images.iter().map(|image| image.readers.len()).collect();
    assert_eq!(numbers, [1, 0]);

    // A reader that was killed two hours ago.
    let leases = objects(&directory.path().join("vm/readers"));
    age(&leases[0]);
    let catalog = Catalog::read(&prefix, None).unwrap();
    assert!(catalog.images.iter().all(|image| image.readers.is_empty()), "{catalog:?}");
    let error = remove_image(&location, IfInUse::Refuse, None).unwrap_err();
    assert!(error.to_string().contains("until `towline store gc` removes its lease"), "{error}");
    Garbage::remove(&prefix, Duration::MAX, None, &mut |_| {}).unwrap();
    assert_eq!(remove_image(&location, IfInUse::Refuse, None).unwrap(), []);
    drop(reader);
}

//! Cost of reading an image: `cargo run --release -p towline-image --example reads [MIB]`.
//!
//! - Comparison with the manifest as delivered, against hashing the file's bytes, as earlier versions did.
//! - Mapping against `pread` into a buffer: hashed, and sent over a socket.
//!
//! Both sides alternate, in one process, on an image in the page cache. Printed for each pair: the median of
//! the ratios of neighbouring rounds, and their spread.

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use towline_image::checksum::{CHUNK_BYTES, hash_chunk};
use towline_image::{ChunkHash, Existing, Image, ImageWriter, Origin};
use towline_migration::{ChannelId, ExtentKind, Guest, Pages, Sink};
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::{DeviceState, encode};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 11;
const BLOCK: BlockIndex = BlockIndex(0);

/// Returns true if the page of this number has content.
type Shape = fn(u64) -> bool;

const SHAPES: [(&str, Shape); 4] = [
    ("every page has content", |_| true),
    ("every second page", |page| page % 2 == 0),
    ("runs of 3 and 5", |page| page % 8 < 3),
    ("one page of each 2 MiB", |page| page % 512 == 100),
];

fn main() -> Result<()> {
    let mib = std::env::args().nth(1).map_or(Ok(512), |text| text.parse::<u64>())?;
    let directory = tempfile::tempdir()?;
    for (name, shape) in SHAPES {
        let path = directory.path().join("image");
        store(&path, mib << 20, shape)?;
        println!("{name}, {mib} MiB:");
        pair("  verified / hashes of the file", &|| verified(&path), &|| by_file(&path))?;
        pair("  pread / mapped, hashed", &|| hashed_by_pread(&path), &|| by_file(&path))?;
        pair("  pread / mapped, sent", &|| sent(&path, Method::Pread), &|| sent(&path, Method::Mapped))?;
        std::fs::remove_file(&path)?;
        std::fs::remove_file(directory.path().join("image.manifest.json"))?;
    }
    Ok(())
}

/// Prints the ratio of `first` to `second`.
fn pair(name: &str, first: &dyn Fn() -> Result<()>, second: &dyn Fn() -> Result<()>) -> Result<()> {
    let timed = |run: &dyn Fn() -> Result<()>| -> Result<Duration> {
        let begun = Instant::now();
        run()?;
        Ok(begun.elapsed())
    };
    first()?;
    second()?;
    let mut ratios = Vec::new();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let (one, other) = (timed(first)?, timed(second)?);
        ratios.push(one.as_secs_f64() / other.as_secs_f64());
        times[0].push(one);
        times[1].push(other);
    }
    ratios.sort_by(f64::total_cmp);
    times.iter_mut().for_each(|times| times.sort());
    println!(
        "{name:<34} {:.2} ({:.2} to {:.2}); medians {:?} and {:?}",
        ratios[ROUNDS / 2],
        ratios[0],
        ratios[ROUNDS - 1],
        times[0][ROUNDS / 2],
        times[1][ROUNDS / 2]
    );
    Ok(())
}

fn store(path: &Path, length: u64, shape: Shape) -> Result<()> {
    let writer = ImageWriter::create(path, Existing::Refuse, Origin::default())?;
    writer.configuration(&Configuration { machine_type: "none".into(), ..Default::default() })?;
    writer.section_start(RamSection { kind: SectionKind::Start, id: 2 })?;
    writer.blocks(&[RamBlock { name: "ram".into(), length, mapped: None }])?;
    let mut page = vec![0; PAGE_SIZE as usize];
    for number in (0..length / PAGE_SIZE).filter(|number| shape(*number)) {
        page.chunks_mut(8).enumerate().for_each(|(at, word)| {
            word.copy_from_slice(
                &(number * 512 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes(),
            );
        });
        let pages = Pages { block: BLOCK, offsets: &[number * PAGE_SIZE], contents: &[&page] };
        writer.pages(ChannelId::Main, &pages)?;
    }
    writer.device_state(DeviceState::parse(&encode(&[("none", 1, b"state")]))?)?;
    writer.commit()?;
    writer.publish()?;
    // Read it into the page cache.
    std::fs::read(path)?;
    Ok(())
}

fn verified(path: &Path) -> Result<()> {
    Ok(Image::open(path)?.verify(1, &|_| {})?)
}

/// Calls `each` for each chunk with content.
fn chunks(image: &Image, mut each: impl FnMut(PageRef, u64) -> Result<()>) -> Result<()> {
    let length = image.blocks()[0].length;
    for offset in (0..length).step_by(CHUNK_BYTES as usize) {
        let (page, chunk) = (PageRef { block: BLOCK, offset }, CHUNK_BYTES.min(length - offset));
        let extent = image.extent(page);
        if extent.kind == ExtentKind::Data || extent.pages * PAGE_SIZE < chunk {
            each(page, chunk)?;
        }
    }
    Ok(())
}

fn check(image: &Image, page: PageRef, found: ChunkHash) -> Result<()> {
    let manifest = image.manifest().ok_or("it has a manifest")?;
    if found == manifest.chunk_hash(BLOCK, (page.offset / CHUNK_BYTES) as usize) {
        Ok(())
    } else {
        Err("another hash".into())
    }
}

/// The comparison of earlier versions: of the file's bytes.
fn by_file(path: &Path) -> Result<()> {
    let image = Image::open(path)?;
    chunks(&image, |page, length| {
        check(&image, page, hash_chunk(image.immutable(page, length).ok_or("an image does not change")?))
    })
}

fn hashed_by_pread(path: &Path) -> Result<()> {
    let image = Image::open(path)?;
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    chunks(&image, |page, length| {
        read(&image, page, &mut buffer[..length as usize])?;
        check(&image, page, hash_chunk(&buffer[..length as usize]))
    })
}

fn read(image: &Image, page: PageRef, buffer: &mut [u8]) -> Result<()> {
    let start = image.blocks()[0].mapped.ok_or("it has a place")?.pages_offset;
    Ok(image.file().read_exact_at(buffer, start + page.offset)?)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Pread,
    Mapped,
}

/// Sends all content over a Unix socket.
fn sent(path: &Path, way: Method) -> Result<()> {
    let image = Image::open(path)?;
    let (mut out, mut into) = UnixStream::pair()?;
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || -> Result<()> {
            let mut buffer = vec![0; 1 << 20];
            while into.read(&mut buffer)? > 0 {}
            Ok(())
        });
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        let sent = chunks(&image, |page, length| match way {
            Method::Pread => {
                read(&image, page, &mut buffer[..length as usize])?;
                Ok(out.write_all(&buffer[..length as usize])?)
            }
            Method::Mapped => {
                image.prepare(page, length)?;
                Ok(out.write_all(image.immutable(page, length).ok_or("an image does not change")?)?)
            }
        });
        drop(out);
        reader.join().map_err(|_| "the reader panicked")??;
        sent
    })
}

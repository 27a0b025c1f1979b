//! Cost of chunk sizes: the share of a second image of a guest that is new to a store with the first one.
//!
//! ```text
//! cargo run --release -p towline-image --example chunk_sizes -- FIRST.img SECOND.img
//! ```
//! Both are files. Nothing is stored: chunks are named and compressed as for a store, and counted.

use std::collections::HashSet;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use towline_image::{ChunkHash, Image, checksum};
use towline_migration::Guest as _;
use towline_protocol::{BlockIndex, PageRef};

const SIZES: [u64; 7] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// zstd level, as in a store.
const LEVEL: i32 = 1;
/// Concurrent requests, and the latency of a request to a remote store.
const REQUESTS: f64 = 32.0;
const REQUEST_SECONDS: f64 = 0.020;

/// Totals of one image with one chunk size.
#[derive(Default)]
struct Sum {
    chunks: u64,
    bytes: u64,
    time: Duration,
}

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [first, second] = &paths[..] else { return Err("usage: chunk_sizes FIRST.img SECOND.img".into()) };
    let (first, second) = (Image::open(Path::new(first))?, Image::open(Path::new(second))?);
    println!(
        "| chunk | first: chunks | MiB | of an index, KiB | second: new chunks | MiB | share | hash and compress, MiB/s | requests of the first at 20 ms, s |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for size in SIZES {
        let mut known = HashSet::new();
        // The first pass faults the pages into this process.
        store(&first, size, &mut HashSet::new())?;
        let one = store(&first, size, &mut known)?;
        let two = store(&second, size, &mut known)?;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let total: u64 = first.ram_blocks().iter().map(|block| block.length.div_ceil(size)).sum();
        println!(
            "| {} KiB | {} | {:.1} | {:.1} | {} | {:.1} | {:.1} % | {:.0} | {:.1} |",
            size >> 10,
            one.chunks,
            mib(one.bytes),
            total as f64 * 32.0 / 1024.0,
            two.chunks,
            mib(two.bytes),
            100.0 * two.bytes as f64 / one.bytes as f64,
            mib(one.chunks * size) / one.time.as_secs_f64(),
            one.chunks as f64 * REQUEST_SECONDS / REQUESTS,
        );
    }
    Ok(())
}

/// Names every chunk, and compresses the new ones.
fn store(image: &Image, size: u64, known: &mut HashSet<[u8; 32]>) -> Result<Sum, Box<dyn Error>> {
    let (mut sum, begun) = (Sum::default(), Instant::now());
    for (number, block) in image.ram_blocks().iter().enumerate() {
        for offset in (0..block.length).step_by(size as usize) {
            let page = PageRef { block: BlockIndex(u32::try_from(number)?), offset };
            let bytes =
                image.immutable(page, size.min(block.length - offset)).ok_or("an image does not change")?;
            if let ChunkHash::Data(name) = checksum::hash_chunk(bytes)
                && known.insert(name)
            {
                sum.chunks += 1;
                sum.bytes += zstd::bulk::compress(bytes, LEVEL)?.len() as u64;
            }
        }
    }
    sum.time = begun.elapsed();
    Ok(sum)
}

//! The index of an image in an object store: an index that is decoded is encoded and decoded again unchanged.

#![no_main]

use libfuzzer_sys::fuzz_target;
use towline_image::index::{Index, MAGIC, VERSION};

/// Contents in a valid frame: the fuzzer would never find their hash.
fn framed(content: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
    bytes.extend_from_slice(blake3::hash(content).as_bytes());
    bytes.extend(zstd::bulk::compress(content, 1).expect("space for incompressible contents"));
    bytes
}

fuzz_target!(|input: &[u8]| {
    for bytes in [input.to_vec(), framed(input)] {
        let Ok(index) = Index::parse(&bytes) else { continue };
        let blocks = index.blocks();
        assert_eq!(
            index.all_names().count(),
            (0..blocks.len())
                .flat_map(|block| index.chunk_names(towline_protocol::BlockIndex(block as u32)))
                .chain(index.device_state_names())
                .filter(|name| **name != towline_image::ChunkHash::Zero)
                .count()
        );
        let decoded = Index::parse(&index.encode().expect("it was decoded")).expect("it was encoded");
        assert_eq!(decoded, index);
    }
});

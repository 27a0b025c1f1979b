//! The index of an image in an object store: whatever is read can be written and is read again as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use towline_image::index::{Index, MAGIC, VERSION};

/// Beside whole objects, contents in a frame that is right: else the hash would keep the fuzzer out for ever.
fn framed(content: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(content.len() as u64).to_le_bytes());
    bytes.extend_from_slice(blake3::hash(content).as_bytes());
    bytes.extend(zstd::bulk::compress(content, 1).expect("room for what does not compress"));
    bytes
}

fuzz_target!(|input: &[u8]| {
    for bytes in [input.to_vec(), framed(input)] {
        let Ok(index) = Index::parse(&bytes) else { continue };
        let blocks = index.blocks();
        assert_eq!(
            index.all_names().count(),
            (0..blocks.len())
                .flat_map(|block| index.names(towline_protocol::BlockIndex(block as u32)))
                .chain(index.device_state_names())
                .filter(|name| **name != towline_image::ChunkHash::Zero)
                .count()
        );
        let again = Index::parse(&index.encode().expect("it was read")).expect("it was written");
        assert_eq!(again, index);
    }
});

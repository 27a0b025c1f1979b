//! A chunk: its name, its object, and its way into and out of that.

use bytes::Bytes;

use crate::ChunkHash;

/// How hard zstd tries: the level that keeps up with a fast link on one core.
const LEVEL: i32 = 1;
/// Most bytes of the object of a chunk of this length: what does not compress is a little longer.
pub(super) fn object_bytes_max(length: u64) -> u64 {
    length + (length >> 4) + 4096
}

/// The key of a chunk's object.
pub(super) fn key(name: &[u8; 32]) -> String {
    let hex = blake3::Hash::from_bytes(*name).to_hex();
    format!("{DIRECTORY}/{}/{hex}.zst", &hex[..2])
}

/// Where chunks are.
pub(super) const DIRECTORY: &str = "chunks";

/// The name of the chunk whose object has this key.
pub(super) fn name(key: &str) -> Option<[u8; 32]> {
    let (directory, hex) = key.strip_prefix(DIRECTORY)?.strip_prefix('/')?.split_once('/')?;
    let hash = blake3::Hash::from_hex(hex.strip_suffix(".zst")?).ok()?;
    let name = *hash.as_bytes();
    (hex.starts_with(directory) && self::key(&name) == key).then_some(name)
}

/// What a chunk of these bytes is called.
pub(super) fn hash(bytes: &[u8]) -> ChunkHash {
    crate::checksum::hash_chunk(bytes)
}

/// A chunk's object.
pub(super) fn compress(bytes: &[u8]) -> Bytes {
    let compressed =
        zstd::bulk::compress(bytes, LEVEL).expect("the buffer has room for what does not compress");
    Bytes::from(compressed)
}

/// The bytes of a chunk of `length` bytes out of its object, compared with its name; else what is wrong.
pub(super) fn decompress(object: &[u8], name: &[u8; 32], length: u64) -> Result<Vec<u8>, String> {
    let bytes = zstd::bulk::decompress(object, length as usize);
    let bytes = bytes.map_err(|error| format!("it is no zstd frame of {length} bytes ({error})"))?;
    if bytes.len() as u64 != length {
        return Err(format!("it has {} bytes, expected {length}", bytes.len()));
    }
    let found = blake3::hash(&bytes);
    match found.as_bytes() == name {
        true => Ok(bytes),
        false => Err(format!("its BLAKE3 is {}", found.to_hex())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_chunk_comes_out_as_it_went_in_or_says_why_not() {
        let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        let ChunkHash::Data(hash) = hash(&bytes) else { panic!("not zero") };
        let object = compress(&bytes);
        assert_eq!(decompress(&object, &hash, 70_000).unwrap(), bytes);
        assert!(decompress(&object, &hash, 69_999).unwrap_err().contains("no zstd frame of 69999 bytes"));
        assert_eq!(decompress(&object, &hash, 70_001).unwrap_err(), "it has 70000 bytes, expected 70001");
        let error = decompress(&object, &[1; 32], 70_000).unwrap_err();
        assert!(error.starts_with("its BLAKE3 is"), "{error}");
        for bit in 0..8 * object.len() {
            let mut flipped = object.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = decompress(&flipped, &hash, 70_000) {
                assert_eq!(read, bytes);
            }
        }
    }

    #[test]
    fn keys_and_names_are_each_others() {
        let key = key(&[0xab; 32]);
        assert_eq!(&key[..12], "chunks/ab/ab");
        assert_eq!(name(&key), Some([0xab; 32]));
        assert_eq!(name(&key.replace("/ab/", "/ac/")), None);
        assert_eq!(name("chunks/ab/abc.zst"), None);
    }
}

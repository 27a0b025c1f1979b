//! Names, keys and encoding of chunks.

use bytes::Bytes;

/// zstd level that keeps up with a fast link on one core.
const LEVEL: i32 = 1;
/// Maximum length of the object of a chunk of `length` bytes: incompressible data grows slightly.
pub(super) fn object_bytes_max(length: u64) -> u64 {
    length + (length >> 4) + 4096
}

/// Key of a chunk's object.
pub(super) fn key(name: &[u8; 32]) -> String {
    let hex = blake3::Hash::from_bytes(*name).to_hex();
    format!("{DIRECTORY}/{}/{hex}.zst", &hex[..2])
}

/// Directory of the chunks.
pub(super) const DIRECTORY: &str = "chunks";

/// Name of the chunk whose object has this key.
pub(super) fn name(key: &str) -> Option<[u8; 32]> {
    let (directory, hex) = key.strip_prefix(DIRECTORY)?.strip_prefix('/')?.split_once('/')?;
    let hash = blake3::Hash::from_hex(hex.strip_suffix(".zst")?).ok()?;
    let name = *hash.as_bytes();
    (hex.starts_with(directory) && self::key(&name) == key).then_some(name)
}

/// Encodes the object of a chunk.
pub(super) fn compress(bytes: &[u8]) -> Bytes {
    let compressed =
        zstd::bulk::compress(bytes, LEVEL).expect("the buffer is large enough for incompressible data");
    Bytes::from(compressed)
}

/// Decodes the object of a chunk of `length` bytes and compares it with its name.
pub(super) fn decompress(object: &[u8], name: &[u8; 32], length: u64) -> Result<Vec<u8>, String> {
    let bytes = zstd::bulk::decompress(object, length as usize);
    let bytes = bytes.map_err(|error| format!("not a zstd frame of {length} bytes ({error})"))?;
    if bytes.len() as u64 != length {
        return Err(format!("it has {} bytes, expected {length}", bytes.len()));
    }
    let found = blake3::hash(&bytes);
    if found.as_bytes() == name { Ok(bytes) } else { Err(format!("its BLAKE3 is {}", found.to_hex())) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::checksum::hash_chunk;

    #[test]
    fn a_chunk_is_decoded_unchanged_or_is_an_error() {
        let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        let hash = hash_chunk(&bytes).data().unwrap();
        let object = compress(&bytes);
        assert_eq!(decompress(&object, &hash, 70_000).unwrap(), bytes);
        assert!(decompress(&object, &hash, 69_999).unwrap_err().contains("not a zstd frame of 69999 bytes"));
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
    fn keys_and_names_are_inverse() {
        let key = key(&[0xab; 32]);
        assert_eq!(&key[..12], "chunks/ab/ab");
        assert_eq!(name(&key), Some([0xab; 32]));
        assert_eq!(name(&key.replace("/ab/", "/ac/")), None);
        assert_eq!(name("chunks/ab/abc.zst"), None);
    }
}

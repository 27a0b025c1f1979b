#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;

fn blocks() -> Vec<RamBlock> {
    let block = |name: &str, length| RamBlock { name: name.into(), length, mapped: None };
    vec![block("pc.ram", (3 << 20) + 4096), block("pc.bios", 256 << 10), block("empty", 0)]
}

fn index() -> Index {
    let configuration = Configuration {
        machine_type: "pc-q35-10.0".into(),
        capabilities: vec!["x-ignore-shared".into()],
        uuid: Some([7; 16]),
        target_page_bits: Some(12),
    };
    let mut names = vec![vec![ChunkHash::Zero; 4], vec![ChunkHash::Data([9; 32])], vec![]];
    names[0][1] = ChunkHash::Data([1; 32]);
    let origin = Origin { source: "qmp".into(), was_running: Some(true), ..Origin::default() };
    Index::new(IndexContents {
        configuration: &configuration,
        section_id: 2,
        origin: &origin,
        chunk_bytes: 1 << 20,
        blocks: &blocks(),
        names,
        device_state: b"state",
        device_state_names: vec![ChunkHash::Data([5; 32])],
    })
}

#[test]
fn a_written_index_is_read_back() {
    let written = index();
    let read = Index::parse(&written.encode().unwrap()).unwrap();
    assert_eq!(read, written);
    assert_eq!(read.blocks(), blocks());
    assert_eq!(read.configuration().machine_type, "pc-q35-10.0");
    assert_eq!(read.chunk_names(BlockIndex(0))[1], ChunkHash::Data([1; 32]));
    assert_eq!(read.all_names().collect::<Vec<_>>(), [[1; 32], [9; 32], [5; 32]]);
    assert_eq!(read.device_state(), (5, Digest::of(b"state")));
}

#[test]
fn an_index_truncated_anywhere_is_refused() {
    let bytes = index().encode().unwrap();
    for length in 0..bytes.len() {
        let error = Index::parse(&bytes[..length]).unwrap_err().to_string();
        assert!(error.contains("truncated"), "{length}: {error}");
    }
}

#[test]
fn an_index_with_any_bit_flipped_is_refused() {
    let written = index();
    let bytes = written.encode().unwrap();
    for bit in 0..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        // A bit or two of zstd's frame have no meaning; the content read equals that written.
        if let Ok(read) = Index::parse(&flipped) {
            assert_eq!(read, written, "bit {bit}");
        }
    }
}

#[test]
fn other_objects_and_newer_versions_are_refused() {
    assert!(matches!(Index::parse(b"{\"format\": \"something else\"}"), Err(Error::NotAnIndex)));
    let mut bytes = index().encode().unwrap();
    bytes[16] = 2;
    assert!(matches!(Index::parse(&bytes), Err(Error::Version { found: 2, known: 1 })));
    bytes[16] = 1;
    bytes[20..28].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(Index::parse(&bytes), Err(Error::TooLarge { found: u64::MAX, .. })));
}

#[test]
fn the_number_of_names_must_match_the_lengths() {
    let mut odd = index();
    odd.names[0].pop();
    let error = Index::parse(&odd.encode().unwrap()).unwrap_err();
    assert!(matches!(error, Error::Names { found: 5, expected: 6 }), "{error}");
    let mut odd = index();
    odd.chunk_bytes = 1000;
    let error = Index::parse(&odd.encode().unwrap()).unwrap_err();
    assert!(matches!(error, Error::Field { found: 1000, .. }), "{error}");
    let mut odd = index();
    odd.blocks[0].length += 1;
    assert!(matches!(Index::parse(&odd.encode().unwrap()), Err(Error::Field { .. })));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), whole in any::<bool>()) {
        let mut input = index().encode().unwrap();
        if whole { input.truncate(FRAME_BYTES); input.extend(bytes) } else { input = bytes }
        prop_assert!(Index::parse(&input).is_err());
    }
}

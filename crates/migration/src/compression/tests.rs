//! Pages are restored unchanged; a stream damaged on the way is an error or other pages, never more pages and
//! never a panic.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use fastrand::Rng;
use flate2::{Compress, FlushCompress};
use proptest::prelude::*;
use towline_channel::IoBuf;
use towline_protocol::{Error as ProtocolError, InvalidMessage, limits};
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation, OutBuffer};

use super::{Compression, Compressor, Decompressor};

const PAGE: usize = 4096;
const PAGES_MAX: usize = limits::PACKET_DATA_BYTES_MAX / PAGE;
const ZLIB: Compression = Compression::Zlib { level: 1 };
const ZSTD: Compression = Compression::Zstd { level: 1 };

fn ends(compression: Compression) -> (Compressor, Decompressor) {
    let compressor = Compressor::new(compression).unwrap().unwrap();
    (compressor, Decompressor::new(compression).unwrap().unwrap())
}

/// One page of this kind: zeros, one byte, text, a ramp, noise.
fn page(kind: u8, rng: &mut Rng) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    match kind % 5 {
        0 => {}
        1 => page[rng.usize(..PAGE)] = rng.u8(..),
        2 => page.iter_mut().for_each(|byte| *byte = b"etaoin shrdlu"[rng.usize(..13)]),
        3 => page.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8),
        _ => rng.fill(&mut page),
    }
    page
}

fn pages(kinds: &[u8], rng: &mut Rng) -> Vec<u8> {
    kinds.iter().flat_map(|&kind| page(kind, rng)).collect()
}

/// Gives the decompressor these bytes as a packet of `length` bytes of pages.
fn give(to: &mut Decompressor, bytes: &[u8], length: usize) -> Result<Vec<u8>, ProtocolError> {
    towline_channel::scatter(bytes, &mut [to.receive(bytes.len())]);
    let mut pages = vec![0xee; length];
    to.decompress(bytes.len(), &mut pages).map(|()| pages)
}

fn any_compression() -> impl Strategy<Value = Compression> {
    let zlib = (0..=Compression::ZLIB_LEVEL_MAX).prop_map(|level| Compression::Zlib { level });
    // The higher levels take the time of their tables, and are below.
    let zstd = (0..=6_u8).prop_map(|level| Compression::Zstd { level });
    prop_oneof![zlib, zstd]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pages_come_out_as_they_went_in(
        compression in any_compression(),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..PAGES_MAX), 1..6),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng::with_seed(seed);
        let (mut compressor, mut decompressor) = ends(compression);
        for kinds in packets {
            let contents = pages(&kinds, &mut rng);
            // In runs of any length, as they lie in a guest.
            let (left, right) = contents.split_at(PAGE * rng.usize(0..=kinds.len()));
            let compressed = compressor.compress(&[left, right]).unwrap().to_vec();
            prop_assert_eq!(give(&mut decompressor, &compressed, contents.len()), Ok(contents));
        }
    }

    #[test]
    fn a_damaged_stream_never_panics(
        is_zlib in any::<bool>(),
        kinds in prop::collection::vec(any::<u8>(), 1..32),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng::with_seed(seed);
        let (mut compressor, mut decompressor) = ends(if is_zlib { ZLIB } else { ZSTD });
        for _ in 0..8 {
            let contents = pages(&kinds, &mut rng);
            let mut bytes = compressor.compress(&[&contents]).unwrap().to_vec();
            mutate(&mut bytes, &mut rng);
            let length = if rng.u8(..4) == 0 { PAGE * rng.usize(1..=PAGES_MAX) } else { contents.len() };
            // The output has exactly the requested length.
            match give(&mut decompressor, &bytes, length) {
                Ok(pages) => prop_assert_eq!(pages.len(), length),
                Err(ProtocolError::Invalid(
                    InvalidMessage::Compressed { .. }
                    | InvalidMessage::CompressedTooShort { .. }
                    | InvalidMessage::CompressedTooLong { .. },
                )) => break,
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(..bytes.len());
        match rng.u8(..6) {
            0 => bytes[at] ^= 1 << rng.u8(..8),
            1 => bytes[at] = rng.u8(..),
            2 => bytes.truncate(at.max(1)),
            3 => bytes.insert(at, rng.u8(..)),
            4 => drop(bytes.remove(at)),
            _ => bytes.extend_from_within(at..(at + 100).min(bytes.len())),
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

#[test]
fn every_level_takes_every_page_and_stays_within_the_limit() {
    let mut rng = Rng::with_seed(1);
    let noise = pages(&[4; PAGES_MAX], &mut rng);
    let mixed = pages(&(0..PAGES_MAX).map(|index| index as u8).collect::<Vec<_>>(), &mut rng);
    let zlib = (0..=Compression::ZLIB_LEVEL_MAX).map(|level| Compression::Zlib { level });
    let zstd = (0..=Compression::ZSTD_LEVEL_MAX).map(|level| Compression::Zstd { level });
    for compression in zlib.chain(zstd) {
        let (mut compressor, mut decompressor) = ends(compression);
        for contents in [&noise, &mixed, &noise] {
            let compressed = compressor.compress(&[contents]).unwrap().to_vec();
            assert_eq!(give(&mut decompressor, &compressed, contents.len()).as_ref(), Ok(contents));
        }
    }
}

#[test]
fn a_packet_gives_as_much_as_it_has_pages() {
    for (compression, method) in [(ZLIB, "zlib"), (ZSTD, "zstd")] {
        for kind in 0..5 {
            let contents = pages(&[kind; 3], &mut Rng::with_seed(2));
            let given = |length: usize| {
                let (mut compressor, mut decompressor) = ends(compression);
                let compressed = compressor.compress(&[&contents]).unwrap().to_vec();
                give(&mut decompressor, &compressed, length)
            };
            let short = InvalidMessage::CompressedTooShort { method, found: 3 * PAGE, expected: 4 * PAGE };
            assert_eq!(given(4 * PAGE), Err(short.into()));
            let long = InvalidMessage::CompressedTooLong { method, expected: 2 * PAGE };
            assert_eq!(given(2 * PAGE), Err(long.into()));
            assert_eq!(given(3 * PAGE), Ok(contents.clone()));
        }
        let (_, mut decompressor) = ends(compression);
        let none = InvalidMessage::CompressedTooShort { method, found: 0, expected: PAGE };
        assert_eq!(give(&mut decompressor, &[], PAGE), Err(none.into()));
    }
}

#[test]
fn a_truncated_packet_is_distinguished_from_a_whole_one() {
    for compression in [ZLIB, ZSTD] {
        let contents = pages(&[2, 4, 3], &mut Rng::with_seed(3));
        let (mut compressor, _) = ends(compression);
        let compressed = compressor.compress(&[&contents]).unwrap().to_vec();
        // The last bytes of all are those of the flush; without them the pages may be whole already.
        for length in (0..compressed.len() - 16).step_by(61) {
            let (_, mut decompressor) = ends(compression);
            let error = give(&mut decompressor, &compressed[..length], contents.len()).unwrap_err();
            let is_short = matches!(error, ProtocolError::Invalid(InvalidMessage::CompressedTooShort { .. }));
            assert!(is_short, "{length}: {error}");
        }
    }
}

#[test]
fn a_bomb_gives_no_more_than_its_pages() {
    let zeros = vec![0; 64 << 20];
    let mut bomb = vec![0; limits::PACKET_COMPRESSED_BYTES_MAX];
    let mut stream = Compress::new(flate2::Compression::new(9), true);
    stream.compress(&zeros, &mut bomb, FlushCompress::Sync).unwrap();
    let (_, mut decompressor) = ends(ZLIB);
    let used = stream.total_out() as usize;
    let error = give(&mut decompressor, &bomb[..used], 128 * PAGE).unwrap_err();
    let long = |method| InvalidMessage::CompressedTooLong { method, expected: 128 * PAGE };
    assert_eq!(error, long("zlib").into());
    let (_, mut decompressor) = ends(ZSTD);
    let used = frame(&zeros, &mut bomb, 22);
    let error = give(&mut decompressor, &bomb[..used], 128 * PAGE).unwrap_err();
    assert_eq!(error, long("zstd").into());
}

/// A zstd stream with a window of this size, flushed.
fn frame(contents: &[u8], into: &mut [u8], window_log: u32) -> usize {
    let mut stream = Encoder::new(1).unwrap();
    stream.set_parameter(CParameter::WindowLog(window_log)).unwrap();
    let (mut input, mut output) = (InBuffer::around(contents), OutBuffer::around(into));
    while input.pos() < contents.len() {
        stream.run(&mut input, &mut output).unwrap();
    }
    while stream.flush(&mut output).unwrap() > 0 {}
    output.pos()
}

#[test]
fn a_stream_may_remember_as_much_as_a_qemu_may_ask_for() {
    let (contents, mut bytes) = (pages(&[2], &mut Rng::with_seed(4)), vec![0; 2 * PAGE]);
    let mut of_window = |log| {
        let used = frame(&contents, &mut bytes, log);
        give(&mut ends(ZSTD).1, &bytes[..used], PAGE)
    };
    assert_eq!(of_window(limits::ZSTD_WINDOW_LOG_MAX).as_ref(), Ok(&contents));
    let fault = "Frame requires too much memory for decoding".into();
    let expected = InvalidMessage::Compressed { method: "zstd", fault };
    assert_eq!(of_window(limits::ZSTD_WINDOW_LOG_MAX + 1), Err(expected.into()));
}

#[test]
fn a_packet_that_ends_the_stream_is_refused() {
    let contents = pages(&[2], &mut Rng::with_seed(5));
    let mut bytes = vec![0; 2 * PAGE];
    let mut stream = Compress::new(flate2::Compression::new(1), true);
    stream.compress(&contents, &mut bytes, FlushCompress::Finish).unwrap();
    let error = give(&mut ends(ZLIB).1, &bytes[..stream.total_out() as usize], PAGE).unwrap_err();
    let fault = "it ends the lane's stream, which lives as long as the lane".into();
    assert_eq!(error, InvalidMessage::Compressed { method: "zlib", fault }.into());
    // Not a compressed stream.
    for (compression, method) in [(ZLIB, "zlib"), (ZSTD, "zstd")] {
        let error = give(&mut ends(compression).1, &contents[..100], PAGE).unwrap_err();
        let text = error.to_string();
        let begin =
            format!("invalid migration stream: multifd packet: its {method} data cannot be decompressed: ");
        assert!(text.starts_with(&begin) && text.len() > begin.len(), "{text}");
    }
}

/// Figures for the documentation: `cargo test --release -p towline-migration -- --ignored --nocapture speed`.
#[test]
#[ignore = "a measurement"]
fn speed_of_a_lane() {
    let mut rng = Rng::with_seed(6);
    let packets: Vec<_> = (0..64).map(|_| half_noise(&mut rng)).collect();
    let bytes: usize = packets.iter().map(Vec::len).sum();
    for compression in [ZLIB, ZSTD] {
        for round in 0..5 {
            let (mut compressor, mut decompressor) = ends(compression);
            let (mut out, mut into, mut wire) = (0.0, 0.0, 0);
            let mut back = vec![0; limits::PACKET_DATA_BYTES_MAX];
            for packet in &packets {
                let begun = std::time::Instant::now();
                let compressed = compressor.compress(&[packet]).unwrap();
                out += begun.elapsed().as_secs_f64();
                wire += compressed.len();
                towline_channel::scatter(compressed, &mut [decompressor.receive(compressed.len())]);
                let begun = std::time::Instant::now();
                decompressor.decompress(compressed.len(), &mut back).unwrap();
                into += begun.elapsed().as_secs_f64();
            }
            let ratio = bytes as f64 / wire as f64;
            let rate = |seconds| bytes as f64 / 1e6 / seconds;
            let begun = std::time::Instant::now();
            for packet in &packets {
                towline_channel::gather(&[IoBuf::from(&packet[..])], &mut back);
                std::hint::black_box(&mut back);
            }
            let copied = rate(begun.elapsed().as_secs_f64());
            println!(
                "{compression:?} {round}: {ratio:.2}:1, {:.0} MB/s out, {:.0} in, the copy alone {copied:.0}",
                rate(out),
                rate(into)
            );
        }
    }
}

/// A packet, half of whose pages are noise, a quarter words, a quarter pointers with zeros between.
fn half_noise(rng: &mut Rng) -> Vec<u8> {
    let words: Vec<Vec<u8>> =
        (0..256).map(|_| (0..rng.usize(3..12)).map(|_| rng.alphanumeric() as u8).collect()).collect();
    let page = |index: usize| {
        let mut page = vec![0; PAGE];
        match index % 4 {
            0 => {
                let mut text: Vec<u8> = Vec::new();
                while text.len() < PAGE {
                    text.extend_from_slice(&words[rng.usize(..256)]);
                }
                page.copy_from_slice(&text[..PAGE]);
            }
            2 => page.chunks_exact_mut(32).for_each(|entry| {
                entry[..8].copy_from_slice(&(0xffff_8880_0000_0000 | rng.u64(..1 << 24)).to_le_bytes());
            }),
            _ => rng.fill(&mut page),
        }
        page
    };
    (0..PAGES_MAX).flat_map(page).collect()
}

//! Streams whose source leaves out shared memory (`x-ignore-shared`).

use towline_protocol::Reader;
use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{SharedMemory, StreamDecoder, StreamItem};
use towline_protocol::ram::{PAGE_SIZE, RamBlock};

const CAPABILITIES: &[u8] = b"\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0fx-ignore-shared";

/// A stream with two blocks, each with its guest address, up to the end of START.
fn stream() -> Vec<u8> {
    let mut out = Vec::new();
    Configuration { machine_type: "pc-q35-10.0".into(), ..Configuration::default() }.encode(&mut out);
    out.extend_from_slice(CAPABILITIES);
    out.extend_from_slice(b"\x01\0\0\0\x09\x03ram\0\0\0\0\0\0\0\x04");
    out.extend_from_slice(&((3 * PAGE_SIZE) | 4).to_be_bytes());
    for (name, pages, address) in [("a", 1, 0xfee0_0000_u64), ("b", 2, 0x1_0000_0000)] {
        out.push(1);
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&(pages * PAGE_SIZE).to_be_bytes());
        out.extend_from_slice(&address.to_be_bytes());
    }
    out.extend_from_slice(&0x10_u64.to_be_bytes());
    out.extend_from_slice(b"\x7e\0\0\0\x09");
    out
}

#[test]
fn addresses_in_the_block_list_are_skipped_and_the_capability_is_not_passed_on() {
    let bytes = stream();
    // Whole, and with an end at each byte: an incomplete item consumes nothing.
    for step in [1, 3, bytes.len()] {
        let mut state = StreamDecoder::with_shared_memory(SharedMemory::AtDestination);
        let (mut configuration, mut blocks, mut ends) = (None, Vec::new(), 0);
        let (mut taken, mut end) = (0, step.min(bytes.len()));
        while taken < bytes.len() {
            let mut reader = Reader::new(&bytes[taken..end]);
            let (next, event) = state.handle(&mut reader).unwrap();
            state = next;
            taken += reader.position();
            match event {
                Some(StreamItem::Configuration(found)) => configuration = Some(found),
                Some(StreamItem::Block(block)) => blocks.push(block),
                Some(StreamItem::SectionEnd(_)) => ends += 1,
                Some(_) => {}
                None if end == bytes.len() => break,
                None => end = (end + step).min(bytes.len()),
            }
        }
        assert_eq!((taken, ends), (bytes.len(), 1), "in steps of {step}");
        assert_eq!(configuration.unwrap().capabilities, [""; 0]);
        let block =
            |name: &str, pages: u64| RamBlock { name: name.into(), length: pages * PAGE_SIZE, mapped: None };
        assert_eq!(blocks, [block("a", 1), block("b", 2)]);
    }
}

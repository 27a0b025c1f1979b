//! Every error that a peer can cause on the main channel, exactly.

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{ITEM_BYTES_MAX, StreamDecoder, StreamItem};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::source::{RamOptions, Setup};
use towline_protocol::{Error, InvalidMessage, PeerIncompatible, PeerMisbehaved, RamBlock, Reader, limits};

use crate::support::*;

const ID: [u8; 4] = [0, 0, 0, 9];

/// Header and configuration, then `rest`.
fn behind_configuration(rest: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    Configuration { machine_type: "pc-q35-10.0".into(), ..Configuration::default() }.encode(&mut out);
    [&out, rest].concat()
}

/// The same with the payload `payload` in a `ram` START.
fn in_start(payload: &[u8]) -> Vec<u8> {
    behind_configuration(&[&[1], &ID[..], b"\x03ram", &[0, 0, 0, 0, 0, 0, 0, 4], payload].concat())
}

/// The be64 that begins a record or the list.
fn word(offset: u64, flags: u64) -> Vec<u8> {
    (offset | flags).to_be_bytes().to_vec()
}

fn block(name: &[u8], length: u64) -> Vec<u8> {
    [&[u8::try_from(name.len()).unwrap()], name, &length.to_be_bytes()].concat()
}

/// The same, after a list of one block "b" of two pages, in START.
fn in_records(records: &[&[u8]]) -> Vec<u8> {
    in_start(&[&word(0x2000, 4), &block(b"b", 0x2000)[..], &records.concat()].concat())
}

/// The same after that whole section.
fn behind_start(rest: &[u8]) -> Vec<u8> {
    in_records(&[&word(0, 0x10), &[0x7e], &ID, rest])
}

/// A mapped-ram stream's only block with this header.
fn mapped(version: u32, page_size: u64, bitmap_offset: u64, pages_offset: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let capabilities = vec!["mapped-ram".into()];
    let configuration = Configuration { machine_type: "x".into(), capabilities, ..Configuration::default() };
    let blocks = [RamBlock { name: "b".into(), length: PAGE_SIZE, mapped: None }];
    let options = RamOptions { section_id: 9, barrier: None };
    let _ = Setup::begin(&configuration, &mut out).write_ram_start(options, &blocks, &mut out);
    // Without EOS and the footer, which come where the header is wanted.
    out.truncate(out.len() - 13);
    out.extend_from_slice(&version.to_be_bytes());
    for word in [page_size, bitmap_offset, pages_offset] {
        out.extend_from_slice(&word.to_be_bytes());
    }
    out
}

/// The error of a main channel, the same in one piece and byte by byte.
fn refused(bytes: &[u8]) -> Error {
    let whole = Driver::default().push(bytes).expect_err("it is refused");
    let mut driver = Driver::default();
    let found = bytes.iter().find_map(|byte| driver.push(&[*byte]).err());
    assert_eq!(found.as_ref(), Some(&whole), "pieces make a difference");
    whole
}

#[test]
fn bytes_that_are_in_no_stream_are_refused() {
    use InvalidMessage as Invalid;
    let section = |found, expected| Invalid::SectionType { found, expected };
    let text = |what, shown: &str| Invalid::Text { what, shown: shown.into() };
    let long = |what, found, limit| Invalid::TooLong { what, found, limit };
    let header = |kind: u8| [b"QEVM\0\0\0\x03", &[kind][..]].concat();
    let subsection = |rest: &[u8]| behind_configuration(&[&[5], rest].concat());
    let sections = "a `ram` section or a command";
    for (bytes, expected) in [
        (b"HTTP".to_vec(), Invalid::Magic { found: 0x4854_5450 }),
        (b"QEVM\0\0\0\x02".to_vec(), Invalid::Version { found: 2 }),
        (header(1), section(1, "the configuration section")),
        (header(9), section(9, "the configuration section")),
        ([&header(7), &[0, 0, 1, 1][..]].concat(), long("machine type name", 257, 256)),
        ([&header(7), &[0, 0, 0, 1, 0xff][..]].concat(), text("machine type name", "\u{fffd}")),
        (subsection(b"\x01x\0\0\0\x01"), text("configuration subsection (unknown)", "x")),
        (
            subsection(b"\x12configuration/uuid\0\0\0\x02"),
            text("configuration subsection (unknown)", "configuration/uuid"),
        ),
        (subsection(b"\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x41"), long("capability list", 65, 64)),
        (behind_configuration(&[0]), section(0, "`ram` or a command")),
        (behind_configuration(&[2]), section(2, "`ram` or a command")),
        (behind_configuration(&[0x55]), section(0x55, "`ram` or a command")),
        (behind_start(&[0]), section(0, sections)),
        (behind_start(&[7]), section(7, sections)),
        (
            behind_configuration(b"\x08\0\x02\0\x03abc"),
            Invalid::CommandLength { command: 2, found: 3, expected: 4 },
        ),
        (
            behind_configuration(b"\x08\0\x01\0\x01a"),
            Invalid::CommandLength { command: 1, found: 1, expected: 0 },
        ),
        (behind_start(b"\x08\0\x0b\0\x01a"), Invalid::CommandLength { command: 11, found: 1, expected: 0 }),
    ] {
        assert_eq!(refused(&bytes), expected.into(), "{bytes:?}");
    }
}

#[test]
fn memory_that_is_in_no_stream_is_refused() {
    use InvalidMessage as Invalid;
    let flags = |flags, offset| Invalid::RecordFlags { flags, offset };
    let page = |offset| Invalid::PageOffset { block: "b".into(), offset, length: 0x2000 };
    let footer = Invalid::SectionType { found: 0x7d, expected: "the section's footer" };
    let long = Invalid::TooLong { what: "XBZRLE page", found: 4097, limit: 4096 };
    for (bytes, expected) in [
        (in_start(&word(0x1000, 8)), flags(8, 0x1000)),
        (in_start(&word(1 << 53, 4)), Invalid::RamTotal { total: 1 << 53 }),
        (
            in_start(&[word(0x1000, 4), block(b"b", 0x2000)].concat()),
            Invalid::BlockLength { name: "b".into(), length: 0x2000, left: 0x1000 },
        ),
        (
            in_start(&[word(0x1000, 4), block(b"b", 0)].concat()),
            Invalid::BlockLength { name: "b".into(), length: 0, left: 0x1000 },
        ),
        (
            in_start(&[word(0x1000, 4), block(b"b", 0x800)].concat()),
            Invalid::BlockAlignment { name: "b".into(), length: 0x800, page_size: 4096 },
        ),
        (
            in_start(&[word(0x3000, 4), block(b"b", 0x1000), block(b"b", 0x1000)].concat()),
            Invalid::DuplicateBlock { name: "b".into() },
        ),
        (
            in_start(&[word(0x1000, 4), block(&[0xff], 0x1000)].concat()),
            Invalid::Text { what: "block name", shown: "\u{fffd}".into() },
        ),
        (in_records(&[&word(0, 0x28)]), Invalid::NothingToContinue),
        (in_records(&[&word(0x2000, 8), b"\x01b"]), page(0x2000)),
        (in_records(&[&word(!0xfff, 2), b"\x01b"]), page(!0xfff)),
        (in_records(&[&word(0, 2), b"\x01b\x01"]), Invalid::FillByte { block: "b".into(), found: 1 }),
        (in_records(&[&word(0, 0x40), b"\x01b\x02\0\0"]), Invalid::Xbzrle("an encoding other than 1")),
        (in_records(&[&word(0, 0x40), b"\x01b\x01\x10\x01"]), long),
        (in_records(&[&word(0, 0)]), flags(0, 0)),
        (in_records(&[&word(0x1000, 0x10)]), flags(0x10, 0x1000)),
        (in_records(&[&word(0, 0x30)]), flags(0x30, 0)),
        (in_records(&[&word(0x1000, 0x200)]), flags(0x200, 0x1000)),
        (in_records(&[&word(0, 0x220)]), flags(0x220, 0)),
        (in_records(&[&word(0, 0x0a)]), flags(0x0a, 0)),
        (in_records(&[&word(0, 0x808)]), flags(0x808, 0)),
        (in_records(&[&word(0, 0x10), &[0x7d], &ID]), footer),
        (in_records(&[&word(0, 0x10), &[0x7e, 0, 0, 0, 8]]), Invalid::Footer { found: 8, expected: 9 }),
    ] {
        assert_eq!(refused(&bytes), expected.into(), "{bytes:?}");
    }
}

#[test]
fn more_blocks_than_any_guest_has() {
    let mut payload = word(limits::RAM_BYTES_MAX, 4);
    for number in 0..=limits::BLOCKS_MAX {
        payload.extend(block(format!("{number}").as_bytes(), 0x1000));
    }
    let bytes = in_start(&payload);
    assert_eq!(Driver::default().push(&bytes), Err(InvalidMessage::TooManyBlocks.into()));
}

#[test]
fn false_headers_of_stored_guests_are_refused() {
    let at = mapped(1, 0x1000, 0, 0).len() as u64;
    let bad = |what, found, expected| InvalidMessage::MappedRam { block: "b".into(), what, found, expected };
    let far = !0xfff;
    for (header, expected) in [
        ((2, 0x1000, at, 1 << 20), bad("version", 2, 1)),
        ((1, 0x2000, at, 1 << 20), bad("page size", 0x2000, 0x1000)),
        ((1, 0x1000, at + 1, 1 << 20), bad("bitmap offset", at + 1, at)),
        ((1, 0x1000, at, 0), bad("pages offset", 0, 1 << 20)),
        ((1, 0x1000, at, (1 << 20) + 1), bad("pages offset", (1 << 20) + 1, 1 << 20)),
        ((1, 0x1000, at, far), bad("pages offset", far, 1 << 20)),
        ((1, 0x1000, at, 1 << 63), bad("pages offset", 1 << 63, 1 << 20)),
    ] {
        let (version, page_size, bitmap_offset, pages_offset) = header;
        let bytes = mapped(version, page_size, bitmap_offset, pages_offset);
        assert_eq!(read_mapped(&bytes), Err(expected.into()), "{header:?}");
    }
    let good = mapped(1, 0x1000, at, 1 << 20);
    assert_eq!(read_mapped(&good), Ok(()));
    for flags in [8, 2, 0x40, 0x200, 0x28] {
        let expected = InvalidMessage::RecordFlags { flags, offset: 0 };
        let bytes = [&good[..], &word(0, flags), b"\x01b"].concat();
        assert_eq!(read_mapped(&bytes), Err(expected.into()), "pages are not in the stream");
    }
}

/// Reads until more bytes are needed, with the file offsets of a stream without gaps.
fn read_mapped(bytes: &[u8]) -> Result<(), Error> {
    let (mut machine, mut input) = (StreamDecoder::default(), Reader::new(bytes));
    loop {
        machine.at_file_offset(input.position() as u64);
        let (next, event) = machine.handle(&mut input)?;
        machine = next;
        if event.is_none() {
            return Ok(());
        }
    }
}

#[test]
fn a_peer_that_misbehaves() {
    use PeerMisbehaved as Misbehaved;
    let unexpected = |found: &str, expected| Misbehaved::Unexpected { found: found.into(), expected };
    let uuid = [&b"\x05\x12configuration/uuid\0\0\0\x01"[..], &[0; 16]].concat();
    for (bytes, expected) in [
        (
            behind_configuration(&uuid.repeat(4)),
            unexpected("configuration subsection 4", "`ram` or a command"),
        ),
        (
            behind_configuration(b"\x08\0\x05\0\0"),
            unexpected("command 5", "a command that belongs to precopy"),
        ),
        (behind_start(&[2, 0, 0, 0, 8]), Misbehaved::UnknownSection { id: 8, expected: 9 }),
        (in_records(&[&word(0, 8), b"\x01c"]), Misbehaved::UnknownBlock { name: "c".into() }),
        (in_records(&[&word(0, 8), b"\x01\xff"]), Misbehaved::UnknownBlock { name: "\u{fffd}".into() }),
    ] {
        assert_eq!(refused(&bytes), expected.into(), "{bytes:?}");
    }
}

#[test]
fn unsupported_features_are_named() {
    use PeerIncompatible as Incompatible;
    let feature = |what, switch| Incompatible::Feature { what, switch };
    let ignore_shared = b"\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0fx-ignore-shared\x08";
    let page_bits =
        |bits: [u8; 4]| [&b"\x05\x1econfiguration/target-page-bits\0\0\0\x01"[..], &bits, &[8]].concat();
    let pages = feature("a target page size other than 4096 bytes", "the machine's larger pages");
    let section = |kind: u8, name: &[u8], version: u8| {
        [&[kind], &ID[..], &[name.len() as u8], name, &[0, 0, 0, 2, 0, 0, 0, version]].concat()
    };
    let iterable = Incompatible::IterableSection { name: "dirty-bitmap".into(), instance: 2 };
    let early = Incompatible::EarlyDevice { name: "virtio-mem".into(), instance: 2 };
    for (bytes, expected) in [
        (
            behind_configuration(ignore_shared),
            feature("memory that is left out of the stream because it is shared", "x-ignore-shared"),
        ),
        (behind_configuration(&page_bits([0, 0, 0, 14])), pages.clone()),
        // Shifted by as much, 1 has no bits left: this was a panic.
        (behind_configuration(&page_bits([0xff; 4])), pages),
        (behind_configuration(&section(1, b"dirty-bitmap", 1)), iterable.clone()),
        (behind_start(&section(1, b"dirty-bitmap", 1)), iterable),
        (behind_configuration(&section(4, b"virtio-mem", 1)), early),
        (
            behind_configuration(&section(1, b"ram", 5)),
            Incompatible::SectionVersion { name: "ram".into(), found: 5, known: 4 },
        ),
        (
            behind_configuration(b"\x08\0\x03\0\0"),
            feature("postcopy, which needs a destination that runs the guest", "postcopy-ram"),
        ),
        (behind_configuration(b"\x08\0\x08\0\0"), feature("COLO", "x-colo")),
        (in_records(&[&word(0, 0x80)]), feature("RDMA", "rdma-pin-all")),
        (in_records(&[&word(0, 0x100)]), feature("compress threads", "compress")),
    ] {
        assert_eq!(refused(&bytes), expected.into(), "{bytes:?}");
    }
}

/// The memory of a background snapshot has no END: a device's section after a PART, and only there, is the
/// device state.
#[test]
fn the_memory_of_a_snapshot_ends_where_devices_begin() {
    let device = [&[4][..], &ID, b"\x05timer\0\0\0\0\0\0\0\x02"].concat();
    let part = [&[2][..], &ID, &word(0, 0x10), &[0x7e], &ID].concat();
    let ends = |mut machine: StreamDecoder, bytes: &[u8]| {
        let mut input = Reader::new(bytes);
        loop {
            let (next, event) = machine.handle(&mut input)?;
            match event {
                Some(StreamItem::DeviceState) => return Ok(Some(bytes[input.position()..].to_vec())),
                None => return Ok(None),
                Some(_) => machine = next,
            }
        }
    };
    let whole = behind_start(&[&part[..], &part, &device].concat());
    assert_eq!(ends(StreamDecoder::of_snapshot(), &whole), Ok(Some(device.clone())));
    let early = Error::from(PeerIncompatible::EarlyDevice { name: "timer".into(), instance: 0 });
    assert_eq!(ends(StreamDecoder::default(), &whole), Err(early.clone()));
    assert_eq!(ends(StreamDecoder::of_snapshot(), &behind_start(&device)), Err(early));
}

#[test]
fn no_item_exceeds_its_limit() {
    let command = [&[8, 0, 99, 0xff, 0xff][..], &vec![0; 0xffff]].concat();
    assert_eq!(command.len(), ITEM_BYTES_MAX);
    let mut driver = Driver::default();
    let bytes = behind_configuration(&command);
    driver.push(&bytes[..bytes.len() - 1]).unwrap();
    let found = "command 99".into();
    let expected = "a command that belongs to precopy";
    assert_eq!(driver.push(&[0]), Err(PeerMisbehaved::Unexpected { found, expected }.into()));
}

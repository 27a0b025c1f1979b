//! The postcopy source: its bytes, written out by hand from QEMU's format, and what it takes from a
//! destination.

use towline_protocol::configuration::Configuration;
use towline_protocol::postcopy::{
    PostcopyBlock, PostcopyReturnPathReader, Recovery, ReturnMessage, decode_bitmap, put_bitmap,
};
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::source::Setup;
use towline_protocol::{BlockIndex, Error, InvalidMessage, PageRef, PeerMisbehaved, RamBlock, Reader};

const HUGE: u64 = 2 << 20;

fn block(name: &str, length: u64, page_bytes: u64) -> PostcopyBlock {
    PostcopyBlock { ram: RamBlock { name: name.into(), length, mapped: None }, page_bytes }
}

fn blocks() -> [PostcopyBlock; 2] {
    [block("pc.ram", 2 * HUGE, HUGE), block("rom", 3 * PAGE_SIZE, PAGE_SIZE)]
}

fn page(block: u32, offset: u64) -> PageRef {
    PageRef { block: BlockIndex(block), offset }
}

/// A command's bytes.
fn command(kind: u16, data: &[u8]) -> Vec<u8> {
    [&[8], &kind.to_be_bytes()[..], &(data.len() as u16).to_be_bytes(), data].concat()
}

fn be64s(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_be_bytes()).collect()
}

/// Type byte, section 2.
fn section(kind: u8) -> Vec<u8> {
    [&[kind], &2_u32.to_be_bytes()[..]].concat()
}

/// EOS and the footer.
fn section_end() -> Vec<u8> {
    [&be64s(&[0x10])[..], &[0x7e], &2_u32.to_be_bytes()].concat()
}

#[test]
fn a_guest_runs_with_the_package_s_last_byte_and_its_pages_follow() {
    let blocks = blocks();
    let configuration = Configuration { machine_type: "pc".into(), ..Configuration::default() };
    let mut out = Vec::new();
    let advised = Setup::advise(&configuration, &blocks, &mut out);
    let head = b"QEVM\x00\x00\x00\x03\x07\x00\x00\x00\x02pc";
    let advise = command(3, &be64s(&[HUGE | PAGE_SIZE, PAGE_SIZE]));
    assert_eq!(out, [&head[..], &command(1, &[]), &command(2, &[0, 0, 0, 1]), &advise].concat());

    out.clear();
    let loading = advised.write_ram_start(2, &blocks, &mut out);
    let start = [&section(1)[..], b"\x03ram", &[0; 4], &[0, 0, 0, 4]].concat();
    let total = be64s(&[(2 * HUGE + 3 * PAGE_SIZE) | 4]);
    // Only a block with pages other than target pages carries their size.
    let list = [b"\x06pc.ram", &be64s(&[2 * HUGE, HUGE])[..], b"\x03rom", &be64s(&[3 * PAGE_SIZE])].concat();
    assert_eq!(out, [start, total, list, section_end()].concat());

    out.clear();
    let mut part = loading.discard(&blocks, &mut out).open_part(&mut out);
    part.records().page(page(1, PAGE_SIZE), &mut out);
    let discarded = part.close(&mut out);
    let discard =
        |name: &[u8], length| command(6, &[&b"\x00"[..], name, b"\x00", &be64s(&[0, length])].concat());
    let discards = [discard(b"\x06pc.ram", 2 * HUGE), discard(b"\x03rom", 3 * PAGE_SIZE)].concat();
    let ahead = [section(2), be64s(&[PAGE_SIZE | 8]), b"\x03rom".to_vec(), section_end()].concat();
    assert_eq!(out, [discards, ahead].concat());

    out.clear();
    let packaged = discarded.package(b"devices", &mut out).unwrap();
    let package = [&command(4, &[])[..], b"devices", &command(2, &[0, 0, 0, 3]), &command(5, &[])].concat();
    let length = (package.len() as u32).to_be_bytes();
    let all = [command(2, &[0, 0, 0, 2]), command(7, &length), package].concat();
    assert_eq!(out, all[..all.len() - 1]);

    let before = out.len();
    let mut serving = packaged.run(&mut out);
    assert_eq!(out[..all.len()], all);
    assert_eq!(out[all.len()..], [command(2, &[0, 0, 0, 4]), section(2)].concat());
    assert_eq!(out.len() - before, 1 + 9 + 5);

    out.clear();
    serving.records().zero(page(1, 0), &mut out);
    serving.records().zero(page(0, HUGE), &mut out);
    serving.end(&mut out);
    let zeros = [&be64s(&[2])[..], b"\x03rom\x00", &be64s(&[HUGE | 2]), b"\x06pc.ram\x00"].concat();
    let end = [section_end(), section(3), section_end(), vec![0]].concat();
    // The record before the guest ran was of `rom` too: its name is repeated.
    assert_eq!(out, [zeros, end].concat());
}

#[test]
fn a_recovery_requests_all_bitmaps_at_once() {
    let mut out = Vec::new();
    let recovery = Recovery::ask(2, &blocks(), &mut out);
    assert_eq!(out, [command(10, b"\x06pc.ram"), command(10, b"\x03rom")].concat());
    out.clear();
    let resuming = recovery.resume(&mut out);
    assert_eq!(out, command(9, &[]));
    out.clear();
    let _serving = resuming.acknowledged(&mut out);
    assert_eq!(out, section(2));
}

fn request(block: Option<&str>, start: u64, length: u32) -> ReturnPathMessage {
    ReturnPathMessage::RequestPages { start, length, block: block.map(str::to_owned) }
}

#[test]
fn requests_name_their_block_once_and_lie_within_it() {
    let (blocks, mut answers) = (blocks(), PostcopyReturnPathReader::default());
    let mut handle = |message| answers.handle(&message, &blocks);
    assert_eq!(handle(request(None, 0, 4096)), Err(InvalidMessage::NothingToContinue.into()));
    let said = |block, offset, length| Ok(ReturnMessage::Request { page: page(block, offset), length });
    assert_eq!(handle(request(Some("rom"), PAGE_SIZE, 4096)), said(1, PAGE_SIZE, 4096));
    assert_eq!(handle(request(None, 0, 12288)), said(1, 0, 12288));
    assert_eq!(handle(request(Some("pc.ram"), HUGE, HUGE as u32)), said(0, HUGE, HUGE));
    let unknown = PeerMisbehaved::UnknownBlock { name: "vga".into() };
    assert_eq!(handle(request(Some("vga"), 0, 4096)), Err(unknown.into()));
    for (start, length) in [
        (PAGE_SIZE, HUGE as u32),
        (2 * HUGE, HUGE as u32),
        (0, 0),
        (u64::MAX - HUGE + 1, HUGE as u32),
        (0, 100),
    ] {
        let (block, total) = ("pc.ram".into(), 2 * HUGE);
        let error = InvalidMessage::Request { block, start, length: u64::from(length), total };
        assert_eq!(handle(request(Some("pc.ram"), start, length)), Err(error.into()));
    }
}

#[test]
fn a_destination_is_done_only_when_it_was_given_everything() {
    let (blocks, mut answers) = (blocks(), PostcopyReturnPathReader::default());
    let early = answers.handle(&ReturnPathMessage::Shut(0), &blocks);
    assert!(matches!(early, Err(Error::Misbehaved(PeerMisbehaved::Unexpected { .. }))), "{early:?}");
    assert_eq!(
        answers.handle(&ReturnPathMessage::Shut(1), &blocks),
        Err(PeerMisbehaved::ShutWithError { status: 1 }.into())
    );
    assert_eq!(
        answers.handle(&ReturnPathMessage::Pong(5), &blocks),
        Err(PeerMisbehaved::Pong { found: 5 }.into())
    );
    answers.expect_shut();
    assert_eq!(answers.handle(&ReturnPathMessage::Shut(0), &blocks), Ok(ReturnMessage::Shut));
}

#[test]
fn a_bitmap_is_as_long_as_its_block_and_ends_with_its_mark() {
    let rom = &blocks()[1];
    let mut bytes = Vec::new();
    put_bitmap(&[0b101], &mut bytes);
    assert_eq!(
        bytes,
        [&be64s(&[8])[..], &[5, 0, 0, 0, 0, 0, 0, 0], &be64s(&[0x0123_4567_89ab_cdef])].concat()
    );
    for cut in 0..bytes.len() {
        let mut reader = Reader::new(&bytes[..cut]);
        assert_eq!(decode_bitmap(&mut reader, rom), Ok(None));
        assert_eq!(reader.position(), 0);
    }
    let bits = decode_bitmap(&mut Reader::new(&bytes), rom).unwrap().unwrap();
    assert_eq!(bits, [5, 0, 0, 0, 0, 0, 0, 0]);
    let bitmap = |what, found, expected| {
        Err(Error::from(InvalidMessage::Bitmap { block: "rom".into(), what, found, expected }))
    };
    bytes[23] = 0;
    let expected = 0x0123_4567_89ab_cdef;
    assert_eq!(
        decode_bitmap(&mut Reader::new(&bytes), rom),
        bitmap("its end mark is", expected & !0xff, expected)
    );
    bytes[0] = 0x40;
    let found = 8 | 0x40 << 56;
    assert_eq!(decode_bitmap(&mut Reader::new(&bytes), rom), bitmap("its bytes are", found, 8));
}

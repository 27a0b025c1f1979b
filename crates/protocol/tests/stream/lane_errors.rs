//! Every error that a peer can cause on a lane or on the return path, exactly.

use towline_protocol::multifd::{HEADER_BYTES, Init, LaneRegistry, Packet};
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::source::ReturnPathReader;
use towline_protocol::{BlockIndex, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved, Reader, limits};

use crate::harness::lane_blocks;

/// A good header of one normal and one zero page, with `change` made to it.
fn header_with(change: impl Fn(&mut [u8])) -> Result<Packet, Error> {
    let packet = Packet {
        block: Some(BlockIndex(2)),
        normal: vec![0],
        zero: vec![0x1000],
        data_bytes: 4096,
        ..Packet::default()
    };
    let mut header = [0; HEADER_BYTES];
    packet.encode(&lane_blocks(), &mut header);
    change(&mut header);
    Packet::decode(&header, &lane_blocks())
}

fn set(at: usize, bytes: &[u8]) -> impl Fn(&mut [u8]) {
    move |header| header[at..at + bytes.len()].copy_from_slice(bytes)
}

#[test]
fn false_packets_are_refused() {
    use InvalidMessage as Invalid;
    let packet = |what, found, limit| Invalid::Packet { what, found, limit };
    let page = |offset| Invalid::PageOffset { block: "pc.bios".into(), offset, length: 0x10000 };
    let size = |found, pages, expected| Invalid::PacketSize { found, pages, expected };
    for (at, bytes, expected) in [
        (0, &[0x51, 0x45, 0x56, 0x4d][..], Invalid::MultifdMagic { found: 0x5145_564d }),
        (4, &[0, 0, 0, 2], Invalid::MultifdVersion { found: 2 }),
        (8, &[0, 0, 0, 6], packet("flags", 6, 63)),
        (8, &[0, 0, 0, 0x80], packet("flags", 0x80, 63)),
        (12, &[0, 0, 0, 129], packet("pages_alloc", 129, 128)),
        (16, &[0xff; 4], packet("normal_pages", 0xffff_ffff, 128)),
        (32, &[0, 0, 0, 128], packet("zero_pages", 128, 127)),
        (20, &[0, 0, 0x10, 1], size(4097, 1, 4096)),
        (20, &[0; 4], size(0, 1, 4096)),
        (64, &[b'x'; 256], Invalid::PacketName),
        (320, &[0, 0, 0, 0, 0, 0, 0, 1], page(1)),
        (328, &[0, 0, 0, 0, 0, 1, 0, 0], page(0x10000)),
        (328, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xf0, 0], page(!0xfff)),
    ] {
        assert_eq!(header_with(set(at, bytes)), Err(expected.into()), "{bytes:?} at {at}");
    }
    let zlib = header_with(|header| {
        set(8, &[0, 0, 0, 2])(header);
        set(20, &[0xff; 4])(header);
    });
    let limit = limits::PACKET_COMPRESSED_BYTES_MAX as u64;
    assert_eq!(zlib, Err(packet("data size", 0xffff_ffff, limit).into()));
    let what = "device state on a lane (VFIO's x-migration-multifd-transfer)";
    let feature = PeerIncompatible::Feature { what, switch: "x-migration-multifd-transfer" };
    assert_eq!(header_with(set(8, &[0, 0, 0, 0x40])), Err(feature.into()));
    let unknown = PeerMisbehaved::UnknownBlock { name: "qc.bios".into() };
    assert_eq!(header_with(set(64, b"q")), Err(unknown.into()));
}

/// QEMU 7.2 leaves the size, name and offsets of the packet before in a packet without pages.
#[test]
fn stale_fields_in_an_empty_packet_of_an_old_qemu_are_ignored() {
    let found = header_with(|header| {
        set(8, &[0, 0, 0, 1])(header);
        set(16, &[0; 4])(header);
        set(32, &[0; 4])(header);
        set(64, &[b'x'; 256])(header);
    });
    assert_eq!(found, Ok(Packet::sync(0)));
}

#[test]
fn lanes_that_are_not_those_of_one_migration() {
    let init = |id, uuid| Init { id, uuid: [uuid; 16] };
    let mut bytes = init(0, 0).encode();
    bytes[7] = 2;
    assert_eq!(Init::decode(&bytes), Err(InvalidMessage::MultifdVersion { found: 2 }.into()));
    bytes[0] = 0;
    assert_eq!(Init::decode(&bytes), Err(InvalidMessage::MultifdMagic { found: 0x0022_3344 }.into()));
    let mut registry = LaneRegistry::new(2);
    assert_eq!(registry.register(&init(1, 1)), Ok(1));
    assert_eq!(registry.uuid(), Some([1; 16]));
    assert_eq!(
        registry.register(&init(2, 1)),
        Err(PeerMisbehaved::LaneOutOfRange { id: 2, lanes: 2 }.into())
    );
    assert_eq!(registry.register(&init(1, 1)), Err(PeerMisbehaved::DuplicateLane { id: 1 }.into()));
    let (found, expected) =
        ("02020202-0202-0202-0202-020202020202".into(), "01010101-0101-0101-0101-010101010101".into());
    assert_eq!(registry.register(&init(0, 2)), Err(PeerMisbehaved::LaneUuid { found, expected }.into()));
    assert_eq!(registry.register(&init(0, 1)), Ok(0), "a refused lane has not taken its place");
}

#[test]
fn messages_of_the_wrong_length() {
    let wrong = |kind, found, expected| InvalidMessage::ReturnPathLength { kind, found, expected };
    for (kind, data, expected) in [
        (1, &[0, 0, 0][..], wrong(1, 3, 4)),
        (2, &[0; 5], wrong(2, 5, 4)),
        (6, &[], wrong(6, 0, 4)),
        (4, &[0; 8], wrong(4, 8, 12)),
        (4, &[0; 7], wrong(4, 7, 12)),
        (4, &[0; 13], wrong(4, 13, 12)),
        (3, &[0; 12], wrong(3, 12, 13)),
        (3, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, b'x'], wrong(3, 14, 13)),
        (3, &[0; 14], wrong(3, 14, 13)),
        (5, &[], wrong(5, 0, 1)),
        (5, &[200, b'x'], wrong(5, 2, 1)),
        (7, &[0], wrong(7, 1, 0)),
    ] {
        let mut bytes = Vec::new();
        ReturnPathMessage::Other { kind, data: data.into() }.encode(&mut bytes);
        assert_eq!(
            ReturnPathMessage::decode(&mut Reader::new(&bytes)),
            Err(expected.into()),
            "{kind} {data:?}"
        );
    }
    let long = InvalidMessage::TooLong { what: "return-path message", found: 513, limit: 512 };
    assert_eq!(ReturnPathMessage::decode(&mut Reader::new(&[0, 1, 2, 1])), Err(long.into()));
}

#[test]
fn a_tls_record_on_the_return_path_is_recognized() {
    // The alert of a server that expects a handshake, and a handshake of TLS 1.0.
    for bytes in [&[0x15, 3, 3, 0, 2, 2, 40][..], &[0x16, 3, 1, 0, 5, 0, 0, 0, 0, 0]] {
        let error = ReturnPathMessage::decode(&mut Reader::new(bytes)).unwrap_err();
        assert_eq!(error, InvalidMessage::Tls.into());
        assert!(error.to_string().contains("turn TLS on here, or off there"), "{error}");
    }
}

#[test]
fn a_source_takes_the_messages_that_it_can_expect() {
    let take = |message| {
        let mut answers = ReturnPathReader::default();
        answers.expect_shut();
        answers.handle(&message).map(|()| answers.has_shut())
    };
    assert_eq!(take(ReturnPathMessage::Shut(0)), Ok(true));
    assert_eq!(take(ReturnPathMessage::Pong(1)), Ok(false));
    assert_eq!(take(ReturnPathMessage::SwitchoverAck), Ok(false));
    let refused = |message| take(message).expect_err("it is refused");
    assert_eq!(refused(ReturnPathMessage::Pong(2)), PeerMisbehaved::Pong { found: 2 }.into());
    assert_eq!(refused(ReturnPathMessage::Shut(1)), PeerMisbehaved::ShutWithError { status: 1 }.into());
    let unexpected = |found: &str| PeerMisbehaved::Unexpected {
        found: found.into(),
        expected: "PONG or SHUT on the return path",
    };
    assert_eq!(refused(ReturnPathMessage::ResumeAck(1)), unexpected("ResumeAck(1)").into());
    let early = ReturnPathReader::default().handle(&ReturnPathMessage::Shut(0));
    let (found, expected) = ("SHUT before the stream's end".into(), "PONG");
    assert_eq!(early, Err(PeerMisbehaved::Unexpected { found, expected }.into()));
}

//! Messages byte for byte, as the specification (QEMU's `docs/interop/vhost-user.rst`) defines them.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};

use towline_vhost_user::message::{
    HEADER_BYTES, MessageError, MessageHeader, PAYLOAD_BYTES_MAX, Reply, Request, RequestCode,
    TransferDirection, VringState,
};

/// Parses hexadecimal bytes with blanks.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn fds(count: usize) -> Vec<OwnedFd> {
    let null = File::open("/dev/null").unwrap();
    (0..count).map(|_| null.as_fd().try_clone_to_owned().unwrap()).collect()
}

/// Decodes a whole message with `count` descriptors.
fn decode(text: &str, count: usize) -> Result<(MessageHeader, Request), MessageError> {
    let bytes = hex(text);
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().unwrap();
    let header = MessageHeader::parse(header)?;
    assert_eq!(header.length, payload.len(), "an error in the golden bytes");
    Request::decode(header.code, payload, fds(count)).map(|request| (header, request))
}

fn shown(text: &str, count: usize) -> String {
    let (_, request) = decode(text, count).unwrap();
    format!("{request:?}")
}

#[test]
fn requests_without_descriptors_are_decoded() {
    for (bytes, wanted) in [
        ("01000000 01000000 00000000", "GetFeatures"),
        ("02000000 01000000 08000000 0000004401000000", "SetFeatures(5435817984)"),
        ("03000000 01000000 00000000", "SetOwner"),
        ("10000000 01000000 08000000 0bd0000000000000", "SetProtocolFeatures(53259)"),
        ("11000000 01000000 00000000", "GetQueueNum"),
        ("13000000 01000000 08000000 5254001234560000", "SendRarp([82, 84, 0, 18, 52, 86])"),
        ("14000000 09000000 08000000 dc05000000000000", "NetSetMtu(1500)"),
        ("22000000 01000000 00000000", "ResetDevice"),
        ("2b000000 01000000 00000000", "CheckDeviceState"),
        (
            "18000000 01000000 0c000000 04000000 08000000 00000000",
            "GetConfig { offset: 4, size: 8, flags: 0 }",
        ),
        (
            "19000000 01000000 0e000000 04000000 02000000 01000000 abcd",
            "SetConfig { offset: 4, flags: 1, bytes: [171, 205] }",
        ),
    ] {
        assert_eq!(shown(bytes, 0), wanted);
    }
    let (header, _) = decode("14000000 09000000 08000000 dc05000000000000", 0).unwrap();
    assert_eq!(header, MessageHeader { code: RequestCode::NET_SET_MTU, need_reply: true, length: 8 });
    assert_eq!(header.encode()[..], hex("14000000 09000000 08000000"));
}

#[test]
fn requests_about_rings_are_decoded() {
    let Request::SetVringAddress(address) = decode(
        "09000000 01000000 28000000 03000000 01000000 1000000000000011 2000000000000022 3000000000000033 4000000000000044",
        0,
    )
    .unwrap()
    .1
    else {
        panic!()
    };
    assert_eq!((address.index, address.flags), (3, 1));
    assert_eq!(address.descriptors, 0x1100_0000_0000_0010);
    assert_eq!(address.used, 0x2200_0000_0000_0020);
    assert_eq!(address.available, 0x3300_0000_0000_0030);
    assert_eq!(address.log, 0x4400_0000_0000_0040);
    let Request::SetVringKick(kick) = decode("0c000000 01000000 08000000 0700000000000000", 1).unwrap().1
    else {
        panic!()
    };
    assert_eq!((kick.index, kick.fd.is_some()), (7, true));
    let Request::SetVringCall(call) = decode("0d000000 01000000 08000000 0701000000000000", 0).unwrap().1
    else {
        panic!()
    };
    assert_eq!((call.index, call.fd.is_none()), (7, true));
    let Request::GetVringBase(state) = decode("0b000000 01000000 08000000 02000000 00000000", 0).unwrap().1
    else {
        panic!()
    };
    assert_eq!(state.index, 2);
}

#[test]
fn requests_about_memory_log_and_state_are_decoded() {
    let table = "05000000 01000000 48000000 02000000 00000000 \
                 0000000000000000 0000a00000000000 00000000007f0000 0000000000000000 \
                 0000000001000000 0000100000000000 0000b000007f0000 0000a00000000000";
    let Request::SetMemTable(regions) = decode(table, 2).unwrap().1 else { panic!() };
    let (second, _) = &regions[1];
    assert_eq!((second.guest_address, second.size), (0x1_0000_0000, 0x10_0000));
    assert_eq!((second.user_address, second.mmap_offset), (0x7f00_00b0_0000, 0xa0_0000));
    let one = "25000000 09000000 28000000 0000000000000000 \
               0000100000000000 0010000000000000 00000000007f0000 0020000000000000";
    let Request::AddMemReg(region, _) = decode(one, 1).unwrap().1 else { panic!() };
    assert_eq!((region.guest_address, region.mmap_offset), (0x10_0000, 0x2000));
    let log = "06000000 01000000 10000000 0080000000000000 0010000000000000";
    let Request::SetLogBase(log) = decode(log, 1).unwrap().1 else { panic!() };
    assert_eq!((log.size, log.offset), (0x8000, 0x1000));
    let load = decode("2a000000 01000000 08000000 01000000 00000000", 1).unwrap().1;
    assert!(matches!(load, Request::SetDeviceStateFd(TransferDirection::Load, _)));
}

#[test]
fn replies_are_encoded() {
    assert_eq!(
        Reply::Number(0x1_4400_0000).encode(RequestCode::GET_FEATURES),
        hex("01000000 05000000 08000000 0000004401000000")
    );
    let base = Reply::VringBase(VringState { index: 1, number: 0xfffe });
    assert_eq!(base.encode(RequestCode::GET_VRING_BASE), hex("0b000000 05000000 08000000 01000000 feff0000"));
    let config = |bytes: &[u8]| {
        Reply::Config { offset: 4, flags: 0, bytes: bytes.to_vec() }.encode(RequestCode::GET_CONFIG)
    };
    assert_eq!(config(&[1, 2]), hex("18000000 05000000 0e000000 04000000 02000000 00000000 0102"));
    assert_eq!(config(&[]), hex("18000000 05000000 00000000"));
}

#[test]
fn errors_of_messages_have_code_and_value() {
    let fault = |text: &str, count| decode(text, count).unwrap_err();
    let code = RequestCode::SET_FEATURES;
    assert_eq!(fault("02000000 00000000 00000000", 0), MessageError::Version { code, found: 0 });
    assert_eq!(fault("02000000 05000000 00000000", 0), MessageError::ReplyAsRequest { code });
    assert_eq!(fault("02000000 01000000 00000000", 0), MessageError::Length { code, found: 0, expected: 8 });
    let descriptors = |code, found, expected| MessageError::Descriptors { code, found, expected };
    assert_eq!(fault("02000000 01000000 08000000 0000000000000000", 1), descriptors(code, 1, 0));
    assert_eq!(
        fault("0c000000 01000000 08000000 0000000000000000", 0),
        descriptors(RequestCode::SET_VRING_KICK, 0, 1)
    );
    assert_eq!(
        fault("0c000000 01000000 08000000 0001000000000000", 1),
        descriptors(RequestCode::SET_VRING_KICK, 1, 0)
    );
    assert_eq!(
        fault("05000000 01000000 08000000 01000000 00000000", 1).to_string(),
        "SET_MEM_TABLE has 8 bytes of payload, expected 40"
    );
    assert_eq!(fault("05000000 01000000 08000000 09000000 00000000", 0), MessageError::Regions { found: 9 });
    for (text, expected) in [
        (
            "0c000000 01000000 08000000 0002000000000000",
            "SET_VRING_KICK: its payload is 512, expected a ring below 256, and bit 8 for no descriptor",
        ),
        (
            "18000000 01000000 0c000000 ff000000 02000000 00000000",
            "GET_CONFIG: the end of the range is 257, expected at most 256",
        ),
        (
            "18000000 01000000 0c000000 ffffffff ffffffff 00000000",
            "GET_CONFIG: the end of the range is 8589934590, expected at most 256",
        ),
        ("1f000000 01000000 00000000", "GET_INFLIGHT_FD is not supported (INFLIGHT_SHMFD is not offered)"),
        ("63000000 01000000 00000000", "request 99 is not supported"),
    ] {
        assert_eq!(fault(text, 0).to_string(), expected);
    }
    let mut long = hex("02000000 01000000 00000000");
    long[8..].copy_from_slice(&u32::to_le_bytes(PAYLOAD_BYTES_MAX as u32 + 1));
    let long = MessageHeader::parse(long.first_chunk().unwrap()).unwrap_err();
    assert_eq!(long.to_string(), "SET_FEATURES has 4097 bytes of payload, at most 4096 are accepted");
}

//! Segmentation and checksums, compared with a model that builds each packet from its fields; and any bytes.
#![allow(clippy::unwrap_used, reason = "a failure of a helper is a failure of its test")]

mod hostile;
mod model;

use proptest::prelude::*;
use towline_net::segment::checksum::Sum;
use towline_net::segment::{HEADERS_BYTES_MAX, Offload, OffloadRequest, REQUEST_BYTES, SEGMENTS_MAX};

use model::{Checksum, Ip, Packet, Transport};

fn ip() -> impl Strategy<Value = Ip> {
    prop_oneof![
        (any::<[u8; 8]>(), any::<u16>(), 0usize..=10, any::<u8>())
            .prop_map(|(addresses, id, options, tos)| Ip::V4 { addresses, id, options: options * 4, tos }),
        any::<[u8; 32]>().prop_map(|addresses| Ip::V6 { addresses }),
    ]
}

fn transport() -> impl Strategy<Value = Transport> {
    let tcp = (any::<u32>(), any::<u8>(), 0usize..=10);
    prop_oneof![
        tcp.prop_map(|(sequence, flags, options)| Transport::Tcp { sequence, flags, options: options * 4 }),
        Just(Transport::Udp),
    ]
}

fn packet(longest: usize) -> impl Strategy<Value = Packet> {
    let payload = prop::collection::vec(any::<u8>(), 1..=longest);
    (0usize..=2, ip(), transport(), payload).prop_map(|(vlans, ip, transport, payload)| Packet {
        vlans,
        ip,
        transport,
        payload,
    })
}

/// Packets that the code under test makes of a frame, with checksums in software.
fn packets(header: &[u8; REQUEST_BYTES], frame: &[u8]) -> Option<Vec<Vec<u8>>> {
    let headers = &frame[..frame.len().min(HEADERS_BYTES_MAX)];
    let add_rest = |bytes: &[u8]| {
        let bytes = bytes.to_vec();
        // In parts, as in guest memory.
        move |sum: &mut Sum| bytes.chunks(61).for_each(|part| sum.add(part))
    };
    match OffloadRequest::new(header).offload(headers, frame.len())? {
        Offload::None => Some(vec![frame.to_vec()]),
        Offload::Checksum(partial) => {
            let mut packet = headers.to_vec();
            partial.finish(&mut packet, add_rest(&frame[headers.len()..]));
            Some(vec![[&packet, &frame[headers.len()..]].concat()])
        }
        Offload::Segmentation(segments) => {
            let made = (0..segments.count()).map(|index| {
                let payload = &frame[segments.payload(index)];
                let mut packet = vec![0xaa; segments.header_bytes()];
                segments.write(index, &mut packet).finish(&mut packet, add_rest(payload));
                [&packet, payload].concat()
            });
            Some(made.collect())
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn super_frames_are_segmented_as_by_the_model(packet in packet(6000), segment in 1u16..2000) {
        let frame = packet.frame(Checksum::Partial);
        let made = packets(&packet.request(Some(segment)), &frame);
        let count = packet.payload.len().div_ceil(segment.into());
        if count > SEGMENTS_MAX {
            prop_assert_eq!(made, None);
        } else {
            let wanted: Vec<_> = packet.segments(segment.into()).iter().map(|packet| packet.frame(Checksum::Complete)).collect();
            prop_assert_eq!(made, Some(wanted));
        }
    }

    #[test]
    fn checksums_are_those_of_the_model(packet in packet(3000)) {
        prop_assert_eq!(packets(&packet.request(None), &packet.frame(Checksum::Partial)), Some(vec![packet.frame(Checksum::Complete)]));
    }

    #[test]
    fn frames_without_offloads_are_not_changed(frame in prop::collection::vec(any::<u8>(), 14..300)) {
        prop_assert_eq!(packets(&[0; REQUEST_BYTES], &frame), Some(vec![frame]));
    }

    #[test]
    fn any_bytes_become_valid_packets_or_none(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        hostile::frames(&bytes);
    }

    /// Valid frames with a few changed bytes reach more of the code.
    #[test]
    fn damaged_frames_become_valid_packets_or_none(
        packet in packet(2000),
        segment in any::<u16>(),
        damage in prop::collection::vec((0usize..80, any::<u8>()), 0..4),
    ) {
        let mut bytes = packet.request(Some(segment)).to_vec();
        bytes.extend(packet.frame(Checksum::Partial));
        for (at, byte) in damage {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        hostile::frames(&bytes);
    }
}

#[test]
fn unsupported_offloads_are_left_to_the_kernel() {
    let ip = Ip::V4 { addresses: [1; 8], id: 7, options: 0, tos: 0 };
    let transport = Transport::Tcp { sequence: 1, flags: 0x18, options: 0 };
    let packet = Packet { vlans: 0, ip, transport, payload: vec![5; 3000] };
    let (request, frame) = (packet.request(Some(1000)), packet.frame(Checksum::Partial));
    assert!(packets(&request, &frame).is_some());
    let refused = |at: usize, byte: u8, what: &str| {
        let (mut request, mut frame) = (request, frame.clone());
        match at.checked_sub(REQUEST_BYTES) {
            Some(at) => frame[at] = byte,
            None => request[at] = byte,
        }
        assert_eq!(packets(&request, &frame), None, "{what}");
    };
    refused(0, 0, "a super-frame without a partial checksum");
    refused(1, 3, "UFO");
    refused(1, 4, "another family");
    refused(1, 5, "another protocol");
    refused(6, 30, "another csum_start");
    refused(8, 6, "another csum_offset");
    refused(REQUEST_BYTES + 20, 0x20, "a fragment");
    refused(REQUEST_BYTES + 23, 47, "a tunnel");
}

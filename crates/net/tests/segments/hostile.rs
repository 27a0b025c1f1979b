//! Any frame of a guest becomes packets with valid lengths and checksums, or none.
#![allow(unreachable_pub, reason = "the fuzz target uses it")]

use towline_net::segment::checksum::Sum;
use towline_net::segment::{HEADERS_BYTES_MAX, Offload, OffloadRequest, REQUEST_BYTES, SEGMENTS_MAX};

/// Segments a virtio header and a frame.
///
/// # Panics
/// If a packet is invalid.
pub fn frames(bytes: &[u8]) {
    let Some((header, frame)) = bytes.split_first_chunk::<REQUEST_BYTES>() else { return };
    let headers = &frame[..frame.len().min(HEADERS_BYTES_MAX)];
    match OffloadRequest::new(header).offload(headers, frame.len()) {
        None | Some(Offload::None) => {}
        Some(Offload::Checksum(partial)) => {
            let mut packet = headers.to_vec();
            partial.finish(&mut packet, |sum| sum.add(&frame[headers.len()..]));
            let (start, field) = (usize::from(partial.start), usize::from(partial.start + partial.offset));
            assert_eq!((packet.len(), &packet[..field]), (headers.len(), &headers[..field]));
            assert_eq!(
                &packet[field + 2..],
                &headers[field + 2..],
                "only the field changes, from {start} on"
            );
        }
        Some(Offload::Segmentation(segments)) => {
            let count = segments.count();
            assert!((1..=SEGMENTS_MAX).contains(&count), "{count} packets");
            let mut next = segments.header_bytes();
            for index in 0..count {
                let range = segments.payload(index);
                assert!(range.start == next && range.end > next, "{range:?} begins at {next}");
                next = range.end;
                let payload = &frame[range];
                let mut packet = vec![0; segments.header_bytes()];
                let partial = segments.write(index, &mut packet);
                partial.finish(&mut packet, |sum: &mut Sum| sum.add(payload));
                packet.extend(payload);
                assert!(packet.len() <= segments.packet_bytes_max());
                check(&packet);
            }
            assert_eq!(next, frame.len(), "the payload is incomplete");
        }
    }
}

/// Validates a packet as its receiver does.
fn check(packet: &[u8]) {
    let mut ip = 12;
    while packet[ip] == 0x81 || packet[ip..ip + 2] == [0x88, 0xa8] {
        ip += 4;
    }
    ip += 2;
    let length = |at: usize| usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
    let (transport, end, protocol, addresses) = if packet[ip] >> 4 == 4 {
        let transport = ip + usize::from(packet[ip] & 0xf) * 4;
        assert!(is_valid(&packet[ip..transport]), "the header checksum is wrong");
        (transport, ip + length(ip + 2), packet[ip + 9], ip + 12..ip + 20)
    } else {
        (ip + 40, ip + 40 + length(ip + 4), packet[ip + 6], ip + 8..ip + 40)
    };
    assert_eq!(end, packet.len(), "the length is wrong");
    let mut summed = packet[addresses].to_vec();
    summed.extend([0, protocol]);
    summed.extend(u16::try_from(end - transport).expect("lengths have 16 bits").to_be_bytes());
    summed.extend(&packet[transport..]);
    assert!(is_valid(&summed), "the checksum of protocol {protocol} is wrong");
}

/// Returns true if the checksum is valid: the words sum up to all ones.
fn is_valid(bytes: &[u8]) -> bool {
    let words =
        bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |low| (*low).into()));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

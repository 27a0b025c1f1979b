//! The frame by which switches learn the new port of a guest (RFC 903, as in QEMU's announcements).

/// Length of the shortest Ethernet frame without its checksum.
const FRAME_BYTES: usize = 60;

/// A broadcast from this address that requests its own IP address. No reply is expected.
pub(crate) fn frame(mac: [u8; 6]) -> [u8; FRAME_BYTES] {
    let mut frame = [0; FRAME_BYTES];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // RARP; Ethernet (6 bytes) to IPv4 (4 bytes); reverse request.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_frame_has_the_layout_of_rfc_903() {
        let frame = super::frame([2, 0, 0, 0, 0, 9]);
        let text: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        let wanted = "ffffffffffff0200000000098035000108000604000302000000000900000000020000000009";
        assert_eq!(text.trim_end_matches('0'), wanted);
        assert_eq!(frame.len(), 60);
    }
}

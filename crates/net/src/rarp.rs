//! The frame that tells switches where a guest is now (RFC 903, as QEMU's own announcements have it).

/// Bytes of the shortest Ethernet frame, without its checksum.
const FRAME_BYTES: usize = 60;

/// A broadcast from this address, which asks for its own IP address; nobody answers, every switch learns.
pub(crate) fn frame(mac: [u8; 6]) -> [u8; FRAME_BYTES] {
    let mut frame = [0; FRAME_BYTES];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // RARP; Ethernet addresses of 6 bytes for IPv4 of 4; a request.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_frame_is_as_rfc_903_has_it() {
        let frame = super::frame([2, 0, 0, 0, 0, 9]);
        let text: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        let wanted = "ffffffffffff0200000000098035000108000604000302000000000900000000020000000009";
        assert_eq!(text.trim_end_matches('0'), wanted);
        assert_eq!(frame.len(), 60);
    }
}

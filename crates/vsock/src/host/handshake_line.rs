//! Firecracker's handshake over Unix sockets: clients send `CONNECT port\n` and receive `OK port\n`, as its
//! `docs/vsock.md` describes.

use crate::packet::SocketType;

/// Maximum length of a line.
pub(super) const LINE_BYTES_MAX: usize = 32;

/// Result of parsing the bytes that were received so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeLine {
    /// The line is incomplete.
    Incomplete,
    /// The line is complete.
    Complete {
        /// The port.
        port: u32,
        /// Length of the line in bytes.
        length: usize,
    },
    /// Not a valid line.
    Invalid,
}

/// Parses a client's `CONNECT port`. With [`SocketType::Seqpacket`] the end of the message ends the line too.
pub(super) fn parse_connect(bytes: &[u8], kind: SocketType) -> HandshakeLine {
    parse(bytes, kind, "connect", |port| port != u32::MAX)
}

/// Parses the `OK port` of another process.
pub(super) fn parse_ok(bytes: &[u8], kind: SocketType) -> HandshakeLine {
    parse(bytes, kind, "ok", |_| true)
}

fn parse(bytes: &[u8], kind: SocketType, word: &str, is_valid: impl Fn(u32) -> bool) -> HandshakeLine {
    let end = bytes.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n');
    let (text, length) = match end {
        Some(end) => (&bytes[..end], end + 1),
        None if kind == SocketType::Seqpacket && bytes.len() <= LINE_BYTES_MAX => (bytes, bytes.len()),
        None if bytes.len() >= LINE_BYTES_MAX => return HandshakeLine::Invalid,
        None => return HandshakeLine::Incomplete,
    };
    let Ok(text) = std::str::from_utf8(text) else { return HandshakeLine::Invalid };
    let mut words = text.split_whitespace();
    if !words.next().is_some_and(|first| first.eq_ignore_ascii_case(word)) {
        return HandshakeLine::Invalid;
    }
    match words.next().and_then(|port| port.parse().ok()).filter(|port| is_valid(*port)) {
        Some(port) => HandshakeLine::Complete { port, length },
        None => HandshakeLine::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete(port: u32, length: usize) -> HandshakeLine {
        HandshakeLine::Complete { port, length }
    }

    #[test]
    fn lines_are_parsed_as_firecracker_parses_them() {
        let connect = |bytes: &[u8]| parse_connect(bytes, SocketType::Stream);
        assert_eq!(connect(b"CONNECT 52\n"), complete(52, 11));
        assert_eq!(connect(b"connect 52\nand data"), complete(52, 11));
        assert_eq!(connect(b"CONNECT  52 \r\n"), complete(52, 14));
        assert_eq!(connect(b"CONN"), HandshakeLine::Incomplete);
        assert_eq!(connect(b""), HandshakeLine::Incomplete);
        assert_eq!(connect(b"CONNECT 52"), HandshakeLine::Incomplete);
        assert_eq!(parse_connect(b"CONNECT 52", SocketType::Seqpacket), complete(52, 10));
        for invalid in
            [&b"HELLO 1\n"[..], b"CONNECT\n", b"CONNECT x\n", b"CONNECT 4294967296\n", b"\n", b"\xff\n"]
        {
            assert_eq!(connect(invalid), HandshakeLine::Invalid, "{invalid:?}");
        }
        assert_eq!(connect(&[b'C'; LINE_BYTES_MAX]), HandshakeLine::Invalid);
        assert_eq!(parse_ok(b"OK 1073741824\n", SocketType::Stream), complete(1_073_741_824, 14));
    }
}

//! Recognizes a protocol by its first bytes, to name the mistake of a peer that speaks another one.

/// First bytes of TLS: a handshake record of any version 3.x.
const HELLO: [u8; 2] = [0x16, 3];

/// Guesses the protocol from the first bytes, if it is a known one that belongs on another port.
pub fn describe_plain(first: &[u8]) -> Option<&'static str> {
    match first {
        b"QEVM" => Some("a migration without TLS"),
        [0x11, 0x22, 0x33, 0x44] => Some("a migration's lane without TLS"),
        b"GET " => Some("HTTP without TLS"),
        [a, b, ..] if [*a, *b] == HELLO => Some("TLS"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_on_the_wrong_port_is_named_by_its_first_bytes() {
        assert_eq!(describe_plain(b"QEVM"), Some("a migration without TLS"));
        assert_eq!(describe_plain(&[0x11, 0x22, 0x33, 0x44]), Some("a migration's lane without TLS"));
        assert_eq!(describe_plain(&[0x16, 3, 1, 2]), Some("TLS"));
        assert_eq!(describe_plain(&[0x16]), None);
        assert_eq!(describe_plain(b""), None);
    }
}

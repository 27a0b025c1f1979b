//! Firecracker's way over Unix sockets: `CONNECT port\n` and `OK port\n`, as its `docs/vsock.md` has it.

/// The longest line that is waited for.
pub(super) const LINE_BYTES_MAX: usize = 32;

/// What a line so far comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line<T> {
    /// Not complete.
    More,
    /// Complete, with so many bytes.
    Whole(T, usize),
    /// It will never be one.
    Wrong,
}

/// What whoever connects has to say. `whole`: the bytes are a message, whose end is the line's too.
pub(super) fn connect(bytes: &[u8], whole: bool) -> Line<u32> {
    line(bytes, whole, "connect", |port: u32| port != u32::MAX)
}

/// What is answered, by another process like this one.
pub(super) fn ok(bytes: &[u8], whole: bool) -> Line<u32> {
    line(bytes, whole, "ok", |_| true)
}

fn line(bytes: &[u8], whole: bool, word: &str, good: impl Fn(u32) -> bool) -> Line<u32> {
    let end = bytes.iter().take(LINE_BYTES_MAX).position(|byte| *byte == b'\n');
    let (text, length) = match end {
        Some(end) => (&bytes[..end], end + 1),
        None if whole && bytes.len() <= LINE_BYTES_MAX => (bytes, bytes.len()),
        None if bytes.len() >= LINE_BYTES_MAX => return Line::Wrong,
        None => return Line::More,
    };
    let Ok(text) = std::str::from_utf8(text) else { return Line::Wrong };
    let mut words = text.split_whitespace();
    if !words.next().is_some_and(|first| first.eq_ignore_ascii_case(word)) {
        return Line::Wrong;
    }
    match words.next().and_then(|port| port.parse().ok()).filter(|port| good(*port)) {
        Some(port) => Line::Whole(port, length),
        None => Line::Wrong,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_as_firecracker_takes_it() {
        assert_eq!(connect(b"CONNECT 52\n", false), Line::Whole(52, 11));
        assert_eq!(connect(b"connect 52\nand data", false), Line::Whole(52, 11));
        assert_eq!(connect(b"CONNECT  52 \r\n", false), Line::Whole(52, 14));
        assert_eq!(connect(b"CONN", false), Line::More);
        assert_eq!(connect(b"", false), Line::More);
        assert_eq!(connect(b"CONNECT 52", false), Line::More);
        assert_eq!(connect(b"CONNECT 52", true), Line::Whole(52, 10));
        for wrong in
            [&b"HELLO 1\n"[..], b"CONNECT\n", b"CONNECT x\n", b"CONNECT 4294967296\n", b"\n", b"\xff\n"]
        {
            assert_eq!(connect(wrong, false), Line::Wrong, "{wrong:?}");
        }
        assert_eq!(connect(&[b'C'; LINE_BYTES_MAX], false), Line::Wrong);
        assert_eq!(ok(b"OK 1073741824\n", false), Line::Whole(1_073_741_824, 14));
    }
}

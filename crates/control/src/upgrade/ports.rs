//! The other end of a port or monitor, as `-serial`, `-monitor` and `-qmp` name it (`qemu_chr_parse_compat`
//! of QEMU's `chardev/char.c`).

/// The other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Port<'a> {
    /// Internal to QEMU: none, a text console, a chardev that another option describes.
    Own,
    /// A Unix socket that QEMU listens on.
    Listening {
        /// `mon:` or nothing.
        prefix: &'a str,
        path: &'a str,
        /// Its further properties.
        words: &'a str,
    },
    /// A file that QEMU writes.
    File { path: &'a str },
    /// QEMU's terminal, or a new one.
    Terminal,
    /// A socket of another process.
    Connected,
    /// A port of the host.
    Network,
    /// Anything else.
    Unknown,
}

pub(super) fn parse_port(text: &str) -> Port<'_> {
    let (prefix, rest) = match text.strip_prefix("mon:") {
        Some(rest) => ("mon:", rest),
        None => ("", text),
    };
    let (kind, value) = rest.split_once(':').unwrap_or((rest, ""));
    match kind {
        "none" | "null" | "chardev" | "vc" => Port::Own,
        "stdio" | "pty" | "msmouse" => Port::Terminal,
        "file" if prefix.is_empty() && !value.is_empty() => Port::File { path: value },
        "unix" => {
            let (path, words) = value.split_once(',').unwrap_or((value, ""));
            let has = |key: &str| {
                let is_on = |word: &str| {
                    word.strip_prefix(key)
                        .is_some_and(|rest| ["", "=on", "=yes", "=true", "=y"].contains(&rest))
                };
                words.split(',').any(is_on)
            };
            match (has("server"), has("abstract")) {
                // An escaped comma: the path continues.
                _ if value.contains(",,") => Port::Unknown,
                (true, true) => Port::Network,
                (true, false) => Port::Listening { prefix, path, words },
                (false, _) => Port::Connected,
            }
        }
        "tcp" | "telnet" | "tn3270" | "websocket" | "udp" => Port::Network,
        _ => Port::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_apart() {
        for (text, expected) in [
            ("none", Port::Own),
            ("vc:80Cx24C", Port::Own),
            ("chardev:agent", Port::Own),
            ("mon:stdio", Port::Terminal),
            ("file:/tmp/a,b", Port::File { path: "/tmp/a,b" }),
            (
                "unix:/run/a,server,nowait",
                Port::Listening { prefix: "", path: "/run/a", words: "server,nowait" },
            ),
            (
                "mon:unix:a,server=on,wait=off",
                Port::Listening { prefix: "mon:", path: "a", words: "server=on,wait=off" },
            ),
            ("unix:a,server=on,abstract=on", Port::Network),
            ("unix:a,,b,server=on", Port::Unknown),
            ("unix:/run/a", Port::Connected),
            ("unix:/run/a,server=off", Port::Connected),
            ("tcp::4444,server", Port::Network),
            ("/dev/ttyS0", Port::Unknown),
        ] {
            assert_eq!(parse_port(text), expected, "{text}");
        }
    }
}

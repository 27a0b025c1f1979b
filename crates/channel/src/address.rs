//! Addresses in QEMU's URI forms.
//!
//! | form | meaning |
//! |---|---|
//! | `tcp:HOST:PORT` | IPv6 in brackets; without a host every address to listen on, this machine to connect to; host `0` is `0.0.0.0` |
//! | `unix:PATH` | a stream socket |
//! | `ws://HOST[:PORT][/PATH]`, `wss://…` | WebSocket over TCP, or over TLS; ports 80 and 443 if none is given, path `/` |
//! | `fd:N` | a descriptor this process inherited |
//! | `exec:COMMAND` | the standard input and output of `/bin/sh -c COMMAND` |
//! | `file:PATH[,offset=N]` | a file, from byte N (decimal or `0x`); the last `,offset=` counts |
//!
//! Out of scope: the command line's endpoints, which have more forms (`qmp:`, `s3://`) and are parsed there.

use crate::{Error, Result};
use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

const OFFSET: &str = ",offset=";

/// Where a channel leads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A TCP port.
    Tcp {
        /// Name or numeric address, without brackets; empty as the module's table says.
        host: String,
        /// 0 lets a listener choose; see [`Listener::local_address`](crate::Listener::local_address).
        port: u16,
    },
    /// A Unix stream socket.
    Unix(PathBuf),
    /// A WebSocket.
    WebSocket {
        /// Over TLS (`wss:`).
        secure: bool,
        /// As that of [`Address::Tcp`]; never empty.
        host: String,
        /// As that of [`Address::Tcp`].
        port: u16,
        /// The request path, from its leading `/` on.
        path: String,
    },
    /// A descriptor of this process, which a channel takes over.
    Fd(RawFd),
    /// A command for the shell.
    Exec(String),
    /// A file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Where the stream begins, in bytes.
        offset: u64,
    },
}

impl FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::BadAddress { address: text.to_owned(), why: why.to_owned() };
        let (scheme, rest) = text
            .split_once(':')
            .ok_or_else(|| bad("expected tcp:HOST:PORT, unix:PATH, fd:N, exec:COMMAND or file:PATH"))?;
        match scheme {
            "tcp" => tcp(rest).map_err(bad),
            "unix" if rest.is_empty() => Err(bad("the path is missing: unix:PATH")),
            "unix" => Ok(Self::Unix(rest.into())),
            "ws" | "wss" => websocket(rest, scheme == "wss").map_err(bad),
            "fd" => digits(rest)
                .map(Self::Fd)
                .ok_or_else(|| bad("expected the number of an open descriptor, such as fd:3")),
            "exec" if rest.trim().is_empty() => Err(bad("the command is missing: exec:COMMAND")),
            "exec" => Ok(Self::Exec(rest.to_owned())),
            "file" => file(rest).map_err(bad),
            _ => Err(bad("unknown kind; expected tcp:, unix:, ws://, wss://, fd:, exec: or file:")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { .. } => write!(f, "tcp:{}", self.authority().unwrap_or_default()),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::WebSocket { secure, path, .. } => {
                let scheme = if *secure { "wss" } else { "ws" };
                write!(f, "{scheme}://{}{path}", self.authority().unwrap_or_default())
            }
            Self::Fd(number) => write!(f, "fd:{number}"),
            Self::Exec(command) => write!(f, "exec:{command}"),
            Self::File { path, offset } => {
                let path = path.display().to_string();
                write!(f, "file:{path}")?;
                // A path that seems to end in an offset needs a real one after it to be parsed back
                // unchanged.
                if *offset != 0 || path.contains(OFFSET) { write!(f, "{OFFSET}{offset}") } else { Ok(()) }
            }
        }
    }
}

impl Address {
    /// Refuses an address whose kind does not go with TLS, or without.
    pub(crate) fn check_tls(&self, tls: bool) -> Result<()> {
        match self {
            Self::WebSocket { secure: true, .. } if !tls => {
                Err(self.bad("wss:// needs certificates; ws:// is the one without TLS"))
            }
            Self::WebSocket { secure: false, .. } if tls => {
                Err(self.bad("ws:// is the one without TLS; with certificates it is wss://"))
            }
            _ => Ok(()),
        }
    }

    /// Host and port as they stand in a URL; `None` where there are none.
    pub(crate) fn authority(&self) -> Option<String> {
        match self {
            Self::Tcp { host, port } | Self::WebSocket { host, port, .. } if host.contains(':') => {
                Some(format!("[{host}]:{port}"))
            }
            Self::Tcp { host, port } | Self::WebSocket { host, port, .. } => Some(format!("{host}:{port}")),
            _ => None,
        }
    }

    /// An address that the system would refuse, with the reason.
    pub(crate) fn bad(&self, why: impl Into<String>) -> Error {
        Error::BadAddress { address: self.to_string(), why: why.into() }
    }
}

fn tcp(rest: &str) -> Result<Address, &'static str> {
    let (host, port) = match rest.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once("]:").ok_or("expected tcp:[IPV6]:PORT")?,
        None => rest.rsplit_once(':').ok_or("expected tcp:HOST:PORT")?,
    };
    if rest.starts_with('[') {
        if !host.contains(':') || host.contains(['[', ']']) {
            return Err("brackets are for IPv6 addresses: tcp:[IPV6]:PORT");
        }
    } else if host.contains(':') {
        return Err("an IPv6 address needs brackets: tcp:[IPV6]:PORT");
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control() || c == ',') {
        return Err("the host has a character that no host name has");
    }
    if port.contains(',') {
        return Err("options after the port are not supported; expected tcp:HOST:PORT");
    }
    let port = digits(port).ok_or("the port is not a number from 0 to 65535")?;
    Ok(Address::Tcp { host: host.to_owned(), port })
}

fn websocket(rest: &str, secure: bool) -> Result<Address, &'static str> {
    let rest = rest.strip_prefix("//").ok_or("expected ws://HOST[:PORT][/PATH], or wss://")?;
    let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    if path.contains(|c: char| {
        !c.is_ascii_graphic()
            || matches!(c, '?' | '#' | '%' | '"' | '<' | '>' | '\\' | '^' | '`' | '{' | '|' | '}')
    }) {
        return Err("a path here has letters, digits and -._~!$&'()*+,;=:@/ only");
    }
    let has_port = authority.rsplit(']').next().is_some_and(|end| end.contains(':'));
    let port = if secure { ":443" } else { ":80" };
    match tcp(&format!("{authority}{}", if has_port { "" } else { port }))? {
        Address::Tcp { host, .. } if host.is_empty() => {
            Err("the host is missing; 0.0.0.0 is every one of this machine's")
        }
        Address::Tcp { host, port } => Ok(Address::WebSocket { secure, host, port, path: path.to_owned() }),
        _ => Err("expected ws://HOST[:PORT][/PATH]"),
    }
}

fn file(rest: &str) -> Result<Address, &'static str> {
    let (path, offset) = match rest.rsplit_once(OFFSET) {
        None => (rest, 0),
        Some((path, offset)) => {
            let number = match offset.strip_prefix("0x").or_else(|| offset.strip_prefix("0X")) {
                Some(hex) if hex.starts_with('+') => None,
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => digits(offset),
            };
            (path, number.ok_or("the offset is not a number of bytes, such as 4096 or 0x1000")?)
        }
    };
    if path.is_empty() {
        return Err("the path is missing: file:PATH[,offset=N]");
    }
    Ok(Address::File { path: path.into(), offset })
}

/// A number of digits only: `parse` alone would take a `+` before it.
fn digits<N: FromStr>(text: &str) -> Option<N> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Address {
        text.parse().unwrap()
    }

    fn why(text: &str) -> String {
        match text.parse::<Address>() {
            Err(Error::BadAddress { address, why }) if address == text => why,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn qemu_s_forms() {
        let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
        let file = |path: &str, offset| Address::File { path: path.into(), offset };
        assert_eq!(parse("tcp:127.0.0.1:4444"), tcp("127.0.0.1", 4444));
        assert_eq!(parse("tcp::4444"), tcp("", 4444));
        assert_eq!(parse("tcp:0:4444"), tcp("0", 4444));
        assert_eq!(parse("tcp:[::1]:0"), tcp("::1", 0));
        assert_eq!(parse("tcp:[fe80::1%eth0]:9"), tcp("fe80::1%eth0", 9));
        assert_eq!(parse("unix:/run/a:b,c"), Address::Unix("/run/a:b,c".into()));
        let ws = |secure, host: &str, port, path: &str| Address::WebSocket {
            secure,
            host: host.into(),
            port,
            path: path.into(),
        };
        assert_eq!(parse("ws://host:8080/vm/a"), ws(false, "host", 8080, "/vm/a"));
        assert_eq!(parse("ws://host"), ws(false, "host", 80, "/"));
        assert_eq!(parse("wss://[::1]/x"), ws(true, "::1", 443, "/x"));
        assert_eq!(parse("wss://[::1]:9"), ws(true, "::1", 9, "/"));
        assert_eq!(parse("fd:7"), Address::Fd(7));
        assert_eq!(parse("exec:cat > x: y"), Address::Exec("cat > x: y".into()));
        assert_eq!(parse("file:/a,b"), file("/a,b", 0));
        assert_eq!(parse("file:/a,offset=0x1000"), file("/a", 4096));
        assert_eq!(parse("file:/a,offset=1,offset=2"), file("/a,offset=1", 2));
    }

    #[test]
    fn malformed_addresses_are_refused_with_the_reason() {
        assert_eq!(why("tcp:::1:4444"), "an IPv6 address needs brackets: tcp:[IPV6]:PORT");
        assert_eq!(why("tcp:[localhost]:1"), "brackets are for IPv6 addresses: tcp:[IPV6]:PORT");
        assert_eq!(why("tcp:host"), "expected tcp:HOST:PORT");
        assert_eq!(why("tcp:host:65536"), "the port is not a number from 0 to 65535");
        assert_eq!(why("tcp:host:+1"), "the port is not a number from 0 to 65535");
        assert_eq!(why("tcp:host:"), "the port is not a number from 0 to 65535");
        assert_eq!(
            why("tcp:host:1,to=9"),
            "options after the port are not supported; expected tcp:HOST:PORT"
        );
        assert_eq!(why("ws:host"), "expected ws://HOST[:PORT][/PATH], or wss://");
        assert_eq!(why("ws:///path"), "the host is missing; 0.0.0.0 is every one of this machine's");
        assert!(why("ws://host/a b").starts_with("a path here has letters"));
        assert_eq!(why("fd:-1"), "expected the number of an open descriptor, such as fd:3");
        assert_eq!(why("unix:"), "the path is missing: unix:PATH");
        assert_eq!(why("exec: "), "the command is missing: exec:COMMAND");
        assert_eq!(why("file:/a,offset=0x"), "the offset is not a number of bytes, such as 4096 or 0x1000");
        assert_eq!(why("file:,offset=1"), "the path is missing: file:PATH[,offset=N]");
        assert_eq!(why("rdma:x"), "unknown kind; expected tcp:, unix:, ws://, wss://, fd:, exec: or file:");
        assert!(why("nothing").starts_with("expected tcp:"));
    }

    fn addresses() -> impl Strategy<Value = Address> {
        let host = prop_oneof!["[a-z0-9.-]{0,20}", "[0-9a-f]{1,4}::[0-9a-f]{0,4}"];
        let path = prop_oneof!["[^\u{0}]{1,30}", "/[a-z]{1,5},offset=[0-9x]{1,5}"];
        prop_oneof![
            (host, any::<u16>()).prop_map(|(host, port)| Address::Tcp { host, port }),
            path.clone().prop_map(|path| Address::Unix(path.into())),
            (
                any::<bool>(),
                "[a-z0-9.-]{1,20}|[0-9a-f]{1,4}::[0-9a-f]{0,4}",
                any::<u16>(),
                "/[a-z0-9/._~-]{0,20}"
            )
                .prop_map(|(secure, host, port, path)| Address::WebSocket {
                    secure,
                    host,
                    port,
                    path
                }),
            (0..RawFd::MAX).prop_map(Address::Fd),
            "[^\u{0}]{0,30}[a-z]".prop_map(Address::Exec),
            (path, any::<u64>()).prop_map(|(path, offset)| Address::File { path: path.into(), offset }),
        ]
    }

    proptest! {
        #[test]
        fn a_formatted_address_parses_back(address in addresses()) {
            prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
        }

        #[test]
        fn parsing_never_panics_and_formatting_is_stable(text in ".{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
            }
        }
    }
}

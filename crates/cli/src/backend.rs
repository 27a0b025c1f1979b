//! towline as a vhost-user backend that others find and start: `docs/interop/vhost-user.rst` and `vhost-user.json` of QEMU.
//!
//! Whoever looks for a backend finds a JSON file with a path to a program, runs it with `--print-capabilities`, later with
//! `--socket-path` or `--fd`. The path has no room for a command's name, so a link of the name `towline-net` or `towline-vsock`
//! to this program is that command.

use std::ffi::OsString;
use std::path::Path;

use serde_json::{Value, json};

/// Why a service manager's socket is none.
pub(crate) const NOT_PASSED: &str = "LISTEN_FDS is set, but for another process (LISTEN_PID): give --socket PATH or --fd N, or start this one by its unit";
const OPTION: &str = "--print-capabilities";

/// A kind of device that this program is a backend of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Net,
    Vsock,
}

impl Backend {
    const ALL: [Self; 2] = [Self::Net, Self::Vsock];

    /// The command, and `VHostUserBackendType`.
    fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Vsock => "vsock",
        }
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|backend| backend.name() == name)
    }

    /// `VHostUserBackendCapabilities`; these two kinds have no features of their own.
    pub(crate) fn capabilities(self) -> Value {
        json!({ "type": self.name() })
    }
}

/// The words of the command line, with the command that the program's own name stands for.
pub(crate) fn with_command(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let own = words.first().and_then(|word| Path::new(word).file_name()?.to_str());
    if let Some(backend) = own.and_then(|own| Backend::of(own.strip_prefix("towline-")?)) {
        words.insert(1, backend.name().into());
    }
    words
}

/// Whose capabilities are asked for; all other options count for nothing then.
pub(crate) fn asked(words: &[OsString]) -> Option<Backend> {
    let backend = words.get(1)?.to_str().and_then(Backend::of)?;
    words[2..].iter().any(|word| word == OPTION).then_some(backend)
}

/// Why a device has nobody to serve, if neither its command line nor a service manager gives it a socket.
pub(crate) fn lacks_socket(socket: Option<&Path>, fd: Option<i32>) -> Option<&'static str> {
    let is_there = socket.is_some() || fd.is_some() || std::env::var_os("LISTEN_FDS").is_some();
    (!is_there).then_some(
        "no socket: give --socket PATH or --fd N, or have a service manager pass one (LISTEN_FDS, socket activation)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        with_command(text.split_whitespace().map(OsString::from))
    }

    #[test]
    fn a_link_is_a_command() {
        assert_eq!(
            words("/usr/lib/towline/towline-net --fd 3"),
            ["/usr/lib/towline/towline-net", "net", "--fd", "3"]
        );
        assert_eq!(words("towline net --fd 3"), ["towline", "net", "--fd", "3"]);
        assert_eq!(words("towline-other"), ["towline-other"]);
    }

    #[test]
    fn capabilities_are_told_whatever_else_is_asked() {
        let backend = asked(&words("towline-vsock --print-capabilities")).unwrap();
        assert_eq!(backend.capabilities().to_string(), r#"{"type":"vsock"}"#);
        assert_eq!(
            asked(&words("towline net --socket-path x --print-capabilities --nonsense")),
            Some(Backend::Net)
        );
        assert_eq!(asked(&words("towline net --fd 3")), None);
        assert_eq!(asked(&words("towline copy --print-capabilities")), None);
        assert_eq!(asked(&[]), None);
    }
}

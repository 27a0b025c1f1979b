//! Discovery of towline as a vhost-user backend: `docs/interop/vhost-user.rst` and `vhost-user.json` of QEMU.
//!
//! A management application finds the path of a program in a JSON file, and runs it with
//! `--print-capabilities`, later with `--socket-path` or `--fd`. The path cannot contain a command, so a link
//! to this program named `towline-net` or `towline-vsock` runs that command.

use std::ffi::OsString;
use std::path::Path;

use serde_json::json;

const OPTION: &str = "--print-capabilities";

/// Commands with a device, each also its `VHostUserBackendType`.
const BACKENDS: [&str; 2] = ["net", "vsock"];

fn known(name: &str) -> Option<&'static str> {
    BACKENDS.into_iter().find(|backend| *backend == name)
}

/// Returns the command line, with the command that the program's name implies.
pub(crate) fn with_command(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let own = words.first().and_then(|word| Path::new(word).file_name()?.to_str());
    if let Some(backend) = own.and_then(|own| known(own.strip_prefix("towline-")?)) {
        words.insert(1, backend.into());
    }
    words
}

/// Returns the `VHostUserBackendCapabilities` if they are requested; all other options are ignored then. These
/// types have no features.
pub(crate) fn requested_capabilities(words: &[OsString]) -> Option<String> {
    let backend = words.get(1)?.to_str().and_then(known)?;
    words[2..].iter().any(|word| word == OPTION).then(|| json!({ "type": backend }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        with_command(text.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_name_of_a_link_is_a_command() {
        assert_eq!(
            words("/usr/lib/towline/towline-net --fd 3"),
            ["/usr/lib/towline/towline-net", "net", "--fd", "3"]
        );
        assert_eq!(words("towline net --fd 3"), ["towline", "net", "--fd", "3"]);
        assert_eq!(words("towline-other"), ["towline-other"]);
    }

    #[test]
    fn capabilities_are_printed_whatever_the_other_options() {
        let found = requested_capabilities(&words("towline-vsock --print-capabilities")).unwrap();
        assert_eq!(found, r#"{"type":"vsock"}"#);
        assert_eq!(
            requested_capabilities(&words("towline net --socket-path x --print-capabilities --nonsense")),
            Some(r#"{"type":"net"}"#.to_owned())
        );
        assert_eq!(requested_capabilities(&words("towline net --fd 3")), None);
        assert_eq!(requested_capabilities(&words("towline copy --print-capabilities")), None);
        assert_eq!(requested_capabilities(&[]), None);
    }
}

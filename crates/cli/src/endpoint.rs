//! Endpoints as they are written on the command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use towline_channel::Address;
use towline_control::plan;

use crate::memory::Memory;

/// A URI of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Qmp(PathBuf),
    Stream(Address),
    Image(PathBuf),
    Memory(Memory),
    Null,
}

/// Schemes that are planned, with what they will be.
const PLANNED: [(&str, &str); 5] = [
    ("s3://", "object stores"),
    ("gs://", "object stores"),
    ("az://", "object stores"),
    ("http://", "object stores"),
    ("https://", "object stores"),
];

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, what)) = PLANNED.iter().find(|(scheme, _)| text.starts_with(scheme)) {
            return Err(format!("{what} are not there yet; use a file: or a stream (tcp:, unix:, exec:)"));
        }
        let Some((scheme, rest)) = text.split_once(':') else { return image(text) };
        match scheme {
            "qmp" if rest.is_empty() => {
                Err("qmp: needs the path of a QMP socket, as qmp:/run/vm/a.qmp".into())
            }
            "qmp" => Ok(Self::Qmp(rest.into())),
            "file" => image(rest),
            "mem" => rest.parse().map(Self::Memory),
            "null" if rest.is_empty() => Ok(Self::Null),
            "tcp" | "unix" | "ws" | "wss" | "fd" | "exec" => {
                text.parse().map(Self::Stream).map_err(|error| format!("{error}"))
            }
            // A path may have a colon in it, but then it has a slash too, or it is written with file: before it.
            _ if text.contains('/') => image(text),
            _ => Err(format!(
                "unknown scheme {scheme:?}: qmp:, tcp:, unix:, ws://, wss://, fd:, exec:, file:, mem:, null:, or a path (a file of this name is file:{text})"
            )),
        }
    }
}

fn image(path: &str) -> Result<Endpoint, String> {
    match path {
        "" => Err("an image needs a path".into()),
        path => Ok(Endpoint::Image(path.into())),
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "qmp:{}", path.display()),
            Self::Stream(address) => write!(f, "{address}"),
            Self::Image(path) => write!(f, "file:{}", path.display()),
            Self::Memory(memory) => write!(f, "{memory}"),
            Self::Null => f.write_str("null:"),
        }
    }
}

impl Endpoint {
    /// As a source.
    pub(crate) fn source(&self) -> Result<plan::Source, String> {
        match self {
            Self::Qmp(path) => Ok(plan::Source::Qmp(path.clone())),
            Self::Stream(address) => Ok(plan::Source::Stream(address.clone())),
            Self::Image(path) => Ok(plan::Source::Image(path.clone())),
            Self::Memory(memory) => memory.shape().map(plan::Source::Memory),
            Self::Null => Err("null: has no guest to copy".into()),
        }
    }

    /// As a destination.
    pub(crate) fn destination(&self) -> Result<plan::Destination, String> {
        Ok(match self {
            Self::Qmp(path) => plan::Destination::Qmp(path.clone()),
            Self::Stream(address) => plan::Destination::Stream(address.clone()),
            Self::Image(path) => plan::Destination::Image(path.clone()),
            Self::Memory(memory) => plan::Destination::Memory(memory.room()?),
            Self::Null => plan::Destination::Null,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_shown() {
        for (text, shown) in [
            ("qmp:/run/a.qmp", "qmp:/run/a.qmp"),
            ("guest.img", "file:guest.img"),
            ("file:a:b.img", "file:a:b.img"),
            ("/var/a:b.img", "file:/var/a:b.img"),
            ("tcp:127.0.0.1:4444", "tcp:127.0.0.1:4444"),
            ("wss://host/vm/a", "wss://host:443/vm/a"),
            ("exec:cat > x", "exec:cat > x"),
            ("null:", "null:"),
            ("mem:64M,dirty=1M", "mem:64M,dirty=1M"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_endpoint_says_what_would_be() {
        let error = "guest:img".parse::<Endpoint>().unwrap_err();
        assert!(error.contains("file:guest:img"), "{error}");
        let error = "s3://bucket/guest".parse::<Endpoint>().unwrap_err();
        assert!(error.starts_with("object stores are not there yet"), "{error}");
        assert!("qmp:".parse::<Endpoint>().is_err());
    }
}

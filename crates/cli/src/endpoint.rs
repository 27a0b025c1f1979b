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
    #[cfg(feature = "store")]
    Store(towline_image::store::Location),
    Memory(Memory),
    Null,
    /// With a secret in it, and why that cannot be. The parser of the command line would show what it refuses.
    #[cfg(feature = "store")]
    Secret(String),
    /// What was written down of one end; for `check`.
    Facts(PathBuf),
    /// A `migration_version` attribute; for `check`.
    Attribute(PathBuf),
    /// A device of ours, by its control socket; for `check`.
    Control(PathBuf),
}

/// How endpoints of object stores begin.
#[cfg(not(feature = "store"))]
const STORES: [&str; 6] = ["s3://", "gs://", "az://", "http://", "https://", "store:"];

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        #[cfg(feature = "store")]
        if towline_image::store::Location::has_scheme(text) {
            use towline_image::store::Error;
            return match text.parse() {
                Ok(location) => Ok(Self::Store(location)),
                Err(error @ Error::Secret { .. }) => Ok(Self::Secret(error.to_string())),
                Err(error) => Err(error.to_string()),
            };
        }
        #[cfg(not(feature = "store"))]
        if STORES.iter().any(|scheme| text.starts_with(scheme)) {
            return Err("this towline was built without object stores (cargo's feature `store`)".into());
        }
        let Some((scheme, rest)) = text.split_once(':') else { return image(text) };
        match scheme {
            "qmp" if rest.is_empty() => {
                Err("qmp: needs the path of a QMP socket, as qmp:/run/vm/a.qmp".into())
            }
            "qmp" => Ok(Self::Qmp(rest.into())),
            "file" => image(rest),
            "mem" => rest.parse().map(Self::Memory),
            "facts" | "attr" | "ctl" if rest.is_empty() => Err(format!("{scheme}: needs a path")),
            "facts" => Ok(Self::Facts(rest.into())),
            "attr" => Ok(Self::Attribute(rest.into())),
            "ctl" => Ok(Self::Control(rest.into())),
            "null" if rest.is_empty() => Ok(Self::Null),
            "tcp" | "unix" | "ws" | "wss" | "fd" | "exec" => {
                text.parse().map(Self::Stream).map_err(|error| format!("{error}"))
            }
            // A path may have a colon in it, but then it has a slash too, or it is written with file: before it.
            _ if text.contains('/') => image(text),
            _ => Err(format!(
                "unknown scheme {scheme:?}: qmp:, tcp:, unix:, ws://, wss://, fd:, exec:, file:, s3://, gs://, az://, http(s)://, store:, mem:, null:, or a path (a file of this name is file:{text})"
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
            #[cfg(feature = "store")]
            Self::Store(location) => write!(f, "{location}"),
            Self::Memory(memory) => write!(f, "{memory}"),
            Self::Null => f.write_str("null:"),
            #[cfg(feature = "store")]
            Self::Secret(_) => f.write_str("an address with a secret in it"),
            Self::Facts(path) => write!(f, "facts:{}", path.display()),
            Self::Attribute(path) => write!(f, "attr:{}", path.display()),
            Self::Control(path) => write!(f, "ctl:{}", path.display()),
        }
    }
}

impl Endpoint {
    /// Whether it is a stored guest.
    pub(crate) fn is_image(&self) -> bool {
        match self {
            Self::Image(_) => true,
            #[cfg(feature = "store")]
            Self::Store(_) => true,
            _ => false,
        }
    }

    /// As a source.
    pub(crate) fn source(&self) -> Result<plan::Source, String> {
        match self {
            Self::Qmp(path) => Ok(plan::Source::Qmp(path.clone())),
            Self::Stream(address) => Ok(plan::Source::Stream(address.clone())),
            Self::Image(path) => Ok(plan::Source::Image(path.clone())),
            #[cfg(feature = "store")]
            Self::Store(location) => Ok(plan::Source::Store(location.clone())),
            Self::Memory(memory) => memory.shape().map(plan::Source::Memory),
            Self::Null => Err("null: has no guest to copy".into()),
            #[cfg(feature = "store")]
            Self::Secret(why) => Err(why.clone()),
            Self::Facts(_) | Self::Attribute(_) | Self::Control(_) => Err(self.only_checked()),
        }
    }

    /// As a destination.
    pub(crate) fn destination(&self) -> Result<plan::Destination, String> {
        Ok(match self {
            Self::Qmp(path) => plan::Destination::Qmp(path.clone()),
            Self::Stream(address) => plan::Destination::Stream(address.clone()),
            Self::Image(path) => plan::Destination::Image(path.clone()),
            #[cfg(feature = "store")]
            Self::Store(location) => plan::Destination::Store(location.clone()),
            Self::Memory(memory) => plan::Destination::Memory(memory.room()?),
            Self::Null => plan::Destination::Null,
            #[cfg(feature = "store")]
            Self::Secret(why) => return Err(why.clone()),
            Self::Facts(_) | Self::Attribute(_) | Self::Control(_) => return Err(self.only_checked()),
        })
    }

    fn only_checked(&self) -> String {
        format!("{self} is no guest and takes none: it is for `towline check`")
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
            #[cfg(feature = "store")]
            ("s3://bucket/a/guest", "s3://bucket/a/guest"),
            #[cfg(feature = "store")]
            ("store:images/guest", "store:images/guest"),
            ("null:", "null:"),
            ("facts:a.json", "facts:a.json"),
            ("attr:/sys/x/migration_version", "attr:/sys/x/migration_version"),
            ("ctl:/run/vm/net0.qmp", "ctl:/run/vm/net0.qmp"),
            ("mem:64M,dirty=1M", "mem:64M,dirty=1M"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_endpoint_says_what_would_be() {
        let error = "guest:img".parse::<Endpoint>().unwrap_err();
        assert!(error.contains("file:guest:img"), "{error}");
        #[cfg(feature = "store")]
        {
            let endpoint = "s3://key:secret@bucket/guest".parse::<Endpoint>().unwrap();
            assert!(!format!("{endpoint}{endpoint:?}").contains("secret@"));
            let error = endpoint.source().unwrap_err();
            assert!(error.contains("no user, password or query") && !error.contains("secret"), "{error}");
        }
        assert!("qmp:".parse::<Endpoint>().is_err());
    }
}

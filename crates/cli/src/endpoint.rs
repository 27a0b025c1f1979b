//! Endpoints of the command line.

pub(crate) mod memory;
mod recorded;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use towline_channel::Address;
use towline_control::plan;
use towline_control::remote::{NewGuest, Place, SshTarget};
use towline_control::run::ImageLocation;
use towline_image::{Location, LocationError};
use towline_launch::GuestName;

use crate::libvirt;
use memory::MemEndpoint;
use recorded::RecordedImage;

/// Endpoint as parsed.
#[derive(Debug, Clone)]
pub(crate) enum Endpoint {
    Qmp(PathBuf),
    Stream(Address),
    Image(PathBuf),
    Store(Location),
    /// An image of a record.
    Recorded(RecordedImage),
    /// A place on another host.
    Ssh(SshEndpoint),
    Memory(MemEndpoint),
    Null,
    /// Location with a secret, and the reason to refuse it. The parser would print the whole text.
    Secret(String),
    /// Recorded facts; for `check`.
    Facts(PathBuf),
    /// A `migration_version` attribute; for `check`.
    Attribute(PathBuf),
    /// A device of towline, by its control socket; for `check`.
    Control(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(image) = RecordedImage::parse(text) {
            return Ok(Self::Recorded(image));
        }
        if Location::has_scheme(text) {
            return match text.parse() {
                Ok(location) => Ok(Self::Store(location)),
                Err(error @ LocationError::Secret { .. }) => Ok(Self::Secret(error.to_string())),
                Err(error) => Err(error.to_string()),
            };
        }
        let Some((scheme, rest)) = text.split_once(':') else { return image(text) };
        match scheme {
            "qmp" if rest.is_empty() => {
                Err("qmp: needs the path of a QMP socket, such as qmp:/run/vm/a.qmp".into())
            }
            "qmp" => Ok(Self::Qmp(rest.into())),
            "file" => image(rest),
            "ssh" => on_host(rest).map(Self::Ssh),
            "mem" => MemEndpoint::parse(rest).map(Self::Memory),
            "facts" | "attr" | "ctl" if rest.is_empty() => Err(format!("{scheme}: needs a path")),
            "facts" => Ok(Self::Facts(rest.into())),
            "attr" => Ok(Self::Attribute(rest.into())),
            "ctl" => Ok(Self::Control(rest.into())),
            "null" if rest.is_empty() => Ok(Self::Null),
            "tcp" | "unix" | "ws" | "wss" | "fd" | "exec" => {
                text.parse().map(Self::Stream).map_err(|error| format!("{error}"))
            }
            // A path with a colon contains a slash, or is written with file: before it.
            _ if text.contains('/') => image(text),
            _ => Err(format!(
                "unknown scheme {scheme:?}: expected qmp:, ssh:, tcp:, unix:, ws://, wss://, fd:, exec:, file:, s3://, gs://, az://, http(s)://, store:, mem:, null:, or a path; write a file of this name as file:{text}"
            )),
        }
    }
}

fn image(path: &str) -> Result<Endpoint, String> {
    if path.is_empty() {
        return Err("file: needs the path of an image".into());
    }
    Ok(Endpoint::Image(path.into()))
}

/// Parses what follows `ssh:`.
fn on_host(text: &str) -> Result<SshEndpoint, String> {
    let (target, place) = text.split_once('/').unwrap_or((text, ""));
    let is_name = !place.contains([':', '/']);
    let place = match place {
        name if is_name && !name.is_empty() && name.parse::<GuestName>().is_err() => {
            return Err(format!("{name:?} cannot be a guest's name; write an image as file:{name}"));
        }
        name if is_name => Place::Guest(NewGuest { name: name.to_owned(), ..NewGuest::default() }),
        place => match place.parse()? {
            Endpoint::Qmp(path) => Place::Qmp(path),
            Endpoint::Image(path) => Place::File(path),
            Endpoint::Store(location) => Place::Store(location.to_string()),
            other => {
                return Err(format!(
                    "{other} is not a place on another host: expected qmp:PATH, the name of a guest, an image or a store"
                ));
            }
        },
    };
    Ok(SshEndpoint { target: target.parse()?, place })
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "qmp:{}", path.display()),
            Self::Stream(address) => write!(f, "{address}"),
            Self::Image(path) => write!(f, "file:{}", path.display()),
            Self::Store(location) => write!(f, "{location}"),
            Self::Recorded(image) => f.write_str(&image.text),
            Self::Ssh(end) => write!(f, "{end}"),
            Self::Memory(memory) => write!(f, "{memory}"),
            Self::Null => f.write_str("null:"),
            Self::Secret(_) => f.write_str("an address with a secret in it"),
            Self::Facts(path) => write!(f, "facts:{}", path.display()),
            Self::Attribute(path) => write!(f, "attr:{}", path.display()),
            Self::Control(path) => write!(f, "ctl:{}", path.display()),
        }
    }
}

impl From<ImageLocation> for Endpoint {
    fn from(image: ImageLocation) -> Self {
        match image {
            ImageLocation::Store(location) => Self::Store(location),
            ImageLocation::File(path) | ImageLocation::Guest(path) => Self::Image(path),
        }
    }
}

impl Endpoint {
    /// Returns true if it is a stored guest.
    pub(crate) fn is_image(&self) -> bool {
        matches!(self, Self::Image(_) | Self::Store(_) | Self::Recorded(_))
    }

    /// The endpoint itself, where this is an image of a record.
    pub(crate) fn resolved(&self) -> Result<Self, String> {
        match self {
            Self::Recorded(image) => Ok(image.image()?.into()),
            other => Ok(other.clone()),
        }
    }

    /// Converts it into a source.
    pub(crate) fn source(&self) -> Result<plan::Source, String> {
        match self {
            Self::Qmp(path) => Ok(plan::Source::Qmp(path.clone())),
            Self::Stream(address) => Ok(plan::Source::Stream(address.clone())),
            Self::Image(path) => {
                Ok(libvirt::stream_of(path)?.unwrap_or_else(|| plan::Source::Image(path.clone())))
            }
            Self::Store(location) => Ok(plan::Source::Store(location.clone())),
            Self::Recorded(_) => self.resolved()?.source(),
            Self::Ssh(end) => {
                Err(format!("{end} can be a SOURCE of `copy` alone, as an image: start towline on that host"))
            }
            Self::Memory(memory) => memory.source(),
            Self::Null => Err("null: cannot be a SOURCE".into()),
            Self::Secret(why) => Err(why.clone()),
            Self::Facts(_) | Self::Attribute(_) | Self::Control(_) => Err(self.error_of_check_only()),
        }
    }

    /// Converts it into a destination.
    pub(crate) fn destination(&self) -> Result<plan::Destination, String> {
        Ok(match self {
            Self::Qmp(path) => plan::Destination::Qmp(path.clone()),
            Self::Stream(address) => plan::Destination::Stream(address.clone()),
            Self::Image(path) => plan::Destination::Image(path.clone()),
            Self::Store(location) => plan::Destination::Store(location.clone()),
            Self::Recorded(image) => {
                return Err(format!("{} is an image of a record, and cannot be a DEST", image.text));
            }
            Self::Ssh(end) => {
                return Err(format!("{end} is for DEST of a `move`, or of a `copy` of a qmp: SOURCE alone"));
            }
            Self::Memory(memory) => memory.destination()?,
            Self::Null => plan::Destination::Null,
            Self::Secret(why) => return Err(why.clone()),
            Self::Facts(_) | Self::Attribute(_) | Self::Control(_) => return Err(self.error_of_check_only()),
        })
    }

    fn error_of_check_only(&self) -> String {
        format!("{self} is neither SOURCE nor DEST of a copy: it is for `towline check`")
    }
}

/// `ssh:[USER@]HOST[:PORT][/PLACE]`: another host, and the place of a guest there.
#[derive(Debug, Clone)]
pub(crate) struct SshEndpoint {
    pub(crate) target: SshTarget,
    /// Without the command line of a guest that is started there.
    pub(crate) place: Place,
}

impl fmt::Display for SshEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ssh:{}", self.target)?;
        match &self.place {
            Place::Guest(guest) if guest.name.is_empty() => Ok(()),
            Place::Guest(guest) => write!(f, "/{}", guest.name),
            Place::Qmp(path) => write!(f, "/qmp:{}", path.display()),
            Place::File(path) => write!(f, "/file:{}", path.display()),
            Place::Store(location) => write!(f, "/{location}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_parsed_and_formatted() {
        for (text, shown) in [
            ("qmp:/run/a.qmp", "qmp:/run/a.qmp"),
            ("guest.img", "file:guest.img"),
            ("file:a:b.img", "file:a:b.img"),
            ("/var/a:b.img", "file:/var/a:b.img"),
            ("tcp:127.0.0.1:4444", "tcp:127.0.0.1:4444"),
            ("wss://host/vm/a", "wss://host:443/vm/a"),
            ("exec:cat > x", "exec:cat > x"),
            ("s3://bucket/a/guest", "s3://bucket/a/guest"),
            ("store:images/guest", "store:images/guest"),
            ("null:", "null:"),
            ("facts:a.json", "facts:a.json"),
            ("attr:/sys/x/migration_version", "attr:/sys/x/migration_version"),
            ("ctl:/run/vm/net0.qmp", "ctl:/run/vm/net0.qmp"),
            ("ssh:b", "ssh:b"),
            ("ssh:root@b:22/web", "ssh:root@b:22/web"),
            ("ssh:b/qmp:/run/vm/b.qmp", "ssh:b/qmp:/run/vm/b.qmp"),
            ("ssh:b//srv/a.img", "ssh:b/file:/srv/a.img"),
            ("ssh:b/s3://bucket/a/guest", "ssh:b/s3://bucket/a/guest"),
            ("mem:64M,dirty=1M", "mem:64M,dirty=1M"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn errors_name_the_expected_forms() {
        let error = "guest:img".parse::<Endpoint>().unwrap_err();
        assert!(error.contains("file:guest:img"), "{error}");
        let endpoint = "s3://key:secret@bucket/guest".parse::<Endpoint>().unwrap();
        assert!(!format!("{endpoint}{endpoint:?}").contains("secret@"));
        let error = endpoint.source().unwrap_err();
        assert!(error.contains("no user, password or query") && !error.contains("secret"), "{error}");
        assert!("qmp:".parse::<Endpoint>().is_err());
    }

    #[test]
    fn a_file_whose_name_has_such_an_end_is_an_image() {
        let directory = tempfile::tempdir().unwrap();
        let name = |name: &str| directory.path().join(name).display().to_string();
        let parsed = |text: &str| text.parse::<Endpoint>().unwrap();
        std::fs::create_dir(name("web")).unwrap();
        assert!(matches!(parsed(&name("web@-37s")), Endpoint::Recorded(_)));
        assert!(matches!(parsed(&name("other@-37s")), Endpoint::Image(_)));
        std::fs::write(name("web@-37s"), "").unwrap();
        assert!(matches!(parsed(&name("web@-37s")), Endpoint::Image(_)));
        assert!(matches!(parsed("s3://bucket/web@newest"), Endpoint::Recorded(_)));
        assert!(matches!(parsed("s3://key:secret@bucket/web"), Endpoint::Secret(_)));
        let Endpoint::Recorded(empty) = parsed(&name("web@newest")) else { panic!() };
        assert!(empty.image().unwrap_err().contains("nothing is recorded there"));
    }
}

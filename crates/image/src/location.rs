//! Locations of images in object stores: `s3://BUCKET/PREFIX/NAME` and the like. They are parsed by every
//! build; the stores themselves are the feature `store`.

use std::fmt;
#[cfg(feature = "store")]
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum length of a segment of the path; stores allow 1024 bytes in all.
const SEGMENT_BYTES_MAX: usize = 200;
/// Maximum number of segments.
const SEGMENTS_MAX: usize = 16;

/// A text that is not a location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocationError {
    /// The location is invalid.
    #[error("{text}")]
    Invalid { text: String },
    /// The location may contain a secret, so it is not repeated.
    #[error(
        "{scheme}: an address has no user, password or query (@, ?, #); credentials come from the environment or the usual files (docs/store.md)"
    )]
    Secret { scheme: &'static str },
}

/// Kind of store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3 and compatible stores.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage; the account comes from the environment.
    Azure,
    /// Read-only, from any web server.
    Http,
    /// As [`Self::Http`], with TLS.
    Https,
    /// A directory of this host.
    Directory,
}

impl Scheme {
    const ALL: [(&str, Self); 6] = [
        ("s3://", Self::S3),
        ("gs://", Self::Google),
        ("az://", Self::Azure),
        ("http://", Self::Http),
        ("https://", Self::Https),
        ("store:", Self::Directory),
    ];

    fn text(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, scheme)| *scheme == self);
        found.map_or("", |(text, _)| *text)
    }

    /// Returns true if images can be written there.
    pub fn is_writable(self) -> bool {
        !matches!(self, Self::Http | Self::Https)
    }
}

/// Location of an image in a store, or of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    scheme: Scheme,
    /// Bucket, container, or host with its port; empty for a directory.
    authority: String,
    /// True for a directory with an absolute path.
    is_absolute: bool,
    segments: Vec<String>,
}

impl Location {
    /// Returns true if `text` begins with the scheme of a store.
    pub fn has_scheme(text: &str) -> bool {
        Scheme::ALL.iter().any(|(scheme, _)| text.starts_with(scheme))
    }

    /// Kind of store.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }
}

#[cfg(feature = "store")]
impl Location {
    /// Suffix of an image's index.
    pub(crate) const SUFFIX: &str = ".towline";

    /// Bucket, container, or host with its port.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Location of the image `name` of this prefix. A name that ends in the suffix of indexes has it twice in
    /// its location, where the last one is ignored.
    ///
    /// # Errors
    /// The name has characters that no location has.
    pub fn image(&self, name: &str) -> Result<Self, LocationError> {
        let suffix = if name.ends_with(Self::SUFFIX) { Self::SUFFIX } else { "" };
        self.object_name(&format!("{name}{suffix}")).parse()
    }

    /// Name of the image: the last segment.
    pub(crate) fn name(&self) -> Result<&str, LocationError> {
        let name = self.segments.last().filter(|name| *name != "." && *name != "..");
        let none = || LocationError::Invalid {
            text: format!("{self}: the name of an image is missing, as {self}/NAME"),
        };
        name.map(|name| name.strip_suffix(Self::SUFFIX).unwrap_or(name)).ok_or_else(none)
    }

    /// Prefix of the image.
    pub(crate) fn parent(&self) -> Self {
        let segments = self.segments[..self.segments.len().saturating_sub(1)].to_vec();
        Self { segments, ..self.clone() }
    }

    /// Prefix within the bucket; empty for a directory.
    pub(crate) fn prefix(&self) -> String {
        match self.scheme {
            Scheme::Directory => String::new(),
            _ => self.segments.join("/"),
        }
    }

    /// Path of a store in a directory.
    pub(crate) fn directory(&self) -> PathBuf {
        let root = if self.is_absolute { "/" } else { "./" };
        PathBuf::from(format!("{root}{}", self.segments.join("/")))
    }

    /// Name of an object of this prefix, for messages.
    pub(crate) fn object_name(&self, key: &str) -> String {
        let shown = self.to_string();
        format!("{}/{key}", shown.strip_suffix('/').unwrap_or(&shown))
    }
}

impl FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let (begin, scheme) =
            Scheme::ALL.iter().find(|(scheme, _)| text.starts_with(scheme)).copied().ok_or_else(|| {
                LocationError::Invalid {
                    text: "a store is s3://, gs://, az://, http://, https:// or store:PATH".into(),
                }
            })?;
        let rest = &text[begin.len()..];
        // Not repeated in the error, as it may be a secret.
        if scheme != Scheme::Directory
            && (rest.split('/').next().is_some_and(|authority| authority.contains('@'))
                || rest.contains(['?', '#']))
        {
            return Err(LocationError::Secret { scheme: begin });
        }
        let (authority, path) = match scheme {
            Scheme::Directory => ("", rest),
            _ => rest.split_once('/').unwrap_or((rest, "")),
        };
        let bad = |why: String| LocationError::Invalid { text: format!("{text}: {why}") };
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:[]".contains(c);
        if scheme != Scheme::Directory && (authority.is_empty() || !authority.chars().all(is_plain)) {
            return Err(bad(format!("a bucket or host is expected after {begin}")));
        }
        let segments: Vec<String> =
            path.split('/').filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
        if segments.len() > SEGMENTS_MAX && scheme != Scheme::Directory {
            return Err(bad(format!(
                "its path has {} parts, at most {SEGMENTS_MAX} are allowed",
                segments.len()
            )));
        }
        for segment in &segments {
            check_segment(segment, scheme).map_err(bad)?;
        }
        if scheme == Scheme::Directory && segments.is_empty() {
            return Err(bad("a path is expected after store:, as in store:/srv/images/guest".into()));
        }
        Ok(Self { scheme, authority: authority.into(), is_absolute: path.starts_with('/'), segments })
    }
}

/// Only characters that every store accepts, and that need no quoting in shells, URLs or logs.
fn check_segment(segment: &str, scheme: Scheme) -> Result<(), String> {
    if scheme == Scheme::Directory && matches!(segment, "." | "..") {
        return Ok(());
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+=,".contains(c);
    let plain = segment.chars().all(is_plain) && !segment.chars().all(|c| c == '.');
    if plain && segment.len() <= SEGMENT_BYTES_MAX {
        Ok(())
    } else {
        Err(format!(
            "{segment:?} is not valid in a name, which has up to {SEGMENT_BYTES_MAX} letters, digits and -_.+=,"
        ))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.segments.join("/");
        let slash = match self.scheme {
            Scheme::Directory => self.is_absolute,
            _ => !path.is_empty(),
        };
        write!(f, "{}{}{}{path}", self.scheme.text(), self.authority, if slash { "/" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[cfg(feature = "store")]
    #[test]
    fn every_scheme_is_parsed_and_displayed() {
        for (text, prefix, name) in [
            ("s3://bucket/guest", "", "guest"),
            ("s3://bucket/a/b/guest.towline", "a/b", "guest"),
            ("gs://bucket/x/guest-1", "x", "guest-1"),
            ("az://container/guest", "", "guest"),
            ("http://host:8080/images/guest", "images", "guest"),
            ("https://[::1]:8443/guest", "", "guest"),
        ] {
            let location: Location = text.parse().unwrap();
            assert_eq!(location.to_string(), text);
            assert_eq!((location.parent().prefix().as_str(), location.name().unwrap()), (prefix, name));
        }
        let location: Location = "store:/srv/images/guest".parse().unwrap();
        assert_eq!(location.parent().directory(), PathBuf::from("/srv/images"));
        assert_eq!(location.parent().object_name("chunks"), "store:/srv/images/chunks");
        let location: Location = "store:guest".parse().unwrap();
        assert_eq!(location.parent().directory(), PathBuf::from("./"));
        assert_eq!(location.to_string(), "store:guest");
    }

    #[cfg(feature = "store")]
    #[test]
    fn the_image_of_a_listed_name_has_that_name() {
        let prefix: Location = "s3://bucket/vm".parse().unwrap();
        for name in ["a", "a.towline", "a.towline.towline"] {
            assert_eq!(prefix.image(name).unwrap().name().unwrap(), name);
        }
        assert!(prefix.image("x y").is_err());
        assert!("s3://bucket".parse::<Location>().unwrap().name().is_err());
    }

    #[test]
    fn an_invalid_location_is_explained_and_no_secret_is_repeated() {
        let error = |text: &str| text.parse::<Location>().unwrap_err().to_string();
        for text in ["s3://key:hunter2@bucket/x", "https://host/x?sig=hunter2", "https://u:hunter2@host/x"] {
            assert!(!error(text).contains("hunter2"), "{}", error(text));
            assert!(error(text).contains("environment"), "{}", error(text));
        }
        assert!(error("s3:///guest").contains("a bucket or host is expected"));
        assert!(error("s3://bucket/a b").contains("\"a b\" is not valid in a name"));
        assert!(error("s3://bucket/../x").contains("\"..\" is not valid in a name"));
    }
}

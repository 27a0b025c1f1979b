//! Locations of images: `s3://BUCKET/PREFIX/NAME` and the like.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::{Error, Result};

/// Suffix of an image's index.
pub(super) const SUFFIX: &str = ".towline";
/// Maximum length of a segment of the path; stores allow 1024 bytes in all.
const SEGMENT_BYTES_MAX: usize = 200;
/// Maximum number of segments.
const SEGMENTS_MAX: usize = 16;

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

    /// Bucket, container, or host with its port.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// Name of the image: the last segment.
    pub(super) fn name(&self) -> Result<&str> {
        let name = self.segments.last().filter(|name| *name != "." && *name != "..");
        let none =
            || Error::Location { text: format!("{self}: the name of an image is missing, as {self}/NAME") };
        name.map(|name| name.strip_suffix(SUFFIX).unwrap_or(name)).ok_or_else(none)
    }

    /// Prefix of the image.
    pub(super) fn parent(&self) -> Self {
        let segments = self.segments[..self.segments.len().saturating_sub(1)].to_vec();
        Self { segments, ..self.clone() }
    }

    /// Prefix within the bucket; empty for a directory.
    pub(super) fn prefix(&self) -> String {
        match self.scheme {
            Scheme::Directory => String::new(),
            _ => self.segments.join("/"),
        }
    }

    /// Path of a store in a directory.
    pub(super) fn directory(&self) -> PathBuf {
        let root = if self.is_absolute { "/" } else { "./" };
        PathBuf::from(format!("{root}{}", self.segments.join("/")))
    }

    /// Name of an object of this prefix, for messages.
    pub(super) fn object_name(&self, key: &str) -> String {
        let shown = self.to_string();
        format!("{}/{key}", shown.strip_suffix('/').unwrap_or(&shown))
    }
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (begin, scheme) =
            Scheme::ALL.iter().find(|(scheme, _)| text.starts_with(scheme)).copied().ok_or_else(|| {
                Error::Location {
                    text: "a store is s3://, gs://, az://, http://, https:// or store:PATH".into(),
                }
            })?;
        let rest = &text[begin.len()..];
        // Not repeated in the error, as it may be a secret.
        if scheme != Scheme::Directory
            && (rest.split('/').next().is_some_and(|authority| authority.contains('@'))
                || rest.contains(['?', '#']))
        {
            return Err(Error::Secret { scheme: begin });
        }
        let (authority, path) = match scheme {
            Scheme::Directory => ("", rest),
            _ => rest.split_once('/').unwrap_or((rest, "")),
        };
        let bad = |why: String| Error::Location { text: format!("{text}: {why}") };
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
        assert!("s3://bucket".parse::<Location>().unwrap().name().is_err());
    }
}

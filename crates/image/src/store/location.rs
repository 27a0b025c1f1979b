//! Where an image is: `s3://BUCKET/PREFIX/NAME` and the like.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::{Error, Result};

/// What stands behind an image's name in its store.
pub(super) const SUFFIX: &str = ".towline";
/// Longest segment of a path: stores take 1024 bytes in all.
const SEGMENT_BYTES_MAX: usize = 200;
/// Most segments.
const SEGMENTS_MAX: usize = 16;

/// The kind of store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3 and what speaks as it does.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage; the account is in the environment.
    Azure,
    /// Read-only, from any web server.
    Http,
    /// As [`Self::Http`], encrypted.
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

    /// Whether images can be put there.
    pub fn is_writable(self) -> bool {
        !matches!(self, Self::Http | Self::Https)
    }
}

/// An image in a store, or a prefix that has images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    scheme: Scheme,
    /// Bucket, container, or host with its port; empty for a directory.
    authority: String,
    /// The root, for a directory whether the path began with one.
    is_absolute: bool,
    segments: Vec<String>,
}

impl Location {
    /// Whether this is how a location begins.
    pub fn is_one(text: &str) -> bool {
        Scheme::ALL.iter().any(|(scheme, _)| text.starts_with(scheme))
    }

    /// The kind of store.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Bucket, container, or host with its port.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// The image's name, which is the last segment.
    pub(super) fn name(&self) -> Result<&str> {
        let name = self.segments.last().filter(|name| *name != "." && *name != "..");
        let none =
            || Error::Location { text: format!("{self}: the name of an image is missing, as {self}/NAME") };
        name.map(|name| name.strip_suffix(SUFFIX).unwrap_or(name)).ok_or_else(none)
    }

    /// The prefix that an image's name stands behind.
    pub(super) fn parent(&self) -> Self {
        let segments = self.segments[..self.segments.len().saturating_sub(1)].to_vec();
        Self { segments, ..self.clone() }
    }

    /// The prefix within the bucket; for a directory none.
    pub(super) fn prefix(&self) -> String {
        match self.scheme {
            Scheme::Directory => String::new(),
            _ => self.segments.join("/"),
        }
    }

    /// The directory, for one.
    pub(super) fn directory(&self) -> PathBuf {
        let root = if self.is_absolute { "/" } else { "./" };
        PathBuf::from(format!("{root}{}", self.segments.join("/")))
    }

    /// An object of this prefix, for people.
    pub(super) fn object(&self, key: &str) -> String {
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
        // Nothing of it is repeated: it may be a secret.
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
            return Err(bad(format!("a bucket or host is expected behind {begin}")));
        }
        let segments: Vec<String> =
            path.split('/').filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
        if segments.len() > SEGMENTS_MAX && scheme != Scheme::Directory {
            return Err(bad(format!(
                "its path has {} parts, at most {SEGMENTS_MAX} are taken",
                segments.len()
            )));
        }
        for segment in &segments {
            check_segment(segment, scheme).map_err(bad)?;
        }
        if scheme == Scheme::Directory && segments.is_empty() {
            return Err(bad("a path is expected behind store:, as store:/srv/images/guest".into()));
        }
        Ok(Self { scheme, authority: authority.into(), is_absolute: path.starts_with('/'), segments })
    }
}

/// What every store takes as it is, and no shell, URL or log has to quote.
fn check_segment(segment: &str, scheme: Scheme) -> Result<(), String> {
    if scheme == Scheme::Directory && matches!(segment, "." | "..") {
        return Ok(());
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+=,".contains(c);
    let plain = segment.chars().all(is_plain) && !segment.chars().all(|c| c == '.');
    match plain && segment.len() <= SEGMENT_BYTES_MAX {
        true => Ok(()),
        false => Err(format!(
            "{segment:?} is no part of a name here: up to {SEGMENT_BYTES_MAX} letters, digits and -_.+=,"
        )),
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
    fn every_form_is_read_and_shown() {
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
        assert_eq!(location.parent().object("chunks"), "store:/srv/images/chunks");
        let location: Location = "store:guest".parse().unwrap();
        assert_eq!(location.parent().directory(), PathBuf::from("./"));
        assert_eq!(location.to_string(), "store:guest");
    }

    #[test]
    fn what_is_none_says_what_would_be_and_repeats_no_secret() {
        let error = |text: &str| text.parse::<Location>().unwrap_err().to_string();
        for text in ["s3://key:hunter2@bucket/x", "https://host/x?sig=hunter2", "https://u:hunter2@host/x"] {
            assert!(!error(text).contains("hunter2"), "{}", error(text));
            assert!(error(text).contains("environment"), "{}", error(text));
        }
        assert!(error("s3:///guest").contains("a bucket or host is expected"));
        assert!(error("s3://bucket/a b").contains("\"a b\" is no part of a name"));
        assert!(error("s3://bucket/../x").contains("\"..\" is no part of a name"));
        assert!("s3://bucket".parse::<Location>().unwrap().name().is_err());
    }
}

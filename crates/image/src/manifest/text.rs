//! Values that are strings in JSON.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Maximum length of untrusted text in an error.
const SHOWN_BYTES_MAX: usize = 80;

/// Truncates untrusted text for an error.
pub(super) fn truncated(text: &str) -> String {
    if text.len() <= SHOWN_BYTES_MAX {
        return text.into();
    }
    let end = (0..=SHOWN_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &text[..end])
}

/// Last second of the year 9999: RFC 3339 has four digits for a year.
const SECONDS_MAX: u64 = 253_402_300_799;

/// A second between 1970 and 9999, UTC; RFC 3339 as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp {
    /// Seconds since 1970.
    seconds: u64,
}

impl Timestamp {
    /// The current time of this host.
    pub fn now() -> Self {
        SystemTime::now().into()
    }
}

impl From<SystemTime> for Timestamp {
    /// Truncated to seconds, and clamped to those years.
    fn from(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { seconds: seconds.min(SECONDS_MAX) }
    }
}

impl From<Timestamp> for SystemTime {
    fn from(timestamp: Timestamp) -> Self {
        UNIX_EPOCH + Duration::from_secs(timestamp.seconds)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_rfc3339_seconds((*self).into()).fmt(f)
    }
}

impl From<Timestamp> for String {
    fn from(timestamp: Timestamp) -> Self {
        timestamp.to_string()
    }
}

impl TryFrom<String> for Timestamp {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let time = humantime::parse_rfc3339(&text);
        let time = time.map_err(|why| {
            format!("a time is RFC 3339 in UTC, as 2025-11-21T09:30:00Z, not {:?}: {why}", truncated(&text))
        })?;
        Ok(time.into())
    }
}

//! Images of a record: `PLACE@CHOICE`.

use std::path::Path;

use towline_channel::Cancel;
use towline_control::record::{Error, InstantChoice, Place};
use towline_control::run::ImageLocation;
use towline_image::Location;

use crate::units::period;

/// An image of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedImage {
    pub(crate) place: Place,
    pub(crate) choice: InstantChoice,
    /// As it was given.
    pub(crate) text: String,
}

impl RecordedImage {
    /// Parses `PLACE@CHOICE`; `None` for other texts, and for files of such a name.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (place, choice) = text.rsplit_once('@')?;
        let choice = choice_of(choice)?;
        let place = if Location::has_scheme(place) {
            Place::Prefix(place.parse().ok()?)
        } else {
            let path = Path::new(place.strip_prefix("file:").unwrap_or(place));
            Place::Directory(Some(path).filter(|path| path.is_dir() && !Path::new(text).exists())?.to_owned())
        };
        Some(Self { place, choice, text: text.to_owned() })
    }

    /// The image that is meant.
    pub(crate) fn image(&self) -> Result<ImageLocation, String> {
        let failed = |error: Error| error.to_string();
        let cancel = Cancel::new().map_err(|error| error.to_string())?;
        let instants = self.place.instants(&cancel).map_err(failed)?;
        let instant = self.choice.of(&instants).ok_or_else(|| match (instants.first(), instants.last()) {
            (Some(first), Some(last)) => format!(
                "{}: no such instant; the first one is {} of {}, {} s before the newest, {} of {}",
                self.text,
                first.sequence,
                first.at,
                (last.elapsed - first.elapsed).as_secs(),
                last.sequence,
                last.at
            ),
            _ => format!("{}: nothing is recorded there (`towline record`)", self.text),
        })?;
        self.place.image(&instant).map_err(failed)
    }
}

fn choice_of(text: &str) -> Option<InstantChoice> {
    if text == "newest" {
        return Some(InstantChoice::Newest);
    }
    if let Some(age) = text.strip_prefix('-') {
        return period(age).ok().map(InstantChoice::Before);
    }
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().map(InstantChoice::Sequence);
    }
    humantime::parse_rfc3339_weak(text).ok().map(|time| InstantChoice::At(time.into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_image_of_a_record_is_named_by_number_age_or_time() {
        let time = humantime::parse_rfc3339("2026-11-26T14:03:05Z").unwrap().into();
        for (text, choice) in [
            ("newest", Some(InstantChoice::Newest)),
            ("42", Some(InstantChoice::Sequence(42))),
            ("-37s", Some(InstantChoice::Before(Duration::from_secs(37)))),
            ("-1.5h", Some(InstantChoice::Before(Duration::from_secs(5400)))),
            ("2026-11-26T14:03:05", Some(InstantChoice::At(time))),
            ("2026-11-26T14:03:05Z", Some(InstantChoice::At(time))),
            ("-37", None),
            ("example.org", None),
            ("", None),
        ] {
            assert_eq!(choice_of(text).filter(|_| !text.is_empty()), choice, "{text}");
        }
    }
}

//! Parsing and formatting of numbers with units.

use std::ops::RangeInclusive;
use std::time::Duration;

use indicatif::{HumanBytes, HumanCount};

/// Unit of an option whose value is a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// A count, or an index.
    None,
    Microseconds,
    Milliseconds,
}

impl Unit {
    fn of_unit(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Microseconds => " of microseconds",
            Self::Milliseconds => " of milliseconds",
        }
    }

    /// Length of a unit of time in seconds.
    fn seconds(self) -> Option<f64> {
        match self {
            Self::None => None,
            Self::Microseconds => Some(1e-6),
            Self::Milliseconds => Some(1e-3),
        }
    }
}

/// Parses a whole number in a range. It is in the option's unit; a time may have another one, such as `0.3s`.
pub(crate) fn whole<T: TryFrom<u64>>(
    text: &str,
    unit: Unit,
    range: RangeInclusive<u64>,
) -> Result<T, String> {
    let of_unit = unit.of_unit();
    let converted =
        unit.seconds().filter(|_| !text.ends_with(|c: char| c.is_ascii_digit())).and_then(|length| {
            let count = time_in(text, length)?;
            ((count - count.round()).abs() < 1e-6).then(|| count.round().to_string())
        });
    let text = converted.as_deref().unwrap_or(text);
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        let example = without_suffix(text).parse::<u64>().map(|number| format!(", such as {number}"));
        let form =
            if unit.seconds().is_some() { "or a time such as 300ms or 2s" } else { "without a suffix" };
        return Err(format!("expected a whole number{of_unit} {form}{}", example.unwrap_or_default()));
    }
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| match *range.end() {
        u64::MAX => format!("out of range: expected a whole number{of_unit} of at least {}", range.start()),
        end => format!("out of range: expected a whole number{of_unit} from {} to {end}", range.start()),
    })
}

/// Parses a count or an index.
pub(crate) fn number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    whole(text, Unit::None, 0..=u64::from(u32::MAX >> 1))
}

/// Parses milliseconds.
pub(crate) fn milliseconds(text: &str) -> Result<u64, String> {
    whole(text, Unit::Milliseconds, 0..=u64::MAX)
}

/// Parses the microseconds of busy-polling.
pub(crate) fn poll_us(text: &str) -> Result<u64, String> {
    whole(text, Unit::Microseconds, 0..=1_000_000)
}

/// Returns a text without the letters at its end.
fn without_suffix(text: &str) -> &str {
    text.trim_end_matches(|c: char| c.is_ascii_alphabetic())
}

/// Parses a time whose unit is this number of seconds if it has no unit.
fn time_in(text: &str, unit: f64) -> Option<f64> {
    let digits = without_suffix(text);
    let length = match &text[digits.len()..] {
        "" => unit,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return None,
    };
    digits.parse::<f64>().ok().map(|number| number * length / unit)
}

/// Parses a size such as `1048576`, `64M` or `1.5G`, where suffixes are powers of 1024, or `10MB`, as in
/// `10^7` bytes; a rate may end in `/s`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let size = text.strip_suffix("/s").unwrap_or(text);
    let digits = without_suffix(size);
    let suffix = &size[digits.len()..];
    let scale = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 1_u64,
        "K" | "KIB" => 1 << 10,
        "M" | "MIB" => 1 << 20,
        "G" | "GIB" => 1 << 30,
        "T" | "TIB" => 1 << 40,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => {
            return Err(format!(
                "unknown suffix {suffix:?}: expected bytes, or K, M, G or T, or KB, MB, GB or TB"
            ));
        }
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("invalid size {text:?}: expected a number of bytes such as 64M"))?;
    let value = number * scale as f64;
    if !(1.0..=2f64.powi(60)).contains(&value) {
        return Err(format!("{text:?} is out of range: expected 1 byte to 1 EiB"));
    }
    Ok(value as u64)
}

/// Parses seconds, with an optional fraction.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = time_in(text, 1.0).ok_or_else(|| {
        format!("invalid time {text:?}: expected a number of seconds, or a time such as 300ms or 2min")
    })?;
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{text:?} is out of range: expected more than 0, at most 86400 seconds"))
    }
}

/// Parses a time with its unit, of a second to many years.
pub(crate) fn period(text: &str) -> Result<Duration, String> {
    let seconds = time_in(text, 1.0).filter(|_| text.ends_with(|c: char| c.is_ascii_alphabetic()));
    seconds.filter(|seconds| (1.0..=1e10).contains(seconds)).map(Duration::from_secs_f64).ok_or_else(|| {
        format!("invalid time {text:?}: expected a time of a second at least with its unit, such as 30s, 5min, 1h or 7d")
    })
}

/// Parses hours, with an optional fraction.
pub(crate) fn hours(text: &str) -> Result<Duration, String> {
    let hours = time_in(text, 3600.0).ok_or_else(|| {
        format!("invalid time {text:?}: expected a number of hours, or a time such as 30min or 7d")
    })?;
    if (0.0..=1e6).contains(&hours) {
        Ok(Duration::from_secs_f64(hours * 3600.0))
    } else {
        Err(format!("{text:?} is out of range: expected 0 to 1000000 hours"))
    }
}

/// Formats a size: `1.50 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// Formats an age in its largest unit: `5 min`.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Formats a number of things: `1 chunk`, `1,234 chunks`.
pub(crate) fn counted(number: u64, noun: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{} {noun}{ending}", count(number))
}

/// Formats a number: `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    HumanCount(number).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_suffixes() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("1.5k"), Ok(1536));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("0"), Err("\"0\" is out of range: expected 1 byte to 1 EiB".into()));
        assert_eq!(
            (bytes("10MB"), bytes("10MiB/s"), bytes("1Gb")),
            (Ok(10_000_000), Ok(10 << 20), Ok(1_000_000_000))
        );
        for (text, suffix) in [("fast", "fast"), ("1X", "X")] {
            let error =
                format!("unknown suffix {suffix:?}: expected bytes, or K, M, G or T, or KB, MB, GB or TB");
            assert_eq!(bytes(text), Err(error));
        }
    }

    #[test]
    fn times_have_the_unit_of_their_option_or_their_own() {
        for text in ["300", "300ms", "0.3s", "0.005min"] {
            assert_eq!(milliseconds(text), Ok(300), "{text}");
        }
        assert_eq!((poll_us("50us"), poll_us("1ms"), poll_us("2")), (Ok(50), Ok(1000), Ok(2)));
        let form = "expected a whole number of milliseconds or a time such as 300ms or 2s";
        assert_eq!(milliseconds("300x"), Err(format!("{form}, such as 300")));
        assert_eq!(
            [milliseconds("-1"), milliseconds("300us")],
            [Err(form.into()), Err(format!("{form}, such as 300"))]
        );
        assert_eq!(
            poll_us("1000001"),
            Err("out of range: expected a whole number of microseconds from 0 to 1000000".into())
        );
        assert_eq!(number::<usize>("4x"), Err("expected a whole number without a suffix, such as 4".into()));
        assert_eq!(
            number::<usize>("99999999999999999999"),
            Err("out of range: expected a whole number from 0 to 2147483647".into())
        );
        assert_eq!(
            (seconds("10s"), seconds("0.3"), seconds("300ms")),
            (Ok(Duration::from_secs(10)), seconds("0.3s"), seconds("0.3"))
        );
        assert_eq!((hours("24h"), hours("7d"), hours("30min")), (hours("1d"), hours("168"), hours("0.5")));
        assert!(
            seconds("10x").unwrap_err().starts_with("invalid time \"10x\": expected a number of seconds")
        );
        assert!(hours("1w").unwrap_err().starts_with("invalid time \"1w\": expected a number of hours"));
    }

    #[test]
    fn ages_are_in_their_largest_unit() {
        let shown =
            [0, 59, 60, 3599, 3600, 172_799, 172_800].map(|seconds| age(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0 s", "59 s", "1 min", "59 min", "1 h", "47 h", "2 d"]);
    }

    #[test]
    fn numbers_are_formatted_in_groups() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
        assert_eq!(
            [0, 1, 2345].map(|number| counted(number, "chunk")),
            ["0 chunks", "1 chunk", "2,345 chunks"]
        );
        assert_eq!(size(1536), "1.50 KiB");
        assert_eq!(size(12), "12 B");
    }
}

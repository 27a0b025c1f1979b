//! Parsing and formatting of numbers with units.

use std::ops::RangeInclusive;
use std::time::Duration;

use indicatif::{HumanBytes, HumanCount};

/// Unit of an option whose value is a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// A count, or an index.
    None,
    Bytes,
    Microseconds,
    Milliseconds,
    Seconds,
}

impl Unit {
    fn of_unit(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Bytes => " of bytes",
            Self::Microseconds => " of microseconds",
            Self::Milliseconds => " of milliseconds",
            Self::Seconds => " of seconds",
        }
    }
}

/// Parses a whole number in a range, whose unit belongs to the option and not to its value.
pub(crate) fn whole<T: TryFrom<u64>>(
    text: &str,
    unit: Unit,
    range: RangeInclusive<u64>,
) -> Result<T, String> {
    let of_unit = unit.of_unit();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        let example = without_suffix(text).parse::<u64>().map(|number| format!(", such as {number}"));
        return Err(format!(
            "expected a whole number{of_unit} without a suffix{}",
            example.unwrap_or_default()
        ));
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

/// Parses a size such as `1048576`, `64M` or `1.5G`; suffixes are powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = without_suffix(text);
    let suffix = &text[digits.len()..];
    let scale = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 1_u64,
        "K" | "KIB" => 1 << 10,
        "M" | "MIB" => 1 << 20,
        "G" | "GIB" => 1 << 30,
        "T" | "TIB" => 1 << 40,
        _ => {
            return Err(format!("unknown suffix {suffix:?}: expected bytes, or K, M, G or T"));
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
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("invalid time {text:?}: expected a number of seconds without a suffix"))?;
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{text:?} is out of range: expected more than 0, at most 86400 seconds"))
    }
}

/// Parses hours, with an optional fraction.
pub(crate) fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 = text
        .parse()
        .map_err(|_| format!("invalid time {text:?}: expected a number of hours without a suffix"))?;
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
        assert_eq!(bytes("1Gb"), Err("unknown suffix \"Gb\": expected bytes, or K, M, G or T".into()));
        assert_eq!(bytes("fast"), Err("unknown suffix \"fast\": expected bytes, or K, M, G or T".into()));
    }

    #[test]
    fn a_plain_number_with_a_suffix_is_refused_with_its_unit() {
        assert_eq!(milliseconds("300"), Ok(300));
        assert_eq!(
            milliseconds("300ms"),
            Err("expected a whole number of milliseconds without a suffix, such as 300".into())
        );
        assert_eq!(
            milliseconds("-1"),
            Err("expected a whole number of milliseconds without a suffix".into())
        );
        assert_eq!(
            poll_us("50us"),
            Err("expected a whole number of microseconds without a suffix, such as 50".into())
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
            whole::<u64>("10s", Unit::Seconds, 1..=u64::MAX),
            Err("expected a whole number of seconds without a suffix, such as 10".into())
        );
        assert_eq!(
            whole::<u16>("67", Unit::Bytes, 68..=65_535),
            Err("out of range: expected a whole number of bytes from 68 to 65535".into())
        );
        assert_eq!(
            seconds("10s"),
            Err("invalid time \"10s\": expected a number of seconds without a suffix".into())
        );
        assert_eq!(
            hours("24h"),
            Err("invalid time \"24h\": expected a number of hours without a suffix".into())
        );
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

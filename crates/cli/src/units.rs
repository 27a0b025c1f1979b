//! Parsing and formatting of numbers with units.

use std::time::Duration;

/// Parses a size such as `1048576`, `64M` or `1.5G`; suffixes are powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1_u64,
        "K" | "KIB" => 1 << 10,
        "M" | "MIB" => 1 << 20,
        "G" | "GIB" => 1 << 30,
        "T" | "TIB" => 1 << 40,
        suffix => return Err(format!("unknown suffix {suffix:?}: expected K, M, G or T")),
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
    let seconds: f64 =
        text.parse().map_err(|_| format!("invalid time {text:?}: expected a number of seconds"))?;
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{text:?} is out of range: expected more than 0, at most 86400 seconds"))
    }
}

/// Parses hours, with an optional fraction.
pub(crate) fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 =
        text.parse().map_err(|_| format!("invalid time {text:?}: expected a number of hours"))?;
    if (0.0..=1e6).contains(&hours) {
        Ok(Duration::from_secs_f64(hours * 3600.0))
    } else {
        Err(format!("{text:?} is out of range: expected 0 to 1000000 hours"))
    }
}

/// Formats a size: `1.50 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.2} {}", units[unit]),
    }
}

/// Formats a number: `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
        assert_eq!(bytes("5X"), Err("unknown suffix \"X\": expected K, M, G or T".into()));
        assert_eq!(bytes("fast"), Err("unknown suffix \"FAST\": expected K, M, G or T".into()));
    }

    #[test]
    fn numbers_are_formatted_in_groups() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
        assert_eq!(size(1536), "1.50 KiB");
        assert_eq!(size(12), "12 B");
    }
}

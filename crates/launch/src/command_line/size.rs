//! Sizes as QEMU writes them.

use super::error::{ValueError, excerpt};

/// Parses a size of whole bytes: a number with the suffix `B`, `K`, `M`, `G`, `T`, `P` or `E` (powers of
/// 1024), decimal or `0x…`. A number without one is in `unit` bytes. Fractions (`1.5G`) are accepted where
/// they are whole bytes.
///
/// Source: QEMU's `util/cutils.c`, `qemu_strtosz`.
///
/// # Errors
/// [`ValueError::Size`].
pub fn parse_size(text: &str, unit: u64) -> Result<u64, ValueError> {
    parse(text, unit).ok_or_else(|| ValueError::Size { found: excerpt(text) })
}

fn parse(text: &str, unit: u64) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(digits, 16).ok()?.checked_mul(unit);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let shift = match suffix {
        "" => None,
        "B" | "b" => Some(0),
        "K" | "k" => Some(10),
        "M" | "m" => Some(20),
        "G" | "g" => Some(30),
        "T" | "t" => Some(40),
        "P" | "p" => Some(50),
        "E" | "e" => Some(60),
        _ => return None,
    };
    let factor = shift.map_or(unit, |shift| 1 << shift);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    // Up to 18 digits fit into the product of two 64-bit numbers.
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| *digits <= 18)?;
    let product = fraction.parse::<u128>().ok()? * u128::from(factor);
    let scale = 10_u128.pow(digits);
    (product % scale == 0).then_some(())?;
    whole.checked_add(u64::try_from(product / scale).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_or_a_unit() {
        for (text, unit, wanted) in [
            ("128", 1 << 20, 128 << 20),
            ("128", 1, 128),
            ("512K", 1, 512 << 10),
            ("4G", 1 << 20, 4 << 30),
            ("1.5G", 1 << 20, 3 << 29),
            ("0x1000", 1, 4096),
            ("100b", 1 << 20, 100),
        ] {
            assert_eq!(parse_size(text, unit), Ok(wanted), "{text}");
        }
        for text in ["", "G", "-1", "1.0.0G", "1.1B", "16E", "4GB", "0xg", "1e3"] {
            assert_eq!(parse_size(text, 1), Err(ValueError::Size { found: text.into() }));
        }
    }
}

//! Forms that values from an image may have. None of them admits a `/`, a `\`, or a URL, so no such value can
//! name a file. The exception is the arguments of a kernel, which only the guest reads.

use std::net::IpAddr;

use crate::names::NameGroup;

/// A form, and the properties whose values have it.
pub(crate) type Known = NameGroup<Form>;

/// Form of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `on`, `off`, `yes`, `no`, `true`, `false`, `auto`.
    Switch,
    /// A switch that only this host turns on.
    Off,
    /// A decimal or hexadecimal number, with a sign or without.
    Number,
    /// A number with a unit.
    Size,
    /// Letters, digits, `-`, `_`, `.`, `+`.
    Word,
    /// Words and blanks.
    Label,
    /// Arguments of the guest's kernel: printable text.
    KernelArguments,
    /// As a word; beginning with a letter, but not with `towline-`, as those of the launcher do. It refers to
    /// another option.
    Id,
    /// Six bytes in hexadecimal.
    Mac,
    /// `slot` or `slot.function`, in hexadecimal.
    PciAddress,
    /// In hexadecimal, with dashes.
    Uuid,
    /// As `2026-11-22T19:00:00`, or `utc` or `localtime`.
    Date,
    /// Numbers and ranges of numbers; may be given several times.
    Ranges,
    /// An IP address, with the length of a prefix or without.
    Network,
    /// Nothing.
    Empty,
    /// One of these.
    One(&'static [&'static str]),
    /// Comes from this host only.
    Host,
}

/// Longest value of any other form than a kernel's arguments, in bytes.
const BYTES_MAX: usize = 128;
/// Longest arguments of a kernel: those of Linux on x86.
const KERNEL_ARGUMENTS_BYTES_MAX: usize = 2048;

impl Form {
    /// Returns true if a value has this form.
    pub(crate) fn admits(self, value: &str) -> bool {
        let hex = |text: &str, length_max: usize| {
            !text.is_empty() && text.len() <= length_max && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let is_word = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b));
        if value.len() > if self == Self::KernelArguments { KERNEL_ARGUMENTS_BYTES_MAX } else { BYTES_MAX } {
            return false;
        }
        match self {
            Self::KernelArguments => value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()),
            Self::Switch => ["on", "off", "yes", "no", "true", "false", "auto"].contains(&value),
            Self::Off => ["off", "no", "false"].contains(&value),
            Self::Number => {
                let digits = value.strip_prefix('-').unwrap_or(value);
                match digits.strip_prefix("0x") {
                    Some(digits) => hex(digits, 16),
                    None => {
                        !digits.is_empty()
                            && digits.len() <= 20
                            && digits.bytes().all(|byte| byte.is_ascii_digit())
                    }
                }
            }
            Self::Size => crate::command_line::parse_size(value, 1).is_ok(),
            Self::Word => !value.is_empty() && is_word(value) && value != "." && value != "..",
            Self::Label => {
                !value.is_empty()
                    && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+ ()".contains(&b))
            }
            Self::Id => {
                value.starts_with(|c: char| c.is_ascii_alphabetic())
                    && is_word(value)
                    && !value.starts_with("towline-")
            }
            Self::Mac => {
                let bytes: Vec<_> = value.split([':', '-']).collect();
                bytes.len() == 6 && bytes.iter().all(|byte| hex(byte, 2))
            }
            Self::PciAddress => {
                let (slot, function) = value.split_once('.').unwrap_or((value, "0"));
                [slot, function].iter().all(|part| hex(part.strip_prefix("0x").unwrap_or(part), 2))
            }
            Self::Uuid => {
                value.split('-').map(str::len).eq([8, 4, 4, 4, 12]) && hex(&value.replace('-', ""), 32)
            }
            Self::Date => {
                ["utc", "localtime"].contains(&value)
                    || value.starts_with(|c: char| c.is_ascii_digit())
                        && value.bytes().all(|byte| byte.is_ascii_digit() || b"-:T".contains(&byte))
            }
            Self::Ranges => {
                !value.is_empty() && value.split('-').all(|part| Self::Number.admits(part) && part.len() <= 6)
            }
            Self::Network => {
                let (address, prefix) = value.split_once('/').unwrap_or((value, "0"));
                address.parse::<IpAddr>().is_ok() && prefix.len() <= 3 && prefix.parse::<u8>().is_ok()
            }
            Self::Empty => value.is_empty(),
            Self::One(values) => values.contains(&value),
            Self::Host => false,
        }
    }

    /// Describes the form, for errors.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::Switch => "on, off or auto".into(),
            Self::Off => "off, unless this host sets it".into(),
            Self::Number => "a number".into(),
            Self::Size => "a size".into(),
            Self::Word => "letters, digits and -_.+".into(),
            Self::Label => "letters, digits, blanks and -_.+()".into(),
            Self::KernelArguments => {
                format!("printable text of at most {KERNEL_ARGUMENTS_BYTES_MAX} bytes")
            }
            Self::Id => "an id that does not begin with towline-".into(),
            Self::Mac => "a MAC address".into(),
            Self::PciAddress => "a PCI slot and function".into(),
            Self::Uuid => "a UUID".into(),
            Self::Date => "a date, utc or localtime".into(),
            Self::Ranges => "a range of numbers".into(),
            Self::Network => "an IP address".into(),
            Self::Empty => "no value".into(),
            Self::One(values) => values.join(" or "),
            Self::Host => "a value of this host".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_admit_their_values() {
        for (form, admitted, refused) in [
            (Form::Switch, &["on", "auto"][..], &["", "maybe"][..]),
            (
                Form::Number,
                &["0", "-1", "0x1f", "18446744073709551615"],
                &["", "-", "1.5", "0x", "1e5", "1 "],
            ),
            (Form::Size, &["512M", "1073741824"], &["", "1/2", "G"]),
            (Form::Word, &["pc-q35-10.0", "a_b+c"], &["", ".", "..", "a/b", "a:b", "a b", "\u{e9}"]),
            (Form::Label, &["Standard PC (Q35 + ICH9)"], &["", "a/b", "a,b", "a:b"]),
            (Form::KernelArguments, &["", "root=/dev/vda1 console=ttyS0,115200n8"], &["a\nb", "\u{e9}"]),
            (Form::Off, &["off", "no"], &["", "on", "auto"]),
            (Form::Id, &["net0", "pci.1", "towline"], &["", "0", "a/b", "a|b", "towline-qmp"]),
            (Form::Mac, &["52:54:00:12:34:56", "0-1-2-3-4-5"], &["", "52:54:00:12:34", "g:1:2:3:4:5"]),
            (Form::PciAddress, &["1f.2", "0x3", "3"], &["", "1f.", "0000:01:00.0"]),
            (
                Form::Uuid,
                &["6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11"],
                &["", "6b5f1c1e", "----", "zb5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11"],
            ),
            (Form::Date, &["utc", "2026-11-22T19:00:00", "2026-11-22"], &["", "T", "now"]),
            (Form::Ranges, &["0", "0-3"], &["", "-", "0-", "a"]),
            (Form::Network, &["10.0.2.0/24", "fec0::/64", "::1"], &["", "/etc", "10.0.2.0/", "10.0.2.0/a/b"]),
            (Form::Empty, &[""], &["a"]),
            (Form::One(&["none"]), &["none"], &["", "non"]),
            (Form::Host, &[], &["", "on", "1"]),
        ] {
            admitted.iter().for_each(|value| assert!(form.admits(value), "{form:?} {value}"));
            refused.iter().for_each(|value| assert!(!form.admits(value), "{form:?} {value}"));
        }
        assert!(!Form::Word.admits(&"a".repeat(BYTES_MAX + 1)));
    }
}

//! Names of one host, and those of another one in their place.
//!
//! ```text
//!   # comment
//!   /srv/vm/=/data/vm/      each value that begins with /srv/vm/
//!   br0=br1                 each value that is br0
//! ```

use std::str::FromStr;

use crate::command_line::{CommandLine, OptionValue, QemuOption, excerpt};
use crate::settings::Setting;

/// Properties that name parts of the guest, and nothing of a host.
const OWN: [&str; 3] = ["id", "node-name", "name"];

/// Translation of the values of a command line for another host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostMap(Vec<Translation>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Translation {
    from: String,
    to: String,
}

/// A line that is not a translation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is {found:?}, expected FROM=TO")]
pub struct HostMapError {
    /// Counted from 1.
    pub line: usize,
    /// Its beginning.
    pub found: String,
}

impl FromStr for HostMap {
    type Err = HostMapError;

    fn from_str(text: &str) -> Result<Self, HostMapError> {
        let lines = text.lines().map(str::trim).enumerate();
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let translation = |(index, line): (usize, &str)| match line.split_once('=') {
            Some((from, to)) if !from.is_empty() && !to.is_empty() => {
                Ok(Translation { from: from.to_owned(), to: to.to_owned() })
            }
            _ => Err(HostMapError { line: index + 1, found: excerpt(line) }),
        };
        lines.map(translation).collect::<Result<_, _>>().map(Self)
    }
}

impl HostMap {
    /// The settings with which this command line has the other host's names. A directory (`/srv/`) is that of each file in it; of several
    /// that fit, the longest counts.
    pub fn settings(&self, line: &CommandLine) -> Vec<Setting> {
        let keys = line.setting_keys();
        keys.iter().zip(line.options()).flat_map(|(key, option)| self.of_option(key, option)).collect()
    }

    fn of_option(&self, key: &str, option: &QemuOption) -> Vec<Setting> {
        match &option.value {
            OptionValue::Text(text) => {
                let setting = |value| Setting { key: key.to_owned(), value };
                self.translated(text).map(setting).into_iter().collect()
            }
            OptionValue::Properties(properties) => {
                let pairs = properties.pairs().into_iter();
                // Not those within a JSON object, which no key addresses.
                let own = pairs.filter(|(name, value)| {
                    !OWN.contains(name) && properties.value(name).as_ref() == Some(value)
                });
                let setting = |(name, value): (&str, String)| {
                    Some(Setting { key: format!("{key}.{name}"), value: self.translated(&value)? })
                };
                own.filter_map(setting).collect()
            }
            _ => Vec::new(),
        }
    }

    fn translated(&self, value: &str) -> Option<String> {
        let fits = |translation: &&Translation| {
            let Translation { from, .. } = translation;
            value == from || from.ends_with('/') && value.starts_with(from)
        };
        let Translation { from, to } = self.0.iter().filter(fits).max_by_key(|one| one.from.len())?;
        Some(format!("{to}{}", &value[from.len()..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_other_host() {
        let map: HostMap =
            "# names\n/srv/=/data/\n/srv/iso/=/iso/\n\nbr0=br1\ndisk0=never\n".parse().unwrap();
        let line = CommandLine::parse(
            [
                "-drive",
                "file=/srv/a.raw,format=raw,id=disk0",
                "-cdrom",
                "/srv/iso/d.iso",
                "-netdev",
                "tap,id=n0,br=br0",
                "-kernel",
                "/srv",
            ]
            .map(std::ffi::OsString::from),
        );
        let settings = map.settings(&line.unwrap());
        let texts: Vec<_> = settings.iter().map(|one| format!("{}={}", one.key, one.value)).collect();
        assert_eq!(texts, ["drive.disk0.file=/data/a.raw", "cdrom=/iso/d.iso", "netdev.n0.br=br1"]);
    }

    #[test]
    fn a_line_without_both_names_is_refused_by_its_number() {
        for text in ["a=b\nc", "a=b\n=c", "a=b\nc="] {
            let error = text.parse::<HostMap>().unwrap_err();
            assert!(error.to_string().starts_with("line 2 is"), "{error}");
        }
    }
}

//! Values of this host for a command line's options: `--set KEY=VALUE`.
//!
//! `KEY` is `OPTION`, `OPTION.ID` or `OPTION.N` (the N-th of those without an id, from 0; of a sole one as
//! well), each with `.PROPERTY` or without: `machine.type`, `drive.disk0.file`, `serial.0`. A value for a
//! property replaces that property; a value for an option replaces the whole option, and an empty one removes
//! it.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::command_line::{CommandLine, OptionName, ParseError, QemuOption, Repeated, Syntax, excerpt};
use crate::limits::NAME_BYTES_MAX;

/// A value for an option or for a property of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The option or property: `OPTION`, `OPTION.ID` or `OPTION.N`, each with `.PROPERTY` or without.
    pub key: String,
    /// Value of the property, without QEMU's escape for commas; or of the whole option, as QEMU reads it.
    pub value: String,
}

/// A setting that cannot be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// Not of the form `KEY=VALUE`.
    #[error(
        "setting {found:?} is malformed: expected OPTION.ID.PROPERTY=VALUE, as drive.disk0.file=/srv/disk0"
    )]
    Malformed { found: String },
    /// QEMU has no such option.
    #[error("setting {key}: QEMU has no option -{option}; write the option's name as QEMU has it")]
    UnknownOption { key: String, option: String },
    /// The command line has no such option.
    #[error("setting {key}: no option of the guest matches; expected one of {expected}")]
    NoMatch {
        key: String,
        /// Keys of the options with that name.
        expected: String,
    },
    /// The option has no properties.
    #[error("setting {key}: -{option} has no properties; set its whole value with {option}=VALUE")]
    NoProperties { key: String, option: String },
    /// The value does not have the option's syntax.
    #[error("setting {key}: {source}; write the value as QEMU expects it")]
    Value { key: String, source: ParseError },
}

/// An option while settings are applied to it.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) option: QemuOption,
    /// The key that addresses it.
    pub(crate) address: String,
    pub(crate) origin: ValueOrigin,
}

/// Origin of an option's values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ValueOrigin {
    /// From the image, except for these properties.
    Image(BTreeSet<String>),
    /// From this host.
    Host,
}

impl FromStr for Setting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let malformed = || SettingError::Malformed { found: excerpt(text) };
        let (key, value) = text.split_once('=').ok_or_else(malformed)?;
        if key.is_empty() || key.len() > 3 * NAME_BYTES_MAX {
            return Err(malformed());
        }
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

/// Index of the option that a key addresses in a command line.
pub(crate) fn addressed(command_line: &CommandLine, key: &str) -> Option<usize> {
    let name = OptionName::find(key.split_once('.').map_or(key, |(name, _)| name))?;
    let candidates = apply(command_line, &[]).ok()?;
    find(&candidates, name, key).map(|(index, _)| index)
}

/// Applies settings to a command line. Their addresses refer to the command line before any of them is
/// applied.
pub(crate) fn apply(
    command_line: &CommandLine,
    settings: &[Setting],
) -> Result<Vec<Candidate>, SettingError> {
    let candidate = |(option, address): (&QemuOption, String)| {
        let origin = ValueOrigin::Image(BTreeSet::new());
        Candidate { option: option.clone(), address, origin }
    };
    let options = command_line.options().iter().zip(command_line.setting_keys());
    let mut candidates: Vec<Candidate> = options.map(candidate).collect();
    for setting in command_line.canonical(settings) {
        apply_one(&mut candidates, &setting)?;
    }
    Ok(candidates)
}

fn apply_one(candidates: &mut Vec<Candidate>, setting: &Setting) -> Result<(), SettingError> {
    let Setting { key, value } = setting;
    let (name, rest) = key.split_once('.').map_or((key.as_str(), None), |(name, rest)| (name, Some(rest)));
    let Some(name) = OptionName::find(name) else {
        return Err(SettingError::UnknownOption { key: key.clone(), option: excerpt(name) });
    };
    let Some((index, property)) = find(candidates, name, key) else {
        return add(candidates, name, rest, setting);
    };
    let fault = |source| SettingError::Value { key: key.clone(), source };
    let candidate = &mut candidates[index];
    match property {
        None if value.is_empty() => drop(candidates.remove(index)),
        None => {
            let id = candidate.option.id();
            candidate.option = QemuOption::parse(name, Some(value)).map_err(fault)?;
            let has_id = candidate.option.id().is_some();
            if let (Some(id), false, Some(properties)) = (id, has_id, candidate.option.properties_mut()) {
                properties.set(if name.as_str() == "blockdev" { "node-name" } else { "id" }, &id);
            }
            candidate.origin = ValueOrigin::Host;
        }
        Some(property) => {
            let Some(properties) = candidate.option.properties_mut() else {
                return Err(SettingError::NoProperties { key: key.clone(), option: name.as_str().into() });
            };
            properties.set(&property, value);
            if let ValueOrigin::Image(trusted) = &mut candidate.origin {
                trusted.insert(property);
            }
            // The whole command line is checked again, now with this value.
            let text = candidate.option.value_text();
            candidate.option = QemuOption::parse(name, text.as_deref()).map_err(fault)?;
        }
    }
    Ok(())
}

/// Adds an option that the command line does not have.
fn add(
    candidates: &mut Vec<Candidate>,
    name: OptionName,
    rest: Option<&str>,
    setting: &Setting,
) -> Result<(), SettingError> {
    let Setting { key, value } = setting;
    let fault = |source| SettingError::Value { key: key.clone(), source };
    let has_name = |candidate: &&Candidate| candidate.option.name == name;
    let expected: Vec<&str> =
        candidates.iter().filter(has_name).map(|candidate| candidate.address.as_str()).collect();
    let option = match rest {
        None if value.is_empty() => return Ok(()),
        None => QemuOption::parse(name, Some(value)).map_err(fault)?,
        Some(property) if expected.is_empty() && !is_repeated(name, Repeated::ById) => {
            let text = format!("{property}={}", value.replace(',', ",,"));
            QemuOption::parse(name, Some(&text)).map_err(fault)?
        }
        Some(_) => {
            let expected = if expected.is_empty() {
                format!("-{} with an id, of which there are none", name.as_str())
            } else {
                expected.join(", ")
            };
            return Err(SettingError::NoMatch { key: key.clone(), expected });
        }
    };
    candidates.push(Candidate { option, address: name.as_str().to_owned(), origin: ValueOrigin::Host });
    Ok(())
}

/// The option that a key addresses, and the property if it has one: the longest address counts, since ids may
/// contain dots.
fn find(candidates: &[Candidate], name: OptionName, key: &str) -> Option<(usize, Option<String>)> {
    let named = candidates.iter().enumerate().filter(|(_, candidate)| candidate.option.name == name);
    let fits = named.filter_map(|(index, Candidate { address, .. })| {
        let rest = key.strip_prefix(address)?;
        let property = if rest.is_empty() { None } else { Some(rest.strip_prefix('.')?.to_owned()) };
        Some((address.len(), index, property))
    });
    fits.max_by_key(|(length, ..)| *length).map(|(_, index, property)| (index, property))
}

fn is_repeated(name: OptionName, as_expected: Repeated) -> bool {
    matches!(name.syntax(), Syntax::Properties { repeated, .. } if repeated == as_expected)
}

impl CommandLine {
    /// The key that addresses each option in a [`Setting`], in the options' order: with its id, with a number if several have none, or its
    /// name alone. Of options that are merged, the last has the name alone, because its values count.
    pub fn setting_keys(&self) -> Vec<String> {
        let options = self.options();
        let ids: Vec<Option<String>> = options
            .iter()
            .map(|option| option.id().filter(|id| is_repeated(option.name, Repeated::ById) && is_id(id)))
            .collect();
        let is_same = |a: usize, b: usize| options[a].name == options[b].name && ids[b].is_none();
        let key = |(index, option): (usize, &QemuOption)| {
            let name = option.name.as_str();
            if let Some(id) = &ids[index] {
                return format!("{name}.{id}");
            }
            let before = (0..index).filter(|other| is_same(index, *other)).count();
            let after = (index + 1..options.len()).filter(|other| is_same(index, *other)).count();
            let is_merged = is_repeated(option.name, Repeated::Merged);
            if is_merged && after == 0 || !is_merged && before + after == 0 {
                name.to_owned()
            } else {
                format!("{name}.{before}")
            }
        };
        options.iter().enumerate().map(key).collect()
    }

    /// The settings by the keys that this command line has: the number of a sole option (`serial.0`) is left
    /// out.
    pub fn canonical(&self, settings: &[Setting]) -> Vec<Setting> {
        let keys = self.setting_keys();
        let key = |key: &str| {
            let (name, rest) = key.split_once('.')?;
            let rest = rest.strip_prefix('0').filter(|rest| rest.is_empty() || rest.starts_with('.'))?;
            let is_numbered = keys.contains(&format!("{name}.0"));
            (!is_numbered && keys.iter().any(|key| key == name)).then(|| format!("{name}{rest}"))
        };
        let canonical = |setting: &Setting| Setting {
            key: key(&setting.key).unwrap_or_else(|| setting.key.clone()),
            value: setting.value.clone(),
        };
        settings.iter().map(canonical).collect()
    }
}

/// Returns true if QEMU accepts the id; another could not be written in a key. Source: `id_wellformed` of
/// QEMU's `util/id.c`.
fn is_id(id: &str) -> bool {
    id.len() <= NAME_BYTES_MAX
        && id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> CommandLine {
        CommandLine::parse(words.split(' ')).unwrap()
    }

    fn set(words: &str, settings: &[&str]) -> Result<String, SettingError> {
        let settings: Vec<Setting> = settings.iter().map(|text| text.parse().unwrap()).collect();
        let candidates = apply(&line(words), &settings)?;
        let mut result = CommandLine::default();
        candidates.into_iter().for_each(|candidate| result.push(candidate.option).unwrap());
        let words: Vec<_> =
            result.to_arguments().into_iter().map(|word| word.into_string().unwrap()).collect();
        Ok(words.join(" "))
    }

    #[test]
    fn options_are_addressed_by_id_number_or_name() {
        let line =
            line("-M q35 -machine smm=off -device e1000,id=pci.1 -device e1000 -serial none -serial null -S");
        let wanted = ["machine.0", "machine", "device.pci.1", "device", "serial.0", "serial.1", "S"]
            .map(str::to_owned);
        assert_eq!(line.setting_keys(), wanted);
    }

    #[test]
    fn a_sole_option_has_a_number_too() {
        assert_eq!(set("-serial none -S", &["serial.0=null"]).unwrap(), "-serial null -S");
        assert_eq!(set("-device e1000", &["device.0.addr=3"]).unwrap(), "-device e1000,addr=3");
        assert_eq!(
            set("-machine q35 -machine smm=off", &["machine.0.type=pc"]).unwrap(),
            "-machine pc -machine smm=off"
        );
        assert!(set("-serial none", &["serial.1=null"]).is_err());
    }

    #[test]
    fn longest_id_counts() {
        let words = "-device e1000,id=pci -device e1000,id=pci.1";
        assert_eq!(
            set(words, &["device.pci.1.addr=3"]).unwrap(),
            "-device e1000,id=pci -device e1000,id=pci.1,addr=3"
        );
    }

    #[test]
    fn a_value_for_an_option_replaces_it_and_keeps_its_id() {
        let words = "-netdev user,id=n0 -device e1000,netdev=n0";
        let wanted = "-netdev tap,ifname=tap0,id=n0 -device e1000,netdev=n0";
        assert_eq!(set(words, &["netdev.n0=tap,ifname=tap0"]).unwrap(), wanted);
        assert_eq!(set(words, &["netdev.n0="]).unwrap(), "-device e1000,netdev=n0");
    }

    #[test]
    fn missing_option_is_added() {
        assert_eq!(
            set("-S", &["m.size=1G", "cpu=Nehalem"]).unwrap(),
            "-S -m size=1G -cpu Nehalem".replace("size=", "")
        );
    }

    #[test]
    fn settings_without_a_target_are_errors() {
        let error = |setting: &str| set("-drive id=a,if=none -S", &[setting]).unwrap_err().to_string();
        assert_eq!(
            error("drive.b.file=/x"),
            "setting drive.b.file: no option of the guest matches; expected one of drive.a"
        );
        assert_eq!(
            error("disk.b.file=/x"),
            "setting disk.b.file: QEMU has no option -disk; write the option's name as QEMU has it"
        );
        assert_eq!(error("S.b=/x"), "setting S.b: -S has no properties; set its whole value with S=VALUE");
        assert!(matches!("drive".parse::<Setting>(), Err(SettingError::Malformed { .. })));
    }

    #[test]
    fn comma_in_a_value_does_not_begin_a_property() {
        assert_eq!(
            set("-drive id=a,if=none", &["drive.a.file=/x,readonly=off"]).unwrap(),
            "-drive id=a,if=none,file=/x,,readonly=off"
        );
    }
}

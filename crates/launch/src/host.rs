//! The part of a command line that comes from this host and its user: everything that names something of the
//! host.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use crate::settings::Setting;

/// A variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Name.
    pub name: OsString,
    /// Value.
    pub value: OsString,
}

/// Arguments that come from this host's configuration or its user, and never from an image.
///
/// In all values but the binary's, `{n}` is the number of the clone, from 0, and `{name}` its name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostArguments {
    /// The QEMU to start: an absolute path, or a name that is looked up in `PATH`.
    pub binary: PathBuf,
    /// Directories of firmware (`-L`).
    pub firmware_directories: Vec<PathBuf>,
    /// Variables of QEMU's environment, beside the few that are inherited ([`Launcher`](crate::Launcher)).
    pub environment: Vec<EnvironmentVariable>,
    /// QEMU's working directory, to which relative paths in settings and arguments are relative; `/` by
    /// default.
    pub working_directory: Option<PathBuf>,
    /// Directory of a log file for each serial port and console of an image. Their length has no limit, so it
    /// belongs on a disk, not on a tmpfs. Without one, QEMU keeps the last 64 KiB of each in a ring buffer
    /// (`ringbuf-read` of QMP).
    pub console_directory: Option<PathBuf>,
    /// Values for the image's options (`--set`). What a setting leaves to the image is the image's choice: a
    /// disk whose `file` is set is written to unless `readonly=on` is set too, and so is the file of a memory
    /// backend whose `mem-path` is set without `share=off`.
    pub settings: Vec<Setting>,
    /// Further arguments of QEMU, unchanged. Those that would detach QEMU from the launcher are refused:
    /// `-daemonize`, `-runas`, `-chroot`, and the same in `-run-with`.
    pub arguments: Vec<OsString>,
}

/// The variables' values for one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestIdentity<'a> {
    /// Number of the clone, from 0.
    pub n: u32,
    /// Name.
    pub name: &'a str,
}

/// A variable that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("variable {{{variable}}} in {text:?} is not known: expected {{n}} or {{name}}; write one of these")]
pub struct HostError {
    /// Name.
    pub variable: String,
    /// The value that has it.
    pub text: String,
}

impl HostArguments {
    /// Returns the arguments for one guest, with the variables replaced by their values.
    ///
    /// # Errors
    /// The first variable that is not known.
    pub fn for_guest(&self, guest: GuestIdentity<'_>) -> Result<Self, HostError> {
        let argument = |value: &OsString| substitute_os(value, guest);
        let path = |path: &PathBuf| substitute_os(path.as_os_str(), guest).map(PathBuf::from);
        let optional = |value: &Option<PathBuf>| value.as_ref().map(path).transpose();
        let variable = |EnvironmentVariable { name, value }: &EnvironmentVariable| {
            let (name, value) = (name.clone(), substitute_os(value, guest)?);
            Ok(EnvironmentVariable { name, value })
        };
        let setting = |Setting { key, value }: &Setting| {
            Ok(Setting { key: key.clone(), value: substitute(value, guest)? })
        };
        Ok(Self {
            binary: self.binary.clone(),
            firmware_directories: self.firmware_directories.iter().map(path).collect::<Result<_, _>>()?,
            environment: self.environment.iter().map(variable).collect::<Result<_, HostError>>()?,
            working_directory: optional(&self.working_directory)?,
            console_directory: optional(&self.console_directory)?,
            settings: self.settings.iter().map(setting).collect::<Result<_, HostError>>()?,
            arguments: self.arguments.iter().map(argument).collect::<Result<_, _>>()?,
        })
    }
}

/// Replaces variables. A brace that does not begin a name in braces is kept, for JSON.
fn substitute(text: &str, guest: GuestIdentity<'_>) -> Result<String, HostError> {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let (before, after) = rest.split_at(at);
        result.push_str(before);
        let name = after[1..].split_once('}').map(|(name, _)| name).filter(|name| is_variable(name));
        let Some(name) = name else {
            result.push('{');
            rest = &after[1..];
            continue;
        };
        match name {
            "n" => result.push_str(&guest.n.to_string()),
            "name" => result.push_str(guest.name),
            _ => return Err(HostError { variable: name.to_owned(), text: text.to_owned() }),
        }
        rest = &after[name.len() + 2..];
    }
    result.push_str(rest);
    Ok(result)
}

fn is_variable(name: &str) -> bool {
    !name.is_empty()
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// As [`substitute`]; a value that is not UTF-8 is divided at its invalid bytes, which no variable contains.
fn substitute_os(value: &OsStr, guest: GuestIdentity<'_>) -> Result<OsString, HostError> {
    let mut bytes = Vec::new();
    for chunk in value.as_bytes().utf8_chunks() {
        bytes.extend_from_slice(substitute(chunk.valid(), guest)?.as_bytes());
        bytes.extend_from_slice(chunk.invalid());
    }
    Ok(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: GuestIdentity<'_> = GuestIdentity { n: 7, name: "web-7" };

    #[test]
    fn variables_are_replaced_in_every_value() {
        let host = HostArguments {
            binary: "/usr/bin/qemu-{n}".into(),
            firmware_directories: vec!["/fw/{name}".into()],
            environment: vec![EnvironmentVariable { name: "N".into(), value: "{n}".into() }],
            working_directory: Some("/w/{n}".into()),
            console_directory: Some("/c/{name}".into()),
            settings: vec![Setting { key: "netdev.n0.ifname".into(), value: "tap{n}".into() }],
            arguments: vec![OsString::from_vec(b"\xff{n}{\xff}".to_vec())],
        };
        let wanted = HostArguments {
            binary: "/usr/bin/qemu-{n}".into(),
            firmware_directories: vec!["/fw/web-7".into()],
            environment: vec![EnvironmentVariable { name: "N".into(), value: "7".into() }],
            working_directory: Some("/w/7".into()),
            console_directory: Some("/c/web-7".into()),
            settings: vec![Setting { key: "netdev.n0.ifname".into(), value: "tap7".into() }],
            arguments: vec![OsString::from_vec(b"\xff7{\xff}".to_vec())],
        };
        assert_eq!(host.for_guest(GUEST).unwrap(), wanted);
    }

    #[test]
    fn json_keeps_its_braces_and_an_unknown_variable_is_an_error() {
        let json = r#"{"driver":"virtio-net-pci","mac":"52:54:00:00:00:{n}"}"#;
        assert_eq!(substitute(json, GUEST).unwrap(), json.replace("{n}", "7"));
        assert_eq!(substitute("a{}{1}{", GUEST).unwrap(), "a{}{1}{");
        let error = substitute("/run/{vm}.sock", GUEST).unwrap_err();
        assert_eq!(
            error.to_string(),
            "variable {vm} in \"/run/{vm}.sock\" is not known: expected {n} or {name}; write one of these"
        );
    }
}

//! A command line in the form recorded in an image.
//!
//! Format, as JSON: `{"version": 1, "options": [{"option": "machine", "value": "pc-q35-10.0,accel=kvm"}, …],
//! "left-out": ["object.key0.data"]}`. A value is written as QEMU reads it; a flag has none. A reader refuses
//! versions that it does not know, and parses the options as those of a process.
//!
//! Options that belong to the process rather than to its guest (monitors, displays, logs, `-incoming`,
//! `-daemonize`, …) are not recorded.
//!
//! Secrets are left out, and the settings that supply them are named in `left-out`: `data` of a `secret`,
//! passwords and keys of any option, URLs with credentials, `string` of `-fw_cfg` and `value` of `-smbios
//! type=11`, which often contain a guest's first credentials. Paths of keys and certificates are not secret.
//! Memory that is a private mapping of a file that QEMU cannot write, as [`MappedMemory`](crate::MappedMemory) has it, is recorded as
//! memory alone: the file is where that guest came from, not a part of the next one.
//!
//! `-append` is recorded: the image holds it anyway, in the guest's memory.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::command_line::{
    CommandLine, OptionName, OptionValue, ParseError, Properties, QemuOption, Syntax, excerpt,
};
use crate::limits::{COMMAND_LINE_BYTES_MAX, LEFT_OUT_MAX, NAME_BYTES_MAX, OPTIONS_MAX};

/// Version of the format.
const VERSION: u32 = 1;

/// A command line without secrets and without the options of its process. Serialized as described in the
/// module's source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Format", into = "Format")]
pub struct Recorded {
    command_line: CommandLine,
    left_out: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Format {
    version: u32,
    options: Vec<FormatOption>,
    #[serde(rename = "left-out", default)]
    left_out: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct FormatOption {
    option: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<String>,
}

impl CommandLine {
    /// Returns what an image keeps of it.
    ///
    /// # Errors
    /// [`ParseError::TooManyLeftOut`].
    pub fn record(&self) -> Result<Recorded, ParseError> {
        let mut guest = self.without_process_options();
        guest.options_mut().iter_mut().for_each(forget_image);
        guest.without_secrets()
    }

    /// Returns it without secrets.
    pub(crate) fn without_secrets(&self) -> Result<Recorded, ParseError> {
        let mut recorded = Recorded { command_line: Self::default(), left_out: Vec::new() };
        for (option, address) in self.options().iter().zip(self.setting_keys()) {
            let mut option = option.clone();
            let left_out = &mut recorded.left_out;
            let is_kept = match &mut option.value {
                OptionValue::Properties(properties) => {
                    let keys = secret_keys(option.name, properties);
                    keys.iter().for_each(|key| properties.remove(key));
                    left_out.extend(keys.into_iter().map(|key| format!("{address}.{key}")));
                    true
                }
                OptionValue::Text(text) => !is_secret_text(text),
                OptionValue::Global(global) => !is_secret(&global.property, &global.value),
                OptionValue::Flag | OptionValue::Cpu(_) => true,
            };
            if is_kept {
                recorded.command_line.push(option)?;
            } else {
                left_out.push(address);
            }
        }
        if recorded.left_out.len() > LEFT_OUT_MAX {
            return Err(ParseError::TooManyLeftOut);
        }
        Ok(recorded)
    }

    /// Returns the options of the guest: without those of the process, and without what only they referred
    /// to.
    pub(crate) fn without_process_options(&self) -> Self {
        let mut guest = self.clone();
        guest.options_mut().retain(|option| !is_process_option(option));
        // Chardevs of monitors, credentials of displays, secrets of credentials.
        loop {
            let options = guest.options().to_vec();
            let is_orphan = |option: &QemuOption| {
                is_auxiliary(option)
                    && self.is_referred_to(option)
                    && !options.iter().any(|other| refers_to(other, option))
            };
            guest.options_mut().retain(|option| !is_orphan(option));
            if guest.options().len() == options.len() {
                return guest;
            }
        }
    }

    fn is_referred_to(&self, option: &QemuOption) -> bool {
        self.options().iter().any(|other| refers_to(other, option))
    }
}

impl Recorded {
    /// Parses a recorded command line.
    ///
    /// # Errors
    /// The text is too long, malformed, of another version, or not a command line.
    pub fn from_json(json: &[u8]) -> Result<Self, ParseError> {
        if json.len() > COMMAND_LINE_BYTES_MAX {
            return Err(ParseError::TooLong { found: json.len() });
        }
        let format: Format = serde_json::from_slice(json)
            .map_err(|error| ParseError::Recorded { reason: error.to_string() })?;
        format.try_into()
    }

    /// Writes it as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("text and numbers can be written as JSON")
    }

    /// The recorded options.
    pub fn command_line(&self) -> &CommandLine {
        &self.command_line
    }

    /// Keys of the settings that supply what was left out, as `object.key0.data`.
    pub fn redacted_keys(&self) -> &[String] {
        &self.left_out
    }
}

impl TryFrom<Format> for Recorded {
    type Error = ParseError;

    fn try_from(format: Format) -> Result<Self, ParseError> {
        if format.version != VERSION {
            return Err(ParseError::Version { found: format.version, expected: VERSION });
        }
        if format.options.len() > OPTIONS_MAX {
            return Err(ParseError::TooManyOptions);
        }
        let is_key = |key: &String| {
            key.len() <= 3 * NAME_BYTES_MAX && !key.chars().any(|c| c.is_control() || c == '=')
        };
        if format.left_out.len() > LEFT_OUT_MAX || !format.left_out.iter().all(is_key) {
            return Err(ParseError::TooManyLeftOut);
        }
        if let Some(key) = format.left_out.iter().find(|key| !is_redactable(key)) {
            let reason = format!("left-out has {:?}, which is not a secret", excerpt(key));
            return Err(ParseError::Recorded { reason });
        }
        let mut command_line = CommandLine::default();
        let mut bytes = 0;
        for FormatOption { option, value } in format.options {
            bytes += option.len() + value.as_ref().map_or(0, String::len) + 3;
            if bytes > COMMAND_LINE_BYTES_MAX {
                return Err(ParseError::TooLong { found: bytes });
            }
            let name = OptionName::find(&option)
                .ok_or_else(|| ParseError::UnknownOption { option: excerpt(&option) })?;
            command_line.push(QemuOption::parse(name, value.as_deref())?)?;
        }
        Ok(Self { command_line, left_out: format.left_out })
    }
}

impl From<Recorded> for Format {
    fn from(recorded: Recorded) -> Self {
        let option = |option: &QemuOption| FormatOption {
            option: option.name.as_str().to_owned(),
            value: option.value_text(),
        };
        Self {
            version: VERSION,
            options: recorded.command_line.options().iter().map(option).collect(),
            left_out: recorded.left_out,
        }
    }
}

/// Returns true for a key that [`CommandLine::record`] may write: of a property, or of an option without any.
fn is_redactable(key: &str) -> bool {
    let (name, rest) = key.split_once('.').map_or((key, None), |(name, rest)| (name, Some(rest)));
    let Some(name) = OptionName::find(name).filter(|name| !name.is_of_process()) else {
        return false;
    };
    match (name.syntax(), rest) {
        (Syntax::Properties { .. }, Some(rest)) => {
            rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./+".contains(&byte))
        }
        (Syntax::Text | Syntax::Global, rest) => rest.is_none_or(|number| number.parse::<usize>().is_ok()),
        _ => false,
    }
}

/// Turns a private mapping of a read-only file into memory of the same size.
fn forget_image(option: &mut QemuOption) {
    let Some(properties) = option.properties_mut() else { return };
    let is_file = properties.value("qom-type").as_deref() == Some("memory-backend-file");
    if !is_file || properties.is_on("share") || !properties.is_on("readonly") {
        return;
    }
    properties.set("qom-type", "memory-backend-ram");
    ["mem-path", "offset", "share", "readonly", "rom"].iter().for_each(|key| properties.remove(key));
}

/// Monitors are objects too, from QEMU 11.1 on.
fn is_process_option(option: &QemuOption) -> bool {
    let is_monitor = |kind: String| kind.starts_with("monitor-");
    option.name.is_of_process()
        || option.name.as_str() == "object" && option.property("qom-type").is_some_and(is_monitor)
}

/// Options that have no effect alone.
fn is_auxiliary(option: &QemuOption) -> bool {
    let kind = option.property("qom-type").unwrap_or_default();
    match option.name.as_str() {
        "chardev" => true,
        "object" => ["tls-creds-", "authz-", "secret"].iter().any(|prefix| kind.starts_with(prefix)),
        _ => false,
    }
}

fn refers_to(option: &QemuOption, target: &QemuOption) -> bool {
    let Some(id) = target.id() else { return false };
    if option.name == target.name && option.id().as_ref() == Some(&id) {
        return false;
    }
    match &option.value {
        OptionValue::Properties(properties) => properties
            .pairs()
            .iter()
            .any(|(key, value)| *value == id || value.contains(&format!("\"{id}\"")) || *key == id),
        OptionValue::Text(text) => text.split([':', ',', '=']).any(|word| word == id),
        OptionValue::Global(global) => global.value == id,
        OptionValue::Flag | OptionValue::Cpu(_) => false,
    }
}

/// Keys whose values are secrets.
fn secret_keys(name: OptionName, properties: &Properties) -> Vec<String> {
    let kind = |key: &str| properties.value(key).unwrap_or_default();
    let is_always = |key: &str| match name.as_str() {
        "object" => kind("qom-type").starts_with("secret") && key == "data",
        "fw_cfg" => key == "string",
        "smbios" => key == "value" && kind("type") == "11",
        _ => false,
    };
    let pairs = properties.pairs().into_iter();
    let mut keys: Vec<String> = pairs
        .filter(|(key, value)| is_always(key) || is_secret(key, value))
        .map(|(key, _)| key.to_owned())
        .collect();
    keys.dedup();
    keys
}

/// A value under a key that names a secret, or one that contains a secret. A switch (`password=on`) is not
/// one.
fn is_secret(key: &str, value: &str) -> bool {
    is_secret_key(key) && !["on", "off", ""].contains(&value) || is_secret_text(value)
}

fn is_secret_key(key: &str) -> bool {
    let last = key.rsplit('.').next().unwrap_or(key).to_ascii_lowercase();
    ["password", "passwd", "passphrase", "cookie", "psk"].contains(&last.as_str())
        || last.ends_with("-password")
        || last.ends_with("_password")
}

/// Credentials within a value: of a URL, of RBD, of nested JSON.
fn is_secret_text(text: &str) -> bool {
    if let Some((_, rest)) = text.split_once("://")
        && let Some((user, _)) =
            rest.split(['/', '?']).next().and_then(|authority| authority.rsplit_once('@'))
        && user.contains([':', '%'])
    {
        return true;
    }
    if text.starts_with("rbd:") && text.contains(":key=") || text.contains("password=") {
        return true;
    }
    let json = text.strip_prefix("json:").unwrap_or(text);
    json.starts_with(['{', '[']) && serde_json::from_str::<Value>(json).is_ok_and(|json| has_secret(&json))
}

fn has_secret(json: &Value) -> bool {
    match json {
        Value::Object(map) => {
            map.iter().any(|(key, value)| is_secret_key(key) && value.is_string() || has_secret(value))
        }
        Value::Array(values) => values.iter().any(has_secret),
        Value::String(text) => is_secret_text(text),
        _ => false,
    }
}

#[cfg(test)]
mod tests;

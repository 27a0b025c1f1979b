//! The command line of a QEMU as typed options.
//!
//! ```text
//!   /proc/PID/cmdline ─► CommandLine ─► Recorded (JSON, without secrets) ─► Recorded::allow ─► AllowedCommandLine ─► argv
//!                             └───────────────── CommandLine::trust ──────────────────────────────┘
//! ```
//! A parsed command line is written so that QEMU reads the same options in the same order. It is not judged
//! here, but by [`Recorded::allow`](crate::Recorded::allow). An option with a name that is not known is an
//! error, because it is unknown if it takes a value.

mod error;
mod properties;
mod size;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

pub(crate) use error::excerpt;
pub use error::{ParseError, ValueError};
pub use properties::{Properties, Property};
pub use size::parse_size;

use crate::limits::{COMMAND_LINE_BYTES_MAX, OPTIONS_MAX, VALUE_BYTES_MAX};
pub(crate) use crate::options::DISK_FILE;
pub use crate::options::{Conflict, OptionName, Repeated, Rewrite, Syntax};
use crate::options::{ImageUse, OptionInfo};

/// A CPU model and its features, in the form of `-cpu`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuModel {
    /// Name of the model.
    pub model: String,
    /// Features as written: `+avx`, `-avx`, `avx`, `avx=on`.
    pub features: Vec<String>,
}

/// A default for a property of all devices of a driver (`-global`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// The driver's name.
    pub driver: String,
    /// The property's name.
    pub property: String,
    /// Value of the option.
    pub value: String,
}

/// Value of an option, parsed as the option's [`Syntax`] requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OptionValue {
    /// A flag has none.
    Flag,
    /// A text.
    Text(String),
    /// Properties.
    Properties(Properties),
    /// Of `-cpu`.
    Cpu(CpuModel),
    /// Of `-global`.
    Global(Global),
}

/// One option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuOption {
    /// Name of the option.
    pub name: OptionName,
    /// Value of the option.
    pub value: OptionValue,
}

/// Options in their order, without the program's name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommandLine {
    options: Vec<QemuOption>,
}

/// Size of the guest's memory, in the form of `-m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySize {
    /// Bytes at start.
    pub size_bytes: u64,
    /// Number of slots for memory that is plugged later.
    pub slots: u64,
    /// Bytes with all slots used; `None` without slots.
    pub size_bytes_max: Option<u64>,
}

/// Options of glibc's dynamic loader that are followed by a value.
const LOADER_VALUES: [&[u8]; 7] = [
    b"--library-path",
    b"--inhibit-rpath",
    b"--audit",
    b"--preload",
    b"--argv0",
    b"--glibc-hwcaps-prepend",
    b"--glibc-hwcaps-mask",
];

/// Words after the program's name. A program that was started by the dynamic loader (`ld-linux-x86-64.so.2 --library-path DIR PROGRAM`)
/// has the loader's words before its own.
fn own_words<'a>(words: impl Iterator<Item = &'a [u8]>) -> impl Iterator<Item = &'a [u8]> {
    let mut words = words.peekable();
    let name = words.next().unwrap_or_default();
    let name = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if name.starts_with(b"ld-linux") {
        while let Some(option) = words.next_if(|word| word.starts_with(b"--")) {
            words.next_if(|_| LOADER_VALUES.contains(&option));
        }
        words.next();
    }
    words
}

impl CommandLine {
    /// Parses the arguments of a QEMU, without the program's name.
    ///
    /// # Errors
    /// The first fault, with its option.
    pub fn parse<I: IntoIterator<Item: AsRef<OsStr>>>(arguments: I) -> Result<Self, ParseError> {
        let mut command_line = Self::default();
        let mut bytes = 0;
        let mut words = arguments.into_iter().enumerate();
        while let Some((position, word)) = words.next() {
            let word = text(word.as_ref(), position + 1)?;
            bytes += word.len() + 1;
            if bytes > COMMAND_LINE_BYTES_MAX {
                return Err(ParseError::TooLong { found: bytes });
            }
            let Some(name) = word.strip_prefix('-') else {
                command_line.push(QemuOption::parse(DISK_FILE, Some(word))?)?;
                continue;
            };
            let name = name.strip_prefix('-').unwrap_or(name);
            let name = OptionName::find(name).filter(|name| *name != DISK_FILE);
            let name = name.ok_or_else(|| ParseError::UnknownOption { option: excerpt(word) })?;
            if name.syntax() == Syntax::Flag {
                command_line.push(QemuOption::parse(name, None)?)?;
                continue;
            }
            let value = words.next().ok_or_else(|| ParseError::MissingValue { option: name.to_string() })?;
            let (position, value) = value;
            let value = text(value.as_ref(), position + 1)?;
            bytes += value.len() + 1;
            command_line.push(QemuOption::parse(name, Some(value))?)?;
        }
        if bytes > COMMAND_LINE_BYTES_MAX {
            return Err(ParseError::TooLong { found: bytes });
        }
        Ok(command_line)
    }

    /// Parses the contents of `/proc/PID/cmdline`: words that end with a NUL, the first of which is the
    /// program.
    ///
    /// # Errors
    /// As [`CommandLine::parse`].
    pub fn parse_proc(cmdline: &[u8]) -> Result<Self, ParseError> {
        if cmdline.len() > COMMAND_LINE_BYTES_MAX {
            return Err(ParseError::TooLong { found: cmdline.len() });
        }
        let words = cmdline.strip_suffix(b"\0").unwrap_or(cmdline);
        Self::parse(own_words(words.split(|byte| *byte == 0)).map(OsStr::from_bytes))
    }

    /// Reads the command line of a running QEMU. Its working directory is not part of it: relative paths are
    /// the caller's to resolve.
    ///
    /// # Errors
    /// [`ParseError::Process`] if `/proc` does not show it, and as [`CommandLine::parse`].
    pub fn of_process(pid: u32) -> Result<Self, ParseError> {
        let bytes = std::fs::read(format!("/proc/{pid}/cmdline"));
        Self::parse_proc(&bytes.map_err(|error| ParseError::Process { pid, reason: error.to_string() })?)
    }

    /// The options, in order.
    pub fn options(&self) -> &[QemuOption] {
        &self.options
    }

    /// The options, for changes.
    pub fn options_mut(&mut self) -> &mut Vec<QemuOption> {
        &mut self.options
    }

    /// Adds an option at the end.
    ///
    /// # Errors
    /// [`ParseError::TooManyOptions`].
    pub fn push(&mut self, option: QemuOption) -> Result<(), ParseError> {
        if self.options.len() == OPTIONS_MAX {
            return Err(ParseError::TooManyOptions);
        }
        self.options.push(option);
        Ok(())
    }

    /// Writes it as arguments, without the program's name.
    pub fn to_arguments(&self) -> Vec<OsString> {
        let mut arguments = Vec::with_capacity(2 * self.options.len());
        for option in &self.options {
            if option.name != DISK_FILE {
                arguments.push(OsString::from(format!("-{}", option.name.as_str())));
            }
            arguments.extend(option.value_text().map(OsString::from));
        }
        arguments
    }

    /// Returns the options of that name, in order.
    pub fn named<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a QemuOption> + 'a {
        self.options.iter().filter(move |option| option.name.as_str() == name)
    }

    /// Returns a property of an option whose occurrences are merged (`-machine`, `-m`, `-smp`, `-name`): the
    /// last one given.
    pub fn merged_value(&self, name: &str, key: &str) -> Option<String> {
        self.named(name).rev().find_map(|option| option.property(key))
    }

    /// Returns the ids of the backends that are the guest's memory: the machine's, and those of its NUMA nodes. Others belong to devices.
    pub fn memory_backends(&self) -> Vec<String> {
        let main = self.merged_value("machine", "memory-backend");
        let nodes = self.named("numa").filter_map(|option| option.property("memdev"));
        main.into_iter().chain(nodes).collect()
    }

    /// Returns the size of the guest's memory; `None` for QEMU's default.
    ///
    /// # Errors
    /// [`ParseError::Value`] if it is not a size.
    pub fn memory_size(&self) -> Result<Option<MemorySize>, ParseError> {
        let fault = |source| ParseError::Value { option: "-m".into(), source };
        let size = |key, unit| {
            self.merged_value("m", key).map(|text| parse_size(&text, unit)).transpose().map_err(fault)
        };
        let Some(size_bytes) = size("size", 1 << 20)? else { return Ok(None) };
        let slots = size("slots", 1)?.unwrap_or(0);
        Ok(Some(MemorySize { size_bytes, slots, size_bytes_max: size("maxmem", 1)? }))
    }

    /// Returns the object with this id.
    pub fn object(&self, id: &str) -> Option<&QemuOption> {
        self.named("object").find(|option| option.id().as_deref() == Some(id))
    }
}

impl QemuOption {
    /// Parses an option's value.
    ///
    /// # Errors
    /// The value is missing, too long, has control characters or violates the option's syntax.
    pub fn parse(name: OptionName, value: Option<&str>) -> Result<Self, ParseError> {
        let option = || name.to_string();
        let Some(text) = value else {
            return match name.syntax() {
                Syntax::Flag => Ok(Self { name, value: OptionValue::Flag }),
                _ => Err(ParseError::MissingValue { option: option() }),
            };
        };
        if name == DISK_FILE && text.starts_with('-') {
            // The value would be written as a word that QEMU takes for an option.
            return Err(ParseError::UnknownOption { option: excerpt(text) });
        }
        if text.len() > VALUE_BYTES_MAX {
            return Err(ParseError::ValueTooLong { option: option(), found: text.len() });
        }
        if text.chars().any(char::is_control) {
            return Err(ParseError::ControlCharacter { option: option() });
        }
        let fault = |source| ParseError::Value { option: option(), source };
        let value = match name.syntax() {
            Syntax::Flag => return Err(ParseError::UnexpectedValue { option: option() }),
            Syntax::Text => OptionValue::Text(text.to_owned()),
            Syntax::Properties { accepts_json: true, .. } if text.starts_with('{') => {
                OptionValue::Properties(Properties::parse_json(text).map_err(fault)?)
            }
            Syntax::Properties { implied, .. } => {
                OptionValue::Properties(Properties::parse(text, implied).map_err(fault)?)
            }
            Syntax::Cpu => OptionValue::Cpu(CpuModel::parse(text)),
            Syntax::Global => OptionValue::Global(Global::parse(text).map_err(fault)?),
        };
        Ok(Self { name, value })
    }

    /// Writes its value as QEMU reads it; a flag has none.
    pub fn value_text(&self) -> Option<String> {
        Some(match &self.value {
            OptionValue::Flag => return None,
            OptionValue::Text(text) => text.clone(),
            OptionValue::Properties(properties) => {
                let implied = match self.name.syntax() {
                    Syntax::Properties { implied, .. } => implied,
                    _ => None,
                };
                properties.to_text(implied)
            }
            OptionValue::Cpu(cpu) => cpu.to_text(),
            OptionValue::Global(global) => global.to_text(),
        })
    }

    /// Returns what another QEMU on this host has of it, while the QEMU that has it still runs.
    pub fn rewrite(&self) -> Rewrite {
        let OptionInfo { image, rewrite, types, .. } = self.name.info();
        match (rewrite, image, &self.value) {
            (Rewrite::ByType, ..) => types.rewrite(&self.type_name().unwrap_or_default()),
            (Rewrite::IfGuests, ImageUse::Text(form), OptionValue::Text(text)) if form.admits(text) => {
                Rewrite::Keep
            }
            (Rewrite::IfGuests, ..) => Rewrite::Refuse(Conflict::Unknown),
            (rewrite, ..) => rewrite,
        }
    }

    /// The type, if the option has types: the value of the implied key; empty if it is not given.
    pub fn type_name(&self) -> Option<String> {
        match (self.name.info().rewrite, self.name.syntax()) {
            (Rewrite::ByType, Syntax::Properties { implied: Some(key), .. }) => {
                Some(self.properties()?.value(key).unwrap_or_default())
            }
            _ => None,
        }
    }

    /// The properties, if the option's syntax has them.
    pub fn properties(&self) -> Option<&Properties> {
        match &self.value {
            OptionValue::Properties(properties) => Some(properties),
            _ => None,
        }
    }

    /// The value of a property; `None` without it.
    pub fn property(&self, key: &str) -> Option<String> {
        self.properties()?.value(key)
    }

    /// The properties, for changes.
    pub fn properties_mut(&mut self) -> Option<&mut Properties> {
        match &mut self.value {
            OptionValue::Properties(properties) => Some(properties),
            _ => None,
        }
    }

    /// Returns the id by which others refer to it: `id=`, or the `node-name=` of a `-blockdev`.
    pub fn id(&self) -> Option<String> {
        let key = if self.name.as_str() == "blockdev" { "node-name" } else { "id" };
        self.property(key)
    }
}

impl CpuModel {
    fn parse(text: &str) -> Self {
        let mut words = text.split(',').map(str::to_owned);
        Self { model: words.next().unwrap_or_default(), features: words.collect() }
    }

    fn to_text(&self) -> String {
        let words: Vec<&str> =
            std::iter::once(&self.model).chain(&self.features).map(String::as_str).collect();
        words.join(",")
    }
}

impl Global {
    fn parse(text: &str) -> Result<Self, ValueError> {
        let fault = || ValueError::Global { found: excerpt(text) };
        let (before, value) = text.split_once('=').ok_or_else(fault)?;
        // `driver.property=value`, where the value is not escaped; otherwise properties.
        if let Some((driver, property)) = before.split_once('.')
            && !before.contains(',')
        {
            let (driver, property) = (driver.to_owned(), property.to_owned());
            return Ok(Self { driver, property, value: value.to_owned() });
        }
        let properties = Properties::parse(text, None)?;
        let field = |key| properties.value(key).ok_or_else(fault);
        Ok(Self { driver: field("driver")?, property: field("property")?, value: field("value")? })
    }

    fn to_text(&self) -> String {
        let is_plain = |text: &str| !text.is_empty() && text.len() < 64 && !text.contains(['.', '=', ',']);
        if is_plain(&self.driver) && is_plain(&self.property) {
            return format!("{}.{}={}", self.driver, self.property, self.value);
        }
        let [driver, property, value] =
            [&self.driver, &self.property, &self.value].map(|text| text.replace(',', ",,"));
        format!("driver={driver},property={property},value={value}")
    }
}

fn text(word: &OsStr, position: usize) -> Result<&str, ParseError> {
    word.to_str().ok_or(ParseError::NotUtf8 { position })
}

#[cfg(test)]
mod tests;

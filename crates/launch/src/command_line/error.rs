//! Errors of parsing a command line.

use crate::limits::{
    COMMAND_LINE_BYTES_MAX, LEFT_OUT_MAX, NAME_BYTES_MAX, OPTIONS_MAX, PROPERTIES_MAX, VALUE_BYTES_MAX,
};

/// A command line that is not one of QEMU's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A name that no QEMU from 7.2 to 11.1 has.
    #[error("option {option} is not known: expected one of QEMU 7.2 to 11.1; start QEMU without it")]
    UnknownOption {
        /// Name of the option, with dashes.
        option: String,
    },
    /// The last word is an option that takes a value.
    #[error("{option} has no value; add it")]
    MissingValue { option: String },
    /// An option without a value has one.
    #[error("{option} has a value, expected a flag; remove the value")]
    UnexpectedValue { option: String },
    /// A word that is not UTF-8.
    #[error("word {position} of the command line is not UTF-8; rename the file that it names")]
    NotUtf8 {
        /// Index of the word; the program is 0.
        position: usize,
    },
    /// A value with a NUL or another control character.
    #[error("value of {option} has a control character; remove it")]
    ControlCharacter { option: String },
    /// More than [`OPTIONS_MAX`] options.
    #[error("command line has more than {OPTIONS_MAX} options; start QEMU with fewer")]
    TooManyOptions,
    /// More than [`COMMAND_LINE_BYTES_MAX`] bytes.
    #[error("command line has {found} bytes, expected at most {COMMAND_LINE_BYTES_MAX}; shorten it")]
    TooLong {
        /// Length in bytes.
        found: usize,
    },
    /// A value longer than [`VALUE_BYTES_MAX`].
    #[error("value of {option} has {found} bytes, expected at most {VALUE_BYTES_MAX}; shorten it")]
    ValueTooLong { option: String, found: usize },
    /// A value that does not have the option's syntax.
    #[error("value of {option} is malformed: {source}")]
    Value { option: String, source: ValueError },
    /// A recorded command line is not JSON of the expected shape.
    #[error("recorded command line cannot be read: {reason}; record it again")]
    Recorded { reason: String },
    /// Recorded by a towline whose format is not known.
    #[error("recorded command line has version {found}, expected {expected}; use a newer towline")]
    Version { found: u32, expected: u32 },
    /// More than [`LEFT_OUT_MAX`] values were left out.
    #[error("recorded command line leaves out more than {LEFT_OUT_MAX} values; record it again")]
    TooManyLeftOut,
    /// The command line of a process cannot be read.
    #[error("command line of process {pid} cannot be read: {reason}; run as its user")]
    Process { pid: u32, reason: String },
}

/// A fault in the value of an option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// A property's key is empty or has an invalid character.
    #[error("key {found:?}, expected up to {NAME_BYTES_MAX} letters, digits, '-', '_', '.', '/' or '+'")]
    Key {
        /// The beginning of the key.
        found: String,
    },
    /// More than [`PROPERTIES_MAX`] properties.
    #[error("more than {PROPERTIES_MAX} properties")]
    TooManyProperties,
    /// A comma at the end.
    #[error("no property follows the last comma")]
    TrailingComma,
    /// Not a JSON object.
    #[error("not a JSON object: {reason}")]
    Json { reason: String },
    /// `-global` of neither form.
    #[error("{found:?}, expected DRIVER.PROPERTY=VALUE")]
    Global { found: String },
    /// Not a number of bytes.
    #[error("{found:?}, expected a size such as 512M or 4G")]
    Size { found: String },
}

/// The beginning of a text of unknown length, for errors.
pub(crate) fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let mut excerpt: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        excerpt.push('…');
    }
    excerpt
}

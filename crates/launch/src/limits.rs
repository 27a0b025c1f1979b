//! Limits of what is accepted from a command line or a recorded one. Real ones are far below: libvirt starts
//! a large guest with some two hundred options, a few kilobytes each at most.

/// Maximum number of options.
pub const OPTIONS_MAX: usize = 1024;
/// Maximum number of properties of one option.
pub const PROPERTIES_MAX: usize = 256;
/// Longest value of one option in bytes.
pub const VALUE_BYTES_MAX: usize = 16 << 10;
/// Longest command line in bytes, and longest recorded one.
pub const COMMAND_LINE_BYTES_MAX: usize = 512 << 10;
/// Maximum number of values that may be left out of a recorded command line.
pub const LEFT_OUT_MAX: usize = 256;
/// Longest name of a property, an id, or a variable in bytes.
pub const NAME_BYTES_MAX: usize = 128;

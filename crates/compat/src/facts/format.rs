//! Name and version of the format of facts.

/// The format's name.
pub const FORMAT: &str = "towline-facts";
/// The version that is written; newer ones are refused.
pub const VERSION: u32 = 1;

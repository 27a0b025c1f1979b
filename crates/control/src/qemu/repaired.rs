//! What became of the changes that a killed towline left in a QEMU.

use std::fmt;

/// What was put back, and what could not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairReport {
    /// The monitor's socket.
    pub socket: String,
    /// The process of the towline that left it.
    pub owner: i32,
    /// What was done, in words.
    pub done: Vec<String>,
    /// What is as that towline left it, and why. It stays in the journal.
    pub left: Vec<String>,
}

impl fmt::Display for RepairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { socket, owner, done, left } = self;
        write!(f, "QEMU on {socket} was left changed by a towline that is gone (process {owner})")?;
        if !done.is_empty() {
            write!(f, "; repaired: {}", done.join(", "))?;
        }
        if !left.is_empty() {
            write!(f, "; not repaired: {}", left.join(", "))?;
        }
        Ok(())
    }
}

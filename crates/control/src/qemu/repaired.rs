//! Report of a repair.

use std::fmt;

/// Changes of a killed towline that were undone, and those that were not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairReport {
    /// The monitor's socket.
    pub socket: String,
    /// Process of the killed towline.
    pub owner: i32,
    /// Changes that were undone, as texts.
    pub done: Vec<String>,
    /// Changes that remain, with the reason. They stay in the journal.
    pub left: Vec<String>,
}

impl fmt::Display for RepairReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { socket, owner, done, left } = self;
        write!(f, "QEMU on {socket} was left changed by a towline process that has exited (pid {owner})")?;
        if !done.is_empty() {
            write!(f, "; repaired: {}", done.join(", "))?;
        }
        if !left.is_empty() {
            write!(f, "; not repaired: {}", left.join(", "))?;
        }
        Ok(())
    }
}

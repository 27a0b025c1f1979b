//! A record in the list of moves.

use super::record::MoveRecord;

/// A record, with the state of its QEMUs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedMove {
    /// The record.
    pub record: MoveRecord,
    /// Process of the towline that works on the move.
    pub owner: Option<i32>,
    /// Monitors of QEMUs of this host that are known to have exited.
    pub exited: Vec<String>,
    /// Monitors of QEMUs that a killed towline has left changed.
    pub changed: Vec<String>,
}

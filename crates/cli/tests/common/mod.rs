//! Snapshots and the schema of events.

pub(crate) mod schema;
pub(crate) mod snapshot;

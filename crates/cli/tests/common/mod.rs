//! Snapshots and the schema of events.

#[allow(unreachable_pub, reason = "public in the lab, whose file it is")]
#[path = "../../../../lab/src/schema.rs"]
pub(crate) mod schema;
pub(crate) mod snapshot;

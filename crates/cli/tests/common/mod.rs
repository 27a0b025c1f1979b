//! Snapshots, the schema of events, and their shapes.

#[allow(unreachable_pub, reason = "public in the lab, whose file it is")]
#[path = "../../../../lab/src/schema.rs"]
pub(crate) mod schema;
mod shape;
pub(crate) mod snapshot;

//! All that is unsafe: memory that others write while we read it.

mod mapping;

pub(crate) use mapping::{Area, Mapping};

//! All that is unsafe: memory that others write while we read it.

mod faults;
pub(crate) mod inherited;
mod mapping;

pub(crate) use faults::Faults;
pub(crate) use mapping::{Area, Mapping};

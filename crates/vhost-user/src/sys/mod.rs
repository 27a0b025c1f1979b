//! All that is unsafe: memory that others write while we read it.

mod faults;
mod guard;
pub(crate) mod inherited;
mod mapping;

pub(crate) use faults::Faults;
pub(crate) use guard::faults as memory_faults;
pub(crate) use mapping::{Area, Mapping};

//! All unsafe code: memory that other processes write while this one reads it.

mod guard;
pub(crate) mod inherited;
mod mapping;
mod userfaultfd;

pub(crate) use guard::faults as memory_faults;
pub(crate) use mapping::{Area, Mapping};
pub(crate) use userfaultfd::Userfaultfd;

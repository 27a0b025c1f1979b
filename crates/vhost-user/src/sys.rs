//! All unsafe code: memory that other processes write while this one reads it, and the time slice of a
//! thread.

pub(crate) mod inherited;
mod mapping;
mod time_slice;
mod userfaultfd;

pub(crate) use mapping::{Area, FileRange, Mapping};
pub(crate) use time_slice::set_time_slice;
pub(crate) use userfaultfd::Userfaultfd;

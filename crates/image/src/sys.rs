//! Mapped files. All `unsafe` code of this crate is here.

mod mapping;

pub(crate) use mapping::Mapping;

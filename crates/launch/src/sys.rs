//! The crate's unsafe code: what a child does between `fork` and `execve`.

#![allow(unsafe_code)]

mod child;

pub(crate) use child::{Child, isolate};

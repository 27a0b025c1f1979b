//! The crate's unsafe code: the calls of a child between `fork` and `execve`.

#![allow(unsafe_code)]

mod child;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use child::{ADMITTED, fork, isolate};

//! Guests of stock QEMUs with a vsock device of ours: their kernel's vsock, `socat` and Perl at their end.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod guests;
mod messages;
mod peers_defects;
mod streams;
mod support;
mod watched;

//! The command line as users have it: the program that packages have, on a terminal too.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod causes;
mod terminal;

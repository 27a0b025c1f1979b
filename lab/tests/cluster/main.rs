//! Guests that a Pacemaker of three hosts runs by `towline ocf`.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod actions;
mod hosts;
mod lives;
mod pacemaker;

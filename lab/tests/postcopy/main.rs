//! Guests that run at their destination before their memory has arrived, on stock QEMU.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod cuts;
mod ends;
mod huge_pages;
mod linux;
mod live;
mod monitors;
mod restores;
mod support;

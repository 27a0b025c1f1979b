//! QMP, QEMU's control protocol: JSON values over a Unix socket (`docs/interop/qmp-spec.rst` of QEMU).
//!
//! ```text
//! Unix socket ── connection ── codec::Decoder ── Client ── commands::*
//!                (deadlines,    (bytes to         (ids,     (types)
//!                 fd passing)    messages)         events)
//! ```
//!
//! [`Client`] executes one command at a time, or several with one round trip, and blocks no longer than its
//! deadline. QEMU serves one client at a time per monitor; a second one gets no greeting until the first
//! disconnects, which is [`Error::NoGreeting`].
//!
//! `Server` is the server side, for your own control socket. It is the feature `server`, on by default.
//!
//! Limits: [`codec::MESSAGE_BYTES_MAX`] for one message, [`codec::DEPTH_MAX`] for its nesting, [`EVENTS_MAX`]
//! for unread events.

#![deny(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod codec;
pub mod commands;

mod client;
mod connection;
mod error;
mod request;
#[cfg(feature = "server")]
mod server;
mod sys;

pub use client::{Client, DEADLINE, EVENTS_MAX, Options, Submitted};
pub use codec::{Event, Greeting, Message};
pub use connection::PeerCredentials;
pub use error::{DisconnectReason, Error};
pub use request::{Command, CommandReply, CommandRequest};
#[cfg(feature = "server")]
pub use server::{
    CLIENTS_MAX, CommandError, Commands, Dialogue, Emitter, REQUEST_BYTES_MAX, Server, Unreadable,
};

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

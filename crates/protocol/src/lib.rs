//! QEMU's migration stream (7.2 to 11.1): its wire formats and both ends' state machines.
//!
//! Sans-IO: there is no input or output here, no thread, no clock and no guest memory. Bytes come in through
//! a [`Reader`], bytes go out into a `Vec<u8>`, and pages are only ever *named* ([`PageRef`]): the driver
//! borrows the page itself and passes it to the kernel, so no page is copied in userspace.
//!
//! ```text
//!   main channel    header · configuration · commands · ram START · ram PART × n · ram END · device state · EOF · VMDESC
//!   lane 0..N-1     init · (packet header · pages) × n                                          (multifd)
//!   return path     PONG · … · SHUT                                     (destination → source, on the main channel)
//! ```
//!
//! - [`destination::StreamDecoder`] reads a main channel, [`source::Setup`] and its successors write one;
//!   [`postcopy`] has those of a source whose guest runs at its destination before its memory is there,
//!   [`colo`] those of a destination that takes a checkpoint of the running guest again and again.
//! - [`multifd`] holds the lanes' formats, [`return_path`] the messages back, [`mapped_ram`] the layout of a
//!   stored guest, [`device_state`] the opaque tail that follows the memory, [`machine`] what a machine type
//!   implies for the wire.
//!
//! Integers are big-endian. A *counted* string is one length byte and that number of bytes, without a NUL.
//! Every length that a peer sends is compared with a constant of [`limits`] before it is used. Limits: target
//! pages of one size per stream (4 KiB by default), `ram` as the only iterable section, no postcopy as the
//! destination.

#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

pub mod colo;
pub mod configuration;
pub mod destination;
pub mod device_state;
mod error;
pub mod limits;
pub mod machine;
pub mod mapped_ram;
pub mod multifd;
mod page;
pub mod postcopy;
pub mod ram;
pub mod return_path;
pub mod section;
pub mod session;
pub mod source;
pub mod wire;
pub mod xbzrle;

pub use error::{Error, InvalidMessage, PeerIncompatible, PeerMisbehaved};
pub use ram::{BlockIndex, PageRef, RamBlock};
pub use wire::Reader;

/// The result of every fallible operation here.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

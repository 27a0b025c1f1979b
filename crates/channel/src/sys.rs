//! The platform: every `unsafe` block of this crate is in here. Linux only.
//!
//! A port would have to provide:
//! - `aead`: ciphers between such buffers and records (feature `tls`);
//! - [`iobuf`]: a buffer with the layout of the platform's scatter-gather element, that never becomes a
//!   slice;
//! - [`cursor`]: the position in an array of them after a partial transfer;
//! - [`io`]: `sendmsg`, `recvmsg`, `readv`, `writev`, `preadv`, `pwritev` over such buffers;
//! - [`error_queue`]: what the kernel reports of a socket beside its stream (`recvmsg` with `MSG_ERRQUEUE`);
//! - [`guard`]: a handler for SIGBUS in mapped files;
//! - [`fd`]: takes over a descriptor by number, and replaces the file of a number (`dup3`);
//! - [`file_owner`]: the owner of files that a thread creates (`setfsuid`);
//! - [`rights`]: the socket option `SO_PASSRIGHTS`;
//! - [`tcp`]: the state of a TCP connection (`TCP_INFO`);
//! - [`zero_copy`]: the socket option `SO_ZEROCOPY`.
//!
//! Everything else (sockets and their options, descriptor passing, `poll`, `eventfd`, `flock`, processes)
//! comes from `std` and `rustix`, whose interfaces are safe.

#[cfg(feature = "tls")]
pub(crate) mod aead;
pub(crate) mod cursor;
pub(crate) mod error_queue;
pub(crate) mod fd;
pub(crate) mod file_owner;
pub mod guard;
pub(crate) mod io;
pub(crate) mod iobuf;
pub(crate) mod rights;
pub(crate) mod tcp;
pub(crate) mod zero_copy;

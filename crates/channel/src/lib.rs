//! Byte channels for moving guests: vectored, flag-taking, fd-passing, over every kind of address of QEMU.
//!
//! ```text
//!            connect(&Address, deadline, &Cancel)      Listener::bind(&Address) . accept(deadline, &Cancel)
//!                          └───────────────┬───────────────────────┘
//!                                  Box<dyn Channel>      send · recv · flush · shutdown · *_fds · *_at
//!              ┌────────┬────────┬────────┼────────┬─────────────┐
//!             tcp      unix    pipe     exec     file     pair (in memory)        fault::{Cut, Delay, Throttle,
//!              ├─socket─┘        └── fd:N is any of these ──┘                     Capture, ShortIo} wrap any of them
//!             TLS, WebSocket
//! ```
//!
//! Scope: system calls behind one trait, [`Channel`], whose [`Capabilities`] state what each kind can do.
//! Buffers are [`IoBuf`] and [`IoBufMut`], which never become slices, because they may be a guest's live
//! memory.
//!
//! Out of scope: it knows no migration, starts no threads except for name resolution and for each handshake
//! of an accepted connection, keeps no statistics except those of zero-copy ([`ZeroCopyStatistics`]), and is
//! not asynchronous. It does not make files durable: `flush` is about buffers.
//!
//! Limits: Linux only. At most [`IOV_MAX`] buffers in one call (the loops of [`ChannelExt`] take any number),
//! at most [`FDS_MAX`] descriptors in one message. Only `tcp:` has [`Capabilities::ZERO_COPY`], when
//! requested ([`ConnectOptions`], [`ListenOptions`]) and supported by the kernel.
//!
//! | feature | adds | needs |
//! |---|---|---|
//! | `tls` | TLS 1.3 over any channel | rustls, aws-lc (a C compiler) |
//! | `websocket` | `ws://`; with `tls`, `wss://` | tungstenite |
//! | `testing` | the layers of `fault` | – |
//!
//! No feature is on by default, and no type or variant depends on one: without it, its use is
//! [`Error::Unsupported`].
//!
//! ```
//! use std::time::{Duration, Instant};
//! use towline_channel::{Cancel, ChannelExt, IoBuf, IoBufMut, Listener, SendFlags, connect};
//!
//! let (deadline, cancel) = (Instant::now() + Duration::from_secs(5), Cancel::new()?);
//! let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?)?;
//! let near = connect(listener.local_address(), deadline, &cancel)?;
//! let far = listener.accept(deadline, &cancel)?;
//!
//! near.send_all(&[IoBuf::from(b"two "), IoBuf::from(b"buffers")], SendFlags::empty())?;
//! let mut bytes = [0; 11];
//! far.recv_exact(&mut [IoBufMut::from(&mut bytes)])?;
//! assert_eq!(&bytes, b"two buffers");
//! # Ok::<(), towline_channel::Error>(())
//! ```
//!
//! `SIGPIPE`: sockets never raise it (`MSG_NOSIGNAL`), but for [`Splice`]. Writing to a pipe whose reader is
//! gone does, unless the process ignores that signal; Rust's runtime does so before `main`, and a host that
//! is not a Rust program must do it itself before it uses `exec:` or a pipe.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod address;
mod calls;
mod cancel;
mod channel;
mod connect;
mod error;
mod exec;
#[cfg(feature = "testing")]
pub mod fault;
mod fd;
mod file;
mod flags;
#[cfg(any(feature = "tls", feature = "websocket"))]
mod framed;
mod guess;
mod layers;
mod listen;
pub mod lock;
mod pair;
mod pending_handshakes;
mod pipe;
mod socket;
mod splice;
mod sys;
mod tcp;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls_absent.rs"]
mod tls;
mod unix;
mod unix_listen;
mod wait;
#[cfg(feature = "websocket")]
mod websocket;
mod zero_copy;

pub use address::Address;
pub use calls::{CallCount, CallCounters};
pub use cancel::Cancel;
pub use channel::{Channel, ChannelExt, FDS_MAX};
pub use connect::{ConnectOptions, connect, connect_with};
pub use error::{Error, Result};
pub use exec::ExecChannel;
pub use fd::inherit;
pub use file::FileChannel;
pub use flags::{Capabilities, Flushed, RecvFlags, SendFlags};
pub use guess::describe_plain;
pub use listen::{ListenOptions, Listener, is_out_of_resources};
pub use pair::{PairChannel, pair};
pub use splice::Splice;
pub use sys::cursor::{IOV_MAX, IoCursor, IoCursorMut};
pub use sys::fd::take_over;
pub use sys::file_owner::{FileOwner, with_file_owner};
pub use sys::guard;
pub use sys::io::{readv, writev};
pub use sys::iobuf::{IoBuf, IoBufMut, gather, scatter, total_len, total_len_mut, with_gaps};
pub use sys::rights::refuse_descriptors;
pub use tcp::{PEER_TIMEOUT, TcpChannel, check_zero_copy};
#[cfg(feature = "tls")]
pub use tls::TlsChannel;
pub use tls::{OneTimeCredentials, OneTimeKey, TlsClient, TlsServer};
pub use unix::UnixChannel;
pub use unix_listen::{SocketFile, lock_directory};
#[cfg(feature = "websocket")]
pub use websocket::WebSocketChannel;
pub use zero_copy::{ZeroCopySend, ZeroCopyStatistics, ZeroCopyTicket};

//! Capabilities of a channel, and flags and results of its calls.

use std::time::Duration;

use crate::{Error, Result};

bitflags::bitflags! {
    /// Capabilities of a channel. Use of a capability that it lacks is [`Error::Unsupported`], never a silent
    /// fallback.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Capabilities: u32 {
        /// [`SendFlags::ZERO_COPY`] is understood.
        const ZERO_COPY = 1 << 0;
        /// File descriptors can be passed: [`Channel::send_fds`](crate::Channel::send_fds),
        /// [`Channel::recv_fds`](crate::Channel::recv_fds).
        const FD_PASSING = 1 << 1;
        /// [`Channel::shutdown`](crate::Channel::shutdown) ends each half separately and wakes the threads
        /// blocked in it.
        const SHUTDOWN = 1 << 2;
        /// [`RecvFlags::PEEK`] is understood.
        const PEEK = 1 << 3;
        /// The peer can reply through the same channel, so a return path is possible. A file that can be read
        /// and written has `SEND` and `RECV`, but not this.
        const BIDIRECTIONAL = 1 << 4;
        /// Bytes can be sent. A pipe's reading end lacks this.
        const SEND = 1 << 5;
        /// Bytes can be received. A pipe's writing end lacks this.
        const RECV = 1 << 6;
    }

    /// Options of a send.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u32 {
        /// Let the kernel read the buffers themselves, after the call too, until
        /// [`Channel::flush`](crate::Channel::flush).
        const ZERO_COPY = 1 << 0;
        /// A hint, allowed everywhere: more follows at once, so a packet need not leave yet (`MSG_MORE`).
        const MORE = 1 << 1;
    }

    /// Options of a receive.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct RecvFlags: u32 {
        /// Return the bytes and leave them in the channel.
        const PEEK = 1 << 0;
        /// A permission, allowed everywhere: bytes may be written to the buffers before they are
        /// authenticated, so a cipher decrypts them there. Only the prefix whose length is returned has been
        /// authenticated; after it, and everywhere after an error, the buffers may hold bytes that the peer
        /// did not send. These must not be used by the caller or anything else, so it is not for memory that
        /// a guest, a device or an image already uses.
        const UNAUTHENTICATED = 1 << 1;
    }
}

/// Result of a [`Channel::flush`](crate::Channel::flush).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flushed {
    /// All sends have finished, and at least one zero-copy send was not copied (or there was none to wait
    /// for).
    Done,
    /// All is done, but the kernel copied every byte: zero-copy cost more than it saved.
    AllCopied,
}

/// Refuses flags that need a capability the channel lacks, and sending where nothing can be sent.
pub(crate) fn check_send(peer: &str, capabilities: Capabilities, flags: SendFlags) -> Result<()> {
    if !capabilities.contains(Capabilities::SEND) {
        return Err(Error::unsupported(peer, "sending: it is open for reading only"));
    }
    if flags.contains(SendFlags::ZERO_COPY) && !capabilities.contains(Capabilities::ZERO_COPY) {
        return Err(Error::unsupported(peer, "zero-copy sends; send without them"));
    }
    Ok(())
}

/// Refuses flags that need a capability the channel lacks, and receiving where nothing can be received.
pub(crate) fn check_recv(peer: &str, capabilities: Capabilities, flags: RecvFlags) -> Result<()> {
    if !capabilities.contains(Capabilities::RECV) {
        return Err(Error::unsupported(peer, "receiving: it is open for writing only"));
    }
    if flags.contains(RecvFlags::PEEK) && !capabilities.contains(Capabilities::PEEK) {
        return Err(Error::unsupported(peer, "looking ahead (PEEK)"));
    }
    Ok(())
}

/// Refuses a timeout of zero, which means "never" for some kinds and "at once" for others.
pub(crate) fn check_timeouts(peer: &str, timeouts: [Option<Duration>; 2]) -> Result<()> {
    if timeouts.contains(&Some(Duration::ZERO)) {
        return Err(Error::unsupported(peer, "a timeout of zero; give None to wait without a limit"));
    }
    Ok(())
}

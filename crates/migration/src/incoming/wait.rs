//! Waits for a listener and for unidentified connections: `poll(2)` in one place.

use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Cancel, Channel, Error as ChannelError, Listener};

use crate::Result;

/// Ready descriptors.
#[derive(Default)]
pub(super) struct Ready {
    /// A connection may have arrived.
    pub(super) listener: bool,
    /// Channels that have bytes, or have ended.
    pub(super) channels: Vec<Arc<dyn Channel>>,
}

impl Ready {
    pub(super) fn has(&self, channel: &Arc<dyn Channel>) -> bool {
        self.channels.iter().any(|ready| Arc::ptr_eq(ready, channel))
    }
}

/// Waits until something is ready, the earliest time before which a channel is left alone, or the deadline.
///
/// # Errors
/// The migration was cancelled, or the kernel refuses.
pub(super) fn wait<'a>(
    listener: &Listener,
    channels: impl Iterator<Item = (&'a Arc<dyn Channel>, Instant)>,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Ready> {
    cancel.check()?;
    let Some(listener) = listener.as_fd() else {
        return Ok(Ready { listener: true, channels: Vec::new() });
    };
    let now = Instant::now();
    let mut until = deadline;
    let mut watched = Vec::new();
    let mut ahead = Vec::new();
    for (channel, next_peek) in channels {
        match channel.as_fd() {
            Some(_) if next_peek <= now && channel.has_buffered() => ahead.push(Arc::clone(channel)),
            Some(fd) if next_peek <= now => watched.push((channel, fd)),
            _ => until = until.min(next_peek),
        }
    }
    let mut fds = vec![PollFd::new(cancel, PollFlags::IN), PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    fds.extend(watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
    if !ahead.is_empty() {
        until = now;
    }
    let left = until.saturating_duration_since(now);
    let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(Ready::default()),
        Err(errno) => {
            let peer = "new connections".to_owned();
            return Err(ChannelError::Io { op: "poll", peer, source: errno.into() }.into());
        }
    }
    cancel.check()?;
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let channels = watched.iter().zip(&fds[2..]).filter(|(_, fd)| is_ready(fd));
    ahead.extend(channels.map(|((channel, _), _)| Arc::clone(channel)));
    Ok(Ready { listener: is_ready(&fds[1]), channels: ahead })
}

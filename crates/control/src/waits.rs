//! Waits for a time, a cancellation, or the end of a QEMU.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towline_channel::Cancel;

use crate::process::Process;

/// End of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Woken {
    /// The time has passed, or a part of it.
    InTime,
    Cancelled,
    /// The QEMU has ended.
    Exited,
}

/// Waits for at most this time.
pub(crate) fn wait(cancel: &Cancel, process: Option<&Process>, time: Duration) -> Woken {
    let mut fds = vec![PollFd::new(cancel, PollFlags::IN)];
    if let Some(Process::Known { pidfd, .. }) = process {
        fds.push(PollFd::new(pidfd, PollFlags::IN));
    }
    // An interrupted wait has passed a part of its time.
    let _ = poll(&mut fds, Timespec::try_from(time).ok().as_ref());
    if cancel.is_cancelled() {
        Woken::Cancelled
    } else if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
        Woken::Exited
    } else {
        Woken::InTime
    }
}

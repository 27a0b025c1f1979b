//! Refuses a migration in an order that its source survives.
//!
//! A QEMU (as of 10.0) that loses a lane while it waits for all of them, as it does at each barrier, may wait
//! forever (`multifd_send_sync_main`: a lane's thread that ends because another one failed does not signal
//! it). At the last barrier it holds its big lock while it waits: its guest is stopped and its monitor does
//! not respond. So its main channel is shut down, which makes it give up, and its lanes are drained until it
//! closes them.

use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Channel, IoBufMut, RecvFlags};

/// Timeout for a source to close its lanes once its main channel is shut down.
pub(super) const REFUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes taken at once.
const BYTES: usize = 64 << 10;

/// Shuts the main channel down and drains the lanes until they end.
pub(super) fn refuse<'a>(main: &Arc<dyn Channel>, lanes: impl Iterator<Item = &'a Arc<dyn Channel>>) {
    if let Err(error) = main.shutdown(Shutdown::Both) {
        tracing::debug!(peer = main.peer(), %error, "shutdown");
    }
    let deadline = Instant::now() + REFUSE_TIMEOUT;
    for lane in lanes {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || lane.set_timeouts(Some(left), None).is_err() {
            return;
        }
        drain(lane.as_ref(), deadline);
    }
}

/// Discards received bytes until the channel ends, the deadline, or its own timeout.
pub(super) fn drain(channel: &dyn Channel, deadline: Instant) {
    let mut bytes = vec![0; BYTES];
    while Instant::now() < deadline {
        match channel.recv(&mut [IoBufMut::from(&mut bytes[..])], RecvFlags::empty()) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
    }
}

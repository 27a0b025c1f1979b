//! The two points of no return of a migration, and the party that decides on them.
//!
//! The engine moves bytes; the embedder decides whether a guest may run at its destination, and whether its
//! source may be acknowledged. The engine calls a [`SwitchoverGate`] right before the last bytes are sent and
//! right before the acknowledgement, on the thread that sends them, so a cancellation comes either before or
//! after, and never between.

use std::fmt::Debug;
use std::time::Duration;

use towline_channel::{Cancel, Channel, IoBufMut, PEER_TIMEOUT, RecvFlags};
use towline_protocol::session::{MoveId, ReceiverMode};

use crate::Error;

/// Permission to send the last bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// No: the migration fails.
    Refused,
    /// Permitted. The destination does not run the guest on its own.
    Reversible,
    /// Permitted. The destination may run the guest as soon as it has them: the source's connection stays
    /// even if something fails then.
    Final,
}

/// State of the connection to a source after its stream is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// The connection is open.
    Open,
    /// The source closed it.
    Closed,
    /// The connection was reset: the source closed it with unread data.
    Reset,
}

/// Decides about the points of no return (see the module). Called from the engine's threads, one at a time.
#[expect(unused_variables, reason = "defaults need none of their arguments")]
pub trait SwitchoverGate: Debug + Send + Sync {
    /// Reports the kind of destination: a towline and its use of the guest, or a QEMU. Called before any page
    /// is sent.
    fn destination(&self, receiver: Option<ReceiverMode>) {}

    /// Reports that a towline is at the source, and will send the outcome of this move. Called before the
    /// first page arrives.
    fn source_reports(&self, id: MoveId) {}

    /// The name of this move, for a towline at the destination that waits for the outcome.
    fn move_id(&self) -> MoveId {
        MoveId::default()
    }

    /// Silence after which a towline at the destination that waits for the outcome, and sends heartbeats,
    /// counts as stopped.
    fn peer_timeout(&self) -> Duration {
        PEER_TIMEOUT
    }

    /// Returns true if the last bytes are held back until a QEMU at the destination has loaded everything
    /// before them.
    fn confirms_loading(&self) -> bool {
        false
    }

    /// Decides whether the last bytes may be sent. `run_state`: the guest's run state when it was stopped, in
    /// QEMU's words.
    fn commit(&self, run_state: Option<&str>) -> Commit {
        Commit::Reversible
    }

    /// The destination holds the guest: may the source be acknowledged?
    fn acknowledge(&self, run_state: Option<&str>, source: LinkState) -> bool {
        true
    }

    /// Returns true if the source must be acknowledged, so it stops for good, although the stream failed
    /// after a [`Commit::Final`].
    fn must_acknowledge_after(&self, error: &Error) -> bool {
        false
    }
}

/// The gate of a session that has none.
#[derive(Debug)]
pub(crate) struct NoGate;

impl SwitchoverGate for NoGate {}

/// Checks the state of a connection on which no further data is expected. Data is left unread.
pub fn probe_link(channel: &dyn Channel) -> LinkState {
    if channel.as_fd().is_none() || !would_receive(channel) {
        return LinkState::Open;
    }
    let mut byte = [0];
    match channel.recv(&mut [IoBufMut::from(&mut byte[..])], RecvFlags::PEEK) {
        Ok(0) => LinkState::Closed,
        Ok(_) => LinkState::Open,
        Err(error) => {
            tracing::debug!(peer = channel.peer(), %error, "the source's connection");
            LinkState::Reset
        }
    }
}

/// Returns true if [`Channel::recv`] would not wait: there are data, or the end of the stream. The descriptor is readable for a
/// packet without data too, such as a proxy's ping. In a process that has no descriptor left it may wait.
pub(crate) fn would_receive(channel: &dyn Channel) -> bool {
    let Ok(at_once) = Cancel::new() else { return true };
    at_once.cancel();
    channel.wait_recv(&at_once).unwrap_or(true)
}

//! Frames of the other towline.

use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_migration::silence_max;

use super::context::Context;
use super::error::{Error, check_cancelled};
use super::peer::{PeerReply, PeerSession};

/// Time in which the other towline has a QEMU listen, and records that it awaits the guest.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for a frame of the other towline, for this time at most, unless it is cancelled.
pub(super) fn await_frame<T>(
    cancel: &Cancel,
    peer: &mut PeerSession,
    within: Option<Duration>,
    context: &Context<'_>,
    receive: impl Fn(&mut PeerSession) -> PeerReply<T>,
) -> Result<T, Error> {
    let begun = Instant::now();
    loop {
        check_cancelled(cancel)?;
        if let Some(frame) = received(peer, context, &receive)? {
            return Ok(frame);
        }
        if within.is_some_and(|within| begun.elapsed() >= within) {
            return Err(Error::PeerSilent { waited: begun.elapsed() });
        }
    }
}

/// The frame that the other towline has sent, if any.
///
/// # Errors
/// It is lost, or silent.
pub(super) fn received<T>(
    peer: &mut PeerSession,
    context: &Context<'_>,
    receive: impl Fn(&mut PeerSession) -> PeerReply<T>,
) -> Result<Option<T>, Error> {
    match receive(peer) {
        PeerReply::Message(frame) => Ok(Some(frame)),
        PeerReply::Lost(error) => Err(error),
        PeerReply::Nothing => {
            let waited = peer.silence();
            if waited >= silence_max(context.options.peer_timeout) {
                return Err(Error::PeerSilent { waited });
            }
            Ok(None)
        }
    }
}

//! A guest that goes from QEMU to QEMU directly, to another host: each is driven by the towline of its host.
//!
//! ```text
//!   in the clear   QEMU ═══════════════ tcp: main channel, lanes with MSG_ZEROCOPY ═══════════════► QEMU
//!   encrypted      QEMU ── unix ──► towline ══ tcp, TLS by the keys of the move ══► towline ── unix ──► QEMU
//!   session                         towline ── HELLO · LISTENS · STOPPED · AWAITS · outcome · report ── towline
//! ```
//! The stream is the QEMUs' own, which no towline reads. The source's migration waits in `pre-switchover` until the other towline has recorded that it awaits the guest; then it completes by
//! itself, once the other QEMU has confirmed that it loaded everything. That QEMU runs the guest only when its towline is sent that the
//! source is done. Nothing is decided here, but by [`crate::switchover`].

mod arrival;
mod departure;

use std::time::Duration;

use towline_channel::Cancel;

use super::context::Context;
use super::ends::{Destination, Source};
use super::error::Failure;
use super::invalid::Invalid;
use super::progress::{CopyReport, Observer};
use super::request::{CopyRequest, Direct, Task, Tls, TransferOptions};
use crate::moves::InterruptedPostcopy;
use crate::switchover::MemorySharing;

impl Direct {
    /// Memory of the guest at the two ends.
    fn memory(&self) -> MemorySharing {
        if self.permits_postcopy() { MemorySharing::ConnectedPostcopy } else { MemorySharing::Connected }
    }
}

/// Sends the rest of a guest that was switched to postcopy and lacks memory at another host, to the towline that waits for it there.
///
/// # Errors
/// [`Failure`]: nothing is changed, or the guest lacks memory as before.
pub fn go_on(
    interrupted: InterruptedPostcopy,
    within: Duration,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<CopyReport, Failure> {
    let task = Task::Move {
        transfer: TransferOptions::default(),
        run: None,
        detach_vsock: false,
        devices: Vec::new(),
    };
    let (address, credentials) = (interrupted.way.address(), interrupted.way.credentials());
    let options = CopyRequest {
        tls: credentials.map(Tls::OneTime),
        peer_name: Some(interrupted.file.record().destination.to_string()),
        recover_timeout: within,
        ..CopyRequest::new(task)
    };
    let context = Context::new(&options, 0, cancel, observer);
    match address {
        Some(to) if options.tls.is_some() => departure::go_on(interrupted, &to, &context),
        _ => Err(Failure::untouched(Invalid::DirectEnds)),
    }
}

/// Has this host's QEMU send or receive a guest; the towline at the other end drives the other QEMU.
pub(super) fn copy(
    source: &Source,
    destination: &Destination,
    how: &Direct,
    context: &Context<'_>,
) -> Result<CopyReport, Failure> {
    match (source, destination) {
        (Source::Qmp(from), Destination::Stream(to)) => departure::copy(from, to, how, context),
        (Source::Stream(at), Destination::Qmp(to)) => arrival::copy(at, to, how, context),
        _ => Err(Failure::untouched(Invalid::DirectEnds)),
    }
}

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

use super::context::Context;
use super::ends::{Destination, Source};
use super::error::Failure;
use super::invalid::Invalid;
use super::progress::CopyReport;
use super::request::Direct;
use crate::switchover::MemorySharing;

impl Direct {
    /// Memory of the guest at the two ends.
    fn memory(&self) -> MemorySharing {
        if self.permits_postcopy() { MemorySharing::ConnectedPostcopy } else { MemorySharing::Connected }
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

//! Continues a guest in another QEMU of this host, in the same memory.
//!
//! ```text
//!   old QEMU ── block list, small blocks, device state ─► SinkWithPresentBlocks ─► Relay ─► new QEMU, which waits
//!      └────────────── memory: proven to be one (`in_place`) ──────────────────────────┘
//! ```
//! As a move between two QEMUs, with the memory that both map left out. Until `cont` at the new QEMU nothing
//! writes into that memory but the old one's guest, so every failure before gives the guest back to the old
//! QEMU. From then on the old one's device state is of another memory (`switchover`,
//! `MemorySharing::Shared`). Of memory that both map copy-on-write from an image, the new QEMU gets the pages
//! that differ from the image.
//!
//! Out of scope: starting and ending the new QEMU ([`crate::upgrade`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use towline_channel::Cancel;
use towline_image::Image;

use super::context::Context;
use super::copy::transfer_to;
use super::endpoint::{QemuDestination, QemuSource, SourceEndpoint as _};
use super::error::{Error, Failure};
use super::preflight::FactsExtent;
use super::progress::{CopyPhase, CopyReport, Observer};
use super::request::{CopyRequest, Task, UpgradeMemory};
use super::vsock;
use crate::in_place::{self, Presence};

/// A QEMU that runs a guest, and one that waits for it in the same memory.
#[derive(Debug, Clone)]
pub struct UpgradeRequest {
    /// QMP socket of the QEMU that runs the guest.
    pub old: PathBuf,
    /// QMP socket of the QEMU that waits (`-incoming defer`).
    pub new: PathBuf,
    /// Detach a vhost-user-vsock before, and attach it again in the new QEMU.
    pub detach_vsock: bool,
    /// Chardevs of network cards in other processes, which both QEMUs have. The old one must be connected to
    /// them until the end: a guest without a link at that time would be without it in the new QEMU.
    pub card_chardevs: Vec<String>,
    /// Memory that both QEMUs cannot map.
    pub memory: UpgradeMemory,
    /// The image that both map copy-on-write: what the guest has written is sent.
    pub image: Option<Arc<Image>>,
    /// Maximum downtime, where memory is sent.
    pub downtime_limit: Duration,
}

impl UpgradeRequest {
    fn options(&self) -> CopyRequest {
        let task = Task::Upgrade { detach_vsock: self.detach_vsock, memory: self.memory };
        CopyRequest { downtime_limit: self.downtime_limit, ..CopyRequest::new(task) }
    }
}

/// Continues the guest in the new QEMU, and ends the old one.
///
/// # Errors
/// The reason and the location of the guest; see [`Failure`].
pub fn upgrade(
    request: &UpgradeRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<CopyReport, Failure> {
    let options = request.options();
    let context = Context::new(&options, 0, cancel, observer);
    let (mut source, mut to) = prepare(request, &context)?;
    transfer_to(&mut source, &mut to, &context)
}

/// Checks that the guest would run in the new QEMU, in the same memory. Changes neither.
///
/// # Errors
/// As [`upgrade`].
pub fn check_upgrade(
    request: &UpgradeRequest,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<(), Failure> {
    let options = request.options();
    let context = Context::new(&options, 0, cancel, observer);
    prepare(request, &context).map(drop)
}

fn prepare(
    request: &UpgradeRequest,
    context: &Context<'_>,
) -> Result<(QemuSource, QemuDestination), Failure> {
    context.observer.phase(CopyPhase::Prepare);
    let mut source = QemuSource::new(&request.old, context)?;
    let description = source.describe_guest(FactsExtent::Compared, context)?;
    let opened = QemuDestination::new(&request.new, &description, context);
    drop(description);
    let mut to = opened.map_err(Failure::untouched)?;
    let presence = prove(&mut source, &mut to, request).map_err(Failure::untouched)?;
    to.replace_source(presence);
    compare(&mut source, &mut to, request).map_err(Failure::untouched)?;
    Ok((source, to))
}

/// Proves which memory both have. Shared memory is left out by the source, so all of it must be there.
fn prove(
    source: &mut QemuSource,
    to: &mut QemuDestination,
    request: &UpgradeRequest,
) -> Result<Presence, Error> {
    let shared = in_place::shared_blocks(&mut source.qmp.qemu)?;
    let mut presence = in_place::of_running(&mut to.qmp.qemu, &mut source.qmp.qemu)?;
    if let Some(image) = &request.image {
        presence.add_base(image, &mut to.qmp.qemu)?;
    }
    let is_in_place = request.memory == UpgradeMemory::InPlace;
    let is_needed = |sent: &&in_place::TransferredBlock| {
        sent.is_unexpected || is_in_place && shared.contains(&sent.block)
    };
    if let Some(sent) = presence.sent().iter().find(is_needed) {
        let (block, reason) = (sent.block.clone(), sent.reason.clone());
        return Err(Error::NotInPlace { socket: to.qmp.qemu.socket().to_owned(), block, reason });
    }
    Ok(presence)
}

/// Refuses a new QEMU that lacks what the old one has. Open files of the old one are checked again before the
/// guest runs in the new one. Vsocks that are detached for the upgrade are ignored.
fn compare(source: &mut QemuSource, to: &mut QemuDestination, request: &UpgradeRequest) -> Result<(), Error> {
    let (mut old, mut new) = (source.qmp.qemu.inventory()?, to.qmp.qemu.inventory()?);
    if request.detach_vsock {
        let chardevs = vsock::chardevs(&mut source.qmp.qemu);
        (old, new) = (old.without(&chardevs, vsock::KIND), new.without(&chardevs, vsock::KIND));
    }
    let differences = old.differences(&new, ["in the old QEMU", "in the new one"]);
    if !differences.is_empty() {
        return Err(Error::NotCarried { socket: to.qmp.qemu.socket().to_owned(), differences });
    }
    source.require_unchanged(request.card_chardevs.clone())
}

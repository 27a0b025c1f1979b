//! A QEMU that waits for a guest, driven by its monitor.

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use towline_channel::{Channel, Error as ChannelError};
use towline_image::{Image, Origin as ImageOrigin};
use towline_migration::{Guest, Relay, Sink, SinkWithPresentBlocks, Snapshot};

use super::super::context::Context;
use super::super::destination::QmpDestination;
use super::super::engine::send;
use super::super::error::Error;
use super::super::preflight;
use super::super::progress::CopyPhase;
use super::super::shared_switchover::TransferContext;
use crate::in_place::{self, IfUnmapped, MappedImage, Presence, Verify};
use crate::lock::lock;
use crate::qemu::Process;
use crate::switchover::MemorySharing;
use crate::temporary_names;

/// Threads that compare an image with its manifest while QEMU loads it.
const VERIFY_THREADS: usize = 2;
/// Interval of queries to a QEMU that loads by itself.
const LOAD_INTERVAL: Duration = Duration::from_millis(2);
/// Interval of queries to a QEMU that is sent a guest of this process.
const SEND_INTERVAL: Duration = Duration::from_millis(250);

/// Description of a guest before anything is transferred.
pub(in super::super) struct GuestDescription<'a> {
    /// Facts for the preflight check; `None` if nothing is known.
    pub(in super::super) guest: Option<preflight::GuestFacts>,
    /// Origin, for the manifest of an image.
    pub(in super::super) origin: ImageOrigin,
    /// The guest's own image, possibly an incremental one.
    #[cfg_attr(not(feature = "store"), expect(dead_code, reason = "used by object stores only"))]
    pub(in super::super) file: Option<&'a Image>,
    /// The image that a running guest maps.
    pub(in super::super) base: Option<Arc<Image>>,
}

/// A guest of this process: an open image, or one that the caller provides.
pub(in super::super) struct LocalGuest<'a> {
    pub(in super::super) guest: &'a dyn Guest,
    /// The guest's own image, possibly an incremental one.
    pub(in super::super) file: Option<&'a Image>,
    /// The image that the destination may have mapped.
    pub(in super::super) base: Option<&'a Image>,
    /// Stored, here or elsewhere.
    pub(in super::super) is_stored: bool,
}

impl LocalGuest<'_> {
    /// Number of lanes into an image: none from a stored guest, which has no stream.
    pub(in super::super) fn lanes(&self, context: &Context<'_>) -> usize {
        if self.is_stored { 0 } else { context.lanes() }
    }
}

/// A QEMU that waits for a guest.
pub(in super::super) struct QemuDestination {
    /// The QEMU.
    pub(in super::super) qmp: QmpDestination,
    /// Set once it is connected for an incoming stream.
    pub(super) relay: Option<RelaySink>,
    /// It has loaded an image by itself.
    pub(in super::super) is_loaded_by_qemu: bool,
    /// Memory that it maps, whose image is locked.
    pub(super) presence: Option<Presence>,
    /// Memory of the guest, compared with the source's: it may replace the source's QEMU on this host.
    pub(in super::super) memory: MemorySharing,
}

/// A relay to a QEMU, which may have a part of the guest's memory.
pub(super) struct RelaySink {
    pub(super) main_channel: Arc<dyn Channel>,
    pub(super) sink: Box<dyn Sink>,
}

impl RelaySink {
    /// A relay that sends everything.
    pub(super) fn whole(relay: Box<Relay>) -> Self {
        Self { main_channel: relay.main_channel(), sink: relay }
    }

    /// A relay that drops pages of memory that the QEMU has.
    pub(super) fn present(sink: SinkWithPresentBlocks<Box<Relay>>) -> Self {
        Self { main_channel: sink.inner().main_channel(), sink: Box::new(sink) }
    }
}

impl QemuDestination {
    /// Connects to it, and checks that the guest would run there.
    pub(in super::super) fn new(
        path: &Path,
        description: &GuestDescription<'_>,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        let mut qemu = QmpDestination::prepare(path, context)?;
        if let Some(guest) = &description.guest {
            guest.check(&mut qemu.qemu, context)?;
        }
        Ok(Self::of(qemu))
    }

    /// A destination that was checked before.
    pub(in super::super) fn of(qemu: QmpDestination) -> Self {
        Self {
            qmp: qemu,
            relay: None,
            is_loaded_by_qemu: false,
            presence: None,
            memory: MemorySharing::Copied,
        }
    }

    /// Gives the sockets of the new QEMU of an upgrade their final names: the old one has exited.
    pub(in super::super) fn publish_sockets(&self) {
        if let Process::Known { pid, .. } = self.qmp.qemu.process() {
            temporary_names::publish_staging_names(pid.cast_unsigned());
        }
    }

    /// Has it replace the source's QEMU. Pages of memory that it maps are not sent; with copied memory as well the source's QEMU has the
    /// guest until this one runs it, and gets the locks of the drives back.
    pub(in super::super) fn replace_source(&mut self, presence: Presence) {
        self.presence = Some(presence);
        self.memory = MemorySharing::Shared;
    }

    /// The memory that this QEMU already has, because it maps the image.
    pub(super) fn presence(
        &mut self,
        local: &LocalGuest<'_>,
        context: &Context<'_>,
    ) -> Result<Option<Presence>, Error> {
        let Some(image) = local.base.filter(|_| !context.options.stream) else { return Ok(None) };
        let verify = if context.options.verify { Verify::All } else { Verify::Nothing };
        let if_unmapped =
            if context.options.requires_mapped_memory { IfUnmapped::Refuse } else { IfUnmapped::Send };
        let notice = |text: &str| context.observer.notice(text);
        let reflink = context.own.and_then(|own| lock(own.reflink).take());
        let mapped = MappedImage { image, reflink, verify, if_unmapped };
        let presence = in_place::find_mapped_memory(&mut self.qmp.qemu, mapped, context.cancel, &notice)?;
        context.check_cancelled()?;
        Ok(presence)
    }

    /// Number of lanes into memory that may have content, which only the main channel clears; `None`: it is zeros.
    pub(super) fn lanes_into_old_memory(&mut self, context: &Context<'_>) -> Result<Option<usize>, Error> {
        let old = in_place::old_memory(&mut self.qmp.qemu)?;
        old.iter().for_each(|old| context.observer.notice(&old.to_string()));
        Ok((!old.is_empty()).then_some(0))
    }

    pub(super) fn stream(
        &mut self,
        guest: &dyn Guest,
        lanes: usize,
        run: TransferContext<'_>,
    ) -> Result<Snapshot, Error> {
        let context = run.context;
        let connections = self.qmp.start(lanes, context)?;
        let mut queried_at = Instant::now();
        send(guest, &connections, run, &mut || {
            if queried_at.elapsed() > SEND_INTERVAL {
                queried_at = Instant::now();
                self.qmp.check_not_failed()?;
            }
            Ok(())
        })
    }

    /// Has QEMU load the file itself. With `--verify` it is hashed meanwhile, so that no guest runs from a
    /// damaged image.
    pub(super) fn load(&mut self, image: &Image, context: &Context<'_>) -> Result<Snapshot, Error> {
        // A separate open file description: QEMU reads the stream at the file's position, which duplicates share.
        let file = image.reopen()?;
        self.qmp.load(&file, context.lanes())?;
        context.observer.phase(CopyPhase::Transfer);
        thread::scope(|scope| {
            let verify = || image.verify(VERIFY_THREADS, &|_| {});
            let verifier = context.options.verify.then(|| Builder::new().spawn_scoped(scope, verify));
            let verifier = verifier.transpose().map_err(ChannelError::NoThread)?;
            let mut loaded = false;
            while !loaded || verifier.as_ref().is_some_and(|verifier| !verifier.is_finished()) {
                context.check_cancelled()?;
                loaded = loaded || self.qmp.has_loaded_file(context.cancel)?;
                thread::park_timeout(LOAD_INTERVAL);
            }
            if let Some(verifier) = verifier {
                verifier.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            Ok(image.qemu_load_statistics())
        })
    }
}

//! An image: read in place as a source, written as a destination. The source is any stored guest, also in an
//! object store.

use std::fmt::Display;
use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use towline_image::{Image, ImageWriter, Origin, StoredGuest};
use towline_migration::incoming::Publication;
use towline_migration::{GuestWithPresentBlocks, Sink, Snapshot};

use super::super::context::Context;
use super::super::engine;
use super::super::error::{Error, Failure};
use super::super::preflight::{FactsExtent, GuestFacts};
use super::super::progress::{CopyReport, Observer, SourceState};
use super::super::request::CopyRequest;
use super::super::shared_switchover::{SharedSwitchover, TransferContext};
use super::driven::{GuestDescription, LocalGuest};
use super::traits::{DestinationEndpoint, Rollback, SourceEndpoint};
use crate::in_place::CapturedGuest;
use crate::switchover::{DestinationKind, Directive, GuestRunState, Input};

/// Opens the image at `path`, which any number of copies may read.
pub(in super::super) fn open(
    path: &Path,
    options: &CopyRequest,
    observer: &dyn Observer,
) -> Result<Image, Error> {
    let image = Image::open(path)?;
    notice_missing_manifest(&image, observer);
    Ok(if options.verify { image.verify_on_read()? } else { image })
}

/// Reports an image without checksums.
pub(in super::super) fn notice_missing_manifest(image: &Image, observer: &dyn Observer) {
    if image.manifest().is_none() {
        let text = "has no manifest (made by QEMU itself?): there are no checksums to verify it by";
        observer.notice(&format!("{} {text}", image.path().display()));
    }
}

/// An open stored guest, which other copies may read at the same time. It stays as it is.
pub(in super::super) struct StoredSource<P> {
    image: P,
    moved: Snapshot,
    /// Time for which a guest that was taken was stopped; it runs on if that is not zero.
    standstill: Option<Duration>,
}

impl<P> StoredSource<P> {
    pub(in super::super) fn new(image: P) -> Self {
        Self { image, moved: Snapshot::default(), standstill: None }
    }
}

impl StoredSource<Box<dyn StoredGuest>> {
    pub(in super::super) fn of_captured(guest: CapturedGuest) -> Self {
        Self { standstill: Some(guest.standstill), ..Self::new(Box::new(guest)) }
    }
}

impl<P: Deref<Target = dyn StoredGuest>> SourceEndpoint for StoredSource<P> {
    fn describe_guest(
        &mut self,
        extent: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        context.check_cancelled().map_err(Failure::untouched)?;
        // Of the same guest, whichever image it is in.
        let recorded = self.image.origin().cloned().unwrap_or_default();
        let Origin { qemu, process, .. } = recorded;
        let origin = Origin { source: self.image.described(), qemu, process, ..Origin::default() };
        let guest = (extent == FactsExtent::Compared).then(|| GuestFacts::of_image(&*self.image));
        Ok(GuestDescription { guest, origin, file: self.image.image(), base: None })
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        let (file, base) = (self.image.image(), self.image.base());
        let local = LocalGuest { guest: &*self.image, file, base, is_stored: true };
        self.moved = to.receive_guest(&local, run)?;
        Ok(())
    }

    fn moved(&self) -> Snapshot {
        self.moved
    }

    fn delivered(&self, to: &dyn DestinationEndpoint, switchover: &SharedSwitchover) -> Directive {
        match to.kind() {
            DestinationKind::Qemu => {
                switchover.loaded(GuestRunState::from_state(self.image.devices().run_state()))
            }
            _ => switchover.handle(Input::Delivered),
        }
    }

    fn close(&mut self, concluded: Result<CopyReport, Failure>) -> Result<CopyReport, Failure> {
        let report = concluded.map_err(|failure| explain_truncation(&*self.image, failure))?;
        let Some(standstill) = self.standstill else { return Ok(report) };
        let source = if standstill.is_zero() { report.source } else { SourceState::Running };
        Ok(CopyReport { downtime_ms: u64::try_from(standstill.as_millis()).ok(), source, ..report })
    }
}

/// Replaces the reason if an image was truncated: a send of missing pages only fails with "bad address".
pub(in super::super) fn explain_truncation(image: &dyn StoredGuest, failure: Failure) -> Failure {
    match image.check_not_truncated() {
        Err(error) => Failure { error: Box::new(error.into()), ..failure },
        Ok(()) => failure,
    }
}

/// An image to be written.
impl DestinationEndpoint for ImageWriter {
    fn sink(&self) -> &dyn Sink {
        self
    }

    fn receive_guest(&mut self, local: &LocalGuest<'_>, run: TransferContext<'_>) -> Result<Snapshot, Error> {
        let lanes = local.lanes(run.context);
        // A guest that is an image but for what it has written.
        if let (None, Some(base)) = (local.file, local.base)
            && let Some(arriving) = self.expect_difference(base, |block| local.guest.difference(block))?
        {
            let guest = GuestWithPresentBlocks::but_for(local.guest, arriving);
            return engine::copy_in_process(&guest, self, lanes, run);
        }
        engine::copy_in_process(local.guest, self, lanes, run)
    }

    fn defer_publication(&self) -> Publication {
        Publication::ByCaller
    }

    fn finalize(&mut self, context: &Context<'_>) -> Result<Vec<String>, Error> {
        if !self.is_published() {
            self.publish()?;
        }
        context.set_increment(self);
        Ok(Vec::new())
    }

    fn roll_back(&mut self, error: Error, _: &Context<'_>, _: Rollback) -> (Error, Vec<String>) {
        (error, self.is_published().then(|| kept(&self.path().display())).into_iter().collect())
    }
}

/// Notice of an image that was published before the copy failed.
pub(super) fn kept(image: &dyn Display) -> String {
    format!("{image} was complete before that, and is kept: it has the guest as it was when it was stopped")
}

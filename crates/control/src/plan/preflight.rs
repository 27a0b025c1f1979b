//! Preflight check of a guest and of its devices against the destination. QEMU itself would notice most
//! differences only while it loads, with an unclear message, or never.
//!
//! The rules are in [`towline_compat`].

use std::path::PathBuf;

use towline_compat::facts::Subject;
use towline_compat::{ConfiguredBy, Facts, Pair, Report, Severity, evaluate};
use towline_image::StoredGuest;
use towline_protocol::RamBlock;

use super::context::Context;
use super::ends::Destination;
use super::error::Error;
use super::progress::Observer;
use super::vsock;
use crate::check::{self, CheckEnd, PlannedTransfer};
use crate::hex::from_hex;
use crate::qemu::Qemu;

/// Extent of the facts about a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FactsExtent {
    /// Identity of the guest.
    Identity,
    /// Identity, and the process of its QEMU, for an image.
    Stored,
    /// All that is compared with a QEMU at its destination.
    Compared,
}

impl FactsExtent {
    /// Extent for a guest that goes to this destination.
    pub(super) fn of(destination: &Destination) -> Self {
        match destination {
            Destination::Qmp(_) => Self::Compared,
            to if to.is_image() => Self::Stored,
            _ => Self::Identity,
        }
    }
}

/// Facts about a guest before it is sent.
#[derive(Debug, Clone)]
pub(super) struct GuestFacts {
    /// `None` if the destination cannot be compared, so the source was not queried either.
    facts: Option<Facts>,
    /// The UUID as QMP prints it; lanes carry it, and QEMU compares it with its own.
    pub(super) uuid: Option<String>,
}

impl GuestFacts {
    pub(super) fn of_image(image: &dyn StoredGuest) -> Self {
        Self { facts: Some(check::image(image)), uuid: None }
    }

    /// A guest whose devices are not known.
    pub(super) fn of_blocks(machine_type: &str, blocks: &[RamBlock]) -> Self {
        Self { facts: Some(check::stored(machine_type, blocks)), uuid: None }
    }

    /// The same guest without the vsocks, which are detached before the transfer.
    pub(super) fn without_vsocks(mut self) -> Self {
        if let Some(Subject::Qemu(qemu)) = self.facts.as_mut().map(|facts| &mut facts.subject) {
            vsock::remove_from_facts(qemu);
        }
        self
    }

    /// Queries a QEMU for this extent of facts.
    pub(super) fn of_qemu(qemu: &mut Qemu, extent: FactsExtent) -> Result<Self, Error> {
        let uuid = Some(qemu.facts().uuid.clone());
        let facts = match extent {
            FactsExtent::Identity | FactsExtent::Stored => None,
            FactsExtent::Compared => Some(Subject::Qemu(Box::new(qemu.compat_facts()?)).into()),
        };
        Ok(Self { facts, uuid })
    }

    /// Refuses a guest that would not run in the waiting QEMU, and passes other findings on as notices.
    pub(super) fn check(&self, waiting: &mut Qemu, context: &Context<'_>) -> Result<(), Error> {
        let Some(source) = &self.facts else { return Ok(()) };
        // A QEMU that already has a part of the guest gets no further queries: its main loop may wait for the
        // rest.
        let is_live = waiting.facts().waits_for_migrate_incoming();
        let known = match source.subject {
            _ if !is_live => waiting.basic_facts(),
            Subject::Image(_) => waiting.facts_for_image()?,
            _ => waiting.compat_facts()?,
        };
        let destination = Subject::Qemu(Box::new(known)).into();
        let report = evaluate(&Pair {
            source,
            destination: &destination,
            lanes: Some(context.lanes()),
            is_postcopy: context.options.is_postcopy(),
            is_live,
            is_one_host: true,
            copies_disks: false,
        });
        report_findings(&report, || format!("QEMU on {}", waiting.socket()), context.observer)
    }
}

/// Refuses the move if a device at the destination could not continue with the state of its peer at the
/// source. QEMU compares neither: a difference between two backends shows only when the guest uses it.
pub(super) fn check_devices(pairs: &[(PathBuf, PathBuf)], observer: &dyn Observer) -> Result<(), Error> {
    for (here, there) in pairs {
        let report = check::check(
            &CheckEnd::Control(here.clone()),
            &CheckEnd::Control(there.clone()),
            PlannedTransfer::default(),
        )?;
        report_findings(&report, || format!("the device on {}", there.display()), observer)?;
    }
    Ok(())
}

/// Refuses what a report forbids, and passes other findings on as notices.
pub(crate) fn report_findings(
    report: &Report,
    destination: impl Fn() -> String,
    observer: &dyn Observer,
) -> Result<(), Error> {
    let reasons = report.reasons(ConfiguredBy::Towline);
    if !reasons.is_empty() {
        return Err(Error::DoesNotFit { destination: destination(), reasons });
    }
    for finding in report.of(ConfiguredBy::Towline) {
        let head = if finding.severity == Severity::Unknown { "it may not run there: " } else { "" };
        observer.notice(&format!("check: {head}{finding}"));
    }
    Ok(())
}

/// Bytes of a UUID as QMP prints it.
pub(super) fn uuid_bytes(text: &str) -> [u8; 16] {
    from_hex(&text.replace('-', "")).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default()
}

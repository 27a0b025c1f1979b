//! `mem:`: a synthetic guest of this process as source, memory of this process as destination.
//!
//! ```text
//!   mem:SIZE ─► fill ─► load runs ─► tcp:, unix:, fd:, exec:          the other end verifies
//!                                └─► image · mem:                     within this process
//!   anything ─► mem:    populated ahead, verified (or hashed) before the source is acknowledged
//! ```

use std::num::NonZeroUsize;
use std::thread;

use towline_image::Origin;
use towline_migration::synthetic::{self, Checked, MemfdPages, Shape, Synthetic};
use towline_migration::{Memory, MemoryError, Sink, Snapshot};

use super::super::context::Context;
use super::super::ends::MemoryOptions;
use super::super::error::{Error, Failure};
use super::super::preflight::FactsExtent;
use super::super::report::DestinationState;
use super::super::shared_switchover::TransferContext;
use super::traits::{DestinationEndpoint, GuestDescription, LocalGuest, SourceEndpoint};
use crate::switchover::SourceKind;

/// A synthetic guest, which ends when this is dropped.
pub(in super::super) struct MemorySource {
    guest: Synthetic,
    moved: Snapshot,
}

impl MemorySource {
    /// Creates the guest.
    pub(in super::super) fn new(shape: &Shape) -> Result<Self, Error> {
        let guest = Synthetic::new(*shape).map_err(towline_migration::Error::from)?;
        Ok(Self { guest, moved: Snapshot::default() })
    }
}

impl SourceEndpoint for MemorySource {
    fn kind(&self) -> SourceKind {
        SourceKind::Stored
    }

    fn describe_guest(
        &mut self,
        _: FactsExtent,
        context: &Context<'_>,
    ) -> Result<GuestDescription<'_>, Failure> {
        context.check_cancelled().map_err(Failure::untouched)?;
        let origin = Origin { source: "mem".into(), ..Origin::default() };
        Ok(GuestDescription { guest: None, origin, file: None })
    }

    fn transfer(&mut self, to: &mut dyn DestinationEndpoint, run: TransferContext<'_>) -> Result<(), Error> {
        self.moved = self
            .guest
            .run(|guest| to.receive_guest(&LocalGuest { guest, file: None, is_stored: false }, run))??;
        Ok(())
    }

    fn moved(&self) -> Snapshot {
        self.moved
    }
}

/// Memory that receives a guest.
pub(in super::super) struct MemoryDestination(Checked);

impl MemoryDestination {
    /// Allocates memory for a guest.
    pub(in super::super) fn new(room: &MemoryOptions) -> Result<Self, Error> {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let memory = match room.length {
            None => Memory::adopting(available_bytes()),
            Some(length) => {
                let failed = |source| {
                    let block = synthetic::BLOCK_NAME.to_owned();
                    towline_migration::Error::from(MemoryError::Map { block, length, source })
                };
                let pages = if room.is_huge { MemfdPages::Huge } else { MemfdPages::Base };
                let file = synthetic::memfd(length, pages).map_err(failed)?;
                // Its pages outlive this mapping.
                synthetic::populate(&file, length, threads).map_err(towline_migration::Error::from)?;
                Memory::adopting_into(file, length)
            }
        };
        Ok(Self(Checked::new(memory, threads)))
    }
}

impl DestinationEndpoint for MemoryDestination {
    fn sink(&self) -> &dyn Sink {
        &self.0
    }

    fn finalize(&mut self, context: &Context<'_>) -> Result<Vec<String>, Error> {
        context.set_memory(self.0.outcome());
        Ok(Vec::new())
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Received
    }
}

/// Memory that the kernel reports as available.
fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

//! Generations of a guest, of which one end gets the next.

use super::mishaps::Scope;
use super::{Source, World};
use crate::switchover::fault::SwitchoverBug;

/// End that has the highest generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Generation {
    /// The guest has none.
    Unused,
    /// The source, in which the guest ran before it was sent.
    Sent,
    Destination,
    /// The source again.
    TakenBack,
}

impl World {
    /// A guest with generations.
    pub(in super::super::super) fn with_generations(self) -> Self {
        Self { generation: Generation::Sent, ..self }
    }

    /// Takes the next generation for the destination; `false` if the source has it.
    pub(super) fn enter(&mut self) -> bool {
        if self.generation == Generation::TakenBack {
            return self.has_fault(SwitchoverBug::RunsWithoutGeneration);
        }
        if self.generation == Generation::Sent {
            self.generation = Generation::Destination;
        }
        true
    }

    /// The destination does not run the guest, and releases its generation.
    pub(super) fn withdraw(&mut self) {
        if self.generation == Generation::Destination {
            self.generation = Generation::Sent;
        }
    }

    /// Returns true if a later towline may take the next generation for a source that is undecided.
    pub(super) fn can_take_back(&self) -> bool {
        let is_left = self.is_left(0) && self.record(0).is_some();
        is_left && self.source == Source::Completed && self.generation == Generation::Sent
    }

    /// Takes the next generation for the source; `false` if the destination has it.
    pub(super) fn leave(&mut self) -> bool {
        if self.generation == Generation::Sent {
            self.generation = Generation::TakenBack;
        }
        self.generation != Generation::Destination
    }

    pub(super) fn take_back(&mut self) {
        let is_taken = self.leave();
        assert!(is_taken, "the step is possible only then");
        self.source = Source::RunAgain;
        self.resumed = true;
        self.forget(Scope::Of(0));
    }
}

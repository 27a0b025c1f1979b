//! State of a protection: both hosts, the way between them, and the arbiter.

use super::Rule;
use super::cluster::Cluster;

/// Number of generations, from 0.
const GENERATIONS: usize = 6;
/// Highest number of a checkpoint.
pub(super) const EPOCHS_MAX: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct World {
    /// The rule that is not kept.
    pub(super) broken: Option<Rule>,
    /// Mishaps that may still happen.
    pub(super) mishaps: u8,
    /// Number of checkpoints of each attempt.
    pub(super) epochs: u8,
    /// The second attempt to protect the guest may still begin.
    pub(super) may_retry: bool,
    pub(super) guest: Guest,
    /// Epoch of what the guest sends now; 0 before the first one of an attempt.
    pub(super) epoch: u8,
    pub(super) card: Card,
    pub(super) ferry: Ferry,
    pub(super) way: Way,
    pub(super) session: Session,
    pub(super) keeper: Keeper,
    /// That of the first attempt, and of the second.
    pub(super) standbys: [Standby; 2],
    /// Index of the one of this attempt.
    pub(super) current: u8,
    /// The card of the other host lives.
    pub(super) has_other_card: bool,
    pub(super) arbiter: Arbiter,
    /// The cluster of both hosts, if that is the arbiter.
    pub(super) cluster: Option<Cluster>,
    /// Highest epoch of a frame that has left the card in this attempt.
    pub(super) sent: u8,
    /// A frame has left it since the second attempt began.
    pub(super) has_sent_again: bool,
    /// The last host that had the guest's state was killed.
    pub(super) is_excused: bool,
    /// The other host could not know that the guest was shut down.
    pub(super) is_unaware: bool,
}

/// The guest in its QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Guest {
    Runs,
    /// For the end of the first copy, or a checkpoint.
    Stopped,
    /// In order.
    ShutDown,
    Dead,
}

/// The guest's card. Of held frames, it knows only the highest epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Card {
    pub(super) is_alive: bool,
    pub(super) is_holding: bool,
    pub(super) generation: u8,
    pub(super) marked: u8,
    pub(super) open: u8,
    /// By the number under which an epoch was marked, less 1.
    pub(super) closed: [u8; EPOCHS_MAX],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ferry {
    pub(super) phase: FerryPhase,
    /// Last checkpoint that it has in memory.
    pub(super) taken: u8,
    /// Last one that it has sent.
    pub(super) given: u8,
    /// Last one that was acknowledged, and whose output it has released.
    pub(super) released: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum FerryPhase {
    Copies,
    /// It may take checkpoints.
    Goes,
    Takes,
    /// It takes no more. The way stays open.
    Ended(Lost),
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Lost {
    Here,
    Standby,
}

/// The way from the ferry to the standby of this attempt, and what is on it; 0: nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Way {
    pub(super) is_cut: bool,
    pub(super) checkpoint: u8,
    pub(super) acknowledgement: u8,
}

/// The session of the keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Session {
    pub(super) is_open: bool,
    /// The request to release the standby is on its way.
    pub(super) request: bool,
    pub(super) reply: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Keeper {
    pub(super) phase: KeeperPhase,
    /// Of the guest here.
    pub(super) generation: u8,
    pub(super) may_be_taken: bool,
    /// In the journal.
    pub(super) is_recorded: bool,
    /// It claims with its own id, or as a repair with another one.
    pub(super) claimant: Owner,
}

/// The keeper, or a later towline in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum KeeperPhase {
    Copies,
    Watches,
    /// It awaits the standby's word.
    Releases(Why),
    Loses(Why),
    /// The ferry is gone.
    EndsCheckpoints(Why),
    Decides(Why),
    Passes(Why),
    /// The output goes; the journal does not say so.
    Forgets(Why),
    /// It has lost.
    Quits,
    Done(Why),
    /// Another towline decides.
    Undecided,
    Dead,
}

/// Reason for the end of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Why {
    Cancelled,
    /// The ferry, or a card.
    Here,
    Standby,
    ShutDown,
    Died,
    Repaired,
    TakenOver,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Standby {
    pub(super) phase: StandbyPhase,
    /// Generation of the guest at its host.
    pub(super) generation: u8,
    /// Last checkpoint that it has; 0: none.
    pub(super) last: u8,
    /// Its memory is that of no checkpoint.
    pub(super) is_torn: bool,
    pub(super) has_qemu: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StandbyPhase {
    Stands,
    /// It has lost the way, and may still be released.
    Grace,
    Deciding,
    Loaded,
    Won,
    /// Its card holds.
    Runs,
    Sends,
    Released,
    /// It has lost the claim, failed or died.
    Ended,
}

/// Claimant of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    Unclaimed,
    Keeper,
    /// A repair that does not know the keeper's.
    Repair,
    /// By its attempt.
    Standby(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Arbiter {
    pub(super) answers: bool,
    pub(super) owners: [Owner; GENERATIONS],
}

impl World {
    pub(super) fn new(mishaps: u8, epochs: u8, may_retry: bool, broken: Option<Rule>) -> Self {
        let mut owners = [Owner::Unclaimed; GENERATIONS];
        owners[1] = Owner::Keeper;
        let absent =
            Standby { phase: StandbyPhase::Ended, generation: 0, last: 0, is_torn: false, has_qemu: false };
        Self {
            broken,
            mishaps,
            epochs,
            may_retry,
            guest: Guest::Runs,
            epoch: 0,
            card: Card {
                is_alive: true,
                is_holding: false,
                generation: 0,
                marked: 0,
                open: 0,
                closed: [0; EPOCHS_MAX],
            },
            ferry: Ferry::NEW,
            way: Way::NEW,
            session: Session::NEW,
            keeper: Keeper::new(1),
            standbys: [Standby::new(1), absent],
            current: 0,
            has_other_card: true,
            arbiter: Arbiter { answers: true, owners },
            cluster: None,
            sent: 0,
            has_sent_again: false,
            is_excused: false,
            is_unaware: false,
        }
    }

    /// The same with a cluster as the arbiter.
    pub(super) fn of_cluster(mishaps: u8, epochs: u8, may_retry: bool, broken: Option<Rule>) -> Self {
        Self { cluster: Some(Cluster::NEW), ..Self::new(mishaps, epochs, may_retry, broken) }
    }

    /// Returns true if this rule is kept.
    pub(super) fn keeps(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    pub(super) fn standby(&self) -> &Standby {
        &self.standbys[usize::from(self.current)]
    }

    /// Returns true if the guest's QEMU has an ordered end, or none.
    pub(super) fn has_exited(&self) -> bool {
        matches!(self.guest, Guest::ShutDown | Guest::Dead)
    }

    /// Returns true if this standby may still go on with the guest.
    pub(super) fn can_take_over(&self, index: u8) -> bool {
        use StandbyPhase::{Deciding, Grace, Loaded, Stands};
        let standby = &self.standbys[usize::from(index)];
        let stands = matches!(standby.phase, Stands | Grace | Deciding | Loaded);
        let owner = self.arbiter.owners[usize::from(standby.generation) + 1];
        // A cluster does not compare claims of two hosts.
        let is_open = self.cluster.is_some() || [Owner::Unclaimed, Owner::Standby(index)].contains(&owner);
        stands && standby.has_qemu && standby.last > 0 && !standby.is_torn && is_open
    }

    /// Returns true if this standby has the way to its ferry, as far as it knows.
    pub(super) fn has_way(&self, index: u8) -> bool {
        index == self.current && self.standbys[usize::from(index)].phase == StandbyPhase::Stands
    }

    /// Claims a generation; `None`: the arbiter does not answer. Returns whether the claimant has it.
    pub(super) fn claim(&mut self, generation: u8, claimant: Owner) -> bool {
        if self.cluster.is_some() && matches!(claimant, Owner::Standby(_)) {
            return true;
        }
        let owner = &mut self.arbiter.owners[usize::from(generation)];
        let is_again = *owner == claimant && self.broken != Some(Rule::ClaimsAreIdempotent);
        let is_won = *owner == Owner::Unclaimed || is_again;
        if *owner == Owner::Unclaimed {
            *owner = claimant;
        }
        is_won
    }

    /// Frames of epochs up to this one leave the card.
    pub(super) fn leaves(&mut self, epoch: u8) {
        self.sent = self.sent.max(epoch);
        self.has_sent_again |= self.current > 0;
    }
}

impl Card {
    /// Holds for a generation. False: it is stale, or the card is dead.
    pub(super) fn hold(&mut self, generation: u8) -> bool {
        if !self.is_alive || generation < self.generation {
            return false;
        }
        if generation > self.generation {
            let closed = self.closed.into_iter().max().unwrap_or_default();
            self.open = self.open.max(closed);
            (self.closed, self.marked, self.generation) = ([0; EPOCHS_MAX], 0, generation);
        }
        self.is_holding = true;
        true
    }

    /// Takes the frames of the epochs up to this one. Returns the highest epoch of one.
    pub(super) fn take(&mut self, number: u8) -> u8 {
        let taken = &mut self.closed[..usize::from(number)];
        let highest = taken.iter().copied().max().unwrap_or_default();
        taken.fill(0);
        highest
    }

    /// Passes all frames. Returns the highest epoch of one.
    pub(super) fn pass(&mut self) -> u8 {
        let highest = self.take(EPOCHS_MAX as u8).max(self.open);
        (self.open, self.is_holding) = (0, false);
        highest
    }
}

impl Ferry {
    pub(super) const NEW: Self = Self { phase: FerryPhase::Copies, taken: 0, given: 0, released: 0 };
}

impl Way {
    pub(super) const NEW: Self = Self { is_cut: false, checkpoint: 0, acknowledgement: 0 };
}

impl Session {
    pub(super) const NEW: Self = Self { is_open: true, request: false, reply: None };
}

impl Keeper {
    pub(super) fn new(generation: u8) -> Self {
        let (phase, claimant) = (KeeperPhase::Copies, Owner::Keeper);
        Self { phase, generation, may_be_taken: false, is_recorded: true, claimant }
    }

    /// Returns true if a process of it lives.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.phase, KeeperPhase::Dead | KeeperPhase::Done(_) | KeeperPhase::Undecided)
    }
}

impl Standby {
    pub(super) fn new(generation: u8) -> Self {
        Self { phase: StandbyPhase::Stands, generation, last: 0, is_torn: false, has_qemu: true }
    }
}

//! Steps that are possible in a world.

use super::Rule;
use super::cluster::{ClusterStep, Role};
use super::world::{FerryPhase, Guest, KeeperPhase, Lost, StandbyPhase, Why, World};

/// Step of one party, or a mishap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    GuestSends,
    CardRestarts,
    OtherCardRestarts,
    ArbiterAnswers,
    // The guest's QEMU and its ferry.
    Copied,
    FerryStarts,
    GuestStops,
    Marked,
    Taken,
    Given,
    Released,
    FerryLoses(Lost),
    FerryExits,
    // The keeper, or a repair.
    Go,
    NotesGo,
    Sees(Why),
    Answered,
    Unanswered,
    KillsFerry,
    EndsCheckpoints,
    KeeperClaims,
    GivesUp,
    Passes,
    Forgets,
    Quits,
    Repair,
    ProtectsAgain,
    // The standby of this attempt.
    Acknowledges,
    Applies,
    ReleaseArrives,
    // A standby, by the attempt.
    LosesWay(u8),
    SeesQemuEnd(u8),
    BeginsToDecide(u8),
    Loads(u8),
    StandbyClaims(u8),
    Runs(u8),
    Sends(u8),
    Cluster(ClusterStep),
    Mishap(Mishap),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mishap {
    KillQemu,
    KillCard,
    KillFerry,
    KillKeeper,
    KillHost,
    KillAgent,
    KillOtherQemu,
    KillOtherCard,
    /// The way and the session.
    CutHosts,
    CutSession,
    /// The keeper takes the ferry for dead, the standby its host, the ferry the standby.
    FerryIsLate,
    HostIsLate,
    StandbyIsLate,
    /// The ferry waits no longer for the keeper.
    KeeperIsLate,
    Cancel,
    ShutDown,
    ArbiterFails,
    /// The answer to a claim that was made.
    KeeperLosesAnswer,
    StandbyLosesAnswer,
    /// A checkpoint is not written whole.
    ApplyFails,
    LoadFails,
    /// The cluster demotes the guest's host, which is to be empty, or has lost its quorum.
    Demote,
    /// It fences the other host.
    FenceOther,
}

const MISHAPS: [Mishap; 23] = [
    Mishap::KillQemu,
    Mishap::KillCard,
    Mishap::KillFerry,
    Mishap::KillKeeper,
    Mishap::KillHost,
    Mishap::KillAgent,
    Mishap::KillOtherQemu,
    Mishap::KillOtherCard,
    Mishap::CutHosts,
    Mishap::CutSession,
    Mishap::FerryIsLate,
    Mishap::HostIsLate,
    Mishap::StandbyIsLate,
    Mishap::KeeperIsLate,
    Mishap::Cancel,
    Mishap::ShutDown,
    Mishap::ArbiterFails,
    Mishap::KeeperLosesAnswer,
    Mishap::StandbyLosesAnswer,
    Mishap::ApplyFails,
    Mishap::LoadFails,
    Mishap::Demote,
    Mishap::FenceOther,
];

impl World {
    /// All steps that are possible, but for mishaps.
    pub(super) fn own_steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut add = |possible: bool, step: Step| possible.then(|| steps.push(step));
        let is_new = if self.card.is_holding { self.card.open < self.epoch } else { self.is_first_sent() };
        add(self.guest == Guest::Runs && self.card.is_alive && is_new, Step::GuestSends);
        add(!self.card.is_alive, Step::CardRestarts);
        add(!self.has_other_card, Step::OtherCardRestarts);
        add(!self.arbiter.answers, Step::ArbiterAnswers);
        self.add_ferry_steps(&mut add);
        self.add_keeper_steps(&mut add);
        for index in 0..=self.current {
            self.add_standby_steps(index, &mut add);
        }
        steps.extend(self.cluster_steps());
        steps
    }

    pub(super) fn mishap_steps(&self) -> impl Iterator<Item = Step> {
        let possible = |mishap: &Mishap| self.mishaps > 0 && self.can_befall(*mishap);
        MISHAPS.into_iter().filter(possible).map(Step::Mishap)
    }

    /// Returns true if a frame that leaves now is the first one of its epoch.
    fn is_first_sent(&self) -> bool {
        self.sent < self.epoch || self.current > 0 && !self.has_sent_again
    }

    fn add_ferry_steps(&self, add: &mut impl FnMut(bool, Step) -> Option<()>) {
        let (ferry, card) = (&self.ferry, &self.card);
        let (stopped, takes) = (self.guest == Guest::Stopped, ferry.phase == FerryPhase::Takes);
        let copies = ferry.phase == FerryPhase::Copies;
        add(copies && self.guest == Guest::Runs && !self.way.is_cut, Step::Copied);
        add(ferry.phase == FerryPhase::Goes && stopped && card.is_alive, Step::FerryStarts);
        let has_buffer = ferry.taken - ferry.released < 2 && self.epoch <= self.epochs;
        add(takes && self.guest == Guest::Runs && has_buffer, Step::GuestStops);
        let marks_late = !self.keeps(Rule::MarksWhileStopped);
        let is_known = card.is_alive && card.generation == self.standby().generation;
        let is_known = is_known || !self.keeps(Rule::HoldsFirst);
        let is_due = if marks_late { card.marked < ferry.taken } else { stopped && card.marked < self.epoch };
        add(takes && is_due && is_known, Step::Marked);
        add(takes && stopped && (marks_late || card.marked == self.epoch), Step::Taken);
        add(takes && ferry.given == ferry.released && ferry.given < ferry.taken, Step::Given);
        let is_acknowledged = self.way.acknowledgement > 0 || !self.keeps(Rule::ReleasesAcknowledged);
        let is_acknowledged = is_acknowledged && ferry.released < ferry.given;
        add(takes && is_acknowledged && is_known && card.marked > ferry.released, Step::Released);
        let works = takes || copies || ferry.phase == FerryPhase::Goes;
        let has_standby = !self.way.is_cut && self.standby().phase == StandbyPhase::Stands;
        add(works && !has_standby, Step::FerryLoses(Lost::Standby));
        let misses_card = takes && !is_known || ferry.phase == FerryPhase::Goes && !card.is_alive;
        add(works && self.has_exited() || misses_card, Step::FerryLoses(Lost::Here));
        let has_ended = matches!(ferry.phase, FerryPhase::Copies | FerryPhase::Ended(_));
        add(has_ended && !self.keeper.is_alive(), Step::FerryExits);
    }

    fn add_keeper_steps(&self, add: &mut impl FnMut(bool, Step) -> Option<()>) {
        use KeeperPhase as Phase;
        let ended = matches!(self.ferry.phase, FerryPhase::Ended(_) | FerryPhase::Gone);
        match self.keeper.phase {
            Phase::Copies => {
                let is_ready = self.ferry.phase == FerryPhase::Copies && self.guest == Guest::Stopped;
                add(is_ready, Step::Go);
                add(ended, Step::Sees(Why::Here));
            }
            Phase::Watches => {
                add(!self.keeper.may_be_taken, Step::NotesGo);
                add(self.guest == Guest::ShutDown, Step::Sees(Why::ShutDown));
                add(self.guest == Guest::Dead, Step::Sees(Why::Died));
                let here = matches!(self.ferry.phase, FerryPhase::Ended(Lost::Here) | FerryPhase::Gone);
                let is_seen = match self.guest {
                    Guest::ShutDown => self.keeps(Rule::LossMayBeShutdown),
                    Guest::Dead => self.keeps(Rule::ReleasesForLivingGuest),
                    Guest::Runs | Guest::Stopped => false,
                };
                let is_slow = self.guest == Guest::Dead && !self.keeps(Rule::ExitIsSeen);
                add(here && !is_seen || is_slow, Step::Sees(Why::Here));
                let standby = self.ferry.phase == FerryPhase::Ended(Lost::Standby);
                add(standby, Step::Sees(Why::Standby));
            }
            Phase::Releases(_) => {
                add(self.session.reply.is_some(), Step::Answered);
                add(true, Step::Unanswered);
            }
            Phase::Loses(_) => drop(add(true, Step::KillsFerry)),
            Phase::EndsCheckpoints(_) => drop(add(true, Step::EndsCheckpoints)),
            Phase::Decides(why) => {
                let gives_up = matches!(why, Why::Cancelled | Why::Repaired);
                add(self.arbiter.answers && self.answers_keeper(), Step::KeeperClaims);
                add(!self.arbiter.answers && gives_up, Step::GivesUp);
            }
            Phase::Passes(_) => {
                let is_ours = self.card.generation <= self.keeper.generation;
                add(self.card.is_alive && is_ours, Step::Passes);
            }
            Phase::Forgets(_) => drop(add(true, Step::Forgets)),
            Phase::Quits => drop(add(true, Step::Quits)),
            Phase::Undecided | Phase::Dead => {
                add(self.keeper.is_recorded && !self.has_exited(), Step::Repair);
            }
            Phase::Done(_) => {}
        }
        let is_lost = matches!(self.keeper.phase, Phase::Done(Why::Here | Why::Standby | Why::Repaired));
        let is_left = self.keeper.phase == Phase::Dead && !self.keeps(Rule::RepairsFirst);
        let has_places = self.cluster.is_none_or(|cluster| cluster.can_protect());
        let can_begin = self.may_retry && self.arbiter.answers && self.guest == Guest::Runs && has_places;
        add(can_begin && (is_lost || is_left), Step::ProtectsAgain);
    }

    fn add_standby_steps(&self, index: u8, add: &mut impl FnMut(bool, Step) -> Option<()>) {
        use StandbyPhase as Phase;
        let standby = &self.standbys[usize::from(index)];
        if self.has_way(index) && !standby.is_torn && self.way.checkpoint > 0 {
            let is_early = !self.keeps(Rule::AcknowledgesApplied);
            let is_new = self.way.acknowledgement == 0 && self.ferry.released < self.way.checkpoint;
            add(is_early && is_new, Step::Acknowledges);
            add(true, Step::Applies);
        }
        add(index == self.current && self.session.request, Step::ReleaseArrives);
        match standby.phase {
            Phase::Stands => {
                let is_closed = match self.ferry.phase {
                    FerryPhase::Ended(_) => !self.keeps(Rule::KeepsWayOpen),
                    phase => phase == FerryPhase::Gone,
                };
                let is_lost = index != self.current || self.way.is_cut || is_closed;
                add(is_lost || standby.is_torn, Step::LosesWay(index));
                add(!standby.has_qemu, Step::SeesQemuEnd(index));
            }
            Phase::Grace => {
                add(true, Step::BeginsToDecide(index));
                add(!standby.has_qemu, Step::SeesQemuEnd(index));
            }
            Phase::Deciding => drop(add(true, Step::Loads(index))),
            Phase::Loaded => {
                let is_answered = self.arbiter.answers && self.answers_standby();
                add(is_answered, Step::StandbyClaims(index));
            }
            Phase::Won => drop(add(true, Step::Runs(index))),
            Phase::Runs => drop(add(self.has_other_card, Step::Sends(index))),
            Phase::Sends | Phase::Released | Phase::Ended => {}
        }
    }

    fn can_befall(&self, mishap: Mishap) -> bool {
        use StandbyPhase::{Deciding, Ended, Loaded, Released, Runs, Sends, Stands, Won};
        let (keeper, ferry, standby) = (&self.keeper, self.ferry.phase, self.standby());
        let is_there = !matches!(standby.phase, Ended | Released);
        // The card of a guest that is not protected any more is started without `--hold`, or its output is let go by hand.
        let protects = !matches!(keeper.phase, KeeperPhase::Forgets(_) | KeeperPhase::Done(_));
        match mishap {
            Mishap::KillQemu => !self.has_exited(),
            Mishap::KillCard => self.card.is_alive && protects && !self.has_exited(),
            Mishap::KillFerry => ferry != FerryPhase::Gone,
            Mishap::KillKeeper => keeper.is_alive(),
            Mishap::KillHost => !self.has_exited() || keeper.is_alive(),
            Mishap::KillAgent => is_there && standby.phase != Sends,
            Mishap::KillOtherQemu => is_there && standby.has_qemu,
            Mishap::KillOtherCard => self.has_other_card && is_there && standby.phase != Sends,
            Mishap::CutHosts => !self.way.is_cut && is_there && !matches!(standby.phase, Runs | Sends),
            Mishap::CutSession => self.session.is_open && is_there,
            Mishap::FerryIsLate => {
                ferry == FerryPhase::Takes && keeper.phase == KeeperPhase::Watches && !self.has_exited()
            }
            Mishap::HostIsLate => standby.phase == Stands && standby.last > 0 && !standby.is_torn,
            Mishap::StandbyIsLate => ferry == FerryPhase::Takes,
            Mishap::KeeperIsLate => matches!(ferry, FerryPhase::Ended(_)) && keeper.is_alive(),
            Mishap::Cancel => {
                use KeeperPhase::{Copies, Decides, Watches};
                matches!(keeper.phase, Copies | Watches | Decides(Why::Here | Why::Standby))
            }
            Mishap::ShutDown => self.guest == Guest::Runs && protects,
            Mishap::ArbiterFails => self.arbiter.answers && (protects || is_there),
            Mishap::KeeperLosesAnswer => {
                matches!(keeper.phase, KeeperPhase::Decides(_)) && self.arbiter.answers
            }
            Mishap::StandbyLosesAnswer => standby.phase == Loaded && self.arbiter.answers,
            Mishap::ApplyFails => self.has_way(self.current) && !standby.is_torn && self.way.checkpoint > 0,
            Mishap::LoadFails => match self.keeps(Rule::LoadsFirst) {
                true => standby.phase == Deciding,
                false => standby.phase == Won,
            },
            Mishap::Demote => self.cluster.is_some_and(|cluster| cluster.here == Role::Promoted),
            Mishap::FenceOther => self.cluster.is_some_and(|cluster| cluster.there != Role::Off) && is_there,
        }
    }
}

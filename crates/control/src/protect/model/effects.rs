//! Effect of each step.

use super::Rule;
use super::steps::Step;
use super::world::{
    Card, EPOCHS_MAX, Ferry, FerryPhase, Guest, Keeper, KeeperPhase, Lost, Owner, Session, Standby,
    StandbyPhase, Way, Why, World,
};

impl World {
    /// The world after a step.
    pub(super) fn taking(mut self, step: Step) -> Self {
        match step {
            Step::GuestSends if self.card.is_holding => self.card.open = self.epoch,
            Step::GuestSends => self.leaves(self.epoch),
            Step::CardRestarts => {
                let is_holding = self.keeps(Rule::NewCardHolds);
                let (generation, marked, open, closed) = (0, 0, 0, [0; EPOCHS_MAX]);
                self.card = Card { is_alive: true, is_holding, generation, marked, open, closed };
            }
            Step::OtherCardRestarts => self.has_other_card = true,
            Step::ArbiterAnswers => self.arbiter.answers = true,
            Step::Acknowledges => self.way.acknowledgement = self.way.checkpoint,
            Step::Applies => self.apply(),
            Step::ReleaseArrives => self.release_standby(),
            Step::LosesWay(index)
            | Step::SeesQemuEnd(index)
            | Step::BeginsToDecide(index)
            | Step::Loads(index)
            | Step::StandbyClaims(index)
            | Step::Runs(index)
            | Step::Sends(index) => self.step_standby(index, step),
            Step::Cluster(step) => self.step_cluster(step),
            Step::Mishap(mishap) => self.suffer(mishap),
            step => {
                self.step_ferry(step);
                self.step_keeper(step);
            }
        }
        self.forget();
        self
    }

    /// Forgets what has no effect any more, so that fewer worlds differ.
    fn forget(&mut self) {
        use StandbyPhase::{Ended, Released, Stands};
        if self.ferry.phase == FerryPhase::Gone {
            self.ferry = Ferry { phase: FerryPhase::Gone, ..Ferry::NEW };
        }
        if self.ferry.phase != FerryPhase::Takes {
            self.way.acknowledgement = 0;
        }
        let is_over = |standby: &Standby| matches!(standby.phase, Ended | Released);
        for standby in self.standbys.iter_mut().filter(|standby| is_over(standby)) {
            (standby.last, standby.is_torn, standby.has_qemu) = (0, false, true);
        }
        if self.standby().phase != Stands || self.standby().is_torn {
            self.way.checkpoint = 0;
        }
        self.session.request &= self.standby().phase != Ended;
        if self.standbys.iter().all(is_over) {
            // No frame contradicts a standby.
            (self.sent, self.card.closed) = (u8::MAX, [0; EPOCHS_MAX]);
            self.has_sent_again = self.current > 0;
            self.card.open = self.card.open.max(self.epoch * u8::from(self.card.is_holding));
        }
    }

    fn step_ferry(&mut self, step: Step) {
        let generation = self.standby().generation;
        match step {
            Step::Copied => self.guest = Guest::Stopped,
            Step::FerryStarts => {
                self.ferry.phase = FerryPhase::Takes;
                if self.keeps(Rule::HoldsFirst) && !self.card.hold(generation) {
                    self.ferry.phase = FerryPhase::Ended(Lost::Here);
                    return;
                }
                (self.guest, self.epoch) = (Guest::Runs, 1);
            }
            Step::GuestStops => self.guest = Guest::Stopped,
            Step::Marked => {
                self.card.marked += 1;
                let marked = usize::from(self.card.marked) - 1;
                self.card.closed[marked] = self.card.open;
                self.card.open = 0;
            }
            Step::Taken => {
                (self.ferry.taken, self.epoch, self.guest) = (self.epoch, self.epoch + 1, Guest::Runs);
            }
            Step::Given => {
                self.ferry.given += 1;
                self.way.checkpoint = self.ferry.given;
            }
            Step::Released => {
                self.ferry.released += 1;
                self.way.acknowledgement = 0;
                let marked = self.card.marked;
                if !self.keeps(Rule::HoldsFirst) && self.card.generation != generation {
                    self.card.hold(generation);
                    self.card.marked = marked;
                }
                let highest = self.card.take(self.ferry.released);
                self.leaves_held(highest);
            }
            Step::FerryLoses(lost) => self.ferry.phase = FerryPhase::Ended(lost),
            Step::FerryExits => self.ferry.phase = FerryPhase::Gone,
            _ => {}
        }
    }

    fn leaves_held(&mut self, highest: u8) {
        if highest > 0 {
            self.leaves(highest);
        }
    }

    fn step_keeper(&mut self, step: Step) {
        use KeeperPhase as Phase;
        match (step, self.keeper.phase) {
            (Step::Go, _) => {
                self.keeper.may_be_taken = self.keeps(Rule::NotedBeforeGo);
                (self.keeper.phase, self.ferry.phase) = (Phase::Watches, FerryPhase::Goes);
            }
            (Step::NotesGo, _) => self.keeper.may_be_taken = true,
            (Step::Sees(why), Phase::Copies) => self.keeper.phase = Phase::Loses(why),
            (Step::Sees(why), _) => self.see(why),
            (Step::Answered, Phase::Releases(why)) => {
                let is_released = self.session.reply.take() == Some(true);
                self.keeper.may_be_taken &= !is_released;
                self.keeper.may_be_taken |= why == Why::Cancelled && !is_released;
                self.follow_release(why);
            }
            (Step::Unanswered, Phase::Releases(why)) => {
                self.session.reply = None;
                self.keeper.may_be_taken |= why == Why::Cancelled;
                self.follow_release(why);
            }
            (Step::KillsFerry, Phase::Loses(why)) => {
                self.ferry.phase = FerryPhase::Gone;
                if self.keeper.may_be_taken && why != Why::Repaired {
                    self.card.hold(self.keeper.generation);
                }
                self.keeper.phase = Phase::EndsCheckpoints(why);
            }
            (Step::EndsCheckpoints, Phase::EndsCheckpoints(why)) => {
                match self.guest {
                    Guest::ShutDown if why != Why::Repaired => return self.see(Why::ShutDown),
                    Guest::ShutDown | Guest::Dead => return self.end(Why::Died),
                    Guest::Runs | Guest::Stopped => {}
                }
                if self.keeps(Rule::RunsGuestOn) {
                    self.guest = Guest::Runs;
                }
                self.keeper.phase = self.after_checkpoints(why);
            }
            (Step::KeeperClaims, Phase::Decides(why)) => self.decide(why),
            (Step::GivesUp, _) => {
                (self.keeper.phase, self.ferry.phase) = (Phase::Undecided, FerryPhase::Gone);
                self.session.is_open = false;
            }
            (Step::Passes, Phase::Passes(why)) => {
                self.card.hold(self.keeper.generation);
                let highest = self.card.pass();
                self.leaves_held(highest);
                self.keeper.phase = Phase::Forgets(why);
            }
            (Step::Forgets, Phase::Forgets(why)) => self.end(why),
            (Step::Quits, _) => {
                if self.guest != Guest::ShutDown && self.keeps(Rule::LoserEnds) {
                    self.guest = Guest::Dead;
                }
                self.end(Why::TakenOver);
            }
            (Step::Repair, _) => {
                self.keeper.phase = Phase::Loses(Why::Repaired);
                // As recorded.
                self.keeper.generation = self.standby().generation;
                self.keeper.may_be_taken = self.keeps(Rule::RepairClaims);
                if !self.keeps(Rule::RepairHasClaimant) {
                    self.keeper.claimant = Owner::Repair;
                }
            }
            (Step::ProtectsAgain, _) => self.protect_again(),
            _ => {}
        }
    }

    fn see(&mut self, why: Why) {
        use KeeperPhase as Phase;
        match why {
            Why::ShutDown if !self.keeps(Rule::ShutdownIsNoDeath) => self.end(Why::Died),
            Why::Died => self.end(Why::Died),
            Why::Standby => self.keeper.phase = Phase::Loses(why),
            _ => self.request_release(why),
        }
    }

    /// Asks the standby for its release, of a guest that lives or was shut down.
    pub(super) fn request_release(&mut self, why: Why) {
        let looks = self.keeps(Rule::ReleasesForLivingGuest);
        match self.guest {
            Guest::ShutDown if why != Why::ShutDown && self.keeps(Rule::LossMayBeShutdown) => {
                return self.see(Why::ShutDown);
            }
            Guest::Dead if looks && self.keeps(Rule::ExitIsSeen) => return self.see(Why::Died),
            _ => {}
        }
        self.keeper.phase = KeeperPhase::Releases(why);
        (self.session.request, self.session.reply) = (self.session.is_open, None);
    }

    fn follow_release(&mut self, why: Why) {
        use KeeperPhase as Phase;
        self.keeper.phase = match why {
            Why::ShutDown => self.after_checkpoints(why),
            _ => Phase::Loses(why),
        };
    }

    fn after_checkpoints(&self, why: Why) -> KeeperPhase {
        match self.keeper.may_be_taken && self.keeps(Rule::KeeperClaims) {
            true => KeeperPhase::Decides(why),
            false => KeeperPhase::Passes(why),
        }
    }

    fn decide(&mut self, why: Why) {
        if self.guest == Guest::Dead && self.keeps(Rule::KeeperClaimsForLivingGuest) {
            return self.end(Why::Died);
        }
        if self.is_demoted() {
            self.keeper.phase = KeeperPhase::Quits;
            return;
        }
        self.keeper.phase = match self.claim(self.keeper.generation + 1, self.keeper.claimant) {
            true => {
                self.keeper.generation += 1;
                KeeperPhase::Passes(why)
            }
            false => KeeperPhase::Quits,
        };
    }

    /// The keeper exits, and its ferry with it, or it waits to protect the guest again.
    fn end(&mut self, why: Why) {
        (self.keeper.phase, self.keeper.is_recorded) = (KeeperPhase::Done(why), false);
        self.ferry.phase = FerryPhase::Gone;
        self.session.is_open = false;
    }

    fn protect_again(&mut self) {
        self.clear_there();
        let owners = self.arbiter.owners;
        let newest = owners.iter().rposition(|owner| *owner != Owner::Unclaimed).unwrap_or_default();
        let generation = newest + 1;
        self.arbiter.owners[generation] = Owner::Keeper;
        let generation = u8::try_from(generation).expect("there are few");
        (self.keeper, self.ferry) = (Keeper::new(generation), Ferry::NEW);
        (self.way, self.session) = (Way::NEW, Session::NEW);
        (self.current, self.standbys[1]) = (1, Standby::new(generation));
        (self.may_retry, self.epoch, self.sent) = (false, 0, 0);
        // What was sent before is in the first copy.
        (self.card.open, self.card.closed) = (0, [0; EPOCHS_MAX]);
    }

    fn apply(&mut self) {
        let checkpoint = std::mem::take(&mut self.way.checkpoint);
        if self.keeps(Rule::AcknowledgesApplied) {
            self.way.acknowledgement = checkpoint;
        }
        self.standbys[usize::from(self.current)].last = checkpoint;
    }

    fn release_standby(&mut self) {
        use StandbyPhase::{Ended, Grace, Released, Stands};
        self.session.request = false;
        let phase = &mut self.standbys[usize::from(self.current)].phase;
        let reply = match *phase {
            Ended => return,
            Stands | Grace | Released => {
                *phase = Released;
                true
            }
            _ => self.broken == Some(Rule::NoReleaseOnceDeciding),
        };
        self.session.reply = self.session.is_open.then_some(reply);
    }

    fn step_standby(&mut self, index: u8, step: Step) {
        use StandbyPhase as Phase;
        let standby = self.standbys[usize::from(index)];
        let runs_torn = !self.keeps(Rule::TornIsNoState);
        let phase = match step {
            Step::LosesWay(_) if standby.last == 0 || standby.is_torn && !runs_torn => Phase::Ended,
            Step::LosesWay(_) => Phase::Grace,
            Step::SeesQemuEnd(_) => Phase::Released,
            Step::BeginsToDecide(_) => Phase::Deciding,
            Step::Loads(_) | Step::StandbyClaims(_)
                if !standby.has_qemu && self.keeps(Rule::StandbyClaimsForLivingGuest) =>
            {
                Phase::Ended
            }
            Step::Loads(_) => Phase::Loaded,
            Step::StandbyClaims(_) if !self.keeps(Rule::StandbyClaims) => Phase::Won,
            Step::StandbyClaims(_) => match self.claim(standby.generation + 1, Owner::Standby(index)) {
                true => Phase::Won,
                false => Phase::Ended,
            },
            Step::Runs(_) if !standby.has_qemu => Phase::Ended,
            Step::Runs(_) => Phase::Runs,
            Step::Sends(_) => Phase::Sends,
            _ => standby.phase,
        };
        self.standbys[usize::from(index)].phase = phase;
    }
}

//! Effect of each mishap.

use super::Rule;
use super::steps::Mishap;
use super::world::{FerryPhase, Guest, KeeperPhase, Lost, Owner, StandbyPhase, Why, World};

impl World {
    pub(super) fn suffer(&mut self, mishap: Mishap) {
        self.mishaps -= 1;
        match mishap {
            Mishap::KillQemu => self.kill_guest(),
            Mishap::KillCard => self.card.is_alive = false,
            Mishap::KillFerry => self.ferry.phase = FerryPhase::Gone,
            Mishap::KillKeeper => self.kill_keeper(),
            Mishap::KillHost => {
                self.kill_guest();
                self.kill_keeper();
                (self.card.is_alive, self.ferry.phase) = (false, FerryPhase::Gone);
                self.session.request = false;
                self.fence_here();
            }
            Mishap::KillAgent => {
                self.session.is_open = false;
                self.lose_standby();
            }
            Mishap::KillOtherQemu => self.kill_other_qemu(),
            Mishap::KillOtherCard => self.has_other_card = false,
            Mishap::CutHosts => (self.way.is_cut, self.session) = (true, cut()),
            Mishap::CutSession => self.session = cut(),
            Mishap::FerryIsLate => self.request_release(Why::Here),
            Mishap::HostIsLate => self.standbys[usize::from(self.current)].phase = StandbyPhase::Grace,
            Mishap::StandbyIsLate => self.ferry.phase = FerryPhase::Ended(Lost::Standby),
            Mishap::KeeperIsLate => self.ferry.phase = FerryPhase::Gone,
            Mishap::Cancel => self.cancel(),
            Mishap::ShutDown => self.shut_down(),
            Mishap::ArbiterFails => self.arbiter.answers = false,
            Mishap::KeeperLosesAnswer => {
                if self.guest != Guest::Dead || !self.keeps(Rule::KeeperClaimsForLivingGuest) {
                    self.claim(self.keeper.generation + 1, self.keeper.claimant);
                }
            }
            Mishap::StandbyLosesAnswer => {
                if self.standby().has_qemu || !self.keeps(Rule::StandbyClaimsForLivingGuest) {
                    self.claim(self.standby().generation + 1, Owner::Standby(self.current));
                }
            }
            Mishap::ApplyFails => {
                // It is acknowledged all the same.
                self.way.acknowledgement = std::mem::take(&mut self.way.checkpoint);
                self.standbys[usize::from(self.current)].is_torn = true;
                self.is_excused |= self.guest == Guest::Dead;
            }
            Mishap::LoadFails => {
                self.is_excused |= self.guest == Guest::Dead;
                self.standbys[usize::from(self.current)].phase = StandbyPhase::Ended;
            }
            Mishap::Demote => self.demote(),
            Mishap::FenceOther => {
                self.session.is_open = false;
                self.kill_other_qemu();
                self.lose_standby();
                self.fence_there();
            }
        }
        let is_apart = matches!(
            mishap,
            Mishap::KillFerry
                | Mishap::KillKeeper
                | Mishap::KillHost
                | Mishap::CutHosts
                | Mishap::HostIsLate
                | Mishap::StandbyIsLate
                | Mishap::KeeperIsLate
        );
        self.is_unaware |= is_apart && self.guest == Guest::ShutDown;
    }

    /// The guest is lost if no standby can go on with it, or if one is about to be released.
    pub(super) fn kill_guest(&mut self) {
        use StandbyPhase::{Runs, Sends, Won};
        if self.has_exited() {
            return;
        }
        self.guest = Guest::Dead;
        let is_there = self.standbys.iter().any(|standby| matches!(standby.phase, Won | Runs | Sends));
        let can = (0..=self.current).any(|index| self.can_take_over(index)) && !self.session.request;
        let can = can && !self.is_to_stop();
        self.is_excused |= !is_there && !can;
    }

    fn kill_keeper(&mut self) {
        if self.keeper.is_alive() {
            self.keeper.phase = KeeperPhase::Dead;
        }
        self.session.is_open = false;
    }

    fn lose_standby(&mut self) {
        self.excuse_standby();
        self.standbys[usize::from(self.current)].phase = StandbyPhase::Ended;
    }

    fn kill_other_qemu(&mut self) {
        self.excuse_standby();
        let standby = &mut self.standbys[usize::from(self.current)];
        standby.has_qemu = false;
        if matches!(standby.phase, StandbyPhase::Runs | StandbyPhase::Sends) {
            standby.phase = StandbyPhase::Ended;
        }
    }

    /// The guest may be lost with this standby.
    fn excuse_standby(&mut self) {
        let next = usize::from(self.standby().generation) + 1;
        let has_won = self.arbiter.owners[next] == Owner::Standby(self.current);
        self.is_excused |= self.guest == Guest::Dead || has_won;
    }

    fn cancel(&mut self) {
        match self.keeper.phase {
            KeeperPhase::Watches => self.request_release(Why::Cancelled),
            KeeperPhase::Copies => self.keeper.phase = KeeperPhase::Loses(Why::Cancelled),
            _ => self.keeper.phase = KeeperPhase::Decides(Why::Cancelled),
        }
    }

    /// The guest is shut down in order. The standby learns that from a keeper which watches, unless it has lost the way by then.
    fn shut_down(&mut self) {
        self.guest = Guest::ShutDown;
        let watches = self.keeper.phase == KeeperPhase::Watches && self.keeper.may_be_taken;
        let is_connected = !matches!(self.ferry.phase, FerryPhase::Gone | FerryPhase::Ended(_));
        let stands = self.standby().phase == StandbyPhase::Stands;
        self.is_unaware |= !(watches && is_connected && stands && !self.way.is_cut);
    }
}

fn cut() -> super::world::Session {
    super::world::Session { is_open: false, request: false, reply: None }
}

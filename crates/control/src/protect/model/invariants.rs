//! Properties of every world.

use super::world::{FerryPhase, Guest, KeeperPhase, StandbyPhase, World};

impl World {
    /// Checks it; the error describes the violation.
    pub(super) fn verify(&self) -> Result<(), String> {
        for index in 0..=self.current {
            self.verify_output(index)?;
        }
        let runs_there = self.runs_there();
        if runs_there && self.card.is_alive && !self.card.is_holding {
            return Err("the guest runs at the other host, and the card here passes".into());
        }
        if self.guest == Guest::ShutDown && runs_there && !self.is_unaware {
            return Err("a guest that was shut down runs at the other host".into());
        }
        match self.judge_end() {
            Err(text) if self.own_steps().is_empty() => Err(text.into()),
            _ => Ok(()),
        }
    }

    /// Output that has left the card was sent by the standby's state as well.
    fn verify_output(&self, index: u8) -> Result<(), String> {
        let standby = &self.standbys[usize::from(index)];
        let has_taken = matches!(standby.phase, StandbyPhase::Won | StandbyPhase::Runs | StandbyPhase::Sends);
        if !has_taken && !self.can_take_over(index) {
            return Ok(());
        }
        let is_former = index < self.current;
        if is_former && self.has_sent_again || !is_former && self.sent > standby.last {
            let last = standby.last;
            return Err(format!("output has left after checkpoint {last}, from which the standby goes on"));
        }
        Ok(())
    }

    fn runs_there(&self) -> bool {
        self.standbys.iter().any(|standby| matches!(standby.phase, StandbyPhase::Runs | StandbyPhase::Sends))
    }

    /// Judges a world in which nothing more happens.
    fn judge_end(&self) -> Result<(), &'static str> {
        let is_protected = self.keeper.phase == KeeperPhase::Watches
            && self.ferry.phase == FerryPhase::Takes
            && self.can_take_over(self.current);
        let sends_here = self.card.is_alive && !self.card.is_holding;
        let sends_there = self.standbys.iter().any(|standby| standby.phase == StandbyPhase::Sends);
        match self.guest {
            Guest::Stopped => Err("the guest is stopped for ever"),
            Guest::Runs if self.runs_there() => Err("the guest runs at both hosts for ever"),
            Guest::Runs if sends_here || is_protected => Ok(()),
            Guest::Runs => Err("the guest's output is held for ever"),
            Guest::Dead if !sends_there && !self.is_excused => Err("the guest is lost"),
            Guest::ShutDown | Guest::Dead => Ok(()),
        }
    }
}

//! The guest's generations, and the decision between its two hosts.

use std::path::PathBuf;

use towline_channel::Cancel;

use super::request::{Error, ProtectObserver, ProtectRequest};
use crate::arbiter::{Claim, Claimant, Stake};
use crate::cards::HoldingCards;

/// The guest's host, as one of two claimants.
pub(super) struct Keeper<'a> {
    pub(super) request: &'a ProtectRequest,
    pub(super) cancel: &'a Cancel,
    pub(super) observer: &'a dyn ProtectObserver,
    pub(super) claimant: Claimant,
    /// The guest's name, and its generation here.
    pub(super) guest: String,
    pub(super) generation: u64,
    /// The other host has had a checkpoint of it.
    pub(super) has_protected: bool,
    /// Reason for which it may be stopped, or its output be held, until the next attempt has repaired that.
    pub(super) left: Option<Error>,
}

impl Keeper<'_> {
    /// Claims a generation that no host, and none of these cards, has had. No standby may take the guest over.
    pub(super) fn claim_new(&mut self, guest: &str, cards: &[PathBuf]) -> Result<(), Error> {
        let arbiter = &self.request.arbiter;
        let of_cards = HoldingCards::generation(cards).map_err(Error::Card)?;
        let generation = arbiter.newest(guest)?.max(of_cards) + 1;
        if !arbiter.claim(&Claim { guest, generation, stake: Stake::Guest }, &self.claimant)? {
            return Err(Error::Claimed { generation });
        }
        (self.guest, self.generation) = (guest.to_owned(), generation);
        Ok(())
    }

    /// Claims the next generation of the guest, which its standby may have. Its output is held meanwhile. Returns whether the guest is ours.
    ///
    /// # Errors
    /// [`Error::Undecided`]: cancelled before the arbiter has decided.
    pub(super) fn decide(&mut self, stake: Stake) -> Result<bool, Error> {
        let next = self.generation + 1;
        let notice = |text: &str| self.observer.notice(text);
        let arbiter = &self.request.arbiter;
        let claim = Claim { guest: &self.guest, generation: next, stake };
        let is_won = arbiter.decide(&claim, &self.claimant, self.cancel, &notice);
        let is_won = is_won.map_err(|source| Error::Undecided { source })?;
        if is_won {
            self.generation = next;
        }
        Ok(is_won)
    }
}

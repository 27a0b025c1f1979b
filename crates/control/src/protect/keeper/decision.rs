//! The guest's generations, and the decision between its two hosts.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;

use super::request::{Error, ProtectObserver, ProtectRequest};
use crate::arbiter::{Claimant, Verdict};
use crate::cards::HoldingCards;

/// Interval of claims while the arbiter does not decide.
const CLAIM_INTERVAL: Duration = Duration::from_millis(200);

/// Time for a card to answer, and the interval of attempts.
const CARD_WITHIN: Duration = Duration::from_secs(10);
const CARD_INTERVAL: Duration = Duration::from_millis(100);

/// The guest's host, as one of two claimants.
pub(super) struct Keeper<'a> {
    pub(super) request: &'a ProtectRequest,
    pub(super) cancel: &'a Cancel,
    pub(super) observer: &'a dyn ProtectObserver,
    pub(super) claimant: Claimant,
    /// The guest's generation here.
    pub(super) generation: u64,
}

/// The host that goes on with the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    Here,
    There,
}

impl<'a> Keeper<'a> {
    /// Claims a generation that no host has had.
    pub(super) fn new(
        request: &'a ProtectRequest,
        cancel: &'a Cancel,
        observer: &'a dyn ProtectObserver,
    ) -> Result<Self, Error> {
        let (claimant, generation) = (Claimant::new(), request.arbiter.newest()? + 1);
        match request.arbiter.claim(generation, &claimant) {
            Verdict::Won => Ok(Self { request, cancel, observer, claimant, generation }),
            Verdict::Lost => Err(Error::Claimed { generation }),
            Verdict::Unknown(error) => Err(error.into()),
        }
    }

    /// Claims the next generation of the guest, which its standby may have. Its output is held meanwhile.
    ///
    /// # Errors
    /// [`Error::Undecided`]: cancelled before the arbiter has decided.
    pub(super) fn decide(&mut self) -> Result<Decision, Error> {
        let (next, mut said) = (self.generation + 1, None);
        loop {
            match self.request.arbiter.claim(next, &self.claimant) {
                Verdict::Won => {
                    self.generation = next;
                    return Ok(Decision::Here);
                }
                Verdict::Lost => return Ok(Decision::There),
                Verdict::Unknown(source) if self.cancel.is_cancelled() => {
                    return Err(Error::Undecided { source });
                }
                Verdict::Unknown(error) => {
                    let text = error.to_string();
                    if said.as_ref() != Some(&text) {
                        self.observer.notice(&format!(
                            "not decided who goes on with the guest, whose output is held: {text}; it is tried again"
                        ));
                        said = Some(text);
                    }
                    thread::sleep(CLAIM_INTERVAL);
                }
            }
        }
    }

    /// Has the cards send what they hold. One that has died may be started again meanwhile.
    pub(super) fn pass(&self, cards: &[PathBuf]) -> Result<(), Error> {
        let deadline = Instant::now() + CARD_WITHIN;
        loop {
            let held = HoldingCards::hold(cards, self.generation);
            match held.and_then(|mut cards| cards.pass()) {
                Err(_) if Instant::now() < deadline => thread::sleep(CARD_INTERVAL),
                passed => return passed.map_err(Error::Card),
            }
        }
    }
}

//! The plan's switchover as a model: the destination loads paused, runs when the source has completed, and
//! instead of a source that has exited, if it has everything. The rules are `control`'s, which speaks QMP to
//! real QEMUs.

use super::destination::Endpoint;
use super::net::Net;
use super::relay::Relay;
use super::scenario::{Mutation, Scenario};
use super::source::Source;

/// Outcome of a copy, by its exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// 0: the guest runs at its destination.
    Done,
    /// 1: the guest is unchanged at its source.
    Safe,
    /// 3: an operator has to look.
    LookAt,
}

#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) is_alive: bool,
    pub(crate) verdict: Option<Verdict>,
    /// `cont` was sent to the destination.
    pub(crate) has_run_it: bool,
    runs_early: bool,
}

impl Control {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let runs_early = scenario.mutation == Some(Mutation::RunEarly);
        Self { is_alive: true, verdict: None, has_run_it: false, runs_early }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.verdict.is_some() || !self.is_alive
    }

    /// Queries the monitors, and returns the result; monitors reply at once or are gone.
    pub(crate) fn step(
        &mut self,
        net: &mut Net,
        source: &mut Source,
        relay: &mut Relay,
        destination: &mut Endpoint,
    ) -> bool {
        if self.is_over() {
            return false;
        }
        let loaded = destination.is_alive && destination.is_loaded;
        if self.runs_early && loaded && !self.has_run_it {
            self.run(destination);
        }
        let Some(relayed) = &relay.outcome else { return false };
        // Its questions take their time, in which something may happen.
        if net.rng.u8(0..3) > 0 {
            return true;
        }
        let was_over = source.outcome.is_some();
        self.verdict = match relayed {
            Ok(()) => self.switch_over(net, source, destination),
            Err(_) if !source.is_alive && relay.is_sent && loaded => Some(self.run(destination)),
            Err(_) => self.undo(net, source),
        };
        self.is_over() || was_over != source.outcome.is_some()
    }

    fn switch_over(
        &mut self,
        net: &mut Net,
        source: &mut Source,
        destination: &mut Endpoint,
    ) -> Option<Verdict> {
        // Before the source is queried: until then it may get its guest back.
        if !destination.is_alive {
            return if source.is_alive { self.undo_or_keep(net, source) } else { Some(Verdict::LookAt) };
        }
        match &source.outcome {
            _ if !source.is_alive => Some(self.run(destination)),
            Some(Ok(())) => Some(self.run(destination)),
            Some(Err(_)) => self.undo(net, source),
            None => None,
        }
    }

    fn run(&mut self, destination: &mut Endpoint) -> Verdict {
        if !destination.is_alive {
            return Verdict::LookAt;
        }
        self.has_run_it = true;
        destination.running = true;
        Verdict::Done
    }

    /// The destination is lost before it ran: a source that is done keeps the guest, paused, and gets it back
    /// with `cont`.
    fn undo_or_keep(&mut self, net: &mut Net, source: &mut Source) -> Option<Verdict> {
        if source.outcome == Some(Ok(())) {
            source.guest.running = true;
            return Some(Verdict::Safe);
        }
        self.undo(net, source)
    }

    /// Ends the migration at the source, whose guest runs on.
    fn undo(&mut self, net: &mut Net, source: &mut Source) -> Option<Verdict> {
        if !source.is_alive {
            return Some(Verdict::LookAt);
        }
        match &source.outcome {
            None => {
                source.cancel(net);
                None
            }
            Some(Err(_)) => Some(Verdict::Safe),
            // Completed after all: `cont` at the source resumes the guest, which ran nowhere else.
            Some(Ok(())) => {
                source.guest.running = true;
                Some(Verdict::Safe)
            }
        }
    }
}

//! Decisions that are durable before they are acted on.
//!
//! ```text
//!   requested ─► Recording ─ Recorded ──► acted on
//!                    └────── NotRecorded ─► not acted on: the stream fails, or the guest stays paused where it is
//! ```
//! A record is kept if the guest can come to be at both ends and one of them is a QEMU that is driven here. An
//! image stays as it is, and a stored guest does not run: there is nothing to decide later.

use super::events::{Decision, DestinationKind, Directive, Input, PeerMessage, SourceKind};
use super::fault::SwitchoverBug;
use super::machine::{AfterRetraction, Restoration, Switchover, SwitchoverState};
use super::outcome::{AtDestination, GuestState, SwitchoverOutcome, ToDo};

impl Switchover {
    /// Returns true if decisions must outlive this process.
    pub(crate) fn keeps_record(&self) -> bool {
        let (source, destination) = (self.request.source, self.request.destination);
        let can_be_at_both = source != SourceKind::Stored && destination != DestinationKind::Stored;
        can_be_at_both && (source == SourceKind::Qemu || destination == DestinationKind::Qemu)
    }

    /// Directs the record of a decision, which is then acted on.
    pub(super) fn decide(&mut self, decision: Decision) -> Directive {
        self.stage = SwitchoverState::Recording(decision);
        if !self.keeps_record() || self.fault.has(SwitchoverBug::ActsBeforeRecord) {
            return self.recorded(decision);
        }
        Directive::Record(decision)
    }

    pub(super) fn recording(&mut self, input: Input, decision: Decision) -> Directive {
        match (decision, input) {
            (_, Input::Recorded) => self.recorded(decision),
            (Decision::Commit | Decision::Acknowledge, Input::NotRecorded) => self.not_passed(),
            // The stream failed meanwhile, and nothing was done.
            (Decision::Commit | Decision::Acknowledge, _) => {
                self.stage = SwitchoverState::Transfer;
                self.undo()
            }
            // It may be recorded all the same, and a later towline act on it.
            (Decision::Complete, _) if self.has_switched() => self.disconnected(),
            (Decision::Complete | Decision::Left, _) => {
                self.unresolved(AtDestination::Holds, ToDo::LookAtDestination)
            }
            (Decision::Run, _) => self.not_run(),
        }
    }

    fn recorded(&mut self, decision: Decision) -> Directive {
        match decision {
            Decision::Commit | Decision::Acknowledge if self.aborting => self.not_passed(),
            Decision::Commit => {
                (self.sent, self.stage) = (true, SwitchoverState::Committed);
                Directive::Proceed
            }
            // Two QEMUs that are connected to each other may complete at any time.
            Decision::Acknowledge if self.is_direct() => {
                (self.sent, self.stage) = (true, SwitchoverState::Transfer);
                Directive::Proceed
            }
            Decision::Acknowledge => {
                (self.sent, self.stage) = (true, SwitchoverState::Acknowledged);
                Directive::Proceed
            }
            Decision::Complete => self.report_completed(),
            Decision::Run | Decision::Left => {
                self.stage = SwitchoverState::Starting;
                Directive::RunDestination
            }
        }
    }

    /// The source is done with the guest, which the towline at its destination is sent.
    pub(super) fn report_completed(&mut self) -> Directive {
        self.stage = SwitchoverState::Reporting;
        Directive::Send(PeerMessage::Completed(self.request.run))
    }

    /// A point of no return is not passed: the stream is to fail.
    pub(super) fn not_passed(&mut self) -> Directive {
        self.stage = SwitchoverState::Transfer;
        Directive::Refuse
    }

    /// The guest is not started at its destination, which holds it. A source that shares its memory gets its guest back.
    fn not_run(&mut self) -> Directive {
        if self.is_memory_shared() && !self.source_exited {
            return self.retract(AfterRetraction::Resume);
        }
        self.end_unresolved(self.not_started())
    }

    /// The guest is not in order at its destination. If it is certain that it does not run there, an operator may run it at its source,
    /// so that the record must not have it running at its destination any more.
    pub(super) fn end_unresolved(&mut self, unresolved: GuestState) -> Directive {
        match unresolved.to_do {
            ToDo::RunOne => self.retract(AfterRetraction::End),
            _ if self.fault.has(SwitchoverBug::ReportsNotRunUnseen) => self.report_not_run(unresolved),
            _ => Directive::End(SwitchoverOutcome::Unresolved(unresolved)),
        }
    }

    /// Directs the withdrawal of the decision to run the guest at its destination.
    pub(super) fn retract(&mut self, then: AfterRetraction) -> Directive {
        if then == AfterRetraction::Resume && self.fault.has(SwitchoverBug::EndsBeforeRetract) {
            return self.restore(true);
        }
        self.stage = SwitchoverState::Retracting(then);
        if self.keeps_record() { Directive::Retract } else { self.retracting(Input::Recorded, then) }
    }

    pub(super) fn retracting(&mut self, input: Input, then: AfterRetraction) -> Directive {
        let is_retracted =
            input == Input::Recorded || self.fault.has(SwitchoverBug::ReportsPausedUnretracted);
        match then {
            AfterRetraction::Resume if input == Input::Recorded || !self.guest.is_live() => {
                self.restore(true)
            }
            AfterRetraction::Resume => self.begin_restoring(Restoration::GuestUnretracted),
            AfterRetraction::End if is_retracted => self.report_not_run(self.not_started()),
            AfterRetraction::EndAsReported if is_retracted => {
                self.unresolved(AtDestination::Holds, ToDo::RunOne)
            }
            AfterRetraction::End | AfterRetraction::EndAsReported => {
                self.unresolved(AtDestination::Holds, ToDo::ForgetRecord)
            }
        }
    }

    /// The source's towline is sent a message only if it is certain that the guest does not run here; without one it reports that the
    /// destination may run it.
    fn report_not_run(&mut self, unresolved: GuestState) -> Directive {
        if self.request.source == SourceKind::Towline {
            self.stage = SwitchoverState::ReportingNotRun(unresolved);
            return Directive::Send(PeerMessage::NotRun);
        }
        Directive::End(SwitchoverOutcome::Unresolved(unresolved))
    }
}

//! Connections that are made again while the guest lacks memory at its destination.

use super::events::{
    DestinationKind, DestinationStatus, Directive, Input, LossCause, SourceStatus, SwitchProgress,
};
use super::fault::SwitchoverBug;
use super::machine::{Switchover, SwitchoverState};
use super::outcome::{AtDestination, AtSource, ToDo};

impl Switchover {
    /// The rest of the memory cannot be sent: the hosts are not connected.
    pub(super) fn disconnected(&self) -> Directive {
        let runs = self.switch == SwitchProgress::Runs;
        let destination = if runs { AtDestination::Runs } else { AtDestination::Unknown };
        self.unresolved(destination, ToDo::Reconnect)
    }

    pub(super) fn reconnect(&mut self) -> Directive {
        self.stage = SwitchoverState::Reconnecting;
        Directive::Recover
    }

    pub(super) fn reconnecting(&mut self, input: Input) -> Directive {
        match input {
            _ if self.may_switch() => self.reconnected(input),
            Input::Done if self.is_direct() => self.follow(),
            Input::Done => {
                self.switch = SwitchProgress::Switched;
                self.serve()
            }
            Input::Destination(DestinationStatus::Loaded | DestinationStatus::Running) => self.arrive(),
            Input::Destination(status) if self.is_direct() => self.judged_unseen(status),
            Input::Destination(status @ (DestinationStatus::Failed | DestinationStatus::Exited)) => {
                self.abandoned(LossCause::Connection, status)
            }
            Input::MemoryLost(loss) => self.abandon(loss.cause),
            _ if self.is_direct() => self.judge(SourceStatus::FollowingPaused),
            _ => self.abandon(LossCause::Connection),
        }
    }

    /// The towlines of two hosts, whose QEMUs have switched, are connected again, or not.
    fn reconnected(&mut self, input: Input) -> Directive {
        let is_source = self.request.destination == DestinationKind::Towline;
        match input {
            // The destination's may have it already.
            Input::Done if is_source && self.has_switched() => self.report_completed(),
            // By an earlier towline, which may not have recorded that.
            Input::Done if is_source => {
                self.switch = SwitchProgress::Switched;
                self.complete()
            }
            Input::Done if self.has_switched() => self.arrive(),
            Input::Done => {
                self.stage = SwitchoverState::Acknowledged;
                Directive::AwaitPeer
            }
            Input::Source(SourceStatus::Exited) => {
                self.source_exited = true;
                self.unresolved(AtDestination::Unknown, ToDo::LookAtDestination)
            }
            // The destination has everything, and may have reported that.
            Input::Source(SourceStatus::Completed) => {
                self.unresolved(AtDestination::MayRun, ToDo::KeepDestination)
            }
            Input::Source(SourceStatus::HasGuest | SourceStatus::CompletedThenResumed) => {
                Directive::unresolved(AtSource::HasIt, AtDestination::MayRun, ToDo::EndOne)
            }
            Input::Destination(status) if !self.has_switched() => self.not_seen(status),
            _ if !is_source && !self.has_switched() => self.not_seen(DestinationStatus::Unknown),
            Input::Destination(
                DestinationStatus::Loaded
                | DestinationStatus::Running
                | DestinationStatus::Failed
                | DestinationStatus::Exited,
            ) => self.arriving(input),
            _ if is_source && self.fault.has(SwitchoverBug::RegainsDisconnected) => self.restore(false),
            _ => self.disconnected(),
        }
    }
}

//! Carries out directives in a world, and the requests of the engines.

use super::super::super::{
    Decision, DestinationKind, DestinationStatus, Directive, FinalRunState, Input, MemorySharing,
    PeerMessage, SourceKind, SourceLink, SourceStatus, StartResult, SwitchoverOutcome,
};
use super::{Destination, Disk, Engine, Reply, Source, World};
use crate::switchover::fault::SwitchoverBug;

impl World {
    pub(super) fn commit(&mut self, index: usize, directive: Directive) {
        match directive {
            Directive::Proceed => {
                self.towline(index).engine = Engine::Sent;
                self.wires[index + 1].all = self.wires[index + 1].open;
            }
            Directive::ServeMemory => {
                self.wires[index + 1].all = self.wires[index + 1].open;
                self.towline(index).engine = Engine::Ended;
                self.towline(index).todo = Some(directive);
            }
            Directive::Record(_) => {
                self.towline(index).engine = Engine::Committing;
                self.towline(index).todo = Some(directive);
            }
            _ => self.fail(index, Input::Failed),
        }
    }

    pub(super) fn acknowledge(&mut self, index: usize) {
        let source = if index == 0 {
            self.link()
        } else if self.wires[index].open {
            SourceLink::Open
        } else {
            SourceLink::Reset
        };
        let input = Input::AcknowledgeRequested { guest: self.carried, source };
        let directive = self.handle(index, input);
        self.acknowledged(index, directive);
    }

    pub(super) fn acknowledged(&mut self, index: usize, directive: Directive) {
        match directive {
            Directive::Proceed => {
                self.wires[index].shut = self.wires[index].open;
                self.towline(index).engine = Engine::Ended;
                let next = self.handle(index, Input::Delivered);
                self.set(index, next);
            }
            Directive::Record(_) => {
                self.towline(index).engine = Engine::Acknowledging;
                self.towline(index).todo = Some(directive);
            }
            _ => self.fail(index, Input::Failed),
        }
    }

    pub(super) fn fail(&mut self, index: usize, input: Input) {
        self.towline(index).engine = Engine::Ended;
        let directive = self.handle(index, input);
        if directive == Directive::AcknowledgeUnconfirmed {
            self.cut(index + 1);
        } else {
            self.hang_up(index);
        }
        self.set(index, directive);
    }

    pub(super) fn cancel(&mut self, index: usize) {
        self.towline(index).cancelled = true;
        if self.handle(index, Input::Cancel) == Directive::Abort {
            self.fail(index, Input::Failed);
        }
    }

    pub(super) fn set(&mut self, index: usize, directive: Directive) {
        let reconnects = directive == Directive::Recover && self.connects_qemus();
        let towline = self.towline(index);
        match directive {
            Directive::End(outcome) => {
                (towline.todo, towline.outcome) = (None, Some(outcome));
                self.end_record(index, outcome);
                // Data sent before the close is still read at the other end.
                self.hang_up(index);
            }
            directive => towline.todo = Some(directive),
        }
        if reconnects {
            self.hang_up(index);
        }
    }

    /// The record at the end of the command.
    pub(super) fn end_record(&mut self, index: usize, outcome: SwitchoverOutcome) {
        let disk = self.disk;
        let towline = self.towline(index);
        let leaves = matches!(outcome, SwitchoverOutcome::Completed(placement) if towline.machine.leaves_paused_guest(placement));
        match outcome {
            SwitchoverOutcome::Unresolved(held) if held.is_open() => {}
            _ if leaves && disk == Disk::Writable => towline.record = Some(Decision::Left),
            _ if leaves || disk == Disk::ReadOnly => {}
            _ => towline.record = None,
        }
    }

    pub(super) fn carry(&mut self, index: usize, reply: Reply) {
        let directive = self.towline(index).todo.take().expect("there is one");
        let is_silent = reply == Reply::TimedOut && directive == Directive::Recover;
        if is_silent || matches!(reply, Reply::Silent | Reply::Unanswered | Reply::Refused | Reply::Crashed) {
            self.spend();
        }
        let input = self.carried_out(index, directive, reply);
        let next = self.handle(index, input);
        let engine = self.towline(index).engine;
        match engine {
            Engine::Committing if self.is_direct() => self.pass_once(next),
            Engine::Committing => self.commit(index, next),
            Engine::Acknowledging if self.is_direct() => self.connect_direct(next),
            Engine::Acknowledging => self.acknowledged(index, next),
            _ => self.set(index, next),
        }
    }

    pub(super) fn carried_out(&mut self, index: usize, directive: Directive, reply: Reply) -> Input {
        if reply == Reply::TimedOut && directive != Directive::Recover {
            return self.timed_out(directive);
        }
        let done = if reply == Reply::True { Input::Done } else { Input::NotDone };
        match directive {
            Directive::Record(decision) => {
                if self.disk != Disk::Writable {
                    return Input::NotRecorded;
                }
                self.towline(index).record = Some(decision);
                if decision == Decision::Run && !self.enter() {
                    return Input::NotRecorded;
                }
                // The source's connection is probed once more before the last bytes are sent.
                let is_open = decision != Decision::Commit || self.wires[index].open;
                if reply == Reply::True && is_open { Input::Recorded } else { Input::NotRecorded }
            }
            Directive::StartPostcopy => self.start_postcopy(reply),
            Directive::RunEarly => self.run_early(reply),
            Directive::Recover if self.connects_qemus() => self.not_reconnected(index, reply),
            Directive::Recover => self.recover(reply),
            Directive::ServeMemory => self.serve(reply),
            Directive::QuerySource | Directive::FollowSource => Input::Source(self.source_view()),
            Directive::ProbeSourceLink => Input::SourceLink(self.link()),
            Directive::Retract => self.retract(index),
            Directive::QueryDestination if reply == Reply::Silent => {
                Input::Destination(DestinationStatus::Unknown)
            }
            Directive::QueryDestination | Directive::LookAtDestination => {
                Input::Destination(self.destination_view())
            }
            Directive::AwaitPeer => self.await_peer_message(index),
            Directive::RunDestination => self.run(reply),
            Directive::AcknowledgeUnconfirmed => {
                self.wires[index].shut = self.wires[index].open;
                if self.wires[index].open { Input::Done } else { Input::NotDone }
            }
            Directive::Send(message) => self.send(index, message),
            Directive::CancelMigration => {
                if self.is_direct() && reply == Reply::True {
                    self.cancel_direct();
                } else if self.can_be_cancelled() && reply == Reply::True {
                    self.regain_guest();
                    if self.connects_qemus() {
                        self.cut_connected();
                    }
                }
                Input::Done
            }
            Directive::FinalizeDestination if reply == Reply::True => self.finalize(),
            Directive::RestoreSource
            | Directive::ResumeSource
            | Directive::ResumeSourceFirst
            | Directive::QuitSource => self.at_source(index, directive, reply),
            _ => done,
        }
    }

    /// A lost connection leaves a source that has switched without its guest, also if it is cancelled.
    fn can_be_cancelled(&self) -> bool {
        let may_be = [Source::Migrating, Source::Waiting, Source::Switching, Source::Following];
        may_be.contains(&self.source)
    }

    /// Carries out a directive at the source after the switchover.
    fn at_source(&mut self, index: usize, directive: Directive, reply: Reply) -> Input {
        let done = if reply == Reply::True { Input::Done } else { Input::NotDone };
        if self.source == Source::Exited {
            return match (directive, reply) {
                (Directive::QuitSource, _) => Input::Done,
                (_, Reply::True) => Input::Source(SourceStatus::Exited),
                _ => done,
            };
        }
        match directive {
            Directive::ResumeSource | Directive::ResumeSourceFirst if reply == Reply::True => {
                if self.towline(index).request.memory == MemorySharing::Shared
                    && directive == Directive::ResumeSource
                {
                    self.end_for_source();
                }
                if self.source == Source::Completed {
                    self.source = Source::RunAgain;
                }
            }
            Directive::QuitSource if reply == Reply::True => self.source = Source::Exited,
            _ => {}
        }
        done
    }

    fn finalize(&mut self) -> Input {
        if self.destination == Destination::Exited {
            return Input::Destination(DestinationStatus::Exited);
        }
        if self.last_kind() == DestinationKind::Stored {
            self.destination = Destination::Stored;
        }
        Input::Done
    }

    /// No event came within the deadline. Only a monitor that was reachable before can time out.
    fn timed_out(&mut self, directive: Directive) -> Input {
        let waits = match directive {
            Directive::QuerySource => self.is_source_busy(),
            Directive::QueryDestination if self.misses_peer() => return Input::PeerLost,
            Directive::QueryDestination => self.destination == Destination::Loading,
            _ => false,
        };
        if !waits {
            self.spend();
        }
        match directive {
            // The state that a closed monitor shows before the deadline.
            Directive::QuerySource if !waits => Input::Source(SourceStatus::Unknown),
            _ => Input::TimedOut,
        }
    }

    pub(super) fn source_view(&self) -> SourceStatus {
        match self.source {
            Source::Migrating | Source::Waiting | Source::Switching => SourceStatus::Migrating,
            Source::Following => SourceStatus::Following,
            Source::FollowingPaused => SourceStatus::FollowingPaused,
            Source::Completed => SourceStatus::Completed,
            Source::MovedOn if self.has_fault(SwitchoverBug::TakesAnyCompletion) => SourceStatus::Completed,
            Source::MovedOn => SourceStatus::CompletedByOthers,
            Source::RunAgain => SourceStatus::CompletedThenResumed,
            Source::HasGuest => SourceStatus::HasGuest,
            Source::Exited => SourceStatus::Exited,
            Source::Stored => SourceStatus::Unknown,
        }
    }

    pub(super) fn destination_view(&self) -> DestinationStatus {
        match self.destination {
            Destination::Loaded if self.lacks_memory => DestinationStatus::LacksMemory(FinalRunState::Paused),
            Destination::Running if self.lacks_memory => {
                DestinationStatus::LacksMemory(FinalRunState::Running)
            }
            Destination::Loading => DestinationStatus::Loading,
            Destination::Loaded | Destination::Stored => DestinationStatus::Loaded,
            Destination::Running => DestinationStatus::Running,
            Destination::Failed => DestinationStatus::Failed,
            Destination::Exited => DestinationStatus::Exited,
        }
    }

    /// Without room for another record the former one is removed.
    fn retract(&mut self, index: usize) -> Input {
        let disk = self.disk;
        let towline = self.towline(index);
        if towline.record <= Some(Decision::Acknowledge) {
            return Input::Recorded;
        }
        match disk {
            Disk::Writable => towline.record = Some(Decision::Acknowledge),
            Disk::Full | Disk::Vanished => towline.record = None,
            Disk::ReadOnly => return Input::NotRecorded,
        }
        if towline.request.destination == DestinationKind::Qemu {
            self.withdraw();
        }
        Input::Recorded
    }

    /// Before a source is resumed, its destination in the same memory is ended.
    pub(super) fn end_for_source(&mut self) {
        self.ended_for_source = true;
        self.destination = Destination::Exited;
        let last = self.last_wire();
        self.wires[last].open = false;
    }

    fn await_peer_message(&mut self, index: usize) -> Input {
        let towline = *self.towline(index);
        let message = match towline.request.source {
            SourceKind::Towline => self.wires[index].down.take(),
            _ => self.wires[index + 1].up.take(),
        };
        match message {
            Some(message) => Input::Peer(message),
            None if self.is_source_stuck(index) => Input::Source(self.source_view()),
            None => Input::PeerLost,
        }
    }

    fn send(&mut self, index: usize, message: PeerMessage) -> Input {
        let (wire, is_down) = match message {
            PeerMessage::Completed(_) | PeerMessage::Aborted => (index + 1, true),
            PeerMessage::Placed(_) | PeerMessage::NotRun => (index, false),
        };
        if !self.wires[wire].open {
            return Input::NotDone;
        }
        let is_told = matches!(message, PeerMessage::Completed(_));
        let has_exited = self.towlines[0].is_some_and(|first| first.machine.has_source_exited());
        self.ran_without_memory |= is_told && has_exited && self.lacks_memory;
        let wire = &mut self.wires[wire];
        let slot = if is_down { &mut wire.down } else { &mut wire.up };
        *slot = Some(message);
        Input::Done
    }

    fn run(&mut self, reply: Reply) -> Input {
        let started = match (self.destination, reply) {
            (Destination::Exited, Reply::True) => StartResult::ExitedBefore,
            (Destination::Exited, _) => StartResult::Unknown,
            (_, Reply::Refused) => StartResult::Refused,
            (_, Reply::Silent) => StartResult::Unknown,
            (Destination::Loaded | Destination::Running, Reply::Crashed) => {
                self.has_run_there = true;
                self.destination = Destination::Exited;
                let last = self.last_wire();
                self.wires[last].open = false;
                StartResult::Exited
            }
            (Destination::Loaded | Destination::Running, reply) => {
                self.has_run_there = true;
                self.destination = Destination::Running;
                if reply == Reply::Unanswered { StartResult::Unknown } else { StartResult::Live }
            }
            _ => StartResult::Refused,
        };
        Input::Started(started)
    }
}

//! Two QEMUs that are connected to each other in a world, each driven by a towline.
//!
//! ```text
//!   QEMU ─────────────── wire 0 ─────────────── QEMU
//!   towline ──────────── wire 1 ──────────── towline
//! ```
//! A source that has stopped its guest waits until it may complete (`shut` of wire 0), and notices nothing of a lost connection until then. It
//! completes when the destination has confirmed that it loaded the guest.

use super::super::super::{DestinationStatus, Directive, Input, MemorySharing, Switchover};
use super::{Destination, Engine, FRESH, Reply, Source, Step, Towline, World};

impl World {
    /// Returns true if the QEMUs of two towlines are connected to each other.
    pub(in super::super) fn connects_qemus(&self) -> bool {
        let is_connected =
            |memory| matches!(memory, MemorySharing::Connected | MemorySharing::ConnectedPostcopy);
        self.towlines[0].is_some_and(|towline| is_connected(towline.request.memory))
    }

    /// Returns true if the source of connected QEMUs may be switched to postcopy.
    pub(in super::super) fn may_switch(&self) -> bool {
        self.towlines[0].is_some_and(|towline| towline.request.memory == MemorySharing::ConnectedPostcopy)
    }

    /// Returns true if a towline that has reported the switch sees that its source cannot send the rest of the memory.
    pub(super) fn is_source_stuck(&self, index: usize) -> bool {
        let has_switched = self.towlines[index].is_some_and(|towline| towline.machine.has_switched());
        index == 0 && has_switched && matches!(self.source, Source::FollowingPaused | Source::Exited)
    }

    /// Returns true if a towline whose guest lacks memory sees that the other one is lost.
    pub(super) fn misses_peer(&self) -> bool {
        self.may_switch() && self.lacks_memory && !self.wires[1].open
    }

    pub(super) fn add_connected_steps(
        &self,
        index: usize,
        towline: Towline,
        add: &mut impl FnMut(bool, Step) -> Option<()>,
    ) {
        let (between, session) = (self.wires[0], self.wires[1]);
        let (streams, sent) = (towline.engine == Engine::Streaming, towline.engine == Engine::Sent);
        let has_source_failed =
            matches!(self.source, Source::HasGuest | Source::RunAgain | Source::MovedOn | Source::Exited);
        if index == 0 {
            let transfers = self.source == Source::Migrating && between.open;
            add(streams && transfers && session.open, Step::SourceWaits);
            add(sent && session.shut, Step::EngineAcknowledges(0));
            let is_lost = !(session.open || sent && session.shut) || has_source_failed;
            add((streams || sent) && is_lost, Step::EngineFails(0));
        } else {
            add(streams && session.all && session.open, Step::EngineAcknowledges(1));
            let is_lost = matches!(self.destination, Destination::Failed | Destination::Exited);
            add(streams && (is_lost || !session.open), Step::EngineFails(1));
        }
    }

    /// The QEMUs lose their connection.
    pub(super) fn cut_connected(&mut self) {
        let may_complete = self.source == Source::Waiting && self.wires[0].shut;
        self.wires[0].open = false;
        if self.source == Source::Following {
            self.source = Source::FollowingPaused;
        }
        if matches!(self.source, Source::Migrating | Source::Switching) || may_complete {
            self.regain_guest();
        }
        if self.destination == Destination::Loading {
            self.destination = Destination::Failed;
        }
    }

    /// Returns true if both towlines connect again, and their QEMUs can be.
    pub(super) fn can_reconnect(&self) -> bool {
        let connects = |towline: &Option<Towline>| {
            towline.is_some_and(|towline| towline.alive && towline.todo == Some(Directive::Recover))
        };
        self.connects_qemus()
            && self.towlines.iter().all(connects)
            && matches!(self.source, Source::FollowingPaused | Source::Completed)
            && matches!(self.destination, Destination::Loaded | Destination::Running)
    }

    pub(super) fn reconnect(&mut self) {
        self.wires[1] = FRESH;
        if self.lacks_memory && self.source == Source::FollowingPaused {
            (self.source, self.wires[0].open) = (Source::Following, true);
        }
        for index in 0..2 {
            self.towline(index).todo = None;
            let next = self.handle(index, Input::Done);
            self.set(index, next);
        }
    }

    /// Returns true if a later towline finds a source that was switched to postcopy.
    pub(super) fn can_go_on(&self) -> bool {
        self.may_switch()
            && self.is_left(0)
            && self.record(0).is_some()
            && self.source == Source::FollowingPaused
    }

    pub(super) fn go_on(&mut self) {
        let carried = self.carried;
        let towline = self.towline(0);
        let machine = Switchover { fault: towline.fault, ..Switchover::going_on(towline.request, carried) };
        *towline = Towline {
            machine,
            engine: Engine::Ended,
            todo: None,
            alive: true,
            outcome: None,
            cancelled: false,
            ..*towline
        };
        self.set(0, Directive::Recover);
    }

    /// Returns true if this towline waits without result to be connected again.
    pub(super) fn cannot_reconnect(&self, index: usize) -> bool {
        let is_own_lost = match index {
            0 => matches!(self.source, Source::Exited | Source::RunAgain),
            _ => matches!(self.destination, Destination::Failed | Destination::Exited),
        };
        is_own_lost || self.is_left(1 - index)
    }

    pub(super) fn not_reconnected(&self, index: usize, reply: Reply) -> Input {
        match index {
            0 if matches!(self.source, Source::Exited | Source::Completed | Source::RunAgain) => {
                Input::Source(self.source_view())
            }
            0 => Input::NotDone,
            _ if reply == Reply::TimedOut => Input::NotDone,
            _ if reply == Reply::Silent => Input::Destination(DestinationStatus::Unknown),
            _ => Input::Destination(self.destination_view()),
        }
    }
}

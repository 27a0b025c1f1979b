//! Postcopy in a world.
//!
//! ```text
//!   QEMU ────────── link ────────── QEMU      one towline drives both; wire 0 is their connection
//!   image ── towline ── link ── QEMU          the memory of a stored guest follows; wire 1
//! ```
//! A source stops its guest when it switches. Until it has noticed that its destination loaded the devices, a
//! lost connection gives it the guest back (`postcopy-device`); older versions notice nothing, and wait. A
//! migration that is cancelled after the switch has the source run the guest again.

use super::super::super::{
    DestinationStatus, Directive, FinalRunState, Input, LossCause, MemoryLoss, MemorySharing, SourceKind,
    SourceLink, StartResult,
};
use super::{Destination, Engine, Reply, Source, Step, World};

impl World {
    pub(in super::super) fn is_postcopy(&self) -> bool {
        self.towlines[0].is_some_and(|towline| towline.request.memory == MemorySharing::Postcopy)
    }

    /// Returns true if the two QEMUs are connected to each other.
    pub(in super::super) fn is_direct(&self) -> bool {
        self.is_postcopy()
            && self.towlines[0].is_some_and(|towline| towline.request.source == SourceKind::Qemu)
    }

    fn holds_devices(&self) -> bool {
        matches!(self.destination, Destination::Loaded | Destination::Running)
    }

    /// Adds the steps of two QEMUs that are connected to each other.
    pub(super) fn add_direct_steps(&self, steps: &mut Vec<Step>) {
        let mut add = |possible: bool, step: Step| possible.then(|| steps.push(step));
        let (open, loads) = (self.wires[0].open, self.destination == Destination::Loading);
        let migrates = self.source == Source::Migrating;
        add(migrates && open && loads, Step::SourceConverges);
        add(migrates && open && loads && self.asked_to_switch, Step::SourceSwitches);
        self.add_following_steps(&mut add);
        let Some(towline) = self.towlines[0].filter(|towline| towline.alive && towline.outcome.is_none())
        else {
            return;
        };
        let streams = towline.engine == Engine::Streaming;
        add(towline.engine == Engine::Preparing, Step::EngineConnects);
        add(streams && migrates && self.guest.is_live(), Step::EnginePassesOnce);
        let completed = matches!(self.source, Source::Completed | Source::RunAgain);
        add(streams && completed, Step::EngineSeesCompletion);
        let failed = matches!(self.source, Source::HasGuest | Source::MovedOn | Source::Exited);
        add(streams && failed, Step::EngineFails(0));
    }

    /// Adds the steps of a source that switches to postcopy, or has, and of its destination.
    pub(super) fn add_following_steps(&self, add: &mut impl FnMut(bool, Step) -> Option<()>) {
        let (open, loads) = (self.wires[0].open, self.destination == Destination::Loading);
        let sent = matches!(self.source, Source::Switching | Source::Following);
        add(sent && open && loads, Step::DevicesLoad);
        add(self.source == Source::Switching && open, Step::SourceFollows);
        let follows = self.source == Source::Following && open && self.holds_devices();
        add(follows && self.lacks_memory, Step::MemoryArrives);
        add(follows && !self.lacks_memory, Step::SourceCompletes);
    }

    /// The destination of this stored guest gets its memory.
    pub(super) fn serves(&self) -> bool {
        let serves = |towline: super::Towline| towline.alive && towline.todo == Some(Directive::ServeMemory);
        self.is_postcopy()
            && self.towlines[0].is_some_and(serves)
            && self.wires[1].open
            && self.holds_devices()
    }

    pub(super) fn postcopy_step(&mut self, step: Step) {
        match step {
            Step::SourceConverges => {
                self.carried = self.guest;
                (self.source, self.destination) = (Source::Completed, Destination::Loaded);
            }
            Step::SourceSwitches => {
                self.carried = self.guest;
                (self.source, self.lacks_memory) = (Source::Switching, true);
            }
            Step::DevicesLoad => {
                let runs = self.cont_while_loading;
                self.operator_ran |= runs;
                // Of two hosts, no towline has decided that: it is as if another party ran it later.
                self.has_run_there |= runs && self.is_direct();
                self.destination = if runs { Destination::Running } else { Destination::Loaded };
            }
            Step::SourceFollows => self.source = Source::Following,
            Step::MemoryArrives => self.lacks_memory = false,
            Step::SourceCompletes => self.source = Source::Completed,
            Step::EngineConnects => {
                let input = Input::AcknowledgeRequested { guest: self.guest, source: SourceLink::Open };
                let directive = self.handle(0, input);
                self.connect_direct(directive);
            }
            Step::EnginePassesOnce => {
                let directive = self.handle(0, Input::SwitchRequested(self.guest));
                self.pass_once(directive);
            }
            Step::EngineSeesCompletion => {
                let directive = self.handle(0, Input::CommitRequested(self.carried));
                if directive == Directive::Proceed {
                    self.towline(0).engine = Engine::Ended;
                    let next = self.handle(0, Input::Delivered);
                    self.set(0, next);
                } else {
                    self.fail(0, Input::Failed);
                }
            }
            _ => unreachable!("no step of a postcopy"),
        }
    }

    pub(super) fn connect_direct(&mut self, directive: Directive) {
        match directive {
            Directive::Record(_) => {
                self.towline(0).engine = Engine::Acknowledging;
                self.towline(0).todo = Some(directive);
            }
            Directive::Proceed => {
                self.towline(0).engine = Engine::Streaming;
                if self.source == Source::HasGuest && self.destination == Destination::Loading {
                    self.source = Source::Migrating;
                }
            }
            _ => self.fail(0, Input::Failed),
        }
    }

    pub(super) fn pass_once(&mut self, directive: Directive) {
        match directive {
            Directive::Record(_) => {
                self.towline(0).engine = Engine::Committing;
                self.towline(0).todo = Some(directive);
            }
            Directive::Refuse => self.fail(0, Input::Failed),
            directive => {
                self.towline(0).engine = Engine::Ended;
                self.set(0, directive);
            }
        }
    }

    /// The connection between two QEMUs is lost.
    pub(super) fn cut_direct(&mut self) {
        self.wires[0].open = false;
        self.source = match self.source {
            Source::Migrating | Source::Switching => Source::HasGuest,
            Source::Following => Source::FollowingPaused,
            other => other,
        };
        if self.destination == Destination::Loading {
            self.destination = Destination::Failed;
        }
    }

    /// The source's migration is cancelled.
    pub(super) fn cancel_direct(&mut self) {
        let has_switched =
            matches!(self.source, Source::Switching | Source::Following | Source::FollowingPaused);
        self.cancelled_switched |= has_switched;
        if has_switched || self.source == Source::Migrating {
            self.cut_direct();
            self.source = Source::HasGuest;
        }
    }

    /// The devices of a stored guest have arrived, which QEMU runs by itself.
    pub(super) fn load_postcopy(&mut self) {
        let request = self.towlines[0].expect("there is one").request;
        let is_requested = FinalRunState::requested(request.run, self.carried) == FinalRunState::Running;
        let runs = is_requested || self.cont_while_loading;
        self.operator_ran |= self.cont_while_loading;
        (self.lacks_memory, self.has_loaded) = (true, self.wires[1].open);
        self.has_run_there |= runs;
        self.destination = if runs { Destination::Running } else { Destination::Loaded };
    }

    pub(super) fn start_postcopy(&mut self, reply: Reply) -> Input {
        let is_reached = self.source != Source::Exited;
        self.asked_to_switch |= is_reached && matches!(reply, Reply::True | Reply::Unanswered);
        match reply {
            Reply::True if is_reached => Input::Done,
            Reply::Refused if is_reached => Input::NotDone,
            _ => Input::TimedOut,
        }
    }

    pub(super) fn run_early(&mut self, reply: Reply) -> Input {
        Input::Started(match (self.destination, reply) {
            (Destination::Loaded | Destination::Running, reply) => {
                if reply != Reply::Silent {
                    self.has_run_there = true;
                    self.destination = Destination::Running;
                }
                if reply == Reply::True { StartResult::Live } else { StartResult::Unknown }
            }
            _ => StartResult::NotSent,
        })
    }

    pub(super) fn recover(&mut self, reply: Reply) -> Input {
        match reply {
            Reply::Silent if self.is_direct() => return Input::NotDone,
            Reply::Silent => {
                return Input::MemoryLost(MemoryLoss { cause: LossCause::Connection, has_loaded: true });
            }
            Reply::Unanswered => return Input::Destination(DestinationStatus::Unknown),
            _ => {}
        }
        match self.destination_view() {
            DestinationStatus::LacksMemory(_) if !self.is_direct() => {
                self.wires[1].open = true;
                Input::Done
            }
            DestinationStatus::LacksMemory(_) => {
                if self.source == Source::FollowingPaused {
                    (self.source, self.wires[0].open) = (Source::Following, true);
                }
                Input::Done
            }
            view => Input::Destination(view),
        }
    }

    pub(super) fn serve(&mut self, reply: Reply) -> Input {
        let has_loaded = self.has_loaded && reply != Reply::Unanswered;
        if reply == Reply::Refused {
            self.wires[1].open = false;
            return Input::MemoryLost(MemoryLoss { cause: LossCause::Unreadable, has_loaded });
        }
        if self.wires[1].open {
            return Input::Delivered;
        }
        Input::MemoryLost(MemoryLoss { cause: LossCause::Connection, has_loaded })
    }

    /// Returns true if this directive has a result without a mishap.
    pub(super) fn is_postcopy_settled(&self, directive: Directive) -> bool {
        match directive {
            Directive::ServeMemory => !self.wires[1].open || self.holds_devices() && !self.lacks_memory,
            Directive::Recover => self.destination != Destination::Loading || !self.will_load(),
            _ => true,
        }
    }

    /// Returns true if a destination that loads has everything that it needs for that.
    pub(super) fn will_load(&self) -> bool {
        if self.is_direct() {
            return self.wires[0].open;
        }
        if self.connects_qemus() {
            let completes = self.wires[0].shut && self.source == Source::Waiting;
            let has_switched = matches!(self.source, Source::Switching | Source::Following);
            return self.wires[0].open && (completes || has_switched);
        }
        self.wires[self.last_wire()].all
    }
}

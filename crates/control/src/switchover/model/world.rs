//! All parties of a world, and their steps.

mod carry;
mod connected;
mod generations;
mod mishaps;
mod postcopy;
mod steps;

use generations::Generation;
use mishaps::Scope;

use super::super::fault::{FaultSwitch, SwitchoverBug};
use super::super::{
    AtDestination, AtSource, Decision, DestinationKind, Directive, GuestRunState, GuestState, Input,
    InterruptedMove, MemorySharing, OtherEnd, PeerMessage, Placement, ResumeAction, RunRequest, SourceAction,
    SourceKind, SourceLink, Switchover, SwitchoverOutcome, SwitchoverRequest, ToDo,
};

/// The source's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Source {
    /// Its guest is live or not, and its memory is being sent.
    Migrating,
    /// Its guest has stopped for postcopy, and the destination has not reported that it has the devices.
    Switching,
    /// The destination has the guest, and is sent the rest of its memory.
    Following,
    /// The same, without a connection.
    FollowingPaused,
    /// Everything was sent; it waits for its acknowledgement.
    Waiting,
    /// `postmigrate`.
    Completed,
    /// It has its guest, as it was.
    HasGuest,
    /// It had completed, and its guest was resumed.
    RunAgain,
    /// Its guest ran on, and another party has sent it elsewhere, where it runs.
    MovedOn,
    Exited,
    /// An image.
    Stored,
}

/// The destination's QEMU, or the storage of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Destination {
    Loading,
    Loaded,
    Running,
    Stored,
    Failed,
    Exited,
}

/// The disk with the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Disk {
    Writable,
    /// Nothing can be written; files can be removed.
    Full,
    ReadOnly,
    /// As `Full`, and the records that it had are gone.
    Vanished,
}

/// A connection and the messages in flight on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Wire {
    pub(in super::super) open: bool,
    /// The whole stream has been sent.
    all: bool,
    /// The destination's acknowledgement is in flight.
    shut: bool,
    /// The acknowledgement was read.
    shut_read: bool,
    down: Option<PeerMessage>,
    up: Option<PeerMessage>,
}

const FRESH: Wire = Wire { open: true, all: false, shut: false, shut_read: false, down: None, up: None };

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Engine {
    /// Two QEMUs are not connected to each other yet.
    Preparing,
    Streaming,
    /// The permission for the last bytes is being recorded.
    Committing,
    Sent,
    /// The permission to acknowledge the source is being recorded.
    Acknowledging,
    Ended,
}

/// A towline with its own machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Towline {
    pub(in super::super) request: SwitchoverRequest,
    machine: Switchover,
    engine: Engine,
    todo: Option<Directive>,
    pub(in super::super) alive: bool,
    pub(in super::super) outcome: Option<SwitchoverOutcome>,
    cancelled: bool,
    /// Its record on disk.
    pub(in super::super) record: Option<Decision>,
    fault: FaultSwitch,
}

/// See the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct World {
    pub(in super::super) source: Source,
    pub(in super::super) destination: Destination,
    /// Run state of the guest at its source unless the migration has stopped it.
    pub(in super::super) guest: GuestRunState,
    /// Run state in the stream.
    pub(in super::super) carried: GuestRunState,
    pub(in super::super) towlines: [Option<Towline>; 2],
    wires: [Wire; 3],
    mishaps: u8,
    pub(in super::super) disk: Disk,
    /// Another party sent `cont` to the destination while that loaded.
    cont_while_loading: bool,
    /// The destination has the locks of the drives.
    locks: bool,
    /// The source aborted, because it got its guest back while the destination had the locks of the drives.
    pub(in super::super) aborted: bool,
    /// An operator resumed the guest at a completed source, or at a destination that held it.
    pub(in super::super) operator_ran: bool,
    /// The former, after a towline had reported that the guest does not run at its destination.
    may_run_at_source: bool,
    /// After that a later towline has run the guest at its destination.
    pub(in super::super) stale: bool,
    /// An operator cancelled at the source, or a towline was killed, after a destination that runs the guest by
    /// itself was sent everything.
    pub(in super::super) window: bool,
    /// Another party has had the source complete before its towline did.
    pub(in super::super) continued: bool,
    /// A later towline has acted on a record, or found the guest and reported it.
    pub(in super::super) resumed: bool,
    /// The destination has run the guest.
    pub(in super::super) has_run_there: bool,
    /// A towline has ended the destination to give the source its guest back.
    pub(in super::super) ended_for_source: bool,
    /// The destination has the devices of the guest, and not all of its memory.
    pub(in super::super) lacks_memory: bool,
    /// The destination has reported that it loaded the devices of a stored guest.
    has_loaded: bool,
    /// The source was asked to switch to postcopy.
    asked_to_switch: bool,
    /// A towline has cancelled a migration that had switched to postcopy.
    pub(in super::super) cancelled_switched: bool,
    /// A later towline has started a guest whose memory ended with its source.
    pub(in super::super) ran_without_memory: bool,
    generation: Generation,
}

/// A step of one party.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Step {
    SourceSendsTheRest,
    EngineCommits(usize),
    DestinationLoads,
    DestinationFails,
    EngineAcknowledges(usize),
    SourceIsAcknowledged,
    /// A source that is connected to its destination has stopped its guest, and waits until it may complete.
    SourceWaits,
    EngineFails(usize),
    /// Two towlines that have lost each other in a postcopy, and their QEMUs, are connected again.
    Reconnect,
    /// A later towline of a source that was switched to postcopy connects it again.
    GoOn,
    SourceConverges,
    SourceSwitches,
    DevicesLoad,
    SourceFollows,
    MemoryArrives,
    SourceCompletes,
    EngineConnects,
    EnginePassesOnce,
    EngineSeesCompletion,
    Carry(usize, Reply),
    /// A later towline examines the ends of this one and finishes the move if that is enough.
    Resume(usize),
    /// As [`Self::Resume`], with the other end as it is, by the word of its host.
    ResumeTold(usize, OtherEnd),
    /// A later towline takes the next generation for the guest at its source, and runs it there.
    TakeBack,
    /// A later towline examines both ends.
    ResumeBoth,
    /// A later towline fails to start the guest at its destination.
    ResumeFails(usize, Reply),
    // Mishaps.
    DiskFails(Disk),
    /// The directory of the records is gone, and with it the records.
    DirectoryVanishes,
    ContWhileLoading,
    DestinationRunByOperator,
    DestinationPausedByOperator,
    SourceMovedOn,
    Cut(usize),
    SourceCancelled,
    /// Another party has it complete before its towline does.
    SourceContinued,
    SourceStopped,
    SourceExits,
    SourceRunAgain,
    DestinationExits,
    Cancel(usize),
    Kill(usize),
    /// A towline that gives the source its guest back is killed when it has ended the destination in the same memory.
    KillInRestore(usize),
}

/// Result of carrying out a directive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Reply {
    True,
    Silent,
    TimedOut,
    Refused,
    /// It took effect, and its reply is lost.
    Unanswered,
    /// It took effect, and QEMU exited before it replied.
    Crashed,
}

/// Returns true if the guest was reported to be paused at both ends, so that it may be run at either.
pub(in super::super) fn is_paused_at_both(state: GuestState) -> bool {
    state == GuestState::new(AtSource::Paused, AtDestination::Holds, ToDo::RunOne)
}

impl World {
    pub(in super::super) fn with_one(
        request: SwitchoverRequest,
        guest: GuestRunState,
        mishaps: u8,
        fault: FaultSwitch,
    ) -> Self {
        Self::new(guest, mishaps, [Some(Towline::new(request, fault)), None])
    }

    pub(in super::super) fn with_two(
        after: SourceAction,
        memory: MemorySharing,
        guest: GuestRunState,
        mishaps: u8,
        fault: FaultSwitch,
    ) -> Self {
        let run = RunRequest::AsItWas;
        let (source, destination) = (SourceKind::Qemu, DestinationKind::Towline);
        let here = Towline::new(SwitchoverRequest { source, destination, run, after, memory }, fault);
        let (source, destination) = (SourceKind::Towline, DestinationKind::Qemu);
        let there = Towline::new(
            SwitchoverRequest { source, destination, run, after: SourceAction::KeepPaused, memory },
            fault,
        );
        Self::new(guest, mishaps, [Some(here), Some(there)])
    }

    fn new(guest: GuestRunState, mishaps: u8, towlines: [Option<Towline>; 2]) -> Self {
        let first = towlines[0].expect("there is one").request;
        let stored = first.source == SourceKind::Stored;
        let is_prepared = towlines[0].is_some_and(|towline| towline.engine == Engine::Preparing);
        Self {
            source: match first.source {
                SourceKind::Stored => Source::Stored,
                _ if is_prepared => Source::HasGuest,
                _ => Source::Migrating,
            },
            destination: Destination::Loading,
            guest,
            carried: guest,
            towlines,
            wires: [Wire { all: stored, ..FRESH }, FRESH, FRESH],
            mishaps,
            disk: Disk::Writable,
            cont_while_loading: false,
            locks: false,
            aborted: false,
            operator_ran: false,
            may_run_at_source: false,
            stale: false,
            window: false,
            continued: false,
            resumed: false,
            has_run_there: false,
            ended_for_source: false,
            lacks_memory: false,
            has_loaded: false,
            asked_to_switch: false,
            cancelled_switched: false,
            ran_without_memory: false,
            generation: Generation::Unused,
        }
    }

    fn count(&self) -> usize {
        self.towlines.iter().flatten().count()
    }

    /// Kind of the last destination.
    pub(in super::super) fn last_kind(&self) -> DestinationKind {
        self.towlines[self.count() - 1].expect("there is one").request.destination
    }

    fn last_wire(&self) -> usize {
        self.count()
    }

    /// State of the connection to the source.
    fn link(&self) -> SourceLink {
        let wire = self.wires[0];
        match self.source {
            Source::Completed | Source::RunAgain if wire.shut_read => SourceLink::Closed,
            Source::HasGuest | Source::MovedOn | Source::Exited => SourceLink::Reset,
            _ if !wire.open => SourceLink::Reset,
            _ => SourceLink::Open,
        }
    }

    /// The world after this step.
    pub(in super::super) fn after(mut self, step: Step) -> Self {
        match step {
            Step::SourceSendsTheRest => {
                self.source = Source::Waiting;
                self.carried = self.guest;
                self.wires[0].all = true;
            }
            Step::EngineCommits(index) => {
                let directive = self.handle(index, Input::CommitRequested(self.carried));
                self.commit(index, directive);
            }
            Step::DestinationLoads => self.load(),
            Step::DestinationFails => {
                self.spend();
                self.destination = Destination::Failed;
                self.lose_destination();
            }
            Step::EngineAcknowledges(index) => self.acknowledge(index),
            Step::SourceIsAcknowledged => {
                self.source = Source::Completed;
                self.wires[0].shut_read = true;
            }
            Step::SourceWaits => {
                (self.source, self.carried) = (Source::Waiting, self.guest);
                self.towline(0).engine = Engine::Sent;
                self.wires[1].all = self.wires[1].open;
            }
            Step::EngineFails(index) => self.fail(index, Input::Failed),
            Step::Reconnect => self.reconnect(),
            Step::GoOn => self.go_on(),
            Step::SourceConverges
            | Step::SourceSwitches
            | Step::DevicesLoad
            | Step::SourceFollows
            | Step::MemoryArrives
            | Step::SourceCompletes
            | Step::EngineConnects
            | Step::EnginePassesOnce
            | Step::EngineSeesCompletion => self.postcopy_step(step),
            Step::Carry(index, reply) => self.carry(index, reply),
            Step::Resume(index) => self.resume(self.scope(index), self.case(index)),
            Step::ResumeTold(index, other) => {
                self.resume(Scope::Of(index), self.case(index).with_other_end(other));
            }
            Step::ResumeFails(index, reply) => self.resume_fails(index, reply),
            Step::TakeBack => self.take_back(),
            Step::ResumeBoth => self.resume(Scope::All, self.case_of_both()),
            mishap => self.mishap(mishap),
        }
        self
    }

    fn spend(&mut self) {
        self.mishaps -= 1;
    }

    pub(super) fn has_fault(&self, fault: SwitchoverBug) -> bool {
        self.towlines[0].is_some_and(|towline| towline.fault.has(fault))
    }

    /// The source fails to migrate, and has its guest back, with its drives.
    pub(super) fn regain_guest(&mut self) {
        let is_held = matches!(self.destination, Destination::Loaded | Destination::Running);
        self.aborted |= self.locks && is_held && self.source == Source::Waiting;
        self.source = Source::HasGuest;
    }

    fn towline(&mut self, index: usize) -> &mut Towline {
        self.towlines[index].as_mut().expect("it is there")
    }

    fn handle(&mut self, index: usize, input: Input) -> Directive {
        self.towline(index).machine.handle(input)
    }
}

impl Towline {
    /// The image is published when the source has been resumed.
    fn publishes_last(&self) -> bool {
        self.request.source == SourceKind::Qemu && self.request.after == SourceAction::Resume
    }

    fn new(request: SwitchoverRequest, fault: FaultSwitch) -> Self {
        let mut machine = Switchover::new(request);
        machine.fault = fault;
        let is_direct = request.source == SourceKind::Qemu && request.memory == MemorySharing::Postcopy;
        Self {
            request,
            machine,
            engine: if is_direct { Engine::Preparing } else { Engine::Streaming },
            todo: None,
            alive: true,
            outcome: None,
            cancelled: false,
            record: None,
            fault,
        }
    }
}

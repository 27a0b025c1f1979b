use tempfile::TempDir;
use towline_channel::{Address, Cancel, UnixChannel};
use towline_migration::Sink;

use super::super::destination::StartFailure;
use super::super::endpoint::DestinationEndpoint;
use super::super::fake_qemu::{FakeQemu, in_copy};
use super::super::recorder::tests::stage;
use super::super::request::{CopyRequest, RequestedPages};
use super::super::shared_switchover::tests::recording;
use super::super::source::QmpSource;
use super::*;
use crate::moves::MoveEnd;
use crate::switchover::{
    AtDestination, AtSource, DestinationKind, DestinationStatus, SourceKind, SourceLink, SourceStatus,
    StartResult,
};

/// A destination with scripted replies, which keeps what was done.
struct Destination {
    status: DestinationStatus,
    started: Option<StartResult>,
    done: Vec<&'static str>,
}

impl DestinationEndpoint for Destination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Qemu
    }

    fn move_end(&self) -> MoveEnd {
        MoveEnd::Stored
    }

    fn sink(&self) -> &dyn Sink {
        unreachable!("nothing is sent")
    }

    fn stored_state(&self) -> DestinationState {
        unreachable!("it is not stored")
    }

    fn query_status(&mut self) -> DestinationStatus {
        self.status
    }

    fn start_guest(&mut self) -> Result<StartResult, StartFailure> {
        self.done.push("cont");
        match self.started.expect("it is not to be started") {
            StartResult::Live => Ok(StartResult::Live),
            started => Err(StartFailure { started, error: Box::new(Error::Cancelled) }),
        }
    }

    fn end(&mut self) -> Result<(), Error> {
        self.done.push("end");
        Ok(())
    }
}

/// A source in these states, which has sent its guest, and the end of the command from there.
struct Case {
    source: FakeQemu,
    destination: Destination,
    memory: MemorySharing,
    /// Directory of its record.
    place: TempDir,
}

impl Case {
    fn new(status: DestinationStatus, started: Option<StartResult>) -> Self {
        let source = FakeQemu::start("running");
        let destination = Destination { status, started, done: Vec::new() };
        Self { source, destination, memory: MemorySharing::Copied, place: TempDir::new().unwrap() }
    }

    /// The source, which sends its guest.
    fn sent(&self, context: &Context<'_>) -> QmpSource {
        let mut qemu = QmpSource::prepare(&self.source.path(), context).unwrap();
        let nowhere = Address::Unix("/nowhere".into());
        qemu.start_postcopy(&nowhere, RequestedPages::MainChannel, context).unwrap();
        qemu
    }

    fn script(&self, (status, migration): (&'static str, &'static str)) {
        (self.source.script().status, self.source.script().migration) = (status, Some(migration));
    }

    fn conclude(
        &mut self,
        source: (&'static str, &'static str),
        is_delivered: bool,
    ) -> Result<CopyReport, Failure> {
        let options = CopyRequest::default();
        let cancel = Cancel::new().unwrap();
        let context = &Context::new(&options, 0, &cancel, &());
        let mut qemu = self.sent(context);
        self.script(source);
        let switchover =
            SharedSwitchover::new(SourceKind::Qemu, DestinationKind::Qemu, self.memory, &options);
        let switchover = recording(switchover, &self.place);
        let guest = GuestRunState::Running;
        assert_eq!(switchover.handle(Input::CommitRequested(guest)), Directive::Proceed);
        let ended = if is_delivered {
            let input = Input::AcknowledgeRequested { guest, source: SourceLink::Open };
            assert_eq!(switchover.handle(input), Directive::Record(Decision::Acknowledge));
            assert_eq!(switchover.handle(Input::Recorded), Directive::Proceed);
            Ok(switchover.handle(Input::Delivered))
        } else {
            Err(Error::Cancelled)
        };
        let (source, destination) = (SourceControl::Qemu(&mut qemu), &mut self.destination);
        Executor::new(&switchover, source, destination, context).conclude(ended)
    }

    fn outcome(&mut self, source: (&'static str, &'static str), is_delivered: bool) -> GuestState {
        let failure = self.conclude(source, is_delivered).unwrap_err();
        failure.guest.state(SourceCategory::Qemu)
    }

    /// Commands to the source after its migration.
    fn source_commands(&self) -> Vec<String> {
        let commands = self.source.commands();
        let at = commands.iter().position(|command| command == "migrate").unwrap();
        commands[at + 1..].iter().filter(|command| !command.starts_with("migrate-set")).cloned().collect()
    }
}

const SAFE: GuestState = GuestState::new(AtSource::HasIt, AtDestination::None, ToDo::Nothing);

#[test]
fn a_guest_runs_at_its_destination_when_its_source_is_complete() {
    let mut case = Case::new(DestinationStatus::Loaded, Some(StartResult::Live));
    let report = case.conclude(("postmigrate", "completed"), true).unwrap();
    assert_eq!((report.destination, report.source), (DestinationState::Running, SourceState::Paused));
    assert_eq!(case.destination.done, ["cont"]);
    assert_eq!(case.source_commands(), [""; 0]);
}

/// An operator resumed it there: as it runs, is stopped again, or sleeps.
#[test]
fn a_guest_that_was_resumed_at_its_source_is_not_started_elsewhere() {
    for status in ["running", "paused", "suspended"] {
        let mut case = Case::new(DestinationStatus::Loaded, None);
        let expected = GuestState::new(AtSource::HasIt, AtDestination::Holds, ToDo::RunOne);
        assert_eq!(case.outcome((status, "completed"), true), expected, "{status}");
        assert_eq!(case.destination.done, [""; 0]);
    }
}

#[test]
fn a_failed_copy_leaves_the_guest_at_its_source_unless_another_party_runs_it_elsewhere() {
    for (status, expected) in [
        (DestinationStatus::Loaded, SAFE),
        (DestinationStatus::Failed, SAFE),
        (DestinationStatus::Exited, SAFE),
        (DestinationStatus::Unknown, SAFE),
        (DestinationStatus::Running, GuestState::new(AtSource::HasIt, AtDestination::Runs, ToDo::EndOne)),
    ] {
        let mut case = Case::new(status, None);
        assert_eq!(case.outcome(("running", "failed"), false), expected, "{status:?}");
        assert_eq!((case.destination.done.len(), case.source_commands().len()), (0, 0));
    }
}

/// A source that fails late resumes its guest by itself, and has it only then.
#[test]
fn a_source_that_has_failed_has_its_guest_when_it_is_resumed() {
    let options = CopyRequest::default();
    let cancel = Cancel::new().unwrap();
    let case = Case::new(DestinationStatus::Loaded, None);
    let mut qemu = case.sent(&Context::new(&options, 0, &cancel, &()));
    for (status, expected) in
        [("finish-migrate", SourceStatus::Migrating), ("running", SourceStatus::HasGuest)]
    {
        case.script((status, "failed"));
        assert_eq!(qemu.query_status(&options), expected);
    }
}

#[test]
fn a_source_that_does_not_fail_by_itself_is_cancelled() {
    let mut case = Case::new(DestinationStatus::Loaded, None);
    assert_eq!(case.outcome(("running", "active"), false), SAFE);
    // It may wait before the switchover.
    assert_eq!(case.source_commands(), ["migrate_cancel", "migrate-continue", "migrate-continue"]);
}

#[test]
fn a_source_that_never_cleans_up_its_last_migration_is_not_changed() {
    let case = Case::new(DestinationStatus::Loaded, None);
    case.script(("running", "failed"));
    case.source.script().keeps_migration = true;
    let error = in_copy(|context| QmpSource::prepare(&case.source.path(), context).err());
    assert!(matches!(error, Some(Error::NotCleanedUp { .. })), "{error:?}");
    assert!(case.source.commands().is_empty());
}

#[test]
fn a_refused_start_is_undone_only_in_shared_memory() {
    let mut case = Case::new(DestinationStatus::Loaded, Some(StartResult::Refused));
    let paused = |destination, to_do| GuestState::new(AtSource::Paused, destination, to_do);
    let expected = paused(AtDestination::Holds, ToDo::RunOne);
    assert_eq!(case.outcome(("postmigrate", "completed"), true), expected);
    assert_eq!((&case.destination.done[..], case.source_commands().len()), (&["cont"][..], 0));
    assert_eq!(stage(&case.place).as_deref(), Some("acknowledge"), "it does not run there");
    let mut case = Case::new(DestinationStatus::Loaded, Some(StartResult::Refused));
    case.memory = MemorySharing::Shared;
    assert_eq!(case.outcome(("postmigrate", "completed"), true), SAFE);
    // It is ended before.
    assert_eq!(
        (&case.destination.done[..], case.source_commands()),
        (&["cont", "end"][..], vec!["cont".to_owned()])
    );
    for (started, destination) in
        [(StartResult::Unknown, AtDestination::Unknown), (StartResult::StoppedAgain, AtDestination::Holds)]
    {
        let expected = paused(destination, ToDo::KeepDestination);
        let mut case = Case::new(DestinationStatus::Loaded, Some(started));
        case.memory = MemorySharing::Shared;
        assert_eq!(case.outcome(("postmigrate", "completed"), true), expected);
        assert_eq!((&case.destination.done[..], case.source_commands().len()), (&["cont"][..], 0));
    }
}

/// Without its end the guest runs at neither: a busy host has the time of a source that is driven here.
#[test]
fn a_source_that_is_not_driven_has_as_long_to_complete() {
    let (options, cancel) = (CopyRequest::default(), Cancel::new().unwrap());
    let context = Context::new(&options, 0, &cancel, &());
    let memory = MemorySharing::Copied;
    let switchover = SharedSwitchover::new(SourceKind::Stream, DestinationKind::Qemu, memory, &options);
    let (here, _there) = UnixChannel::pair().unwrap();
    let mut destination = Case::new(DestinationStatus::Loaded, None).destination;
    let source = SourceControl::Stream(Arc::new(here));
    let mut executor = Executor::new(&switchover, source, &mut destination, &context);
    for (waited, expected) in [(55, Input::SourceLink(SourceLink::Open)), (60, Input::TimedOut)] {
        executor.since = Instant::now().checked_sub(Duration::from_secs(waited)).unwrap();
        assert_eq!(executor.probe_link(), expected, "{waited} s");
    }
}

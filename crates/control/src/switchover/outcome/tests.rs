//! State of a guest that the machine reports after each failure.

use super::AtDestination::{self, Holds, MayRun, Runs};
use super::AtSource::{self, HasIt, Paused};
use super::{GuestState, SwitchoverOutcome, ToDo};
use crate::switchover::{
    DestinationKind, Directive, GuestRunState, Input, MemorySharing, PeerMessage, RunRequest, SourceAction,
    SourceKind, SourceLink, SourceStatus, StartResult, Switchover, SwitchoverRequest,
};

mod postcopy;

const NONE: AtDestination = AtDestination::None;
const LOST: AtDestination = AtDestination::Ended;
const UNKNOWN: AtDestination = AtDestination::Unknown;
const GONE: AtSource = AtSource::Ended;
const UNSEEN: AtSource = AtSource::Unknown;

const SENT: Input = Input::CommitRequested(GuestRunState::Running);
const ACKNOWLEDGE: Input =
    Input::AcknowledgeRequested { guest: GuestRunState::Running, source: SourceLink::Open };
/// The destination holds the guest, which is recorded, and the source is acknowledged.
const HELD: [Input; 4] = [SENT, ACKNOWLEDGE, Input::Recorded, Input::Delivered];
/// The destination is to run the guest.
const STARTED: [Input; 2] = [Input::Source(SourceStatus::Completed), Input::Recorded];
const STARTED_ALONE: [Input; 2] = [Input::Source(SourceStatus::Exited), Input::Recorded];

fn request(source: SourceKind, destination: DestinationKind) -> SwitchoverRequest {
    let (run, after, memory) = (RunRequest::AsItWas, SourceAction::KeepPaused, MemorySharing::Copied);
    SwitchoverRequest { source, destination, run, after, memory }
}

fn end(request: SwitchoverRequest, inputs: &[&[Input]]) -> GuestState {
    let mut machine = Switchover::new(request);
    let directives: Vec<_> = inputs.concat().into_iter().map(|input| machine.handle(input)).collect();
    match directives.last() {
        Some(Directive::End(SwitchoverOutcome::Unresolved(state))) => *state,
        _ => panic!("{inputs:?}: {directives:?}"),
    }
}

/// An end by its name, after these inputs.
struct Case<'a>(&'a str, &'a [&'a [Input]], AtSource, AtDestination, ToDo);

#[track_caller]
fn check(request: SwitchoverRequest, cases: &[Case<'_>]) {
    for Case(name, inputs, source, destination, to_do) in cases {
        assert_eq!(end(request, inputs), GuestState::new(*source, *destination, *to_do), "{name}");
    }
}

#[test]
fn between_two_qemus() {
    let started = |result| [Input::Started(result)];
    let refused = started(StartResult::Refused);
    check(
        request(SourceKind::Qemu, DestinationKind::Qemu),
        &[
            Case("destination-holds", &[&HELD, &[Input::TimedOut]], UNSEEN, Holds, ToDo::LookAtSource),
            Case(
                "source-run-by-others",
                &[&HELD, &[Input::Source(SourceStatus::CompletedThenResumed)]],
                HasIt,
                Holds,
                ToDo::RunOne,
            ),
            Case(
                "both-paused",
                &[&HELD, &STARTED, &refused, &[Input::Recorded]],
                Paused,
                Holds,
                ToDo::RunOne,
            ),
            Case(
                "not-retracted",
                &[&HELD, &STARTED, &refused, &[Input::NotRecorded]],
                Paused,
                Holds,
                ToDo::ForgetRecord,
            ),
            Case(
                "stopped-again",
                &[&HELD, &STARTED, &started(StartResult::StoppedAgain)],
                Paused,
                Holds,
                ToDo::KeepDestination,
            ),
            Case(
                "destination-lost",
                &[&HELD, &STARTED, &started(StartResult::Exited)],
                Paused,
                LOST,
                ToDo::RunSourceUnlessItRan,
            ),
            Case(
                "destination-unknown",
                &[&HELD, &STARTED, &started(StartResult::Unknown)],
                Paused,
                UNKNOWN,
                ToDo::LookAtDestination,
            ),
        ],
    );
}

#[test]
fn between_two_qemus_of_which_one_has_exited() {
    let started = |result| [Input::Started(result)];
    let refused = started(StartResult::Refused);
    check(
        request(SourceKind::Qemu, DestinationKind::Qemu),
        &[
            Case("destination-only", &[&HELD, &STARTED_ALONE, &refused], GONE, Holds, ToDo::RunDestination),
            Case(
                "destination-alone",
                &[&HELD, &STARTED_ALONE, &started(StartResult::Live), &[Input::NotDone]],
                GONE,
                MayRun,
                ToDo::LookAtDestination,
            ),
            Case(
                "both-exited",
                &[&HELD, &STARTED_ALONE, &started(StartResult::Exited)],
                GONE,
                LOST,
                ToDo::StartAgain,
            ),
            Case(
                "source-exited",
                &[&[Input::Failed, Input::Source(SourceStatus::Exited)]],
                GONE,
                NONE,
                ToDo::StartAgain,
            ),
            Case(
                "source-exited-since",
                &[&[
                    SENT,
                    Input::Failed,
                    Input::Source(SourceStatus::HasGuest),
                    Input::Source(SourceStatus::Exited),
                ]],
                GONE,
                UNKNOWN,
                ToDo::StartAgain,
            ),
            Case(
                "source-unknown",
                &[&[Input::Failed, Input::TimedOut, Input::TimedOut]],
                UNSEEN,
                NONE,
                ToDo::RunSource,
            ),
        ],
    );
    let quits =
        SwitchoverRequest { after: SourceAction::Quit, ..request(SourceKind::Qemu, DestinationKind::Qemu) };
    let live: [Input; 3] = [Input::Started(StartResult::Live), Input::Done, Input::NotDone];
    check(quits, &[Case("source-not-ended", &[&HELD, &STARTED, &live], Paused, Runs, ToDo::EndSource)]);
}

#[test]
fn in_shared_memory() {
    let started = |result| [Input::Started(result)];
    let request = SwitchoverRequest {
        after: SourceAction::Quit,
        memory: MemorySharing::Shared,
        ..request(SourceKind::Qemu, DestinationKind::Qemu)
    };
    check(
        request,
        &[
            Case(
                "upgraded-lost",
                &[&HELD, &STARTED, &started(StartResult::Exited)],
                Paused,
                LOST,
                ToDo::StartAgain,
            ),
            Case(
                "upgraded-stopped",
                &[&HELD, &STARTED, &started(StartResult::StoppedAgain)],
                Paused,
                Holds,
                ToDo::KeepDestination,
            ),
            Case(
                "upgraded-unknown",
                &[&HELD, &STARTED, &started(StartResult::Unknown)],
                Paused,
                UNKNOWN,
                ToDo::KeepDestination,
            ),
            Case(
                "upgrade-not-undone",
                &[&HELD, &STARTED, &started(StartResult::Refused), &[Input::Recorded, Input::NotDone]],
                Paused,
                NONE,
                ToDo::RunSource,
            ),
        ],
    );
}

#[test]
fn from_an_image() {
    let held = [SENT, ACKNOWLEDGE, Input::Delivered];
    let started = |result| [Input::Started(result)];
    check(
        request(SourceKind::Stored, DestinationKind::Qemu),
        &[
            Case("both-paused", &[&held, &started(StartResult::Refused)], HasIt, Holds, ToDo::RunDestination),
            Case(
                "stopped-again",
                &[&held, &started(StartResult::StoppedAgain)],
                HasIt,
                Holds,
                ToDo::LookAtDestination,
            ),
            Case(
                "destination-lost",
                &[&held, &started(StartResult::Exited)],
                HasIt,
                LOST,
                ToDo::RunSourceUnlessItRan,
            ),
            Case(
                "destination-unknown",
                &[&held, &started(StartResult::Unknown)],
                HasIt,
                UNKNOWN,
                ToDo::LookAtDestination,
            ),
        ],
    );
    let failed: [Input; 2] = [SENT, Input::Failed];
    check(
        request(SourceKind::Stored, DestinationKind::Stream),
        &[Case("destination-may-run", &[&failed], HasIt, MayRun, ToDo::LookAtDestination)],
    );
}

#[test]
fn to_a_stream() {
    let committed = [SENT, Input::Recorded];
    let unconfirmed = [Input::Failed, Input::Done];
    let source = |status| [Input::Source(status)];
    check(
        request(SourceKind::Qemu, DestinationKind::Stream),
        &[
            Case(
                "destination-may-run",
                &[&committed, &unconfirmed, &source(SourceStatus::Completed)],
                Paused,
                MayRun,
                ToDo::LookAtDestination,
            ),
            Case(
                "destination-may-run, source exited",
                &[&committed, &unconfirmed, &source(SourceStatus::Exited)],
                GONE,
                MayRun,
                ToDo::LookAtDestination,
            ),
            Case(
                "both-may-run",
                &[&committed, &[ACKNOWLEDGE, Input::Delivered], &source(SourceStatus::HasGuest)],
                HasIt,
                MayRun,
                ToDo::EndOne,
            ),
        ],
    );
}

#[test]
fn to_another_towline() {
    let completed = [Input::Source(SourceStatus::Completed)];
    let reported = [Input::Recorded, Input::Done];
    check(
        request(SourceKind::Qemu, DestinationKind::Towline),
        &[
            Case(
                "peer-waits",
                &[&HELD, &completed, &[Input::NotRecorded]],
                Paused,
                Holds,
                ToDo::LookAtDestination,
            ),
            Case("peer-waits", &[&HELD, &[Input::TimedOut]], UNSEEN, Holds, ToDo::LookAtSource),
            Case(
                "peer-unknown",
                &[&HELD, &completed, &reported, &[Input::PeerLost]],
                Paused,
                UNKNOWN,
                ToDo::LookAtDestination,
            ),
            Case(
                "peer-did-not-run",
                &[&HELD, &completed, &reported, &[Input::Peer(PeerMessage::NotRun), Input::Recorded]],
                Paused,
                Holds,
                ToDo::RunOne,
            ),
        ],
    );
    check(
        request(SourceKind::Towline, DestinationKind::Qemu),
        &[Case("undecided", &[&HELD, &[Input::PeerLost]], UNSEEN, Holds, ToDo::LookAtSource)],
    );
}

#[test]
fn to_an_image_with_a_source_that_is_resumed_first() {
    let stored = [SENT, ACKNOWLEDGE, Input::Delivered, Input::Source(SourceStatus::Completed)];
    let exited = [Input::Source(SourceStatus::Exited)];
    let resumes = SwitchoverRequest {
        after: SourceAction::Resume,
        ..request(SourceKind::Qemu, DestinationKind::Stored)
    };
    check(
        resumes,
        &[
            Case(
                "source-not-resumed",
                &[&stored, &[Input::NotDone, Input::Done]],
                Paused,
                Holds,
                ToDo::RunSource,
            ),
            Case("stored-only", &[&stored, &exited, &[Input::Done]], GONE, Holds, ToDo::Restore),
            Case("unpublished", &[&stored, &exited, &[Input::NotDone]], GONE, UNKNOWN, ToDo::Restore),
        ],
    );
}

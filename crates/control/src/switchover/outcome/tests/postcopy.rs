//! The same of postcopy.

use super::*;
use crate::switchover::{DestinationStatus, FinalRunState, LossCause, MemoryLoss};

const SAFE: Directive = Directive::End(SwitchoverOutcome::Safe);

fn postcopy(source: SourceKind) -> SwitchoverRequest {
    SwitchoverRequest { memory: MemorySharing::Postcopy, ..request(source, DestinationKind::Qemu) }
}

/// The QEMUs are connected, and the source is asked to switch.
const ASKED: [Input; 4] =
    [ACKNOWLEDGE, Input::Recorded, Input::SwitchRequested(GuestRunState::Running), Input::Recorded];
/// The source accepts, and is seen to have switched.
const SWITCHED: [Input; 4] = [
    Input::Done,
    Input::Source(SourceStatus::Following),
    Input::Recorded,
    Input::Source(SourceStatus::Following),
];
const PAUSED: Input = Input::Source(SourceStatus::FollowingPaused);
const LACKS: DestinationStatus = DestinationStatus::LacksMemory(FinalRunState::Running);

fn finds(status: DestinationStatus) -> [Input; 1] {
    [Input::Destination(status)]
}

#[test]
fn of_a_guest_between_two_qemus() {
    let live = [Input::Started(StartResult::Live)];
    let alone = [Input::Source(SourceStatus::Exited)];
    check(
        postcopy(SourceKind::Qemu),
        &[
            Case(
                "unanswered, source lost, devices loaded",
                &[&ASKED, &[Input::TimedOut, Input::TimedOut], &finds(LACKS)],
                UNSEEN,
                Runs,
                ToDo::Reconnect,
            ),
            Case(
                "unanswered, source lost, all loaded",
                &[&ASKED, &[Input::TimedOut, Input::TimedOut], &finds(DestinationStatus::Loaded)],
                UNSEEN,
                Holds,
                ToDo::LookAtSource,
            ),
            Case(
                "unanswered, both lost",
                &[&ASKED, &[Input::TimedOut, Input::TimedOut], &finds(DestinationStatus::Unknown)],
                UNSEEN,
                UNKNOWN,
                ToDo::LookAtSource,
            ),
            Case(
                "not recovered",
                &[&ASKED, &SWITCHED, &live, &[PAUSED, Input::NotDone], &finds(LACKS)],
                Paused,
                Runs,
                ToDo::Reconnect,
            ),
            Case(
                "destination lost",
                &[&ASKED, &SWITCHED, &live, &[PAUSED], &finds(DestinationStatus::Exited)],
                Paused,
                LOST,
                ToDo::RunSourceUnlessItRan,
            ),
            Case(
                "memory lost with its source",
                &[&ASKED, &SWITCHED, &live, &alone, &finds(LACKS)],
                GONE,
                Runs,
                ToDo::StartAgain,
            ),
        ],
    );
}

#[test]
fn of_a_source_that_failed_is_at_the_source_unless_the_destination_runs_it() {
    let failed = [Input::Done, Input::Source(SourceStatus::HasGuest)];
    let case = |status| {
        let mut machine = Switchover::new(postcopy(SourceKind::Qemu));
        let inputs = [&ASKED[..], &failed, &finds(status), &[Input::Done], &finds(status)].concat();
        inputs.into_iter().map(|input| machine.handle(input)).last().unwrap()
    };
    for status in [DestinationStatus::Failed, DestinationStatus::Exited, DestinationStatus::Loaded] {
        assert_eq!(case(status), SAFE, "{status:?}");
    }
    let both = SwitchoverOutcome::Unresolved(GuestState::new(HasIt, Runs, ToDo::EndOne));
    assert_eq!(case(DestinationStatus::Running), Directive::End(both));
}

#[test]
fn of_a_restore_names_a_lost_connection_a_damaged_image_and_a_truncated_one() {
    let lost = |cause, has_loaded| [SENT, Input::MemoryLost(MemoryLoss { cause, has_loaded })];
    let unreadable = lost(LossCause::Unreadable, true);
    let given_up = [&lost(LossCause::Connection, true)[..], &[Input::NotDone]].concat();
    let unseen = [&lost(LossCause::Connection, false)[..], &[Input::NotDone]].concat();
    let truncated = lost(LossCause::Truncated, true);
    for (inputs, status, state) in [
        (&given_up[..], LACKS, GuestState::LACKS_MEMORY),
        (&given_up, DestinationStatus::Unknown, GuestState::LACKS_MEMORY),
        (&given_up, DestinationStatus::Blocked, GuestState::BLOCKED),
        (&given_up, DestinationStatus::Exited, GuestState::RAN_AND_ENDED),
        (&unseen, DestinationStatus::Unknown, GuestState::UNSEEN),
        (&unreadable, LACKS, GuestState::UNREADABLE),
        (&truncated, DestinationStatus::Running, GuestState::TRUNCATED),
        (&[SENT, Input::Delivered], DestinationStatus::Loaded, GuestState::ARRIVED),
    ] {
        assert_eq!(end(postcopy(SourceKind::Stored), &[inputs, &finds(status)]), state, "{inputs:?}");
    }
    let mut machine = Switchover::new(postcopy(SourceKind::Stored));
    for input in lost(LossCause::Unreadable, false) {
        machine.handle(input);
    }
    assert_eq!(machine.handle(Input::Destination(DestinationStatus::Failed)), SAFE);
}

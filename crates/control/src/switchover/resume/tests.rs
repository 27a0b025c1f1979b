use super::*;

const SOURCES: [SourceStatus; 6] = [
    SourceStatus::Migrating,
    SourceStatus::Completed,
    SourceStatus::CompletedThenResumed,
    SourceStatus::HasGuest,
    SourceStatus::Exited,
    SourceStatus::Unknown,
];
const DESTINATIONS: [DestinationStatus; 7] = [
    DestinationStatus::Stopped,
    DestinationStatus::Loading,
    DestinationStatus::Loaded,
    DestinationStatus::Running,
    DestinationStatus::Failed,
    DestinationStatus::Exited,
    DestinationStatus::Unknown,
];
const DECISIONS: [Decision; 4] = [Decision::Commit, Decision::Acknowledge, Decision::Complete, Decision::Run];

fn cases() -> Vec<InterruptedMove> {
    let mut cases = Vec::new();
    for decision in DECISIONS {
        for source in SOURCES.map(Some).into_iter().chain([None]) {
            for destination in DESTINATIONS.map(Some).into_iter().chain([None]) {
                for run_state in [FinalRunState::Running, FinalRunState::Paused] {
                    cases.push(InterruptedMove {
                        source,
                        destination,
                        ..InterruptedMove::new(decision, run_state)
                    });
                }
            }
        }
    }
    cases
}

/// Neither evidence nor a choice starts a guest that runs, or is about to run, at the other end.
#[test]
fn guest_seen_at_the_other_end_is_never_started() {
    let choices = [Choice::Run(Side::Source), Choice::Run(Side::Destination)];
    for case in cases() {
        let finishes =
            choices.iter().filter_map(|&choice| case.apply(choice).ok()).chain([case.next_action()]);
        for finish in finishes {
            let other = match finish {
                ResumeAction::RunDestination => {
                    !matches!(case.source, None | Some(SourceStatus::Completed | SourceStatus::Exited))
                }
                ResumeAction::RunSource => {
                    matches!(case.destination, Some(DestinationStatus::Running | DestinationStatus::Unknown))
                }
                _ => false,
            };
            assert!(!other, "{finish:?} of {case:?}");
        }
    }
}

/// The exit of a source does not show whether an operator ran the guest there after the record said that it was done.
#[test]
fn guest_of_an_exited_source_is_run_by_itself_only_if_that_was_recorded() {
    for case in cases() {
        let is_run = case.next_action() == ResumeAction::RunDestination;
        if is_run && matches!(case.source, None | Some(SourceStatus::Exited)) {
            assert_eq!(case.decision, Decision::Run, "{case:?}");
        }
    }
}

/// Its memory has been changed: no evidence and no choice runs the source from a state of before.
#[test]
fn source_of_an_upgrade_never_runs_after_the_decision_to_run_its_destination() {
    for case in cases() {
        let case = InterruptedMove { memory: MemorySharing::Shared, ..case };
        let left_behind = case.source == Some(SourceStatus::Completed) && case.decision == Decision::Run;
        if left_behind {
            assert_ne!(case.next_action(), ResumeAction::RunSource, "{case:?}");
            assert_ne!(case.apply(Choice::Run(Side::Source)), Ok(ResumeAction::RunSource), "{case:?}");
        }
    }
    let lost = InterruptedMove {
        memory: MemorySharing::Shared,
        source: Some(SourceStatus::Completed),
        destination: Some(DestinationStatus::Exited),
        ..InterruptedMove::new(Decision::Run, FinalRunState::Running)
    };
    let state = GuestState::new(AtSource::Paused, AtDestination::Ended, ToDo::StartAgain);
    assert_eq!(lost.next_action(), ResumeAction::NeedsChoice(state));
    assert_eq!(lost.apply(Choice::Run(Side::Source)), Err(Refusal::Evidence(state)));
    assert_eq!(lost.apply(Choice::Discard(Side::Source)), Ok(ResumeAction::Quit(Side::Source)));
    // Before, nothing ran there.
    let held = InterruptedMove { decision: Decision::Acknowledge, ..lost };
    assert_eq!(held.apply(Choice::Run(Side::Source)), Ok(ResumeAction::RunSource));
}

#[test]
fn no_choice_ends_a_running_guest_or_the_only_copy() {
    for case in cases() {
        if case.apply(Choice::Discard(Side::Source)) == Ok(ResumeAction::Quit(Side::Source)) {
            assert_eq!(case.source, Some(SourceStatus::Completed), "{case:?}");
            let holds = [
                None,
                Some(DestinationStatus::Loaded),
                Some(DestinationStatus::Running),
                Some(DestinationStatus::Stopped),
            ];
            assert!(holds.contains(&case.destination), "{case:?}");
        }
        if case.apply(Choice::Discard(Side::Destination)) == Ok(ResumeAction::Quit(Side::Destination)) {
            assert_ne!(case.destination, Some(DestinationStatus::Running), "{case:?}");
            let is_only = case.source == Some(SourceStatus::Exited)
                && case.destination == Some(DestinationStatus::Loaded);
            assert!(!is_only, "{case:?}");
        }
    }
}

#[test]
fn guest_that_may_have_run_at_a_lost_destination_needs_a_choice() {
    for case in cases() {
        assert_ne!(case.next_action(), ResumeAction::RunSource, "{case:?}");
    }
    let exited = InterruptedMove {
        source: Some(SourceStatus::Exited),
        destination: Some(DestinationStatus::Loaded),
        ..InterruptedMove::new(Decision::Acknowledge, FinalRunState::Running)
    };
    let state = GuestState::new(AtSource::Ended, AtDestination::Holds, ToDo::RunDestinationUnlessItRanOn);
    assert_eq!(exited.next_action(), ResumeAction::NeedsChoice(state));
    assert_eq!(exited.apply(Choice::Run(Side::Destination)), Ok(ResumeAction::RunDestination));
    let lost = InterruptedMove {
        source: Some(SourceStatus::Completed),
        destination: Some(DestinationStatus::Exited),
        ..InterruptedMove::new(Decision::Acknowledge, FinalRunState::Running)
    };
    let state = GuestState::new(AtSource::Paused, AtDestination::Ended, ToDo::RunSourceUnlessItRan);
    assert_eq!(lost.next_action(), ResumeAction::NeedsChoice(state));
    assert_eq!(lost.apply(Choice::Run(Side::Source)), Ok(ResumeAction::RunSource));
    assert_eq!(lost.apply(Choice::Discard(Side::Source)), Err(Refusal::OnlyCopy));
}

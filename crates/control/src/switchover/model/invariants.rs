//! Invariants of every world, and the meaning of each outcome.

use super::super::outcome::{AtDestination, AtSource, GuestState, Placement, SwitchoverOutcome, ToDo};
use super::super::{Decision, DestinationKind, MemorySharing, SourceAction, SourceKind};
use super::world::{Destination, Disk, Source, Towline, World, is_paused_at_both};

/// Checks a world; the error describes the violation.
pub(super) fn check(world: &World) -> Result<(), String> {
    let runs_elsewhere = world.runs_at_source() || world.source == Source::MovedOn;
    let twice = runs_elsewhere && world.destination == Destination::Running;
    if twice && !world.operator_ran && !world.window {
        return Err("the guest runs at both ends".into());
    }
    if world.aborted {
        return Err("the source aborted: its destination has the locks of its drives".into());
    }
    if world.stale {
        return Err(
            "a later towline ran the guest at its destination after it had been reported not to".into()
        );
    }
    if world.cancelled_switched {
        return Err("a migration was cancelled that had switched to postcopy".into());
    }
    if world.ran_without_memory {
        return Err("a later towline started a guest whose memory ended with its source".into());
    }
    // An operator has paused it: it is the newest.
    let is_dead = world.lacks_memory && world.source == Source::Exited;
    let has_newest = world.destination == Destination::Loaded && world.has_run_there && !is_dead;
    let throws_away = |index: usize| {
        let drives =
            world.towlines[index].is_some_and(|towline| towline.request.destination == DestinationKind::Qemu);
        drives && (world.can_choose_source(index) || world.can_discard_destination(index))
    };
    if has_newest && !world.runs_at_source() && (0..world.towlines.len()).any(throws_away) {
        return Err("a choice throws away the guest that ran at its destination".into());
    }
    let is_shared = world.towlines[0].is_some_and(|towline| towline.request.memory == MemorySharing::Shared);
    if is_shared && world.has_run_there && world.runs_at_source() && !world.operator_ran {
        return Err("the source runs the guest in memory that the destination's guest has changed".into());
    }
    let can_choose = |index| is_shared && world.has_run_there && world.can_choose_source(index);
    if (0..world.towlines.len()).any(|index| world.towlines[index].is_some() && can_choose(index)) {
        return Err(
            "an operator may choose the source, whose memory the destination's guest has changed".into()
        );
    }
    let is_forbidden = |index: usize| {
        let is_left =
            world.towlines[index].is_some() && world.is_left(index) && world.record(index).is_some();
        is_left && !world.can_choose_source(index)
    };
    let is_only_source = world.ended_for_source && world.source == Source::Completed && !world.has_run_there;
    if is_only_source && (0..world.towlines.len()).any(is_forbidden) {
        return Err("the record forbids the source, whose destination was ended for it".into());
    }
    // A towline's outcome is true until another towline acts on the guest.
    for (index, towline) in world.towlines.iter().enumerate().filter(|_| !world.resumed) {
        if let Some((towline, outcome)) = towline.and_then(|towline| Some((towline, towline.outcome?))) {
            truthful(world, index, &towline, outcome)
                .map_err(|text| format!("towline {index} ends with {outcome:?}: {text}"))?;
        }
    }
    if !world.is_over() {
        return Ok(());
    }
    not_lost(world)?;
    known_to_somebody(world)
}

/// A guest that is stopped at both ends is reported by an outcome, or by a record that a later towline finds.
fn known_to_somebody(world: &World) -> Result<(), String> {
    let towlines = || world.towlines.iter().flatten();
    let moves = towlines().all(|towline| {
        let request = towline.request;
        let ends = (request.source, request.destination);
        let is_driven = ends.0 == SourceKind::Qemu || ends.1 == DestinationKind::Qemu;
        is_driven && ends.0 != SourceKind::Stored && ends.1 != DestinationKind::Stored
    });
    let is_stopped = matches!(world.source, Source::Completed | Source::Following | Source::FollowingPaused);
    let stands_still = is_stopped && world.destination != Destination::Running;
    let is_said = world.resumed
        || world.continued
        || matches!(world.disk, Disk::Full | Disk::Vanished)
        || towlines().any(|towline| {
            towline.record.is_some()
                || matches!(
                    towline.outcome,
                    Some(SwitchoverOutcome::Unresolved(_) | SwitchoverOutcome::Completed(_))
                )
        });
    if moves && world.carried.is_live() && stands_still && !is_said {
        return Err("the guest is stopped, and nothing reports it".into());
    }
    Ok(())
}

/// Checks that an outcome describes the world.
fn truthful(
    world: &World,
    index: usize,
    towline: &Towline,
    outcome: SwitchoverOutcome,
) -> Result<(), String> {
    let gone = world.destination == Destination::Exited;
    let right = match outcome {
        SwitchoverOutcome::Completed(_) if world.lacks_memory => false,
        SwitchoverOutcome::Safe if world.is_postcopy() && towline.request.source == SourceKind::Stored => {
            !matches!(world.destination, Destination::Loaded | Destination::Running)
        }
        SwitchoverOutcome::Completed(Placement::Running) => world.destination == Destination::Running || gone,
        SwitchoverOutcome::Completed(Placement::Paused) => {
            world.destination == Destination::Loaded || gone || world.operator_ran
        }
        SwitchoverOutcome::Completed(Placement::Loaded) => {
            matches!(world.destination, Destination::Running | Destination::Loaded) || gone
        }
        SwitchoverOutcome::Completed(Placement::Stored) => world.destination == Destination::Stored,
        // A later exit of the source is not a false report.
        SwitchoverOutcome::Safe if towline.request.source == SourceKind::Qemu => {
            // A guest that was not live is unchanged, in `postmigrate`.
            let is_unchanged = world.source == Source::Completed && !world.carried.is_live();
            let states = [Source::HasGuest, Source::RunAgain, Source::MovedOn, Source::Exited];
            let has_guest = is_unchanged || states.contains(&world.source);
            // It was looked at last, unless the source was resumed after that.
            let request = towline.request;
            let is_seen = request.destination == DestinationKind::Qemu
                && request.memory == MemorySharing::Copied
                && world.source == Source::HasGuest;
            has_guest && !(is_seen && world.destination == Destination::Running)
        }
        SwitchoverOutcome::Safe if towline.request.destination == DestinationKind::Qemu => {
            world.destination != Destination::Running
        }
        SwitchoverOutcome::Safe => world.destination != Destination::Running || world.operator_ran,
        SwitchoverOutcome::Unresolved(state) => is_in(state, world, towline),
    };
    if !right {
        return Err(format!("source {:?}, destination {:?}", world.source, world.destination));
    }
    let ends = towline.request.after == SourceAction::Quit && towline.request.source == SourceKind::Qemu;
    if ends && world.placed(index).is_some() && world.source != Source::Exited {
        return Err("the source was to be ended".into());
    }
    Ok(())
}

/// Returns true if this state of an unresolved guest describes the world.
fn is_in(state: GuestState, world: &World, towline: &Towline) -> bool {
    let has_exited = world.source == Source::Exited;
    let gone = world.destination == Destination::Exited;
    let does_not_run = world.destination != Destination::Running || world.operator_ran;
    let runs_at_source = world.runs_at_source() && !world.operator_ran;
    match (state.source, state.destination, state.to_do) {
        (_, _, ToDo::Nothing) => false,
        // It is not whole.
        (_, AtDestination::Holds, _) if world.may_switch() && world.lacks_memory => false,
        (AtSource::Paused, _, _) if (world.is_postcopy() || world.may_switch()) && runs_at_source => false,
        (_, _, ToDo::RunSource) if world.is_postcopy() && !does_not_run => false,
        (AtSource::Ended, AtDestination::Runs, ToDo::StartAgain) => has_exited && world.lacks_memory,
        (AtSource::HasIt | AtSource::Paused | AtSource::Unknown, AtDestination::Ended, _)
            if world.is_postcopy() || world.connects_qemus() =>
        {
            gone || world.destination == Destination::Failed
        }
        (AtSource::Ended, AtDestination::Ended, _) => has_exited && gone,
        (_, AtDestination::Ended, ToDo::StartAgain) => gone,
        (AtSource::Ended, AtDestination::None, _) => has_exited,
        (AtSource::Ended, AtDestination::Holds, ToDo::Restore) => {
            has_exited && world.destination == Destination::Stored
        }
        (AtSource::Ended, AtDestination::Unknown, ToDo::Restore) => {
            has_exited && world.destination != Destination::Stored
        }
        (AtSource::Paused, AtDestination::Holds, ToDo::RunSource) => world.destination == Destination::Stored,
        (AtSource::Ended, AtDestination::Holds, ToDo::RunDestination) => has_exited,
        (AtSource::Unknown, AtDestination::Holds, ToDo::LookAtSource) => {
            world.destination == Destination::Loaded || gone || world.operator_ran
        }
        // What is reported, and what its record has for a later towline, are the same.
        _ if is_paused_at_both(state) => does_not_run && towline.record <= Some(Decision::Acknowledge),
        (_, _, ToDo::ForgetRecord) => does_not_run,
        _ => true,
    }
}

/// A live guest runs, or is held where an operator was asked to look.
fn not_lost(world: &World) -> Result<(), String> {
    if !world.carried.is_live() || world.source == Source::Stored {
        return Ok(());
    }
    let at_source = !matches!(world.source, Source::Migrating | Source::Exited | Source::Stored);
    let at_destination =
        matches!(world.destination, Destination::Loaded | Destination::Running | Destination::Stored);
    let dead = world.source == Source::Exited
        && matches!(world.destination, Destination::Exited | Destination::Failed);
    if !at_source && !at_destination && !dead && world.destination != Destination::Loading {
        return Err("the guest is nowhere".into());
    }
    let only = world.towlines[0].expect("there is one");
    // The only end that is left and could run it, and its towline saw everything.
    let alone =
        world.towlines[1].is_none() && only.alive && only.request.destination == DestinationKind::Qemu;
    let runs_here = only.request.run != super::super::RunRequest::Pause;
    let held = world.source == Source::Exited && world.destination == Destination::Loaded;
    let lost = GuestState::new(AtSource::Ended, AtDestination::None, ToDo::StartAgain);
    let gave_up = only.outcome == Some(SwitchoverOutcome::Unresolved(lost));
    if alone && held && runs_here && gave_up && only.request.source == SourceKind::Qemu {
        return Err("the destination holds the whole guest, and it was abandoned".into());
    }
    Ok(())
}

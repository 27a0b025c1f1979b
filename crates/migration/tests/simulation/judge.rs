//! Invariants of both ends at the end of a run, after any fault.

use super::control::Verdict;
use super::scenario::Scenario;
use super::world::World;

/// Outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
    /// The guest is at its destination, and all parties know.
    Moved,
    /// The guest runs on at its source, since it wrote too fast.
    NotConverged,
    /// The guest runs on at its source, since something failed.
    Failed,
    /// The destination has the guest though the source does not know: it runs the guest on its own, and its
    /// message was lost (exit status 3).
    WordLost,
    /// Towline died between the destination's word and `cont`: both ends have it, paused.
    Paused,
    /// The source had ended, and the destination had everything.
    TakenOver,
    /// The process with the only complete copy was killed.
    Lost,
}

/// Judges a run that is over.
pub(crate) fn judge(world: &World, scenario: &Scenario) -> Result<Ending, String> {
    let World { source, destination, .. } = world;
    if destination.is_loaded {
        same_guest(world)?;
    }
    if destination.running && !destination.is_loaded {
        return Err("a guest runs that has not arrived".into());
    }
    if source.outcome == Some(Ok(())) && scenario.return_path && !destination.is_loaded {
        return Err("the source believes that its guest arrived, and it did not".into());
    }
    if source.is_alive
        && matches!(source.outcome, Some(Err(_)))
        && !source.guest.running
        && !scenario.is_image
    {
        return Err("a guest that was not moved does not run on".into());
    }
    let ending = match &world.control {
        Some(control) => match control.verdict {
            Some(verdict) => with_verdict(world, verdict),
            None => without_towline(world),
        },
        None => by_itself(world, scenario),
    }?;
    let is_whole = scenario.faults.is_empty()
        && scenario.links.iter().all(|(a, b, _)| a.cut_at.is_none() && b.cut_at.is_none());
    match (is_whole, ending) {
        (true, Ending::Moved) => Ok(ending),
        (true, Ending::NotConverged) if scenario.gives_up => Ok(ending),
        (true, _) => Err(format!("nothing was broken, and yet: {ending:?}, {:?}", source.outcome)),
        (false, _) => Ok(ending),
    }
}

/// Memory and device state at the destination are the source's when it stopped.
fn same_guest(world: &World) -> Result<(), String> {
    let (memory, serial, _) =
        world.source.stopped.as_ref().ok_or("it arrived before its source was stopped")?;
    if world.destination.serial != Some(*serial) {
        return Err(format!("device state {:?}, expected {serial}", world.destination.serial));
    }
    let differs = memory.iter().zip(&world.destination.memory).position(|(a, b)| a != b);
    match differs {
        None => Ok(()),
        Some(page) => {
            let (expected, found) = (memory[page], world.destination.memory[page]);
            Err(format!("page {page} has {found:?}, expected {expected:?}"))
        }
    }
}

/// Two engines without anybody above them.
fn by_itself(world: &World, scenario: &Scenario) -> Result<Ending, String> {
    let World { source, destination, .. } = world;
    let arrived = destination.outcome == Some(Ok(()));
    if arrived && destination.is_alive && !destination.running {
        return Err("a guest that arrived does not run".into());
    }
    let stays = source.is_alive && (source.guest.running || scenario.is_image);
    match (&source.outcome, arrived) {
        _ if !source.is_alive && arrived => Ok(Ending::TakenOver),
        _ if !source.is_alive => Ok(Ending::Lost),
        (Some(Ok(())), true) => match source.guest.running {
            true => Err("a guest that was moved runs at its source".into()),
            false if destination.is_alive => Ok(Ending::Moved),
            false => Ok(Ending::Lost),
        },
        // Without a return path a failure is not reported, and an image stays complete.
        (Some(Ok(())), false) if !scenario.return_path => Ok(Ending::Failed),
        (Some(Ok(())), false) if !destination.is_alive => Ok(Ending::Lost),
        (Some(Err(_)), true) if destination.has_said_so && stays => Ok(Ending::WordLost),
        (Some(Err(reason)), false) if stays => Ok(failed(reason)),
        (outcome, _) => Err(format!("{outcome:?} and {:?}", destination.outcome)),
    }
}

fn failed(reason: &str) -> Ending {
    if reason.starts_with("the guest writes") { Ending::NotConverged } else { Ending::Failed }
}

fn with_verdict(world: &World, verdict: Verdict) -> Result<Ending, String> {
    let World { source, destination, control, .. } = world;
    let has_run_it = control.as_ref().is_some_and(|control| control.has_run_it);
    match verdict {
        Verdict::Done if !has_run_it => Err("done, but the guest was not started".into()),
        Verdict::Done if source.guest.running => Err("done, and the source runs".into()),
        Verdict::Done if !destination.is_alive => Ok(Ending::Lost),
        Verdict::Done if source.is_alive => Ok(Ending::Moved),
        Verdict::Done => Ok(Ending::TakenOver),
        Verdict::Safe if has_run_it => Err("safe at the source, and the destination was run".into()),
        Verdict::Safe if source.is_alive && !source.guest.running => Err("safe, and it does not run".into()),
        Verdict::Safe if !source.is_alive => Ok(Ending::Lost),
        Verdict::Safe => Ok(match &source.outcome {
            Some(Err(reason)) => failed(reason),
            _ => Ending::Failed,
        }),
        Verdict::LookAt if source.is_alive => Err("an operator has to look, but the source has it".into()),
        Verdict::LookAt if destination.is_alive && destination.is_loaded => {
            Err("an operator has to look, but the destination has it".into())
        }
        Verdict::LookAt => Ok(Ending::Lost),
    }
}

/// Towline was killed: `cont` is never sent, and no guest is lost.
fn without_towline(world: &World) -> Result<Ending, String> {
    let World { source, destination, .. } = world;
    let whole = destination.is_alive && destination.is_loaded;
    match &source.outcome {
        _ if destination.running => Ok(Ending::Moved),
        _ if !source.is_alive => Ok(if whole { Ending::Paused } else { Ending::Lost }),
        Some(Ok(())) => Ok(Ending::Paused),
        Some(Err(reason)) if source.guest.running => Ok(failed(reason)),
        outcome => Err(format!("towline died, and its source is {outcome:?}")),
    }
}

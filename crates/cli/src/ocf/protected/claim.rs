//! `towline ocf arbitrate protected`: the program of `--arbiter pacemaker`.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use super::super::refusal::{Code, Outcome, Refusal, answer};
use super::cluster;
use super::instance::Instance;

/// Time for the cluster to start an instance that a claim has had stopped.
const STARTED_WITHIN: Duration = Duration::from_secs(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Promotion score of a host that has the guest's state, and has lost its host.
const SCORE: u32 = 50;
/// Claimant of what no claimant here can have any more.
const NONE: &str = "00000000000000000000000000000000";

/// Answers a claim, by the contract of an arbiter's program.
pub(super) fn arbitrate() -> Outcome {
    let instance = Instance::of(variable("TOWLINE_GUEST")?.parse()?);
    let found = match variable("TOWLINE_ACTION")?.as_str() {
        "newest" => newest(&instance)?.to_string(),
        "claim" => {
            let generation = variable("TOWLINE_GENERATION")?.parse()?;
            claim(&instance, generation, &variable("TOWLINE_CLAIMANT")?, &variable("TOWLINE_STAKE")?)?
        }
        other => {
            let text = format!("TOWLINE_ACTION={other}: expected newest or claim");
            return Err(Refusal::new(Code::Arguments, text));
        }
    };
    answer(&found);
    Ok(())
}

fn variable(name: &str) -> Result<String, Refusal> {
    std::env::var(name).map_err(|error| Refusal::new(Code::Arguments, format!("{name}: {error}")))
}

fn newest(instance: &Instance) -> Result<u64, Refusal> {
    let deadline = Instant::now() + STARTED_WITHIN;
    while !instance.is_started() {
        if Instant::now() >= deadline {
            let guest = &instance.guest;
            return Err(Refusal::failed(format!("the cluster has not started resource {guest} here")));
        }
        thread::sleep(LOOK_INTERVAL);
    }
    cluster::recorded(&instance.guest)
}

/// Returns the claimant that has this generation on this host.
fn claim(instance: &Instance, generation: u64, claimant: &str, stake: &str) -> Result<String, Refusal> {
    if !instance.is_started() {
        // What there was to win was ended with it.
        return Ok(NONE.into());
    }
    let path = instance.claim_path(generation);
    if !path.is_symlink() {
        match stake {
            "copy" => check_copy(instance)?,
            "guest" => {
                if instance.qemu()?.is_none() && !instance.is_promoted() {
                    // It was killed by a demotion.
                    return Ok(NONE.into());
                }
                cluster::check_authority()?;
                let others = cluster::Others::find(&instance.guest)?;
                // One that has just died goes on elsewhere.
                check_guest(instance)?;
                others.stop()?;
            }
            // It goes on nowhere, and needs no promotion.
            "last-output" => {
                cluster::check_authority()?;
                cluster::Others::find(&instance.guest)?.stop()?;
            }
            other => {
                let text = format!("TOWLINE_STAKE={other}: expected guest, copy or last-output");
                return Err(Refusal::new(Code::Arguments, text));
            }
        }
        cluster::record(&instance.guest, generation)?;
        match symlink(claimant, &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => {}
        }
    }
    Ok(fs::read_link(&path)?.to_string_lossy().into_owned())
}

/// Refuses a guest that a demotion would not find, or one whose host is not promoted.
fn check_guest(instance: &Instance) -> Outcome {
    let guest = &instance.guest;
    if instance.qemu()?.is_none() {
        let text =
            format!("guest {guest} is not here; start it by that name, as by towline run --name {guest}");
        return Err(Refusal::failed(text));
    }
    check_promoted(instance)
}

/// Lets the cluster promote a host that can go on with the guest.
fn check_copy(instance: &Instance) -> Outcome {
    if !instance.is_promoted() {
        cluster::set_score(&instance.guest, Some(SCORE))?;
    }
    cluster::check_authority()?;
    check_promoted(instance)
}

fn check_promoted(instance: &Instance) -> Outcome {
    match instance.is_promoted() {
        true => Ok(()),
        false => {
            Err(Refusal::failed(format!("the cluster has not promoted {} on this host", instance.guest)))
        }
    }
}

//! `towline ocf arbitrate protected`: the program of `--arbiter pacemaker`.

use std::thread;
use std::time::{Duration, Instant};

use super::super::refusal::{Code, Outcome, Refusal, answer};
use super::cluster::{self, Cluster, Recorded};
use super::instance::{Instance, STARTED};

/// Time for the cluster to start the instance of this host, or to promote it.
const READY_WITHIN: Duration = Duration::from_secs(15);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which a host claims with a copy while another one is promoted, whose guest is taken for hanging then.
const HANGS_AFTER: Duration = Duration::from_secs(10);
/// Promotion score of a host that has the guest's state, and has lost its host.
const SCORE: u32 = 1;
/// Claimant of what no claimant here can have any more.
const NONE: &str = "00000000000000000000000000000000";

/// Answers a claim, by the contract of an arbiter's program.
pub(super) fn arbitrate() -> Outcome {
    let instance = Instance::of(variable("TOWLINE_GUEST")?.parse()?);
    let found = match variable("TOWLINE_ACTION")?.as_str() {
        "newest" => {
            let is_ready = await_ready(|| Ok(instance.has(STARTED)))?;
            if !is_ready {
                let guest = &instance.guest;
                let text = format!("the cluster has not started resource {guest} on this host; see crm_mon");
                return Err(Refusal::failed(text));
            }
            Recorded::read(&instance.guest)?.generation.to_string()
        }
        "claim" => {
            let generation = variable("TOWLINE_GENERATION")?.parse()?;
            let claimed = Recorded { generation, claimant: variable("TOWLINE_CLAIMANT")? };
            claim(&instance, claimed, &variable("TOWLINE_STAKE")?)?
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

/// Waits for a state of this host. Returns whether it has it.
fn await_ready(is_ready: impl Fn() -> Result<bool, Refusal>) -> Result<bool, Refusal> {
    let deadline = Instant::now() + READY_WITHIN;
    while !is_ready()? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(LOOK_INTERVAL);
    }
    Ok(true)
}

/// Returns the claimant that has this generation, or a higher one.
fn claim(instance: &Instance, claimed: Recorded, stake: &str) -> Result<String, Refusal> {
    if stake == "guest" {
        // A guest that was just started is promoted soon.
        await_ready(|| Ok(instance.is_promoted() || !instance.has(STARTED) || instance.qemu()?.is_none()))?;
    }
    if !instance.has(STARTED) {
        // What there was to win was ended with it.
        return Ok(NONE.into());
    }
    // It keeps a demotion, and a stop, from being done meanwhile.
    let _claiming = instance.claiming()?;
    if !instance.has(STARTED) {
        return Ok(NONE.into());
    }
    let recorded = Recorded::read(&instance.guest)?;
    if recorded.generation >= claimed.generation {
        let is_ours = recorded == claimed;
        return Ok(if is_ours { claimed.claimant } else { NONE.into() });
    }
    let cluster = Cluster::of(&instance.guest, cluster::soon())?;
    match stake {
        "copy" => check_copy(instance, &cluster)?,
        "guest" if instance.qemu()?.is_none() && !instance.is_promoted() => {
            // It was killed by a demotion.
            return Ok(NONE.into());
        }
        "guest" => cluster.stop_others(|cluster, status| {
            if cluster.own(status).is_none_or(|own| own.is_failed) {
                // Both would be ended.
                return Err(Refusal::failed(
                    "the cluster is about to recover the resource on this host; see crm_mon",
                ));
            }
            // One that has just died goes on elsewhere.
            check_guest(instance)
        })?,
        // It goes on nowhere, and needs no promotion.
        "last-output" => {
            cluster.stop_others(|cluster, status| match cluster.is_promoted_elsewhere(status) {
                true => Err(Refusal::failed("the cluster has promoted another host; see crm_mon")),
                false => Ok(()),
            })?;
        }
        other => {
            let text = format!("TOWLINE_STAKE={other}: expected guest, copy or last-output");
            return Err(Refusal::new(Code::Arguments, text));
        }
    }
    if Recorded::read(&instance.guest)?.generation >= claimed.generation {
        return Ok(NONE.into());
    }
    claimed.write(&instance.guest)?;
    Ok(claimed.claimant)
}

/// Refuses a guest that a demotion would not find, or one whose host is not promoted.
fn check_guest(instance: &Instance) -> Outcome {
    if instance.qemu()?.is_none() {
        let guest = &instance.guest;
        let text =
            format!("guest {guest} is not here; start it by that name, as by towline run --name {guest}");
        return Err(Refusal::failed(text));
    }
    check_promoted(instance)
}

/// Lets the cluster promote a host that can go on with the guest.
fn check_copy(instance: &Instance, cluster: &Cluster<'_>) -> Outcome {
    let status = cluster.status()?;
    if !instance.is_promoted() {
        if !cluster.is_promoted_elsewhere(&status) {
            cluster::set_score(&instance.guest, Some(SCORE), &[], cluster::soon())?;
        } else if instance.has_claimed_for(HANGS_AFTER)? {
            // The guest's host would have had this copy ended by now.
            cluster.recover_promoted()?;
        }
    }
    check_promoted(instance)
}

fn check_promoted(instance: &Instance) -> Outcome {
    match instance.is_promoted() {
        true => Ok(()),
        false => Err(Refusal::failed(format!(
            "the cluster has not promoted {} on this host; see crm_mon",
            instance.guest
        ))),
    }
}

//! `ocf:towline:protected`: Pacemaker decides which of two hosts goes on with a guest that `towline protect` protects.
//!
//! ```text
//!   instance of the guest's host   started ─ promote ─► promoted ─ demote: its QEMU is killed ─► started
//!   instance of the other host     started ─ stop: the QEMU that waits is killed ─► stopped
//! ```
//! A claim is answered by what the cluster has done, and by nothing that it has only written down: its configuration is no compare-and-set.
//!
//! | claimant | has the generation once |
//! |---|---|
//! | the guest's host | it is promoted, and the instances of all other hosts were stopped, or their hosts fenced: no QEMU waits there any more |
//! | the other host | it is promoted, which the cluster does after the guest's host was demoted, stopped or fenced: the guest is dead there |
//!
//! A host that waits has no promotion score until it claims; that is when it has lost the guest's host, and its QEMU
//! has loaded the last checkpoint. The roles are files, which a full file system does not keep from being removed.

mod claim;
mod cluster;
mod instance;
mod status;

use std::thread;
use std::time::{Duration, Instant};

use super::parameters::{self, AgentAbout, Parameter, TIMEOUT_MIN};
use super::refusal::{Code, Outcome, Refusal, answer, say};
use cluster::Cluster;
use instance::{Instance, PROMOTED, SCORES_LEFT, STARTED};

/// Promotion score of a host on which the guest runs: above all preferences of users, which are added to it, and below Pacemaker's infinity.
const SCORE: u32 = 900_000;
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
const PARAMETERS: [Parameter; 1] =
    [parameters::fixed("name", None, "Name of the guest, the same on all hosts; that of the resource")];
const ACTIONS: [(&str, u32); 6] =
    [("start", 20), ("stop", 30), ("promote", 20), ("demote", 30), ("meta-data", 10), ("validate-all", 20)];
const PROTECTED: AgentAbout = AgentAbout {
    name: "protected",
    short: "Host that goes on with a protected QEMU guest",
    long: "Decides which host goes on with a guest that `towline protect --arbiter pacemaker` protects. A promotable clone, whose promoted \
           instance is that of the guest's host. See protect.md in towline's documentation.",
    parameters: &PARAMETERS,
    actions: &ACTIONS,
    monitored: &[("Promoted", 1), ("Unpromoted", 10)],
};

/// Does an action of the agent.
pub(super) fn act(action: &str) -> Outcome {
    match action {
        "meta-data" => {
            answer(&parameters::meta_data(&PROTECTED));
            return Ok(());
        }
        "arbitrate" => return claim::arbitrate(),
        _ => {}
    }
    let begun = Instant::now();
    let instance = match (parameters::name(), action) {
        (Ok(name), _) => Instance::of(name),
        // Nothing was started without a name, and a host is not fenced for one.
        (Err(_), "stop") => return Ok(()),
        (Err(_), "monitor" | "status") => return Err(Refusal::NOT_RUNNING),
        (Err(refusal), _) => return Err(refusal),
    };
    let left = || parameters::timeout().saturating_sub(begun.elapsed()).max(TIMEOUT_MIN);
    match action {
        "start" => start(&instance, left),
        "stop" => stop(&instance, left),
        "promote" => promote(&instance, left() / 4),
        "demote" => demote(&instance, left),
        "monitor" | "status" => monitor(&instance, left),
        "validate-all" => Ok(()),
        _ => Err(Refusal::new(Code::Unimplemented, format!("no action {action:?}"))),
    }
}

fn start(instance: &Instance, left: impl Fn() -> Duration) -> Outcome {
    // Left by a cluster that ended without its resources.
    instance.remove(PROMOTED)?;
    let mark = instance.new_mark()?;
    // One that fails is not tried again by the cluster.
    within_time(left() / 2, |by| cluster::mark_start(&instance.guest, &mark, by))?;
    instance.set_started()?;
    set_score(instance, left() / 4);
    Ok(())
}

/// Ends the QEMU that waits, or a guest whose demotion has failed.
fn stop(instance: &Instance, left: impl Fn() -> Duration) -> Outcome {
    instance.remove(PROMOTED)?;
    instance.await_claims(left() / 2)?;
    instance.kill(left())?;
    instance.remove(STARTED)?;
    // An instance that is not started is not promoted either, and a claim that does not see the mark is made again.
    let by = Instant::now() + left() / 4;
    let _ = cluster::set_score(&instance.guest, None, &[], by);
    let _ = instance.new_mark().map(|mark| cluster::mark_start(&instance.guest, &mark, by));
    Ok(())
}

fn promote(instance: &Instance, within: Duration) -> Outcome {
    if instance.qemu()?.is_none() {
        return Err(Refusal::failed(format!("guest {} is not here", instance.guest)));
    }
    instance.set_promoted()?;
    // A promotion that fails would have the copy here ended.
    if let Err(refusal) = within_time(within, |by| take_scores(instance, by)) {
        say(&format!("scores of other hosts are not removed: {}", refusal.reason.unwrap_or_default()));
    }
    Ok(())
}

/// Has this host alone preferred for the guest: one that has died would be, once it is back.
fn take_scores(instance: &Instance, by: Instant) -> Outcome {
    cluster::set_score(&instance.guest, Some(SCORE), &[], by)?;
    Cluster::of(&instance.guest, by)?.take_scores(by)?;
    Ok(instance.remove(SCORES_LEFT)?)
}

/// Does something until it succeeds, for this time; `action` gets its end.
fn within_time(within: Duration, action: impl Fn(Instant) -> Outcome) -> Outcome {
    let by = Instant::now() + within;
    loop {
        match action(by) {
            Err(_) if Instant::now() + RETRY_INTERVAL < by => thread::sleep(RETRY_INTERVAL),
            done => return done,
        }
    }
}

/// Kills the guest, so that the other host goes on with it: `quit` would be an end, which ends the protection too.
fn demote(instance: &Instance, left: impl Fn() -> Duration) -> Outcome {
    instance.remove(PROMOTED)?;
    instance.await_claims(left() / 2)?;
    instance.kill(left())
}

fn monitor(instance: &Instance, left: impl Fn() -> Duration) -> Outcome {
    if !instance.has(STARTED) {
        return Err(Refusal::NOT_RUNNING);
    }
    set_score(instance, left() / 4);
    let by = Instant::now() + left() / 4;
    if !instance.is_promoted() {
        // The cluster forgets it when some of its processes start again.
        let _ = instance.mark().map(|mark| cluster::mark_start(&instance.guest, &mark, by));
    } else if instance.has(SCORES_LEFT) {
        let _ = take_scores(instance, by);
    }
    // One whose state cannot be read may run.
    let is_here = !matches!(instance.qemu(), Ok(None));
    match instance.is_promoted() {
        false => Ok(()),
        true if is_here => Err(Refusal::PROMOTED),
        true => Err(Refusal::new(Code::FailedPromoted, format!("guest {} has ended", instance.guest))),
    }
}

/// Sets the promotion score of a host that has the guest, and removes that of one that has nothing. One that waits sets it when it claims.
///
/// A guest is not killed because the cluster does not take its score for a while.
fn set_score(instance: &Instance, within: Duration) {
    let by = Instant::now() + within;
    let set = instance.qemu().and_then(|qemu| match qemu {
        Some(qemu) if qemu.is_waiting() => Ok(()),
        qemu => cluster::set_score(&instance.guest, qemu.map(|_| SCORE), &[], by),
    });
    if let Err(refusal) = set {
        say(&format!("the promotion score is not set: {}", refusal.reason.unwrap_or_default()));
    }
}

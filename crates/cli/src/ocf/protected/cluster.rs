//! The cluster, by Pacemaker's own commands.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use towline_launch::GuestName;

use super::super::refusal::{Outcome, Refusal};

/// Time in which the instances of other hosts are to be stopped in one claim. Their hosts may have to be fenced first, in further ones.
const STOPPED_WITHIN: Duration = Duration::from_secs(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Runs a command of Pacemaker. Returns its output.
fn output(words: &[&str]) -> Result<String, Refusal> {
    let failed = |reason: &dyn std::fmt::Display| {
        Refusal::failed(format!("{}: {reason}; is this host a member of the cluster?", words.join(" ")))
    };
    let ran = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| failed(&error))?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        return Err(failed(&format_args!("{}: {}", ran.status, said.trim())));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned())
}

/// Sets the promotion score of this host, or removes it.
pub(super) fn set_score(guest: &GuestName, score: Option<u32>) -> Outcome {
    let (promotion, value) = (format!("--promotion={guest}"), score.map(|score| score.to_string()));
    let change = match &value {
        Some(value) => ["--update", value.as_str()],
        None => ["--delete", "--quiet"],
    };
    output(&[&["crm_attribute", &promotion, "--lifetime=reboot"], &change[..]].concat()).map(drop)
}

/// Refuses what Pacemaker says of other hosts where that may not be true: without a quorum, or without fencing.
pub(super) fn check_authority() -> Outcome {
    if output(&["crm_node", "--quorum"])? != "1" {
        return Err(Refusal::failed("this part of the cluster has no quorum"));
    }
    let option = ["--type=crm_config", "--name=stonith-enabled", "--query", "--quiet", "--default=true"];
    match output(&[&["crm_attribute"], &option[..]].concat())?.as_str() {
        "true" | "yes" | "on" | "1" => Ok(()),
        found => Err(Refusal::failed(format!(
            "stonith-enabled={found}: without fencing, a host that is cut off would run the guest too; enable it"
        ))),
    }
}

/// An instance of another host, and the start of it that is to have ended.
struct Other {
    node: String,
    start: String,
}

/// Has the instances of all other hosts stopped, by having the cluster recover them: it starts them again.
///
/// Nothing is written down that could have this effect later, as a constraint could, which a part of the cluster without quorum keeps until it is
/// joined to the rest.
///
/// # Errors
/// One of them is not known to be stopped.
pub(super) fn stop_others(guest: &GuestName) -> Outcome {
    let (own, deadline) = (output(&["crm_node", "--name"])?, Instant::now() + STOPPED_WITHIN);
    let mut others = Vec::new();
    for node in instances(guest)?.into_iter().filter(|node| *node != own) {
        others.push(Other { start: start_of(guest, &node)?, node });
    }
    let mut failure = String::new();
    for Other { node, .. } in &others {
        let fail = ["crm_resource", "--fail", "--resource", guest.as_str(), "--node", node];
        // That of a host which is about to be fenced cannot be.
        if let Err(refusal) = output(&fail) {
            failure = refusal.reason.unwrap_or_default();
        }
    }
    loop {
        let now = instances(guest)?;
        let mut still = Vec::new();
        for other in others {
            if now.contains(&other.node) && start_of(guest, &other.node)? == other.start {
                still.push(other);
            }
        }
        others = still;
        if others.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let nodes: Vec<_> = others.iter().map(|other| other.node.as_str()).collect();
            let text = format!("the cluster has not stopped {guest} on {}, or fenced that", nodes.join(", "));
            return Err(Refusal::failed(if failure.is_empty() {
                text
            } else {
                format!("{text}; {failure}")
            }));
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Marks a start of the instance of this host.
pub(super) fn mark_start(guest: &GuestName) -> Outcome {
    let value = format!("--update={:016x}", fastrand::u64(..));
    output(&["crm_attribute", "--lifetime=reboot", &start_name(guest), &value]).map(drop)
}

/// The last start of the instance of a host.
fn start_of(guest: &GuestName, node: &str) -> Result<String, Refusal> {
    let query =
        ["crm_attribute", "--lifetime=reboot", "--query", "--quiet", "--default=none", "--node", node];
    output(&[&query[..], &[&start_name(guest)]].concat())
}

fn start_name(guest: &GuestName) -> String {
    format!("--name=towline-start-{guest}")
}

/// Hosts on which the resource has an instance that runs, or may run.
fn instances(guest: &GuestName) -> Result<Vec<String>, Refusal> {
    let located = output(&["crm_resource", "--locate", "--quiet", "--resource", guest.as_str()])?;
    Ok(located.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// Returns true if the cluster has promoted the instance of another host.
pub(super) fn is_promoted_elsewhere(guest: &GuestName) -> Result<bool, Refusal> {
    let here = format!(" {} Promoted", output(&["crm_node", "--name"])?);
    let located = output(&["crm_resource", "--locate", "--resource", guest.as_str()])?;
    let is_promoted = |line: &str| line.trim_end().ends_with(" Promoted") && !line.contains(&here);
    Ok(located.lines().any(is_promoted))
}

/// The highest generation of the guest that was recorded in the cluster; 0 for none.
pub(super) fn recorded(guest: &GuestName) -> Result<u64, Refusal> {
    let name = format!("--name={}", property(guest));
    let found = output(&["crm_attribute", "--type=crm_config", &name, "--query", "--quiet", "--default=0"])?;
    found
        .parse()
        .map_err(|_| Refusal::failed(format!("property {}: {found:?} is no number", property(guest))))
}

/// Records a generation of the guest, so that another host can see that it is in the same cluster.
pub(super) fn record(guest: &GuestName, generation: u64) -> Outcome {
    let (name, value) = (format!("--name={}", property(guest)), format!("--update={generation}"));
    output(&["crm_attribute", "--type=crm_config", &name, &value]).map(drop)
}

fn property(guest: &GuestName) -> String {
    format!("towline-generation-{guest}")
}

//! The cluster, by Pacemaker's own commands.

use std::process::{Child, Command, Stdio};
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

/// Instances of other hosts that run, or may run.
pub(super) struct Others<'a> {
    guest: &'a GuestName,
    others: Vec<Other>,
}

/// An instance of another host, and the start of it that is to have ended.
struct Other {
    node: String,
    start: String,
}

/// A command that waits for a host which does not answer.
struct Request(Child);

impl Drop for Request {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl<'a> Others<'a> {
    pub(super) fn find(guest: &'a GuestName) -> Result<Self, Refusal> {
        let own = output(&["crm_node", "--name"])?;
        let others = instances(guest)?.into_iter().filter(|node| *node != own);
        let other = |node: String| Ok(Other { start: start_of(guest, &node)?, node });
        Ok(Self { guest, others: others.map(other).collect::<Result<_, Refusal>>()? })
    }

    /// Has them stopped, by having the cluster recover them: it starts them again.
    ///
    /// Nothing is written down that could have this effect later, as a constraint could, which a part of the cluster without quorum keeps
    /// until it is joined to the rest.
    ///
    /// # Errors
    /// One of them is not known to be stopped.
    pub(super) fn stop(mut self) -> Outcome {
        let _requests = self.others.iter().map(|other| self.recover(other)).collect::<Result<Vec<_>, _>>()?;
        let deadline = Instant::now() + STOPPED_WITHIN;
        while let Some(Other { node, start }) = self.others.last() {
            if !instances(self.guest)?.contains(node) || start_of(self.guest, node)? != *start {
                self.others.pop();
            } else if Instant::now() >= deadline {
                let text = format!("the cluster has not stopped {} on {node}, or fenced that", self.guest);
                return Err(Refusal::failed(text));
            } else {
                thread::sleep(LOOK_INTERVAL);
            }
        }
        Ok(())
    }

    fn recover(&self, other: &Other) -> Result<Request, Refusal> {
        let mut command = Command::new("crm_resource");
        command.args(["--fail", "--resource", self.guest.as_str(), "--node", &other.node]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Request(command.spawn()?))
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

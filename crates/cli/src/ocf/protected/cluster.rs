//! The cluster, by Pacemaker's own commands.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use towline_launch::GuestName;

use super::super::refusal::{Outcome, Refusal};
use super::status::{Node, Status, start_name};

/// Longest run of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(8);
/// Time in which the instances of other hosts are to be stopped in one claim. Their hosts may have to be fenced first, in further ones.
const STOPPED_WITHIN: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which they are to be recovered once more.
const ASK_INTERVAL: Duration = Duration::from_secs(2);
const STATUS: [&str; 4] =
    ["crm_mon", "--one-shot", "--output-as=xml", "--include=none,nodes,resources,attributes,dc,options"];

/// Runs a command of Pacemaker for a bounded time, and not after its action of the agent: the cluster would act in between.
fn run(words: &[&str], by: Instant) -> io::Result<Output> {
    let left = by.saturating_duration_since(Instant::now()).min(COMMAND_TIMEOUT);
    if left.is_zero() {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the cluster has taken all of the time for others",
        ));
    }
    let mut command = Command::new("timeout");
    command.args(["--foreground", &left.as_secs_f32().to_string()]).args(words).stdin(Stdio::null()).output()
}

/// End of a command that begins now, in an action that is repeated.
pub(super) fn soon() -> Instant {
    Instant::now() + COMMAND_TIMEOUT
}

/// Output of a command of Pacemaker, which has succeeded.
fn output(words: &[&str], by: Instant) -> Result<String, Refusal> {
    let failed = |reason: &dyn std::fmt::Display| {
        Refusal::failed(format!("{}: {reason}; see that Pacemaker runs on this host", words.join(" ")))
    };
    let ran = run(words, by).map_err(|error| failed(&error))?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        return Err(failed(&format_args!("{}: {}", ran.status, said.trim())));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).trim().to_owned())
}

/// Sets the promotion score of this host or of another one (`--node NAME`), or removes it. It does not vanish with the host's membership: it may
/// only be cut off for a moment.
pub(super) fn set_score(guest: &GuestName, score: Option<u32>, of: &[&str], by: Instant) -> Outcome {
    let (promotion, value) = (format!("--promotion={guest}"), score.map(|score| score.to_string()));
    let change = match &value {
        Some(value) => ["--update", value.as_str()],
        None => ["--delete", "--quiet"],
    };
    output(&[&["crm_attribute", &promotion, "--lifetime=forever"], &change[..], of].concat(), by).map(drop)
}

/// Marks a start, or a stop, of the instance of this host.
pub(super) fn mark_start(guest: &GuestName, mark: &str, by: Instant) -> Outcome {
    let (name, value) = (format!("--name={}", start_name(guest)), format!("--update={mark}"));
    output(&["crm_attribute", "--lifetime=reboot", &name, &value], by).map(drop)
}

/// The cluster as this host sees it.
pub(super) struct Cluster<'a> {
    guest: &'a GuestName,
    own: String,
}

/// A request that waits for a host which may not answer.
struct Request(Child);

impl Drop for Request {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An instance on another host, which must stop.
struct Other {
    node: String,
    /// Mark of the start that is to end, if it is known.
    start: Option<String>,
    asked: Option<Instant>,
}

impl<'a> Cluster<'a> {
    pub(super) fn of(guest: &'a GuestName, by: Instant) -> Result<Self, Refusal> {
        Ok(Self { guest, own: output(&["crm_node", "--name"], by)? })
    }

    /// Its state, if what it says of other hosts can be relied on: with a quorum, and with fencing.
    pub(super) fn status(&self) -> Result<Status, Refusal> {
        self.status_by(soon())
    }

    fn status_by(&self, by: Instant) -> Result<Status, Refusal> {
        let status = Status::parse(&output(&STATUS, by)?, self.guest)
            .map_err(|reason| Refusal::failed(format!("the state of the cluster (crm_mon): {reason}")))?;
        if !status.fences {
            return Err(Refusal::failed(
                "stonith-enabled is not true: without fencing, a host that is cut off would run the guest too; enable it",
            ));
        }
        if !status.has_quorum {
            return Err(Refusal::failed(
                "this part of the cluster has no quorum; connect this host to the others again",
            ));
        }
        Ok(status)
    }

    /// This host.
    pub(super) fn own<'s>(&self, status: &'s Status) -> Option<&'s Node> {
        status.nodes.get(&self.own)
    }

    /// Hosts but this one.
    fn others<'s>(&self, status: &'s Status) -> impl Iterator<Item = (&'s String, &'s Node)> {
        let own = self.own.clone();
        status.nodes.iter().filter(move |(name, _)| **name != own)
    }

    /// Has the instances of all other hosts stopped, by having the cluster recover them: it starts them again. `may_ask` is called before each
    /// request, and may refuse.
    ///
    /// Nothing is written down that could have this effect later, as a constraint could, which a part of the cluster without quorum keeps until it
    /// is joined to the rest. That a host is not seen, or its instance not known, is no stop.
    ///
    /// # Errors
    /// One of them is not known to be stopped.
    pub(super) fn stop_others(&self, may_ask: impl Fn(&Self, &Status) -> Outcome) -> Outcome {
        let status = self.status()?;
        let mut others = Vec::new();
        for (name, node) in self.others(&status) {
            if !self.is_known_to_be_over(name, node)? {
                others.push(Other { node: name.clone(), start: node.start.clone(), asked: None });
            }
        }
        let mut requests = Vec::new();
        let deadline = Instant::now() + STOPPED_WITHIN;
        loop {
            let status = self.status()?;
            may_ask(self, &status)?;
            let mut left = Vec::new();
            for mut other in others {
                if !self.has_stopped(&other, &status)? {
                    // It may be the start before that.
                    let start = status.nodes.get(&other.node).and_then(|node| node.start.clone());
                    other.start = other.start.or(start);
                    left.push(other);
                }
            }
            others = left;
            let Some(Other { node, .. }) = others.first() else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(Refusal::failed(format!(
                    "the cluster has not stopped {} on {node}, or fenced that host; see crm_mon",
                    self.guest
                )));
            }
            for other in &mut others {
                let may_recover = status.nodes.get(&other.node).is_some_and(Node::can_be_recovered);
                if may_recover && other.asked.is_none_or(|asked| asked.elapsed() > ASK_INTERVAL) {
                    requests.push(self.recover(&other.node)?);
                    other.asked = Some(Instant::now());
                }
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns true if no instance runs on a host: it was seen there not to run, or the host is off.
    fn is_known_to_be_over(&self, name: &str, node: &Node) -> Result<bool, Refusal> {
        match (node.has_instance, node.is_online) {
            (true, _) => Ok(false),
            (false, _) if node.is_guest => Ok(true),
            (false, true) => self.has_history(name),
            (false, false) => Ok(!node.is_unclean),
        }
    }

    /// Returns true if an instance was stopped since it was to be recovered.
    fn has_stopped(&self, other: &Other, status: &Status) -> Result<bool, Refusal> {
        let Some(node) = status.nodes.get(&other.node) else { return Ok(false) };
        match (&other.start, &node.start) {
            (Some(before), Some(now)) if node.is_online => Ok(before != now),
            (Some(_), None) if node.is_online => Ok(false),
            _ => self.is_known_to_be_over(&other.node, node),
        }
    }

    /// Returns true if the cluster knows of a host whether the instance runs there: one that has just joined it was not asked yet.
    fn has_history(&self, node: &str) -> Result<bool, Refusal> {
        let path = format!(
            "//node_state[@uname='{node}']/lrm/lrm_resources/lrm_resource[@id='{}'][lrm_rsc_op][not(lrm_rsc_op[@op-status='-1'])]",
            self.guest
        );
        Ok(run(&["cibadmin", "--query", "--local", "--xpath", &path], soon())?.status.success())
    }

    /// Has the cluster recover the instance of a host.
    fn recover(&self, node: &str) -> Result<Request, Refusal> {
        let mut command = Command::new("crm_resource");
        command.args(["--fail", "--resource", self.guest.as_str(), "--node", node]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Request(command.spawn()?))
    }

    /// Returns true if another host is promoted, as far as is known, and may go on with its guest.
    pub(super) fn is_promoted_elsewhere(&self, status: &Status) -> bool {
        self.others(status).any(|(_, node)| node.is_promoted && !node.is_unclean)
    }

    /// Removes the promotion scores of all other hosts: this one has the guest.
    pub(super) fn take_scores(&self, by: Instant) -> Outcome {
        let status = self.status_by(by)?;
        let taken = self.others(&status).map(|(node, _)| set_score(self.guest, None, &["--node", node], by));
        taken.fold(Ok(()), Outcome::and)
    }

    /// Has the cluster recover the promoted instance of another host, whose guest does not go on.
    pub(super) fn recover_promoted(&self) -> Outcome {
        let status = self.status()?;
        if self.own(&status).is_none_or(|own| own.is_failed || own.is_changing) {
            // Both would be ended.
            return Ok(());
        }
        let mut others = self.others(&status);
        let promoted = others.find(|(_, node)| node.is_promoted && node.can_be_recovered());
        let Some((node, _)) = promoted else { return Ok(()) };
        let mut request = self.recover(node)?;
        let deadline = Instant::now() + STOPPED_WITHIN;
        while Instant::now() < deadline && request.0.try_wait()?.is_none() {
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

/// Generation of a guest that a claimant has, as it is recorded in the cluster.
#[derive(PartialEq, Eq)]
pub(super) struct Recorded {
    /// 0: none.
    pub(super) generation: u64,
    pub(super) claimant: String,
}

impl Recorded {
    pub(super) fn read(guest: &GuestName) -> Result<Self, Refusal> {
        let name = format!("--name={}", property(guest));
        let found = output(
            &["crm_attribute", "--type=crm_config", &name, "--query", "--quiet", "--default=0"],
            soon(),
        )?;
        let (generation, claimant) = found.split_once(' ').unwrap_or((&found, ""));
        let generation = generation.parse().map_err(|_| {
            let text = format!(
                "property {} of the cluster is {found:?}, expected a number and a claimant",
                property(guest)
            );
            Refusal::failed(text)
        })?;
        Ok(Self { generation, claimant: claimant.to_owned() })
    }

    pub(super) fn write(&self, guest: &GuestName) -> Outcome {
        let (name, value) = (
            format!("--name={}", property(guest)),
            format!("--update={} {}", self.generation, self.claimant),
        );
        output(&["crm_attribute", "--type=crm_config", &name, &value], soon()).map(drop)
    }
}

fn property(guest: &GuestName) -> String {
    format!("towline-generation-{guest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_cluster_makes_no_action_late() {
        let (begun, within) = (Instant::now(), Duration::from_millis(10));
        assert!(!run(&["sleep", "3600"], begun + within).unwrap().status.success());
        assert!(run(&["true"], begun).is_err(), "no time is left");
        assert!(begun.elapsed() < Duration::from_secs(600));
    }
}

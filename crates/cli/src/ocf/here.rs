//! The QEMU of a guest on this host, and the moves that it is an end of.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use towline_control::generations::{self, ManagedGuest};
use towline_control::moves::{
    self, Decision, Finding, ListedMove, MoveEnd, MoveRecord, OtherEnd, ResumeChoice, Role,
};
use towline_launch::{GuestName, RuntimeRoot};
use towline_qmp::commands::RunState;

use super::refusal::{Refusal, say};
use super::state::SharedState;
use crate::errors;
use crate::status::query;

/// Deadline of the monitor's greeting and of its reply, each.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checks for the end of another towline.
const OWNER_INTERVAL: Duration = Duration::from_millis(50);
/// Time in which a QEMU ends by itself.
const QUIT_TIMEOUT: Duration = Duration::from_secs(3);

/// State of a QEMU's guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GuestState {
    Runs,
    Paused,
    /// Another client has the monitor, or it does not answer.
    Held,
    /// It is not here yet, or has not begun to run.
    Arriving,
    /// It was sent.
    Sent,
    /// It has stopped on its own, in this state.
    Broken(String),
}

/// The guest's QEMU on this host.
pub(super) struct Here(pub(super) ManagedGuest);

/// Result of deciding a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decided {
    /// The guest is here.
    Here,
    /// It is elsewhere, or in an image.
    Elsewhere,
    /// It is not known, and this QEMU holds it, paused.
    Open,
}

impl Here {
    /// Finds it below this root, by its own state alone: that of another guest, as of another version of towline, would have the host fenced. A
    /// guest of this name that does not have the cluster's generations is another one.
    pub(super) fn find(
        root: &RuntimeRoot,
        name: &GuestName,
        shared: &SharedState,
    ) -> Result<Option<Self>, Refusal> {
        let managed = root.find(name)?.and_then(ManagedGuest::of);
        Ok(managed.filter(|guest| guest.directory() == shared.0).map(Self))
    }

    pub(super) fn qmp(&self) -> &Path {
        &self.0.guest.qmp
    }

    /// State of the guest: by its process first, so one that has ended is not waited for.
    pub(super) fn state(&self) -> GuestState {
        let Ok(status) = query(self.qmp(), MONITOR_TIMEOUT) else {
            // The agent that has started it brings the guest; one that has its generation is there.
            let is_elsewhere = || matches!(self.0.held(), Err(generations::Error::Taken(_)));
            return if self.is_agent_working() && is_elsewhere() {
                GuestState::Arriving
            } else {
                GuestState::Held
            };
        };
        let is = |states: &[RunState]| states.contains(&status.status);
        if status.running {
            GuestState::Runs
        } else if is(&[RunState::INMIGRATE, RunState::PRELAUNCH]) {
            GuestState::Arriving
        } else if is(&[RunState::POSTMIGRATE]) {
            GuestState::Sent
        } else if is(&[RunState::PAUSED, RunState::SUSPENDED]) {
            GuestState::Paused
        } else if is(&[RunState::FINISH_MIGRATE]) {
            // QEMU is about to decide that itself.
            GuestState::Held
        } else {
            GuestState::Broken(status.status.to_string())
        }
    }

    /// Returns true while the agent of another host's move works on it.
    fn is_agent_working(&self) -> bool {
        let words = std::fs::read(format!("/proc/{}/cmdline", self.0.guest.owner_pid)).unwrap_or_default();
        words.ends_with(b"\0agent\0")
    }

    /// Waits for the agent of another host's move, which ends once that host is silent.
    pub(super) fn await_agent(&self, within: Duration) {
        let deadline = Instant::now() + within;
        while self.is_agent_working() && Instant::now() < deadline {
            thread::sleep(OWNER_INTERVAL);
        }
    }

    /// Undecided moves that it is an end of.
    ///
    /// # Errors
    /// A record that cannot be read may be one of them.
    pub(super) fn undecided(&self) -> Result<Vec<ListedMove>, moves::Error> {
        let (mut listed, bad) = moves::list()?;
        listed.retain(|one| one.record.stage != Decision::Left && self.role(&one.record).is_some());
        bad.into_iter().find(|error| error.may_be_of(|end| self.is_it(end))).map_or(Ok(listed), Err)
    }

    fn is_it(&self, end: &MoveEnd) -> bool {
        matches!(end, MoveEnd::Qemu { pid: Some(pid), .. } if i64::from(*pid) == i64::from(self.0.guest.pid))
    }

    fn role(&self, record: &MoveRecord) -> Option<Role> {
        match (self.is_it(&record.source), self.is_it(&record.destination)) {
            (true, _) => Some(Role::Source),
            (_, true) => Some(Role::Destination),
            _ => None,
        }
    }

    /// Decides the interrupted moves of its guest by the QEMU, the record and the generations. `has_ended` is what the cluster knows of the
    /// other host when it starts a guest: that has stopped the guest, or is off. `has_disks`: the guest's memory may be older than they are.
    pub(super) fn decide(&self, shared: &SharedState, has_ended: bool, has_disks: bool) -> Decided {
        let undecided = match self.undecided() {
            Ok(undecided) => undecided,
            // A guest that runs, and has its generation, was decided.
            Err(_) if self.state() == GuestState::Runs && self.0.held().is_ok() => return Decided::Here,
            Err(error) => {
                say(&errors::worded(&error));
                return Decided::Open;
            }
        };
        for ListedMove { record, .. } in undecided {
            let (id, role) = (record.id.as_str(), self.role(&record).unwrap_or(Role::Destination));
            let decided = resumed(id, None, role).unwrap_or_else(|| match role {
                Role::Source => self.decide_source(id),
                _ => self.decide_destination(id, shared, has_ended, has_disks),
            });
            say(&format!("move {} at {:?}: {decided:?}", record.id, record.stage));
            if decided != Decided::Here {
                return decided;
            }
        }
        match self.state() {
            GuestState::Arriving | GuestState::Sent => Decided::Elsewhere,
            _ => Decided::Here,
        }
    }

    /// It was sent, and is continued here unless it has been there: the generation decides that.
    fn decide_source(&self, id: &str) -> Decided {
        let role = Role::Source;
        match self.0.held() {
            Ok(_) => resumed(id, Some(ResumeChoice::RunHere(Some(role))), role).unwrap_or(Decided::Open),
            Err(generations::Error::Taken(_)) => {
                resumed(id, Some(ResumeChoice::OtherEnd(OtherEnd::HasIt)), role).unwrap_or(Decided::Elsewhere)
            }
            Err(_) => Decided::Open,
        }
    }

    fn decide_destination(
        &self,
        id: &str,
        shared: &SharedState,
        has_ended: bool,
        has_disks: bool,
    ) -> Decided {
        let role = Role::Destination;
        let run_here = || resumed(id, Some(ResumeChoice::RunHere(Some(role))), role);
        let newest = match self.0.held() {
            // Taken because the source was done.
            Ok(_) => return run_here().unwrap_or(Decided::Open),
            Err(generations::Error::Taken(newest)) => newest.number,
            Err(_) => return Decided::Open,
        };
        // Whatever the source's host did later, it has saved or written.
        match shared.saved(newest).try_exists() {
            _ if has_disks || newest > self.0.after() => Decided::Elsewhere,
            Ok(true) => Decided::Elsewhere,
            Ok(false) if has_ended => run_here().unwrap_or(Decided::Open),
            Ok(false) | Err(_) => Decided::Open,
        }
    }

    /// Ends it, by force if it does not quit, and releases the generation of a guest that has not run. Returns true if it has ended.
    pub(super) fn end(&self, within: Duration) -> bool {
        let has_not_run = self.state() == GuestState::Arriving;
        let has_ended = self.0.guest.end(QUIT_TIMEOUT.min(within / 2), within);
        if has_ended
            && has_not_run
            && let Err(error) = self.0.withdraw()
        {
            say(&errors::worded(&error));
        }
        has_ended
    }
}

/// Has a move finished, whose end in this `role` is here; `None`: that leaves it open.
fn resumed(id: &str, choice: Option<ResumeChoice>, role: Role) -> Option<Decided> {
    match moves::resume(id, choice) {
        Ok(resumed) => match resumed.finding {
            Finding::AtDestination if role == Role::Destination => Some(Decided::Here),
            Finding::AtSource if role == Role::Source => Some(Decided::Here),
            Finding::Undecided { .. } => None,
            _ => Some(Decided::Elsewhere),
        },
        Err(error) => {
            say(&errors::worded(&error));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::DirBuilderExt as _;

    use towline_launch::{GuestGenerations, RunningGuest};

    use super::*;

    #[test]
    fn a_guest_whose_state_cannot_be_read_is_none_of_another_name() {
        let place = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::at(place.path().join("guests"));
        let state = |name: &str, json: &str| {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(root.path().join(name)).unwrap();
            fs::write(root.path().join(name).join("state.json"), json).unwrap();
        };
        let shared = SharedState(place.path().join("web"));
        let find = |name: &str| Here::find(&root, &name.parse().unwrap(), &shared);
        state("later", "{\"version\": 2}");
        let lock = fs::File::create(root.path().join("later/lock")).unwrap();
        lock.lock().unwrap();
        assert!(find("web").unwrap().is_none());
        assert!(find("later").is_err(), "it may run");
        let guest = |directory: &str| {
            let generations = GuestGenerations { directory: place.path().join(directory), after: 0 };
            let stat = fs::read_to_string("/proc/self/stat").unwrap();
            let guest = RunningGuest {
                name: "web".into(),
                pid: std::process::id(),
                start_time: stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap(),
                owner_pid: 1,
                is_detached: true,
                qmp: "/run/qmp.sock".into(),
                image: None,
                generations: Some(generations),
            };
            let mut json = serde_json::to_value(guest).unwrap();
            json["version"] = 1.into();
            json.to_string()
        };
        state("web", &guest("web"));
        assert!(find("web").unwrap().is_some());
        state("web", &guest("elsewhere"));
        assert!(find("web").unwrap().is_none());
    }
}

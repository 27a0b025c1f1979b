//! A cluster as the arbiter: what it has done with the instances of both hosts.

use super::Rule;
use super::steps::Step;
use super::world::{Guest, KeeperPhase, StandbyPhase, World};

/// Instances of the guest's resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Cluster {
    pub(super) here: Role,
    pub(super) there: Role,
    /// That of the other host is to be recovered for a claim.
    recovers: bool,
    /// It was stopped since.
    was_stopped: bool,
    /// The standby may be promoted.
    has_score: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// Its host was fenced.
    Off,
    Started,
    Promoted,
}

/// Step of the cluster, or of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterStep {
    /// The claim of the guest's host has the other instance recovered.
    Asks,
    Recovers,
    /// The claim of a standby that has loaded the guest.
    Scores,
    Promotes,
    /// The guest has ended.
    Demotes,
}

impl Cluster {
    pub(super) const NEW: Self = Self {
        here: Role::Promoted,
        there: Role::Started,
        recovers: false,
        was_stopped: false,
        has_score: false,
    };

    /// Returns true if the guest can be protected again.
    pub(super) fn can_protect(self) -> bool {
        self.here == Role::Promoted && self.there == Role::Started
    }
}

impl World {
    pub(super) fn cluster_steps(&self) -> Vec<Step> {
        let Some(cluster) = self.cluster else { return Vec::new() };
        let mut steps = Vec::new();
        let mut add = |possible: bool, step: ClusterStep| possible.then(|| steps.push(Step::Cluster(step)));
        let decides = matches!(self.keeper.phase, KeeperPhase::Decides(_)) && self.arbiter.answers;
        let is_open = !cluster.recovers && !cluster.was_stopped && cluster.there != Role::Off;
        let goes_on = cluster.here == Role::Promoted && !self.has_exited();
        add(decides && is_open && (goes_on || self.guest == Guest::ShutDown), ClusterStep::Asks);
        add(cluster.recovers && cluster.there != Role::Off, ClusterStep::Recovers);
        let waits =
            self.standbys.iter().any(|standby| standby.phase == StandbyPhase::Loaded && standby.has_qemu);
        let may_score = waits && cluster.there == Role::Started && !cluster.has_score;
        add(may_score && self.arbiter.answers, ClusterStep::Scores);
        let is_free = cluster.here != Role::Promoted && cluster.there == Role::Started;
        add(is_free && cluster.has_score && waits, ClusterStep::Promotes);
        add(cluster.here == Role::Promoted && self.has_exited(), ClusterStep::Demotes);
        steps
    }

    pub(super) fn step_cluster(&mut self, step: ClusterStep) {
        let Some(cluster) = &mut self.cluster else { return };
        match step {
            ClusterStep::Asks => cluster.recovers = true,
            ClusterStep::Recovers => self.stop_there(),
            ClusterStep::Scores => cluster.has_score = true,
            ClusterStep::Promotes => cluster.there = Role::Promoted,
            ClusterStep::Demotes => cluster.here = Role::Started,
        }
    }

    /// Has nothing wait there for an earlier guest.
    pub(super) fn clear_there(&mut self) {
        self.stop_there();
        self.cluster = self.cluster.map(|cluster| Cluster { was_stopped: false, ..cluster });
    }

    /// Stops the instance of the other host, and starts it again.
    fn stop_there(&mut self) {
        let kills = self.keeps(Rule::StopEndsWaiting);
        let Some(cluster) = &mut self.cluster else { return };
        (cluster.recovers, cluster.was_stopped, cluster.has_score) = (false, true, false);
        // A guest there is killed by the demotion before.
        let was_promoted = std::mem::replace(&mut cluster.there, Role::Started) == Role::Promoted;
        for standby in &mut self.standbys {
            use StandbyPhase::{Deciding, Ended, Grace, Loaded, Runs, Sends, Stands, Won};
            if was_promoted && matches!(standby.phase, Won | Runs | Sends) {
                standby.phase = Ended;
            }
            if kills && matches!(standby.phase, Stands | Grace | Deciding | Loaded) {
                standby.has_qemu = false;
            }
        }
    }

    /// Demotes the guest's host. What it has asked for is not done any more.
    pub(super) fn demote(&mut self) {
        let Some(cluster) = &mut self.cluster else { return };
        let asked = std::mem::take(&mut cluster.recovers);
        cluster.here = Role::Started;
        if self.keeps(Rule::DemotionKills) {
            self.kill_guest();
        }
        let recovers = asked && !self.keeps(Rule::RequestsAreNotKept);
        self.cluster = self.cluster.map(|cluster| Cluster { recovers, ..cluster });
    }

    /// Returns true if the standby is to be ended, for a claim of the guest's host.
    pub(super) fn is_to_stop(&self) -> bool {
        self.cluster.is_some_and(|cluster| cluster.recovers)
    }

    pub(super) fn fence_here(&mut self) {
        if let Some(cluster) = &mut self.cluster {
            (cluster.here, cluster.recovers) = (Role::Off, false);
        }
    }

    pub(super) fn fence_there(&mut self) {
        if let Some(cluster) = &mut self.cluster {
            cluster.there = Role::Off;
        }
    }

    /// Returns true if a claim of the guest's host is answered.
    pub(super) fn answers_keeper(&self) -> bool {
        self.cluster.is_none_or(|cluster| {
            let is_alone = cluster.was_stopped || cluster.there == Role::Off;
            let is_alone = is_alone || !self.keeps(Rule::ClusterStopsOthers);
            let is_demoted = cluster.here != Role::Promoted;
            match self.guest {
                Guest::ShutDown => is_alone,
                // There is nothing left to go on with.
                Guest::Dead => is_demoted,
                _ => is_alone && !is_demoted,
            }
        })
    }

    /// Returns true if the guest was killed by a demotion.
    pub(super) fn is_demoted(&self) -> bool {
        self.guest == Guest::Dead && self.cluster.is_some_and(|cluster| cluster.here != Role::Promoted)
    }

    /// Returns true if a claim of the standby is answered.
    pub(super) fn answers_standby(&self) -> bool {
        let is_promoted = |cluster: Cluster| cluster.there == Role::Promoted;
        self.cluster.is_none_or(is_promoted) || !self.keeps(Rule::ClusterPromotes)
    }
}

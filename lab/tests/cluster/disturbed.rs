//! Hosts, links and processes of a guest that a cluster protects are disturbed at random.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use towline_lab::expect::number;
use towline_lab::{kill, signal_if_any, wait_until};

use crate::configuration::wait_members;
use crate::hosts::{Cluster, Membership, NODES, WITHIN};
use crate::pacemaker::settle;
use crate::protected::{HOSTS, Protected, start_card};

/// Event that a guest survives at one of its hosts.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    /// All processes of a host die.
    Dies(Host),
    /// All processes of a host stand for a while.
    Freezes(Host),
    /// A host has no connection to the others for a while, but for that to the guest's network.
    IsCut(Host),
    /// Both hosts have none to each other for a while, but to the third.
    AreApart,
    /// A process of a host stands for a while, or dies.
    Stops(Part),
    Kills(Part),
    /// The guest's QEMU stands for ever.
    Hangs,
    /// The guest's host is to be empty.
    Standby,
}

/// A host of the cluster.
#[derive(Debug, Clone, Copy)]
enum Host {
    /// That of the guest.
    Guest,
    /// That of its copy.
    Copy,
    Third,
}

const HOSTS_ALL: [Host; 3] = [Host::Guest, Host::Copy, Host::Third];

/// A process of a protection, or of the cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    Keeper,
    Ferry,
    Guest,
    Agent,
    Waiting,
    /// Of Pacemaker, on the guest's host: it carries out actions, or has the agents' work done.
    Controller,
    Executor,
    Corosync,
}

const PARTS: [Part; 8] = [
    Part::Keeper,
    Part::Ferry,
    Part::Guest,
    Part::Agent,
    Part::Waiting,
    Part::Controller,
    Part::Executor,
    Part::Corosync,
];
/// Those whose death the protection survives.
const MORTAL: [Part; 4] = [Part::Ferry, Part::Guest, Part::Agent, Part::Waiting];

impl Host {
    fn node(self, guest: &Protected) -> usize {
        match self {
            Self::Guest => guest.at,
            Self::Copy => guest.other(),
            Self::Third => 3,
        }
    }
}

impl Part {
    fn is(self, name: &str, line: &str) -> bool {
        match self {
            // With the process that waits for it, which stands as long as it does.
            Self::Keeper => ["towline", "nsenter"].contains(&name) && line.contains("\0protect\0"),
            Self::Ferry => name == "towline" && line.ends_with("\0ferry\0"),
            Self::Agent => name == "towline" && line.ends_with("\0agent\0"),
            Self::Guest | Self::Waiting => {
                !["towline", "ssh", "nsenter"].contains(&name) && line.contains("qemu-system")
            }
            Self::Controller => name == "pacemaker-contr",
            Self::Executor => name == "pacemaker-execd",
            Self::Corosync => name == "corosync",
        }
    }
}

impl Disturbance {
    /// Each kind.
    fn all() -> Vec<Self> {
        let of_hosts = HOSTS_ALL.map(|host| [Self::IsCut(host), Self::Freezes(host)]).concat();
        let deaths = [Self::Dies(Host::Guest), Self::Dies(Host::Copy)];
        let of_parts = PARTS.map(Self::Stops).into_iter().chain(MORTAL.map(Self::Kills));
        let others = [Self::AreApart, Self::Standby, Self::Hangs];
        of_hosts.into_iter().chain(deaths).chain(of_parts).chain(others).collect()
    }

    fn random(random: &mut Rng) -> Self {
        let host = random.choice(HOSTS_ALL).unwrap();
        match random.u32(..16) {
            0 | 1 => Self::Dies(Host::Guest),
            2 => Self::Dies(Host::Copy),
            3 | 4 => Self::IsCut(host),
            5 | 6 => Self::AreApart,
            7 => Self::Freezes(host),
            8 => Self::Standby,
            9 | 10 => Self::Kills(random.choice(MORTAL).unwrap()),
            11 => Self::Hangs,
            _ => Self::Stops(random.choice(PARTS).unwrap()),
        }
    }
}

impl Protected {
    /// Disturbs it for this time.
    fn happens(&self, what: Disturbance, lasts: Duration) {
        let cluster = &self.cluster;
        match what {
            Disturbance::Dies(host) => cluster.kill(host.node(self)),
            Disturbance::Freezes(host) => {
                let node = host.node(self);
                cluster.freeze(node, true);
                thread::sleep(lasts);
                cluster.freeze(node, false);
            }
            Disturbance::IsCut(host) => {
                let node = host.node(self);
                cluster.cut(node);
                thread::sleep(lasts);
                cluster.mend(node);
            }
            Disturbance::AreApart => {
                cluster.part(HOSTS, true);
                thread::sleep(lasts);
                cluster.part(HOSTS, false);
            }
            Disturbance::Stops(part) => {
                let found = self.part(part);
                found.iter().for_each(|pid| signal_if_any(*pid, Signal::STOP));
                thread::sleep(lasts);
                // One that was fenced has ended. The process that waits for another one stops again if that still stands.
                found.iter().chain(&found).for_each(|pid| signal_if_any(*pid, Signal::CONT));
            }
            Disturbance::Hangs => {
                self.part(Part::Guest).into_iter().for_each(|pid| signal_if_any(pid, Signal::STOP));
            }
            Disturbance::Kills(part) => self.part(part).into_iter().for_each(kill),
            Disturbance::Standby => {
                let node = format!("node{}", self.at);
                let words = ["crm_attribute", "-t", "nodes", "-N", &node, "-n", "standby"];
                cluster.run(self.at, &[&words[..], &["-v", "on"]].concat());
                settle(cluster);
                cluster.run(self.at, &[&words[..], &["-D"]].concat());
            }
        }
    }

    /// Processes of a part.
    pub(crate) fn part(&self, part: Part) -> Vec<u32> {
        let node = if matches!(part, Part::Agent | Part::Waiting) { self.other() } else { self.at };
        let found = self.cluster.processes(node, |name, line| part.is(name, line));
        assert!(!found.is_empty(), "{part:?}");
        found
    }

    /// Waits until the guest is protected again, at one of its hosts. Returns that.
    fn settles(&mut self) -> usize {
        self.goes_on();
        let promoted = || {
            let is_it = |node: &usize| {
                self.cluster.is_on(*node)
                    && self.cluster.path(*node, "/run/towline/cluster/web/promoted").exists()
            };
            let nodes: Vec<_> = HOSTS.into_iter().filter(is_it).collect();
            assert!(nodes.len() < 2, "both hosts are promoted");
            Ok(nodes.first().copied())
        };
        let at = wait_until("a promoted host", WITHIN, promoted).unwrap();
        // A host may be about to be fenced for what has passed.
        settle_any(&self.cluster);
        let off: Vec<_> = NODES.into_iter().filter(|node| !self.cluster.is_on(*node)).collect();
        if at != self.at {
            self.has_gone();
        }
        for node in off {
            if self.cluster.is_on(node) {
                continue;
            }
            self.cluster.boot(node, Membership::Managed);
            if HOSTS.contains(&node) {
                self.cards[node - 1] = start_card(&self.cluster, node);
            }
        }
        wait_members(&self.cluster);
        self.is_protected();
        self.goes_on();
        at
    }
}

fn settle_any(cluster: &Cluster) {
    wait_until("a cluster at rest", WITHIN, || {
        let mut rests = cluster.on(cluster.any(), &["crm_resource", "--wait", "--timeout=60"]);
        Ok(rests.output()?.status.success().then_some(()))
    })
    .unwrap();
}

/// Times in milliseconds for which a disturbance lasts: around those after which a host, or a process, is taken for dead.
const LASTS_MS: std::ops::Range<u64> = 100..6000;
/// Time for which the guest was protected before, in milliseconds.
const HAPPENS_AFTER_MS: std::ops::Range<u64> = 0..2000;

/// Disturbs a guest. Prints what became of it.
fn disturb(guest: &mut Protected, what: Disturbance, lasts: Duration) {
    let (at, fenced) = (guest.at, guest.cluster.fenced().len());
    println!("  {what:?}, {lasts:.1?}, the guest at node{at}");
    guest.clients.forget_gaps();
    guest.happens(what, lasts);
    let gap = guest.goes_on();
    let to = guest.settles();
    let fenced = guest.cluster.fenced().len() - fenced;
    println!("    the guest at node{to}, {fenced} hosts fenced, {gap:.1?} without a reply");
}

/// Time for which each of them lasts: longer than that after which a host, or a process, is taken for dead.
const LASTS: Duration = Duration::from_secs(5);

#[test]
#[ignore = "nightly"]
fn a_guest_survives_each_disturbance() {
    let Some(mut guest) = Protected::new("a_guest_survives_each_disturbance") else { return };
    Disturbance::all().into_iter().for_each(|what| disturb(&mut guest, what, LASTS));
    guest.ends_well();
}

#[test]
#[ignore = "nightly"]
fn a_cluster_decides_while_anything_is_disturbed() {
    let Some(mut guest) = Protected::new("a_cluster_decides_while_anything_is_disturbed") else { return };
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + number("TOWLINE_SOAK_CLUSTER_DISTURBANCES", 3) {
        let mut random = Rng::with_seed(seed);
        thread::sleep(Duration::from_millis(random.u64(HAPPENS_AFTER_MS)));
        print!("  seed {seed}:");
        let what = Disturbance::random(&mut random);
        disturb(&mut guest, what, Duration::from_millis(random.u64(LASTS_MS)));
    }
    guest.ends_well();
}

//! Hosts, links and processes of a guest that a cluster protects are disturbed at random.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use towline_lab::expect::number;
use towline_lab::wait_until;

use crate::configuration::wait_members;
use crate::hosts::{Cluster, Membership, NODES, WITHIN};
use crate::pacemaker::settle;
use crate::protected::{HOSTS, Protected, start_card};

/// Event that a guest survives at one of its hosts.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    /// All processes of a host die.
    Dies(usize),
    /// All processes of a host stand for a while.
    Freezes(usize),
    /// A host has no connection to the others for a while, but for that to the guest's network.
    IsCut(usize),
    /// Both hosts have none to each other for a while, but to the third.
    AreApart,
    /// A process of a host stands for a while, or dies.
    Stops(Part),
    Kills(Part),
    /// The guest's host is to be empty.
    Standby,
}

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

impl Part {
    /// Its host, of those of the guest and of its copy.
    fn node(self, at: usize, other: usize) -> usize {
        if matches!(self, Self::Agent | Self::Waiting) { other } else { at }
    }

    fn is(self, name: &str, line: &str) -> bool {
        match self {
            Self::Keeper => name == "towline" && line.contains("\0protect\0"),
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
    fn random(random: &mut Rng, at: usize, other: usize) -> Self {
        use Part::{Agent, Controller, Corosync, Executor, Ferry, Guest, Keeper, Waiting};
        let of_three = random.usize(1..=3);
        match random.u32(..16) {
            0 | 1 => Self::Dies(at),
            2 => Self::Dies(other),
            3 | 4 => Self::IsCut(of_three),
            5 | 6 => Self::AreApart,
            7 => Self::Freezes(of_three),
            8 => Self::Standby,
            9 | 10 => Self::Kills(random.choice([Ferry, Guest, Agent, Waiting]).unwrap()),
            _ => Self::Stops(
                random
                    .choice([Keeper, Ferry, Guest, Agent, Waiting, Controller, Executor, Corosync])
                    .unwrap(),
            ),
        }
    }
}

impl Protected {
    /// Disturbs it for this time.
    fn happens(&self, what: Disturbance, lasts: Duration) {
        let cluster = &self.cluster;
        match what {
            Disturbance::Dies(node) => cluster.kill(node),
            Disturbance::Freezes(node) => {
                cluster.freeze(node, true);
                thread::sleep(lasts);
                cluster.freeze(node, false);
            }
            Disturbance::IsCut(node) => {
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
                found.iter().for_each(|pid| send(*pid, Signal::STOP));
                thread::sleep(lasts);
                // One that was fenced has ended.
                found.iter().for_each(|pid| send(*pid, Signal::CONT));
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
        let node = part.node(self.at, self.other());
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

/// Sends a signal to a process, which may have ended.
fn send(pid: u32, signal: Signal) {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("it is the number of a process");
    match kill_process(process, signal) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => panic!("process {pid}: {error}"),
    }
}

pub(crate) fn kill(pid: u32) {
    send(pid, Signal::KILL);
}

/// Times in milliseconds for which a disturbance lasts: around those after which a host, or a process, is taken for dead.
const LASTS_MS: std::ops::Range<u64> = 100..6000;
/// Time for which the guest was protected before, in milliseconds.
const HAPPENS_AFTER_MS: std::ops::Range<u64> = 0..2000;

#[test]
#[ignore = "nightly"]
fn a_cluster_decides_while_anything_is_disturbed() {
    let mut guest: Option<Protected> = None;
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + number("TOWLINE_SOAK_CLUSTER_DISTURBANCES", 3) {
        let Some(mut now) =
            guest.take().or_else(|| Protected::new("a_cluster_decides_while_anything_is_disturbed"))
        else {
            return;
        };
        let mut random = Rng::with_seed(seed);
        thread::sleep(Duration::from_millis(random.u64(HAPPENS_AFTER_MS)));
        let (what, at) = (Disturbance::random(&mut random, now.at, now.other()), now.at);
        let (lasts, fenced) = (Duration::from_millis(random.u64(LASTS_MS)), now.cluster.fenced().len());
        println!("  seed {seed}: {what:?}, {lasts:.1?}, the guest at node{at}");
        now.clients.forget_gaps();
        now.happens(what, lasts);
        let gap = now.goes_on();
        let to = now.settles();
        println!(
            "    the guest at node{to}, {} hosts fenced, {:.1?} without a reply",
            now.cluster.fenced().len() - fenced,
            gap
        );
        guest = Some(now);
    }
    guest.into_iter().for_each(Protected::ends_well);
}

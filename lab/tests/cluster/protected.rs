//! The host that goes on with a protected guest is the one that Pacemaker promotes.
//!
//! ```text
//!   hub  br0 10.7.0.1, numbered requests to the guest's echo
//!    ├─ node1, node2   br0 ── vm0 ── towline net --hold ── the guest, or a QEMU that waits; Pacemaker, sshd
//!    └─ node3          Pacemaker, for the quorum
//! ```

use std::collections::HashMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::counting::{assert_clean, make_ext4};
use towline_lab::expect::{assert_ended, events, qmp, wait_event};
use towline_lab::{
    LinuxGuest, MemoryBackend, Network, Qemu, Qmp, Towline, Version, kill, towline, wait_until,
};

use crate::bridges::{TAP, add_bridge, attach};
use crate::clients::Clients;
use crate::configuration::{configure, monitor, operation, values, wait_members};
use crate::disturbed::Part;
use crate::hosts::{Cluster, Membership, NODES, WITHIN};
use crate::network::{self, GUEST as ADDRESS, card_options, guest_address, set_up};
use crate::pacemaker::settle;

const GUEST: &str = "web";
/// Hosts that may have the guest.
pub(crate) const HOSTS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;
/// Memory that the guest writes round and round, and the bytes of it in a second.
const WRITTEN: u64 = 16 * MIB;
const RATE: u64 = 4 * MIB;
const DISK_BYTES: u64 = 32 * MIB;
const CONNECTIONS: usize = 4;
/// Replies on each connection that prove that it goes on.
const PROOF: u64 = 20;
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A guest that one of two hosts has, the other one protects, and clients talk to.
pub(crate) struct Protected {
    pub(crate) cluster: Cluster,
    pub(crate) cards: [Towline; 2],
    /// The host of the guest, and the command there that protects it.
    pub(crate) at: usize,
    protecting: Option<Towline>,
    pub(crate) clients: Clients,
    _one_sends: OneSends,
    _hub: Network,
}

/// Watches both cards: at most one of them sends what its guest does, and each generation is sent by one host.
struct OneSends {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    violation: Arc<OnceLock<String>>,
}

impl OneSends {
    fn watch(cluster: &Cluster) -> Self {
        let controls = HOSTS.map(|node| cluster.place.path(&format!("node{node}/net0.qmp")));
        let (is_over, violation) = (Arc::<AtomicBool>::default(), Arc::<OnceLock<String>>::default());
        let (over, violated) = (Arc::clone(&is_over), Arc::clone(&violation));
        // The generation of a card that passes.
        let passes = move |host: usize| {
            let card = Qmp::connect(&controls[host], Duration::from_secs(1)).ok()?;
            let held = card.execute("query-held", Value::Null).ok()?;
            (held["holding"] == false).then(|| held["generation"].as_u64()).flatten()
        };
        let watch = move || {
            let mut senders: HashMap<u64, usize> = HashMap::new();
            while !over.load(Ordering::Relaxed) {
                let first = passes(0);
                // The first may hold since.
                if first.is_some() && passes(1).is_some() && passes(0).is_some() {
                    let _ = violated.set("both hosts send what their guest does".into());
                }
                for (host, generation) in [(0, first), (1, passes(1))] {
                    let Some(generation) = generation.filter(|generation| *generation > 0) else { continue };
                    if *senders.entry(generation).or_insert(host) != host {
                        let _ = violated.set(format!("both hosts send generation {generation}"));
                    }
                }
                thread::sleep(LOOK_INTERVAL);
            }
        };
        Self { is_over, violation, thread: Some(thread::spawn(watch)) }
    }
}

impl Drop for OneSends {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
        assert!(thread::panicking() || self.violation.get().is_none(), "{:?}", self.violation.get());
    }
}

impl Drop for Protected {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let shown = "date +%T.%N; crm_mon -1 | tail -n 12; ls -l --full-time /run/towline/cluster/web; towline ps; \
                     cat /run/towline/guests/web/takeover.json; tail -n 5 /run/towline/guests/web/qemu.log; \
                     ps -e -o pid,stat,etimes,args | grep -v kworker | cut -c1-150 | tail -n 40";
        for node in NODES.into_iter().filter(|node| self.cluster.is_on(*node)) {
            let output = self.cluster.on(node, &["sh", "-c", shown]).output();
            eprintln!(
                "node{node}: {}",
                output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
            );
        }
        if let Some(protecting) = &self.protecting {
            eprintln!(
                "{}\n{}",
                protecting.stderr(),
                protecting.stdout().lines().rev().take(20).collect::<Vec<_>>().join("\n")
            );
        }
    }
}

/// The resource of the guest, and where it may be.
fn resource() -> [String; 2] {
    let actions = ["start", "stop", "promote", "demote"].map(|name| operation(GUEST, name, 30)).concat();
    let monitors = monitor(GUEST, 1, "Promoted") + &monitor(GUEST, 10, "Unpromoted");
    let resource = format!(
        "<clone id=\"{GUEST}-clone\"><meta_attributes id=\"{GUEST}-meta\">{}</meta_attributes>\
         <primitive id=\"{GUEST}\" class=\"ocf\" provider=\"towline\" type=\"protected\"><operations>{actions}{monitors}</operations></primitive></clone>",
        values(&format!("{GUEST}-meta"), &[("promotable", "true")])
    );
    let place =
        format!("<rsc_location id=\"elsewhere\" rsc=\"{GUEST}-clone\" node=\"node3\" score=\"-INFINITY\"/>");
    [resource, place]
}

/// Words for the places of the guest's files on a host, which are the same on all.
fn places() -> Vec<String> {
    let qemu = Version::Newest.command().get_program().to_str().unwrap().to_owned();
    let settings = [
        "chardev.net0.path=/run/lab/net0.sock",
        "chardev.agent.path=/run/lab/agent",
        "serial.0=file:/run/lab/console",
        "drive.disk0.file=/run/lab/disk.raw",
    ];
    let settings = settings.into_iter().flat_map(|setting| ["--set", setting]);
    ["--trust-command-line", "--qemu", &qemu].into_iter().chain(settings).map(str::to_owned).collect()
}

pub(crate) fn start_card(cluster: &Cluster, node: usize) -> Towline {
    let socket = cluster.place.path(&format!("node{node}/net0.sock"));
    let _ = fs::remove_file(&socket);
    let words = [
        "net",
        "--json",
        "--socket",
        "/run/lab/net0.sock",
        "--tap",
        TAP,
        "--hold",
        "--qmp",
        "/run/lab/net0.qmp",
    ];
    let mut card = cluster.start(node, &words);
    wait_until("the card's socket", WITHIN, || {
        card.check()?;
        Ok(socket.exists().then_some(()))
    })
    .unwrap();
    card
}

impl Protected {
    /// The guest runs on the first host; `None`: the test is skipped.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let mut cluster = Cluster::new(test)?;
        let hub = network::network(test)?;
        add_bridge(&hub);
        network::give_addresses(&hub, "br0");
        HOSTS.into_iter().for_each(|node| attach(&hub, cluster.network(node), &format!("host{node}")));
        let [resource, place] = resource();
        configure(&cluster, &resource, &place, "freeze");
        NODES.into_iter().for_each(|node| cluster.boot(node, Membership::Managed));
        let cards = HOSTS.map(|node| start_card(&cluster, node));
        let image = save(&cluster);
        let places = places();
        let run = ["towline", "run", "--detach", "--name", GUEST, &image];
        cluster.run(1, &run.into_iter().chain(places.iter().map(String::as_str)).collect::<Vec<_>>());
        wait_members(&cluster);
        wait_promoted(&cluster, 1);
        let mut protecting = protect(&cluster, 1);
        wait_protected(&mut protecting);
        let clients = Clients::begin(&hub, guest_address(ADDRESS), CONNECTIONS);
        clients.wait_more(2);
        clients.forget_gaps();
        let _one_sends = OneSends::watch(&cluster);
        Some(Self { cluster, cards, at: 1, protecting: Some(protecting), clients, _one_sends, _hub: hub })
    }

    pub(crate) fn other(&self) -> usize {
        HOSTS.into_iter().find(|node| *node != self.at).unwrap()
    }

    /// Reports of checkpoints so far.
    fn reports(&self) -> usize {
        let said = self.protecting.as_ref().unwrap().stdout();
        events(&said).iter().filter(|event| event["event"] == "checkpoints").count()
    }

    /// Waits until the same towline takes checkpoints.
    pub(crate) fn is_protected(&mut self) {
        let before = self.reports();
        let more = || {
            let reports = self.reports();
            self.protecting.as_mut().unwrap().check()?;
            Ok((reports > before + 1).then_some(()))
        };
        wait_until("further checkpoints", WITHIN, more).unwrap();
    }

    /// The connections go on. Returns the longest time without a reply until then.
    pub(crate) fn goes_on(&self) -> Duration {
        self.clients.wait_more(PROOF);
        let gap = self.clients.snapshot().longest_gap();
        self.clients.forget_gaps();
        gap
    }

    /// The guest has gone to the other host, which protects it by this one then.
    pub(crate) fn has_gone(&mut self) {
        let (left, at) = (self.at, self.other());
        self.at = at;
        wait_promoted(&self.cluster, self.at);
        if let Some(protecting) = self.protecting.take()
            && self.cluster.is_on(left)
        {
            assert_ended(&protecting.wait(WITHIN).unwrap(), 7, &[]);
        }
        if self.cluster.is_on(left) {
            // Its card holds what the guest has not sent: another one is started for the next guest.
            let is_card = |name: &str, line: &str| name == "towline" && line.contains("\0net\0");
            self.cluster.processes(left, is_card).into_iter().for_each(kill);
            let has_ended = || Ok(self.cluster.processes(left, is_card).is_empty().then_some(()));
            wait_until("the end of a card", WITHIN, has_ended).unwrap();
        } else {
            self.cluster.boot(left, Membership::Managed);
            wait_members(&self.cluster);
        }
        self.cards[left - 1] = start_card(&self.cluster, left);
        fs::remove_file(self.cluster.place.path(&format!("node{left}/disk.raw"))).unwrap();
        let mut protecting = protect(&self.cluster, self.at);
        wait_protected(&mut protecting);
        self.protecting = Some(protecting);
        self.goes_on();
    }

    /// The guest is right, in its memory and on its disk.
    pub(crate) fn ends_well(mut self) {
        let mut guest = LinuxGuest::connect_at(&self.cluster.path(self.at, "/run/lab/agent")).unwrap();
        guest.wait_ready(WITHIN).unwrap();
        guest.stop_dirtying().unwrap();
        assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
        guest.assert_counted("the guest");
        assert_clean(&self.cluster.place.path(&format!("node{}/disk.raw", self.at)));
        self.clients.stop();
        let ended = self.clients.snapshot();
        assert!(ended.errors.is_empty(), "{ended:?}");
    }
}

/// Saves the guest as an image, with its card and its disk on the first host. Returns its path.
fn save(cluster: &Cluster) -> String {
    let path = |name: &str| cluster.place.path(&format!("node1/{name}"));
    let disk = path("disk.raw");
    fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    make_ext4(&disk);
    let drive = format!("file={},format=raw,if=none,id=disk0,file.locking=on", disk.display());
    let builder = Qemu::builder(Version::Newest).linux().memory_mib(256);
    let builder = builder.memory_backend(MemoryBackend::Memfd { prealloc: false });
    let builder = builder.args(card_options(Version::Newest, &path("net0.sock"), 1, 4));
    let (source, mut guest) = builder
        .args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0,id=vda"])
        .boot(WITHIN)
        .unwrap();
    set_up(&mut guest);
    guest.begin_to_count();
    guest.dirty(RATE, WRITTEN).unwrap();
    guest.wait_ticking(WITHIN).unwrap();
    let image = cluster.shared("web.img").display().to_string();
    towline(["move", &qmp(&source), &image]).unwrap().wait_done(WITHIN).unwrap();
    image
}

/// Starts to protect the guest of this host by the other one.
fn protect(cluster: &Cluster, node: usize) -> Towline {
    let (ssh, places) = (cluster.ssh(), places());
    let destination = format!("ssh:node{}", HOSTS.into_iter().find(|other| *other != node).unwrap());
    let timing = ["--epoch", "50ms", "--peer-timeout", "3s"];
    let words = [&["protect", "--json", "--arbiter", "pacemaker", "--ssh", &ssh][..], &timing].concat();
    let words = words.into_iter().chain(places.iter().map(String::as_str)).chain([GUEST, &destination]);
    cluster.start(node, &words.collect::<Vec<_>>())
}

fn wait_protected(protecting: &mut Towline) {
    wait_event(protecting, "the protection", WITHIN, |event| event["event"] == "protected");
}

/// Waits until the cluster has promoted this host.
fn wait_promoted(cluster: &Cluster, node: usize) {
    let words = ["crm_resource", "--locate", "-r", GUEST];
    wait_until("the promotion of a host", WITHIN, || {
        let output = cluster.on(cluster.any(), &words).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_it = |line: &str| line.contains(&format!("node{node}")) && line.contains("Promoted");
        Ok(text.lines().any(is_it).then_some(()))
    })
    .unwrap();
}

#[test]
fn a_cluster_decides_which_host_goes_on_with_a_guest() {
    let Some(mut guest) = Protected::new("a_cluster_decides_which_host_goes_on_with_a_guest") else { return };
    let begun = Instant::now();
    let said = |text: &str| println!("{:6.1} s  {text}", begun.elapsed().as_secs_f64());
    guest.goes_on();
    // Its host dies.
    guest.cluster.kill(guest.at);
    said(&format!("its host died: {:.1?} without a reply", guest.goes_on()));
    assert_eq!(guest.cluster.fenced().len(), 1);
    guest.has_gone();
    said("protected by the host that was fenced");
    // What the other host has is lost: it stays, and is protected again.
    guest.part(Part::Agent).into_iter().for_each(kill);
    said(&format!("the other host lost it: {:.1?} without a reply", guest.goes_on()));
    let mut protecting = guest.protecting.take().unwrap();
    let is_later = |event: &Value| event["event"] == "protected" && event["generation"].as_u64() > Some(3);
    wait_event(&mut protecting, "another protection", WITHIN, is_later);
    guest.protecting = Some(protecting);
    said(&format!("protected again: {:.1?} without a reply", guest.goes_on()));
    // Its QEMU dies, and its host lives.
    guest.is_protected();
    guest.part(Part::Guest).into_iter().for_each(kill);
    said(&format!("its QEMU died: {:.1?} without a reply", guest.goes_on()));
    guest.has_gone();
    said("protected by the other host");
    // Its host is to be empty.
    let node = format!("node{}", guest.at);
    guest.cluster.run(guest.at, &["crm_attribute", "-t", "nodes", "-N", &node, "-n", "standby", "-v", "on"]);
    said(&format!("its host is in standby: {:.1?} without a reply", guest.goes_on()));
    settle(&guest.cluster);
    guest.cluster.run(guest.at, &["crm_attribute", "-t", "nodes", "-N", &node, "-n", "standby", "-D"]);
    guest.has_gone();
    assert_eq!(guest.cluster.fenced().len(), 1, "{:?}", guest.cluster.fenced());
    guest.ends_well();
}

//! A guest under traffic moves between two hosts by `ssh:`, with the frames that its taps receive while it is stopped.
//!
//! ```text
//!   hub  br0 10.7.0.1, numbered datagrams to the guest's echo, and TCP
//!    ├─ veth ── host a  br0 10.7.0.11, sshd ── tap0 ── towline net ── QEMU a ─┐
//!    └─ veth ── host b  br0 10.7.0.12, sshd ── tap0 ── towline net ── QEMU b ◄┘ towline move, in host a
//! ```

use std::fs::{self, File};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::counting::{assert_clean, make_ext4};
use towline_lab::expect::{assert_ended, completed, events, qmp, wait_event};
use towline_lab::{
    Builder, Network, Qemu, SshHost, Sshd, Towline, Version, child, command_after, require_lab, signal,
    wait_until,
};

use crate::moves::{bridged, hub};
use crate::support::{
    EchoClient, GUEST, WITHIN, builder, card, end, guest_address, number, path, scratch, set_up, shell,
};

/// Time between two datagrams.
const INTERVAL: Duration = Duration::from_millis(2);
/// A host of the picture, with its card's process.
struct Host {
    host: SshHost,
    card: Option<Towline>,
    name: &'static str,
    queues: usize,
}

impl Host {
    fn new(sshd: &Sshd, hub: &Network, name: &'static str, address: &str, queues: usize) -> Self {
        let network = bridged(hub, name);
        network.run(&["ip", "address", "add", &format!("{address}/24"), "dev", "br0"]).unwrap();
        Self { host: SshHost::new(sshd, network, address).unwrap(), card: None, name, queues }
    }

    /// Starts a new card on this host; returns its socket. Its control socket is beside it.
    fn card(&mut self, scratch: &TempDir) -> PathBuf {
        let socket = path(scratch, &format!("{}.sock", self.name));
        self.card.take().map(end);
        let (control, queues) = (socket.with_extension("qmp"), self.queues.to_string());
        let options = ["--tap", "tap0", "--queues", &queues, "--qmp", control.to_str().unwrap()];
        self.card = Some(card(self.host.network(), &socket, &options));
        socket
    }

    /// Runs a command on this host.
    fn run(&self, words: &[&str]) {
        assert!(command_after(&self.host.prefix()).args(words).status().unwrap().success());
    }

    /// Builder of a QEMU with a new card.
    fn builder(&mut self, scratch: &TempDir) -> Builder {
        builder(Version::V10_0, &self.card(scratch), self.queues)
    }

    /// Starts the move of a guest of this host to another one.
    fn moves(&self, source: &Qemu, to: &Self, destination: &Qemu) -> Towline {
        self.moves_with(&[], source, to, destination)
    }

    fn moves_with(&self, options: &[&str], source: &Qemu, to: &Self, destination: &Qemu) -> Towline {
        let (place, client) = (format!("ssh:other/{}", qmp(destination)), to.host.client());
        let words = ["move", "--json", "--ssh", &client, &qmp(source), &place];
        Towline::start_after(&self.host.prefix(), &[&words[..], options].concat()).unwrap()
    }
}

/// Datagrams with consecutive numbers that the guest sends back.
struct Numbers {
    stop: Arc<AtomicBool>,
    seen: Arc<AtomicU64>,
    sender: JoinHandle<u64>,
    receiver: JoinHandle<Vec<u64>>,
}

/// Numbers that were received, and were not.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    lost: usize,
    twice: usize,
    /// Those that came after a later one.
    late: usize,
}

impl Numbers {
    fn begin(hub: &Network) -> Self {
        let socket = hub.enter(|| UdpSocket::bind(("0.0.0.0", 0))).unwrap().unwrap();
        socket.connect(guest_address(GUEST)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (stop, seen) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (reads, ends) = (socket.try_clone().unwrap(), stop.clone());
        let sender = thread::spawn(move || {
            let mut next = Instant::now();
            let numbers = (0..).take_while(|_| !ends.load(SeqCst));
            let sent = numbers.map(|number: u64| {
                // A refused datagram is that of a guest that is not there, and counts as lost.
                let _ = socket.send(&number.to_le_bytes());
                next += INTERVAL;
                thread::sleep(next.saturating_duration_since(Instant::now()));
            });
            sent.count() as u64
        });
        let (ends, last) = (stop.clone(), seen.clone());
        let receiver = thread::spawn(move || {
            let (mut found, mut bytes) = (Vec::new(), [0; 8]);
            let mut silent_since = Instant::now();
            // What was sent last comes back within seconds, or not at all.
            while !ends.load(SeqCst) || silent_since.elapsed() < Duration::from_secs(3) {
                if reads.recv(&mut bytes).is_ok() {
                    found.push(u64::from_le_bytes(bytes));
                    last.fetch_add(1, SeqCst);
                    silent_since = Instant::now();
                }
            }
            found
        });
        Self { stop, seen, sender, receiver }
    }

    /// Waits until `more` further ones were received.
    fn wait(&self, more: u64) {
        let wanted = self.seen.load(SeqCst) + more;
        wait_until("numbers", WITHIN, || Ok((self.seen.load(SeqCst) >= wanted).then_some(()))).unwrap();
    }

    fn end(self) -> (u64, Counts) {
        self.stop.store(true, SeqCst);
        let (sent, found) = (self.sender.join().unwrap(), self.receiver.join().unwrap());
        let mut sorted = found.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let (mut greatest, mut late) = (0, 0);
        for number in &found {
            late += usize::from(*number < greatest);
            greatest = greatest.max(*number);
        }
        let lost = usize::try_from(sent).unwrap() - sorted.len();
        (sent, Counts { lost, twice: found.len() - sorted.len(), late })
    }
}

/// Two hosts, and a guest on the first one.
struct Scene {
    hub: Network,
    hosts: [Host; 2],
    scratch: TempDir,
    source: Qemu,
}

impl Scene {
    fn new(test: &str, queues: usize) -> Option<Self> {
        Self::of(test, queues, |builder, _| builder)
    }

    /// With a guest that has more than its card.
    fn of(test: &str, queues: usize, with: impl FnOnce(Builder, &TempDir) -> Builder) -> Option<Self> {
        if !require_lab(test) {
            return None;
        }
        let (sshd, hub) = (Sshd::find(test)?, hub(test)?);
        let scratch = scratch();
        let mut hosts = [("host-a", "10.7.0.11"), ("host-b", "10.7.0.12")]
            .map(|(name, address)| Host::new(&sshd, &hub, name, address, queues));
        let (source, mut guest) = with(hosts[0].builder(&scratch), &scratch).boot(WITHIN).unwrap();
        // The backlog of a pause comes at once.
        shell(
            &mut guest,
            "echo 8388608 > /proc/sys/net/core/rmem_max; echo 8388608 > /proc/sys/net/core/rmem_default",
        );
        set_up(&mut guest);
        Some(Self { hub, hosts, scratch, source })
    }
}

/// Traffic of a test.
struct Traffic {
    client: EchoClient,
    numbers: Numbers,
}

impl Traffic {
    fn begin(hub: &Network) -> Self {
        Self { client: EchoClient::begin(hub, guest_address(GUEST)), numbers: Numbers::begin(hub) }
    }

    /// Waits until both have made progress.
    fn flows(&self) {
        self.client.wait_blocks(5);
        self.numbers.wait(200);
    }

    /// Ends it, and prints what it has seen.
    fn end(self, test: &str) -> Counts {
        self.flows();
        let longest = self.client.end();
        let (sent, counts) = self.numbers.end();
        println!("{test}: {sent} datagrams: {counts:?}; the longest block of TCP took {longest:?}");
        counts
    }
}

/// Time for which a card does not run, as on a busy host.
const SILENCE: Duration = Duration::from_secs(4);

/// Moves a guest to and fro; each time back, the other host's card does not run for a while, in which the guest still runs here. Returns
/// the counts, unless the test is skipped.
fn move_to_and_fro(test: &str, queues: usize) -> Option<Counts> {
    let Scene { hub, mut hosts, scratch, mut source } = Scene::new(test, queues)?;
    let traffic = Traffic::begin(&hub);
    let moves = usize::try_from(number("TOWLINE_SOAK_PAUSES", 2)).unwrap();
    for round in 0..moves {
        traffic.flows();
        let destination = hosts[(round + 1) % 2].builder(&scratch).incoming_defer().start().unwrap();
        let [here, there] = [round, round + 1].map(|host| &hosts[host % 2]);
        let is_silent = round % 2 == 1;
        let options: &[&str] = if is_silent { &["--max-bandwidth", "8M"] } else { &[] };
        let mut moving = here.moves_with(options, &source, there, &destination);
        if is_silent {
            wait_event(&mut moving, "the first pages", WITHIN, |event| event["phase"] == "transfer");
            let card = there.card.as_ref().unwrap().pid();
            signal(card, Signal::STOP);
            thread::sleep(SILENCE);
            let runs_here = !events(&moving.stdout()).iter().any(|event| event["phase"] == "switchover");
            signal(card, Signal::CONT);
            assert!(runs_here, "the guest was stopped too early: {}", moving.stdout());
        }
        let moved = moving.wait(WITHIN).unwrap();
        println!("downtime {} ms {}", completed(&moved)["downtime"], moved.stderr);
        source = destination;
    }
    Some(traffic.end(test))
}

#[test]
fn a_move_loses_no_frame() {
    let counts = move_to_and_fro("a_move_loses_no_frame", 1);
    assert!(counts.is_none_or(|counts| counts == Counts { lost: 0, twice: 0, late: 0 }));
}

/// Size of the disk; MiB of memory, and MiB that are written to memory and disk before the move.
const DISK: u64 = 2 << 30;
const MEMORY_MIB: u64 = 1024;
const CONTENT_MIB: u64 = 256;

fn with_disk(builder: Builder, disk: &Path) -> Builder {
    File::options().create(true).append(true).open(disk).unwrap().set_len(DISK).unwrap();
    let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
    builder.memory_mib(MEMORY_MIB).args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0,id=vda"])
}

#[test]
#[ignore = "nightly"]
fn a_guest_goes_to_another_host_with_its_disk_and_its_card() {
    let test = "a_guest_goes_to_another_host_with_its_disk_and_its_card";
    for via in ["relay", "direct"] {
        let scene = Scene::of(test, 1, |builder, scratch| {
            let builder = with_disk(builder, &path(scratch, "here.raw"));
            make_ext4(&path(scratch, "here.raw"));
            builder
        });
        let Some(Scene { hub, mut hosts, scratch, source }) = scene else { return };
        for host in &hosts {
            host.host.network().limit("uplink", "1gbit").unwrap();
        }
        let mut guest = source.linux(WITHIN).unwrap();
        guest.begin_to_count();
        let content = format!(
            "dd if=/dev/urandom of=/disk/content bs=1M count={CONTENT_MIB} 2>/dev/null; sync; sha256sum /disk/content"
        );
        let sum = shell(&mut guest, &content);
        guest.fill(CONTENT_MIB << 20, 7).unwrap();
        let hash = guest.hash().unwrap();
        let traffic = Traffic::begin(&hub);
        traffic.flows();
        let disk = path(&scratch, "there.raw");
        let destination = with_disk(hosts[1].builder(&scratch), &disk).incoming_defer().start().unwrap();
        let begun = Instant::now();
        let options = ["--with-disks", "--verify-disks", "--via", via];
        let moved = hosts[0].moves_with(&options, &source, &hosts[1], &destination).wait(WITHIN).unwrap();
        let downtime = completed(&moved)["downtime"].clone();
        println!("{via}: {:?}, downtime {downtime} ms", begun.elapsed());
        assert_eq!(traffic.end(test), Counts { lost: 0, twice: 0, late: 0 });
        let mut guest = destination.linux(WITHIN).unwrap();
        assert_eq!(guest.hash().unwrap(), hash);
        assert_eq!(shell(&mut guest, "echo 3 > /proc/sys/vm/drop_caches; sha256sum /disk/content"), sum);
        guest.assert_counted(via);
        destination.kill().unwrap();
        assert_clean(&disk);
    }
}

/// Queues of a guest overtake each other, also without a move.
#[test]
#[ignore = "nightly"]
fn frames_of_several_queues_are_not_lost_by_a_move() {
    let counts = move_to_and_fro("frames_of_several_queues_are_not_lost_by_a_move", 2);
    assert!(counts.is_none_or(|Counts { lost, twice, .. }| (lost, twice) == (0, 0)));
}

#[test]
fn a_move_that_fails_at_the_switchover_loses_no_frame() {
    let test = "a_move_that_fails_at_the_switchover_loses_no_frame";
    let Some(Scene { hub, mut hosts, scratch, source }) = Scene::new(test, 1) else { return };
    let traffic = Traffic::begin(&hub);
    // The decision to acknowledge the guest cannot be recorded there; by then it was stopped.
    let fill = "mount -o remount,size=64k /run && mkdir -p /run/towline && mkdir -m 700 /run/towline/journal && \
        ! dd if=/dev/zero of=/run/filler bs=4k 2>/dev/null";
    hosts[1].run(&["sh", "-c", fill]);
    for _ in 0..number("TOWLINE_SOAK_PAUSES", 2) {
        traffic.flows();
        let there = hosts[1].builder(&scratch).incoming_defer().start().unwrap();
        let failed = hosts[0].moves(&source, &hosts[1], &there).wait(WITHIN).unwrap();
        assert_ended(&failed, 1, &["safe at its source"]);
        let ended = there.qmp().execute("query-status", json!({})).unwrap();
        assert_ne!(ended["status"], "inmigrate", "the guest was stopped before the failure");
        source.qmp().wait_status("running", WITHIN).unwrap();
    }
    assert_eq!(traffic.end(test), Counts { lost: 0, twice: 0, late: 0 });
}

/// An agent of a version without frames, by its greeting.
#[test]
fn a_guest_moves_to_an_older_towline_without_its_frames() {
    let test = "a_guest_moves_to_an_older_towline_without_its_frames";
    let Some(Scene { hub, mut hosts, scratch, source }) = Scene::new(test, 1) else { return };
    let program = hosts[1].host.programs().join("towline");
    let towline = fs::read_link(&program).unwrap();
    fs::remove_file(&program).unwrap();
    let script = format!("#!/bin/sh\n{} \"$@\" | sed -u 's/\"frames\":1,//'\n", towline.display());
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let traffic = Traffic::begin(&hub);
    traffic.flows();
    let destination = hosts[1].builder(&scratch).incoming_defer().start().unwrap();
    completed(&hosts[0].moves(&source, &hosts[1], &destination).wait(WITHIN).unwrap());
    let counts = traffic.end(test);
    // What the others count is not lost by chance.
    assert!(counts.lost > 0 && counts.twice == 0, "{counts:?}");
}

/// Longest time from the guest's stop to the end of the session.
const KILLED_WITHIN_MS: u64 = 60;

/// The ssh of a move is killed while the guest is stopped or shortly afterwards. The guest goes on at one host, with these frames if that
/// is its source, and at worst without them.
#[test]
fn no_frame_is_delivered_twice_by_a_move_whose_session_is_killed() {
    let test = "no_frame_is_delivered_twice_by_a_move_whose_session_is_killed";
    let Some(Scene { hub, mut hosts, scratch, mut source }) = Scene::new(test, 1) else { return };
    let traffic = Traffic::begin(&hub);
    let mut random = fastrand::Rng::with_seed(number("TOWLINE_SOAK_SEED", 1));
    let mut here = 0;
    let mut arrived = 0;
    let kills = number("TOWLINE_SOAK_PAUSE_KILLS", 2);
    for _ in 0..kills {
        traffic.flows();
        let there = 1 - here;
        let destination = hosts[there].builder(&scratch).incoming_defer().start().unwrap();
        let mut moving = hosts[here].moves(&source, &hosts[there], &destination);
        let is_stopped = |event: &Value| event["phase"] == "switchover";
        wait_event(&mut moving, "the switchover", WITHIN, is_stopped);
        let delay = random.u64(..KILLED_WITHIN_MS);
        thread::sleep(Duration::from_millis(delay));
        if let Some(ssh) = child(moving.pid(), "ssh") {
            signal(ssh, Signal::KILL);
        }
        let finished = moving.wait(WITHIN).unwrap();
        println!("killed after {delay} ms: {:?}", finished.status);
        match finished.status.code() {
            Some(0) => {
                (source, here) = (destination, there);
                arrived += 1;
            }
            Some(1) => source.qmp().wait_status("running", WITHIN).unwrap(),
            _ => panic!("{}", finished.stderr),
        }
    }
    let counts = traffic.end(test);
    assert_eq!((counts.twice, counts.late), (0, 0));
    assert!(arrived > 0 || counts.lost == 0, "{counts:?}");
}

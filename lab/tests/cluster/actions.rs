//! Actions of the agent, in the order in which a cluster has them done, around moves that were interrupted.

use std::fs;
use std::process::Output;
use std::thread;

use towline_lab::{LinuxGuest, Version, wait_until};

use crate::hosts::{Cluster, Membership, NODES, WITHIN};
use crate::lives::Watch;
use crate::pacemaker::{save, wait_counting};

const DONE: i32 = 0;
const FAILED: i32 = 1;
const NOT_RUNNING: i32 = 7;
/// Memory that the guest writes, so that a move takes a while at [`BANDWIDTH`].
const WRITTEN: u64 = 48 << 20;
const BANDWIDTH: &str = "16M";

struct Agents<'a> {
    cluster: &'a Cluster,
    image: &'a str,
    set: String,
}

impl Agents<'_> {
    fn act(&self, node: usize, action: &str, more: &[&str]) -> Output {
        let qemu = Version::V10_0.command().get_program().to_str().unwrap().to_owned();
        let shared = |name: &str| self.cluster.shared(name).display().to_string();
        let values = [
            ("image", shared(self.image)),
            ("state", shared("state")),
            ("name", "g".into()),
            ("trust", "true".into()),
            ("qemu", qemu),
            ("ssh", self.cluster.ssh()),
            ("set", self.set.clone()),
            ("bandwidth", BANDWIDTH.into()),
        ];
        let values = values.map(|(name, value)| format!("OCF_RESKEY_{name}={value}"));
        let mut words: Vec<&str> = vec!["env"];
        words.extend(values.iter().map(String::as_str).chain(more.iter().copied()));
        words.extend(["/usr/lib/ocf/resource.d/towline/guest", action]);
        self.cluster.on(node, &words).output().unwrap()
    }

    /// Has an action done on a host, and compares its exit status. Returns its messages.
    fn expect(&self, node: usize, action: &str, code: i32) -> String {
        let output = self.act(node, action, &[]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{action} on node{node}: {text}");
        text
    }

    /// Moves the guest from one host to another, and has another QEMU take the generation there just before it runs: it is paused at
    /// both ends then, as when hosts or towlines end at that moment.
    fn interrupt_move(&self, from: usize, to: usize) {
        let state = self.cluster.shared("state/g");
        let newest = (1..).take_while(|n| state.join(format!("generation.{n}")).exists()).last().unwrap();
        let (taken, before) = (state.join(format!("generation.{}", newest + 1)), self.cluster.sent(from));
        let target = format!("OCF_RESKEY_CRM_meta_migrate_target=node{to}");
        let output = thread::scope(|scope| {
            let moved = scope.spawn(|| self.act(from, "migrate_to", &[&target]));
            wait_until("the guest's memory on the link", WITHIN, || {
                Ok((self.cluster.sent(from) > before + WRITTEN / 4).then_some(()))
            })
            .unwrap();
            let other = fs::read_to_string(state.join(format!("generation.{newest}"))).unwrap();
            fs::write(&taken, other.replace("\"pid\":", "\"pid\":1")).unwrap();
            moved.join().unwrap()
        });
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(FAILED), "{text}");
        assert!(
            text.contains(&format!("generation {} of the guest is that of process", newest + 1)),
            "{text}"
        );
        for node in [from, to] {
            let moves = self.cluster.run(node, &["towline", "moves"]);
            assert!(moves.contains("  undecided  "), "node{node}: {moves}");
        }
        fs::remove_file(taken).unwrap();
    }
}

/// The guest's memory goes on with its disk as it was at that instant, and with no later one.
#[test]
fn memory_is_never_older_than_the_disk_that_it_runs_with() {
    let Some(mut cluster) = Cluster::new("memory_is_never_older_than_the_disk_that_it_runs_with") else {
        return;
    };
    let disk = cluster.shared("disk.raw");
    fs::File::create(&disk).unwrap().set_len(8 << 20).unwrap();
    save(&cluster, Some(&disk), "disk.img");
    NODES.into_iter().for_each(|node| cluster.boot(node, Membership::Alone));
    let watch = Watch::start(&cluster.place.path(""), &["g"]);
    let mut all = agents(&cluster, "disk.img");
    all.set.push_str(&format!(" drive.disk0.file={}", disk.display()));
    let guest_at = |node| {
        let mut guest = LinuxGuest::connect_at(&cluster.path(node, "/run/lab/g.agent")).unwrap();
        guest.wait_ready(WITHIN).unwrap();
        guest
    };
    let write = |guest: &mut LinuxGuest, text: &str| {
        let line = format!("echo {text} | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null");
        guest.shell(&line, WITHIN).unwrap();
    };
    all.expect(1, "start", DONE);
    wait_counting(&watch, "g", 1);
    // Overlays in which the guest would continue are disks that no start finds.
    let records = cluster.shared("records").display().to_string();
    for words in [&["fork", "g"][..], &["record", "g", &records]] {
        let refused = cluster.on(1, &[&["towline"], words].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr);
        let is_it = said.contains("guest g is run by a cluster") && said.contains("its disks cannot be kept");
        assert!(refused.status.code() == Some(1) && is_it, "{words:?}: {said}");
    }
    write(&mut guest_at(1), "second");
    all.expect(1, "stop", DONE);
    // Its memory and its disk are of one instant.
    let said = all.expect(2, "start", DONE);
    assert!(said.contains("runs from") && said.contains("saved.1.img, generation 2"), "{said}");
    assert_continues(&watch, 2);
    all.expect(2, "stop", DONE);
    // Something else has written to the disk since.
    fs::File::options()
        .write(true)
        .open(&disk)
        .unwrap()
        .set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(1))
        .unwrap();
    let said = all.expect(3, "start", DONE);
    assert!(said.contains("boots afresh") && said.contains("was written after"), "{said}");
    let read = guest_at(3).shell("dd if=/dev/vda bs=8 count=1 2>/dev/null", WITHIN).unwrap();
    assert!(read.starts_with("second"), "{read:?}");
    // Its host dies with what it has in memory.
    cluster.kill(3);
    let said = all.expect(1, "start", DONE);
    assert!(said.contains("its host ended in generation 3"), "{said}");
    all.expect(1, "stop", DONE);
    all.expect(1, "monitor", NOT_RUNNING);
}

fn agents<'a>(cluster: &'a Cluster, image: &'a str) -> Agents<'a> {
    let set = "serial.0=file:/run/lab/{name}.ticks chardev.agent.path=/run/lab/{name}.agent".to_owned();
    Agents { cluster, image, set }
}

/// The guest has gone on at this host, with what it had counted.
fn assert_continues(watch: &Watch, node: usize) {
    wait_counting(watch, "g", node);
    let lives = watch.lives("g");
    let [.., before, now] = &lives[..] else { panic!("{lives:?}") };
    // The switchover may have cut a line.
    assert!(now.first > before.last && now.first <= before.last + 2, "{before:?} {now:?}");
}

#[test]
fn the_newest_state_of_an_interrupted_move_goes_on() {
    let Some(mut cluster) = Cluster::new("the_newest_state_of_an_interrupted_move_goes_on") else { return };
    save(&cluster, None, "first.img");
    NODES.into_iter().for_each(|node| cluster.boot(node, Membership::Alone));
    let watch = Watch::start(&cluster.place.path(""), &["g"]);
    let all = agents(&cluster, "first.img");
    all.expect(1, "monitor", NOT_RUNNING);
    for _ in 0..2 {
        all.expect(1, "start", DONE);
    }
    all.expect(1, "monitor", DONE);
    let mut guest = LinuxGuest::connect_at(&cluster.path(1, "/run/lab/g.agent")).unwrap();
    guest.wait_ready(WITHIN).unwrap();
    guest.fill(WRITTEN, 1).unwrap();
    wait_counting(&watch, "g", 1);
    // Both ends are stopped: what the source has is stored, and run.
    all.interrupt_move(1, 2);
    for node in [1, 2] {
        all.expect(node, "monitor", FAILED);
    }
    all.expect(2, "stop", DONE);
    all.expect(1, "stop", DONE);
    let state = |name: &str| cluster.shared("state/g").join(name);
    assert!(state("arrived.1.img").exists() && state("saved.2.img").exists());
    for node in [1, 2] {
        all.expect(node, "monitor", NOT_RUNNING);
        all.expect(node, "stop", DONE);
    }
    all.expect(3, "start", DONE);
    // It has run at its source between.
    assert!(!state("arrived.1.img").exists());
    wait_counting(&watch, "g", 3);
    // The destination's host dies: the source has it.
    all.interrupt_move(3, 2);
    cluster.kill(2);
    all.expect(3, "start", DONE);
    assert_continues_here(&watch, 3);
    // The source's host dies: the destination has it.
    all.interrupt_move(3, 1);
    cluster.kill(3);
    all.expect(1, "start", DONE);
    assert_continues(&watch, 1);
    assert!(state("generation.5").exists() && !state("generation.6").exists());
    watch.assert_never_two();
}

/// The guest goes on where it was.
fn assert_continues_here(watch: &Watch, node: usize) {
    let before = watch.last("g");
    wait_until("a guest that counts on", WITHIN, || {
        Ok((watch.last("g").last > before.last + 2).then_some(()))
    })
    .unwrap();
    let now = watch.last("g");
    assert!(now.node == node && now.first == before.first, "{before:?} {now:?}");
}

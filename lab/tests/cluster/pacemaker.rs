//! A cluster places guests, moves them live, and restarts those of a dead host: each runs once.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use towline_lab::expect::{assert_ended, qmp};
use towline_lab::{Finished, LinuxGuest, Qemu, Version, towline, wait_until};

use crate::configuration::{configure, monitor, operation, values, wait_members};
use crate::hosts::{Cluster, Membership, NODES, WITHIN};
use crate::lives::Watch;

/// The third has a disk.
const GUESTS: [&str; 3] = ["g1", "g2", "g3"];
const COUNTS: &str =
    "(n=0; while :; do n=$((n+1)); echo tick $n > /dev/ttyS0; sleep 0.1; done) > /dev/null 2>&1 &";
const DISK: u64 = 8 << 20;

/// Saves a guest that counts on its serial port as an image.
pub(crate) fn save(cluster: &Cluster, disk: Option<&Path>, image: &str) {
    let builder = Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(256);
    let drive = disk.map(|disk| format!("file={},format=raw,if=none,id=disk0", disk.display()));
    let builder = match &drive {
        Some(drive) => builder.args(["-drive", drive, "-device", "virtio-blk-pci,drive=disk0"]),
        None => builder,
    };
    let (source, mut guest) = builder.boot(WITHIN).unwrap();
    if disk.is_some() {
        guest.shell("echo first | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null", WITHIN).unwrap();
    }
    guest.shell(COUNTS, WITHIN).unwrap();
    let image = cluster.shared(image).display().to_string();
    towline(["move", &qmp(&source), &image]).unwrap().wait_done(WITHIN).unwrap();
}

/// The guests of the cluster.
fn guests(cluster: &Cluster) -> String {
    let guest = |guest: &&str| {
        let qemu = Version::V10_0.command().get_program().to_str().unwrap().to_owned();
        let disk = cluster.shared("disk.raw").display().to_string();
        let mut set =
            "serial.0=file:/run/lab/{name}.ticks chardev.agent.path=/run/lab/{name}.agent".to_owned();
        let image =
            cluster.shared(if *guest == "g3" { "disk.img" } else { "first.img" }).display().to_string();
        if *guest == "g3" {
            set = format!("{set} drive.disk0.file={disk}");
        }
        let state = cluster.shared("state").display().to_string();
        let attributes = values(
            guest,
            &[
                ("image", &image),
                ("state", &state),
                ("trust", "true"),
                ("qemu", &qemu),
                ("ssh", &cluster.ssh()),
                ("set", &set),
            ],
        );
        let operations = ["start", "stop", "migrate_to", "migrate_from"]
            .map(|name| operation(guest, name, 60))
            .into_iter()
            .chain([monitor(guest, 2, "Started")])
            .collect::<String>();
        format!(
            "<primitive id=\"{guest}\" class=\"ocf\" provider=\"towline\" type=\"guest\"><meta_attributes id=\"{guest}-meta\">{}\
             </meta_attributes><instance_attributes id=\"{guest}-attributes\">{attributes}</instance_attributes>\
             <operations>{operations}</operations></primitive>",
            values(&format!("{guest}-meta"), &[("allow-migrate", "true")])
        )
    };
    GUESTS.iter().map(guest).collect()
}

/// The host of a guest, as the cluster sees it.
fn node_of(cluster: &Cluster, guest: &str) -> Option<usize> {
    let output = cluster.on(cluster.any(), &["crm_resource", "--locate", "-Q", "-r", guest]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let nodes: Vec<_> = text.lines().collect();
    match nodes[..] {
        [node] => node.trim().strip_prefix("node")?.parse().ok(),
        _ => None,
    }
}

/// Waits until these guests run, on hosts other than `dead`, and count there.
fn wait_elsewhere(cluster: &Cluster, watch: &Watch, dead: Option<usize>) -> Duration {
    let begun = Instant::now();
    wait_until("guests that run elsewhere", WITHIN, || {
        let nodes = GUESTS.map(|guest| node_of(cluster, guest));
        let are_there = nodes.iter().all(|node| node.is_some() && *node != dead);
        let _ = watch;
        Ok(are_there.then_some(()))
    })
    .unwrap();
    begun.elapsed()
}

/// Waits until a guest counts on this host.
pub(crate) fn wait_counting(watch: &Watch, guest: &str, node: usize) {
    wait_until("a guest that counts", WITHIN, || {
        let last = watch.lives(guest).pop();
        Ok(last.filter(|life| life.node == node && life.last > life.first + 2).map(drop))
    })
    .unwrap_or_else(|error| panic!("{guest} on node{node}: {error:#} {:?}", watch.lives(guest)));
}

pub(crate) fn settle(cluster: &Cluster) {
    cluster.run(cluster.any(), &["crm_resource", "--wait", "--timeout=100"]);
}

#[test]
fn a_cluster_runs_each_guest_once_and_never_twice() {
    let Some(mut cluster) = Cluster::new("a_cluster_runs_each_guest_once_and_never_twice") else { return };
    let begun = Instant::now();
    let said = |text: &str| println!("{:6.1} s  {text}", begun.elapsed().as_secs_f64());
    let disk = cluster.shared("disk.raw");
    fs::File::create(&disk).unwrap().set_len(DISK).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| save(&cluster, None, "first.img"));
        save(&cluster, Some(&disk), "disk.img");
    });
    configure(&cluster, &guests(&cluster), "", "stop");
    said("images are saved");
    NODES.into_iter().for_each(|node| cluster.boot(node, Membership::Managed));
    let watch = Watch::start(&cluster.place.path(""), &GUESTS);
    wait_members(&cluster);
    said("three hosts are members");
    wait_elsewhere(&cluster, &watch, None);
    said("three guests run");
    // All to one host, live.
    let elsewhere: Vec<_> = GUESTS.into_iter().filter(|guest| node_of(&cluster, guest) != Some(1)).collect();
    for guest in &elsewhere {
        cluster.run(1, &["crm_resource", "--move", "-r", guest, "-N", "node1"]);
    }
    settle(&cluster);
    for guest in &elsewhere {
        cluster.run(1, &["crm_resource", "--clear", "-r", guest]);
    }
    settle(&cluster);
    GUESTS.into_iter().for_each(|guest| wait_counting(&watch, guest, 1));
    said("all are on node1");
    refused_by_hand(&cluster);
    let before = GUESTS.map(|guest| watch.last(guest));
    let emptied = Instant::now();
    cluster.run(1, &["crm_attribute", "-t", "nodes", "-N", "node1", "-n", "standby", "-v", "on"]);
    settle(&cluster);
    said("node1 is in standby, and empty");
    for (guest, before) in GUESTS.into_iter().zip(before) {
        let node = node_of(&cluster, guest).unwrap();
        wait_counting(&watch, guest, node);
        let now = watch.last(guest);
        // A line may have been cut by the switchover.
        let there = watch.lives(guest).into_iter().rev().nth(1).unwrap();
        assert!(now.node != 1 && now.first > before.last && now.first <= there.last + 2, "{now:?} {there:?}");
        let (after, gap) = ((now.from - emptied).as_secs_f64(), now.from - there.to);
        println!(
            "          {guest} runs on node{} after {after:.1} s, {gap:.1?} between two ticks",
            now.node
        );
    }
    cluster.run(1, &["crm_attribute", "-t", "nodes", "-N", "node1", "-n", "standby", "-D"]);
    settle(&cluster);
    assert_eq!(cluster.fenced(), Vec::<String>::new());
    a_host_dies(&mut cluster, &watch);
    said("a dead host's guests run elsewhere");
    a_host_is_cut_off(&cluster, &watch);
    said("those of a host that was cut off run elsewhere");
    watch.assert_never_two();
}

/// A move, a copy or an upgrade behind the cluster's back would make a second guest.
fn refused_by_hand(cluster: &Cluster) {
    let (ssh, socket) = (cluster.ssh(), "qmp:/run/towline/guests/g1/qmp.sock");
    let image = cluster.shared("by-hand.img").display().to_string();
    let commands = [
        &["towline", "move", socket, "ssh:node2", "--ssh", &ssh, "--trust-command-line"][..],
        &["towline", "move", socket, &image],
        &["towline", "copy", "--resume", socket, &image],
        &["towline", "upgrade", socket],
    ];
    for words in commands {
        let output = cluster.on(1, words).output().unwrap();
        let finished = Finished {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert_ended(&finished, 1, &["guest g1 is run by a cluster", "is-managed"]);
    }
}

/// The host of the guest with the disk dies: that boots afresh, with what it had written; the others run from their images.
fn a_host_dies(cluster: &mut Cluster, watch: &Watch) {
    let node = node_of(cluster, "g3").unwrap();
    let lost: Vec<_> = GUESTS.into_iter().filter(|guest| node_of(cluster, guest) == Some(node)).collect();
    let mut guest = LinuxGuest::connect_at(&cluster.path(node, "/run/lab/g3.agent")).unwrap();
    guest.wait_ready(WITHIN).unwrap();
    guest.shell("echo second | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null", WITHIN).unwrap();
    let killed = Instant::now();
    cluster.kill(node);
    wait_until("the fence", WITHIN, || Ok((cluster.fenced().len() == 1).then_some(()))).unwrap();
    println!("          fenced after {:.1} s", killed.elapsed().as_secs_f64());
    wait_elsewhere(cluster, watch, Some(node));
    println!("          {lost:?} of node{node} run elsewhere after {:.1} s", killed.elapsed().as_secs_f64());
    for name in GUESTS.into_iter().filter(|name| *name != "g3") {
        wait_counting(watch, name, node_of(cluster, name).unwrap());
        let was_lost = lost.contains(&name);
        let now = watch.last(name);
        let before = watch.lives(name).iter().rev().nth(1).unwrap().last;
        assert_eq!(was_lost, now.first <= before, "{name}: {now:?} after {before}");
    }
    let there = node_of(cluster, "g3").unwrap();
    let mut guest = LinuxGuest::connect_at(&cluster.path(there, "/run/lab/g3.agent")).unwrap();
    guest.wait_ready(WITHIN).unwrap();
    let read = guest.shell("dd if=/dev/vda bs=8 count=1 2>/dev/null", WITHIN).unwrap();
    assert!(read.starts_with("second"), "{read:?}");
    let said = cluster.agents_wrote("g3 boots afresh");
    assert!(said.iter().any(|line| line.contains("no memory of that was saved")), "{said:?}");
    assert!(cluster.fenced()[0].starts_with(&format!("node{node} is off")), "{:?}", cluster.fenced());
    cluster.boot(node, Membership::Managed);
    wait_members(cluster);
    settle(cluster);
}

/// A host that is cut off is fenced before its guests run elsewhere.
fn a_host_is_cut_off(cluster: &Cluster, watch: &Watch) {
    let node = node_of(cluster, "g1").unwrap();
    let (cut, before) = (Instant::now(), watch.last("g1"));
    cluster.cut(node);
    let others = NODES.into_iter().find(|other| *other != node).unwrap();
    wait_until("the fence", WITHIN, || Ok((!cluster.is_on(node)).then_some(()))).unwrap();
    println!("          fenced after {:.1} s", cut.elapsed().as_secs_f64());
    wait_elsewhere(cluster, watch, Some(node));
    wait_counting(watch, "g1", node_of(cluster, "g1").unwrap());
    let now = watch.last("g1");
    println!(
        "          g1 runs elsewhere after {:.1} s, from {} after {}",
        cut.elapsed().as_secs_f64(),
        now.first,
        before.last
    );
    assert_ne!(now.node, node);
    let _ = others;
    let fenced = cluster.fenced();
    assert!(fenced.len() == 2 && fenced[1].starts_with(&format!("node{node} is off")), "{fenced:?}");
}

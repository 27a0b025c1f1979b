//! The copy of a guest's disk: refused, written faster than it is stored, and out of room.

use std::fs;

use fastrand::Rng;
use rustix::process::Signal;
use towline_lab::expect::{assert_ended, wait_event};
use towline_lab::{Sshd, command_after, signal};

use crate::ends_well;
use crate::protected::Protected;
use crate::support::{Hosts, Side, WITHIN};

/// Directory of the other host that has room for what the guest has on its disk, and not for much more.
const SMALL: &str = "/run/small";
/// Where metrics are served, and a request for them.
const METRICS: &str = "127.0.0.1:9110";
const SCRAPE: &str =
    r"exec 3<>/dev/tcp/127.0.0.1/9110; printf 'GET /metrics HTTP/1.1\r\n\r\n' >&3; exec cat <&3";
/// Writes most of the disk.
const BULK: &str = "dd if=/dev/urandom of=/disk/bulk bs=1M count=18 2>/dev/null; sync";

/// The metrics of the protection, by their names.
fn metrics(hosts: &Hosts) -> impl Fn(&str) -> f64 + use<> {
    let scraped = command_after(&hosts.here.prefix()).args(["bash", "-c", SCRAPE]).output().unwrap();
    let text = String::from_utf8(scraped.stdout).unwrap();
    move |name| {
        let line =
            text.lines().find(|line| line.starts_with(&format!("towline_protection_{name}{{destination=")));
        let value = line.and_then(|line| line.rsplit(' ').next()).unwrap_or_else(|| panic!("{name}: {text}"));
        value.parse().unwrap()
    }
}

#[test]
fn a_disk_without_room_there_leaves_the_guest_unprotected_and_running() {
    let test = "a_disk_without_room_there_leaves_the_guest_unprotected_and_running";
    let Some(mut hosts) = Hosts::new(test) else { return };
    let tick = hosts.guest.as_mut().unwrap().tick().unwrap();
    let taken = hosts.place.path("b/disk.raw");
    fs::write(&taken, "other").unwrap();
    assert_ended(&hosts.protect().wait(WITHIN).unwrap(), 1, &["disk disk0", "exists already"]);
    assert_eq!(fs::read(&taken).unwrap(), b"other");
    fs::remove_file(taken).unwrap();
    let mount = format!("mkdir {SMALL} && mount -t tmpfs -o size=16m tmpfs {SMALL}");
    let mounted = command_after(&hosts.there.prefix()).args(["sh", "-c", &mount]).status();
    assert!(mounted.unwrap().success());
    let mut protecting = hosts.protected_by(|words| {
        words.extend(["--set".to_owned(), format!("drive.disk0.file={SMALL}/disk.raw")]);
        words.extend(["--metrics", METRICS].map(str::to_owned));
    });
    let before = metrics(&hosts);
    assert_eq!((before("protected"), before("losses_total")), (1.0, 0.0));
    let clients = hosts.clients();
    clients.wait_more(2);
    clients.forget_gaps();
    hosts.guest.as_mut().unwrap().shell(BULK, WITHIN).unwrap();
    wait_event(&mut protecting, "the loss", WITHIN, |event| event["event"] == "unprotected");
    assert_eq!(hosts.wait_decided(), Side::Here);
    let after = metrics(&hosts);
    assert_eq!((after("protected"), after("losses_total")), (0.0, 1.0));
    assert!(after("checkpoints_total") > 0.0 && after("generation") == before("generation"));
    // In seconds: a stop takes milliseconds.
    let pause = after("pause_seconds_total") / after("checkpoints_total");
    assert!((1e-4..0.5).contains(&pause) && after("latency_seconds_total") > 0.0, "{pause}");
    clients.wait_more(2);
    println!("{:.0?} without a reply", clients.snapshot().longest_gap());
    signal(protecting.pid(), Signal::INT);
    let ended = protecting.wait(WITHIN).unwrap();
    println!("{}", ended.stderr);
    assert_ended(&ended, 0, &[]);
    hosts.wait_none_there();
    hosts.assert_stays(tick);
    ends_well(clients);
}

/// The copy that the host had is replaced.
#[test]
fn a_guest_is_protected_again_by_a_host_that_has_crashed() {
    let test = "a_guest_is_protected_again_by_a_host_that_has_crashed";
    let (Some(mut guest), Some(sshd)) = (Protected::new(test), Sshd::find(test)) else { return };
    let (generation, random) = (guest.generation(), &mut Rng::with_seed(3));
    // It may have the inode of the former one.
    let made =
        |guest: &Protected| fs::metadata(guest.hosts.place.path("b/disk.raw")).unwrap().created().unwrap();
    let before = made(&guest);
    guest.hosts.restart_there(&sshd, random, |hosts| assert!(hosts.place.path("b/disk.raw").exists()));
    assert_eq!(guest.wait_decided(generation), Side::Here);
    guest.is_protected_again(generation);
    println!("  the other host crashed: {:.0?} without a reply", guest.goes_on());
    assert_ne!(made(&guest), before);
    guest.survives_its_host(random);
}

#[test]
#[ignore = "nightly"]
fn a_guest_that_writes_its_disk_at_full_rate_survives_its_host() {
    let test = "a_guest_that_writes_its_disk_at_full_rate_survives_its_host";
    let Some(mut guest) = Protected::new(test) else { return };
    for _ in 0..5 {
        guest.hosts.guest.as_mut().unwrap().shell(BULK, WITHIN).unwrap();
        println!("  {:.0?} without a reply", guest.goes_on());
    }
    let writes = format!("(until [ -e /tmp/end ]; do {BULK}; done) > /dev/null 2>&1 < /dev/null &");
    guest.hosts.guest.as_mut().unwrap().shell(&writes, WITHIN).unwrap();
    guest.takes_checkpoints();
    guest.survives_its_host(&mut Rng::with_seed(8));
}

//! Ctrl-C, SIGTERM and SIGHUP: the copy ends in order, and the source runs on.

use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use towline_lab::{Towline, require_lab};

use crate::support::{
    Place, SLOW, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, ends_soon, guest,
    listens_at, moves, qmp, save, says, signal, small_guest, waiting,
};

/// Sends the signal and expects the exit of a cancelled copy.
#[track_caller]
fn cancel(towline: Towline, name: &str) {
    let since = Instant::now();
    signal(towline.pid(), name);
    let finished = ends_soon(towline, since);
    assert_safe(&finished, &["towline: cancelling; the source keeps its guest", "towline: cancelled"]);
}

#[test]
fn a_signal_while_listening_or_connecting_ends_in_order() {
    if !require_lab("a_signal_while_listening_or_connecting_ends_in_order") {
        return;
    }
    let place = Place::new();
    save(&place, guest(), "guest.img");
    let destination = waiting(&guest());
    for name in ["-INT", "-TERM", "-HUP"] {
        for to in [place.name("new.img"), qmp(&destination)] {
            let socket = place.name("listen.sock");
            let mut towline = place.towline(&format!("copy unix:{socket} {to}"));
            listens_at(&mut towline);
            cancel(towline, name);
            assert_waits(&destination);
        }
        // A peer that accepts the connection and never sends anything.
        let silent = UnixListener::bind(place.path("silent.sock")).unwrap();
        let line = format!("copy {} unix:{}", place.name("guest.img"), place.name("silent.sock"));
        let towline = place.towline(&line);
        let _connection = silent.accept().unwrap();
        cancel(towline, name);
        std::fs::remove_file(place.path("silent.sock")).unwrap();
        place.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

#[test]
fn a_signal_under_way_lets_the_source_run_on() {
    if !require_lab("a_signal_under_way_lets_the_source_run_on") {
        return;
    }
    let (place, source) = (Place::new(), counting(guest()));
    save(&place, guest(), "guest.img");
    for (name, from, to) in [
        ("-INT", qmp(&source), None),
        ("-TERM", qmp(&source), Some("--multifd-channels 0")),
        ("-HUP", qmp(&source), None),
        ("-INT", qmp(&source), Some("--multifd-channels 3")),
        ("-INT", place.name("guest.img"), Some("--stream")),
        ("-TERM", place.name("guest.img"), Some("--stream --multifd-channels 0")),
    ] {
        let destination = waiting(&guest());
        let to = to.map_or(place.name("new.img"), |options| format!("{options} {}", qmp(&destination)));
        let mut towline = place.towline(&format!("copy --json {SLOW} {from} {to}"));
        moves(&mut towline, 1 << 20);
        cancel(towline, name);
        assert_runs(&source);
        assert_waits(&destination);
        place.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

/// At any moment of a whole copy: either it is cancelled and leaves no file, or it is complete.
#[test]
fn a_signal_at_any_moment_leaves_an_image_or_nothing() {
    if !require_lab("a_signal_at_any_moment_leaves_an_image_or_nothing") {
        return;
    }
    let (place, source) = (Place::new(), counting(small_guest()));
    let line = format!("copy --resume {} {}", qmp(&source), place.name("guest.img"));
    let remove = || {
        place.assert_holds(&["guest.img", "guest.img.manifest.json"]);
        std::fs::remove_file(place.path("guest.img")).unwrap();
        std::fs::remove_file(place.path("guest.img.manifest.json")).unwrap();
    };
    let begun = Instant::now();
    assert_ended(&place.run(&line), 0, &[]);
    let took = begun.elapsed();
    remove();
    for step in 1..=12 {
        let mut towline = place.towline(&line);
        std::thread::sleep(took * step / 12);
        if towline.runs().unwrap() {
            signal(towline.pid(), "-INT");
        }
        let finished = towline.wait(WITHIN).unwrap();
        match (finished.status.code(), finished.status.signal()) {
            (Some(0), _) => remove(),
            // The signal came before towline had installed its handler.
            (_, Some(2)) => place.assert_holds(&[]),
            _ => {
                assert_safe(&finished, &["towline: cancelled"]);
                place.assert_holds(&[]);
            }
        }
        assert_runs(&source);
    }
}

/// `nohup` and service managers start programs with SIGHUP ignored, which must stay so.
#[test]
fn an_ignored_hang_up_stays_ignored() {
    if !require_lab("an_ignored_hang_up_stays_ignored") {
        return;
    }
    let place = Place::new();
    let mut towline = place.start(&["nohup"], &format!("copy unix:{} null:", place.name("listen.sock")));
    listens_at(&mut towline);
    signal(towline.pid(), "-HUP");
    let status = std::fs::read_to_string(format!("/proc/{}/status", towline.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 1, 1, "SIGHUP is the first");
    cancel(towline, "-TERM");
}

/// QEMU hangs, so the orderly end takes a while; a second signal ends towline at once.
#[test]
fn a_second_signal_ends_at_once() {
    if !require_lab("a_second_signal_ends_at_once") {
        return;
    }
    let (place, source) = (Place::new(), counting(guest()));
    let mut towline =
        place.towline(&format!("copy --json {SLOW} {} {}", qmp(&source), place.name("guest.img")));
    moves(&mut towline, 1 << 20);
    signal(source.pid(), "-STOP");
    signal(towline.pid(), "-INT");
    says(&mut towline, "again to end at once");
    std::thread::sleep(Duration::from_millis(300));
    assert!(towline.runs().unwrap(), "it waits for QEMU: {}", towline.stderr());
    let since = Instant::now();
    signal(towline.pid(), "-INT");
    let finished = ends_soon(towline, since);
    assert_eq!(finished.status.signal(), Some(2), "{}", finished.status);
    signal(source.pid(), "-CONT");
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs(&source);
}

//! Ctrl-C, SIGTERM and SIGHUP: the copy ends in order, and the source runs on.

use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use towline_lab::{Towline, require_lab};

use crate::support::{
    Fixture, SLOW, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, listens_at,
    qmp, save, signal, small_guest, wait_soon, wait_stderr, wait_transferred, waiting,
};

/// Sends the signal and expects the exit of a cancelled copy.
#[track_caller]
fn cancel(towline: Towline, name: &str) {
    let since = Instant::now();
    signal(towline.pid(), name);
    let finished = wait_soon(towline, since);
    assert_safe(
        &finished,
        &[
            &format!("towline: SIG{}: cancelling; the source keeps its guest", &name[1..]),
            "towline: cancelled",
        ],
    );
}

#[test]
fn a_signal_while_listening_or_connecting_ends_in_order() {
    if !require_lab("a_signal_while_listening_or_connecting_ends_in_order") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let destination = waiting(&guest());
    for name in ["-INT", "-TERM", "-HUP"] {
        for to in [fixture.name("new.img"), qmp(&destination)] {
            let socket = fixture.name("listen.sock");
            let mut towline = fixture.towline(&format!("copy unix:{socket} {to}"));
            listens_at(&mut towline);
            cancel(towline, name);
            assert_waits(&destination);
        }
        // A peer that accepts the connection and never sends anything.
        let silent = UnixListener::bind(fixture.path("silent.sock")).unwrap();
        let line = format!("copy {} unix:{}", fixture.name("guest.img"), fixture.name("silent.sock"));
        let towline = fixture.towline(&line);
        let _connection = silent.accept().unwrap();
        cancel(towline, name);
        std::fs::remove_file(fixture.path("silent.sock")).unwrap();
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

#[test]
fn a_signal_under_way_lets_the_source_run_on() {
    if !require_lab("a_signal_under_way_lets_the_source_run_on") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    save(&fixture, guest(), "guest.img");
    for (name, from, to) in [
        ("-INT", qmp(&source), None),
        ("-TERM", qmp(&source), Some("--multifd-channels 0")),
        ("-HUP", qmp(&source), None),
        ("-INT", qmp(&source), Some("--multifd-channels 3")),
        ("-INT", fixture.name("guest.img"), Some("--stream")),
        ("-TERM", fixture.name("guest.img"), Some("--stream --multifd-channels 0")),
    ] {
        let destination = waiting(&guest());
        let to = to.map_or(fixture.name("new.img"), |options| format!("{options} {}", qmp(&destination)));
        let mut towline = fixture.towline(&format!("copy --json {SLOW} {from} {to}"));
        wait_transferred(&mut towline, 1 << 20);
        cancel(towline, name);
        assert_runs(&source);
        assert_waits(&destination);
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

/// At any moment of a whole copy: either it is cancelled and leaves no file, or it is complete.
#[test]
fn a_signal_at_any_moment_leaves_an_image_or_nothing() {
    if !require_lab("a_signal_at_any_moment_leaves_an_image_or_nothing") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(small_guest()));
    let line = format!("copy --resume {} {}", qmp(&source), fixture.name("guest.img"));
    let remove = || {
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
        std::fs::remove_file(fixture.path("guest.img")).unwrap();
        std::fs::remove_file(fixture.path("guest.img.manifest.json")).unwrap();
    };
    let begun = Instant::now();
    assert_ended(&fixture.run(&line), 0, &[]);
    let took = begun.elapsed();
    remove();
    for step in 1..=12 {
        let mut towline = fixture.towline(&line);
        std::thread::sleep(took * step / 12);
        if towline.runs().unwrap() {
            signal(towline.pid(), "-INT");
        }
        let finished = towline.wait(WITHIN).unwrap();
        match (finished.status.code(), finished.status.signal()) {
            (Some(0), _) => remove(),
            // The signal came before towline had installed its handler.
            (_, Some(2)) => fixture.assert_holds(&[]),
            _ => {
                assert_safe(&finished, &["towline: cancelled"]);
                fixture.assert_holds(&[]);
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
    let fixture = Fixture::new();
    let mut towline = fixture.start(&["nohup"], &format!("copy unix:{} null:", fixture.name("listen.sock")));
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
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let mut towline =
        fixture.towline(&format!("copy --json {SLOW} {} {}", qmp(&source), fixture.name("guest.img")));
    wait_transferred(&mut towline, 1 << 20);
    signal(source.pid(), "-STOP");
    signal(towline.pid(), "-INT");
    wait_stderr(&mut towline, "; a second signal ends towline at once");
    std::thread::sleep(Duration::from_millis(300));
    assert!(towline.runs().unwrap(), "it waits for QEMU: {}", towline.stderr());
    let since = Instant::now();
    signal(towline.pid(), "-INT");
    let finished = wait_soon(towline, since);
    assert_eq!(finished.status.signal(), Some(2), "{}", finished.status);
    signal(source.pid(), "-CONT");
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs(&source);
}

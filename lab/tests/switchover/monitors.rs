//! Monitors without a reliable view of the guest: a proxy that exits, another client's migration, a guest
//! that towline must not run.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command};

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{Finished, Qemu, Qmp, Version, require_lab, skip, wait_until};

use crate::support::{
    Scratch, SentCopy, Suspended, WITHIN, assert_ended, assert_runs_nowhere, assert_runs_only_in, counting,
    end, is_live, qmp, sent_to_a_suspended_destination, signal, small, start, wait_phase, waiting,
};

const SOCAT: &str = "/usr/bin/socat";
/// Advice about a source of which the destination has not acknowledged the guest.
const NOT_ACKNOWLEDGED: &str = "resume it at its source (`cont`), unless QEMU does that by itself";
/// Slow enough that the copy takes a while.
const SLOW: &str = "--max-bandwidth 1M";

/// A proxy in front of a monitor, in a separate process: the process that listens on its socket is not QEMU.
pub(crate) struct Socat(Child);

impl Socat {
    pub(crate) fn start(listen: &str, qemu: &Qemu) -> Self {
        let to = format!("UNIX-CONNECT:{}", qemu.qmp_path().display());
        let child = Command::new(SOCAT).args([format!("UNIX-LISTEN:{listen}"), to]).spawn().unwrap();
        wait_until("a proxy that listens", WITHIN, || Ok(Path::new(listen).exists().then_some(()))).unwrap();
        Self(child)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Socat {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Starts a copy with a proxy in front of its source's monitor, and waits until it has sent everything.
fn sent_by_a_proxy(command: &str, scratch: &Scratch) -> (SentCopy, Socat) {
    let (proxy, socket) = (RefCell::new(None), scratch.text("a.qmp"));
    let sent = sent_to_a_suspended_destination(&|source, destination| {
        // The proxy and socket file of the previous attempt.
        drop(proxy.borrow_mut().take());
        std::fs::remove_file(&socket).ok();
        *proxy.borrow_mut() = Some(Socat::start(&socket, source));
        start(&format!("{command} qmp:{socket} {}", qmp(destination)))
    });
    (sent, proxy.into_inner().unwrap())
}

pub(crate) fn has_socat(name: &str) -> bool {
    let found = Path::new(SOCAT).exists();
    if !found {
        skip(name, "socat is missing; run `cargo xtask setup`");
    }
    found && require_lab(name)
}

/// The source completes, and cannot be queried: the destination has the guest, and does not run it.
#[test]
fn a_proxy_that_exits_when_everything_is_sent_is_not_mistaken_for_qemus_exit() {
    let name = "a_proxy_that_exits_when_everything_is_sent_is_not_mistaken_for_qemus_exit";
    if !has_socat(name) {
        return;
    }
    let (sent, proxy) = sent_by_a_proxy("move", &Scratch::new());
    let SentCopy { suspended, towline, source, destination } = sent;
    drop(proxy);
    drop(suspended);
    let finished = end(towline);
    if finished.stderr.contains(NOT_ACKNOWLEDGED) {
        // It was missed before the destination could acknowledge.
        return assert_has_its_guest_back(&finished, &source, &destination);
    }
    assert_ended(
        &finished,
        3,
        &["it is not known whether its source still has it; whole at its destination"],
    );
    assert!(!is_live(&source) || !is_live(&destination), "two guests run");
    // The commands that the message names.
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    assert_runs_nowhere(&source, &destination);
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert_runs_only_in(&destination, &source);
}

/// The source is missed while its destination has not acknowledged, and resumes its guest.
#[test]
fn a_proxy_that_exits_before_the_acknowledgement_leaves_the_guest_at_its_source() {
    let name = "a_proxy_that_exits_before_the_acknowledgement_leaves_the_guest_at_its_source";
    if !has_socat(name) {
        return;
    }
    let (sent, proxy) = sent_by_a_proxy("move", &Scratch::new());
    let SentCopy { suspended, towline, source, destination } = sent;
    drop(proxy);
    source.qmp().wait_status("running", WITHIN).unwrap();
    drop(suspended);
    assert_has_its_guest_back(&end(towline), &source, &destination);
}

#[track_caller]
fn assert_has_its_guest_back(finished: &Finished, source: &Qemu, destination: &Qemu) {
    assert_ended(finished, 3, &["it is not known whether its source still has it", NOT_ACKNOWLEDGED]);
    source.qmp().wait_status("running", WITHIN).unwrap();
    assert_runs_only_in(source, destination);
}

/// The same, and the proxy is restarted: the source is queried, and the move completes.
#[test]
fn a_restarted_proxy_does_not_affect_the_copy() {
    let name = "a_restarted_proxy_does_not_affect_the_copy";
    if !has_socat(name) {
        return;
    }
    let scratch = Scratch::new();
    let (sent, proxy) = sent_by_a_proxy("copy", &scratch);
    let SentCopy { suspended, mut towline, source, destination } = sent;
    let socket = scratch.text("a.qmp");
    // It is acknowledged and completes only when it goes on: one that is missed before that gets its guest back.
    let stopped = Suspended::new(&source);
    drop(suspended);
    wait_phase(&mut towline, "release");
    drop(proxy);
    // The file of a listener that has exited is in the way of the next one.
    std::fs::remove_file(&socket).ok();
    drop(stopped);
    let done = source.qmp().wait_status("postmigrate", WITHIN);
    done.unwrap_or_else(|error| panic!("{error:#}: {}", towline.stderr()));
    let _again = Socat::start(&socket, &source);
    assert_ended(&end(towline), 0, &[]);
    assert_runs_only_in(&destination, &source);
}

#[test]
fn a_proxy_that_ends_earlier_leaves_the_guest_at_its_source() {
    let name = "a_proxy_that_ends_earlier_leaves_the_guest_at_its_source";
    if !has_socat(name) {
        return;
    }
    let (scratch, builder) = (Scratch::new(), small(Version::V10_0));
    let (source, destination) = (counting(&builder), waiting(&builder));
    let proxy = Socat::start(&scratch.text("a.qmp"), &source);
    let mut towline = start(&format!("move {SLOW} qmp:{} {}", scratch.text("a.qmp"), qmp(&destination)));
    wait_phase(&mut towline, "transfer");
    source.qmp().wait_migration("active", WITHIN).unwrap();
    drop(proxy);
    let finished = end(towline);
    assert_ended(
        &finished,
        3,
        &["it is not known whether its source still has it", "resume it at its source (`cont`)"],
    );
    assert!(!finished.stderr.contains("has ended, and the guest with it"), "{}", finished.stderr);
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs_only_in(&source, &destination);
}

/// The destination's monitor is held by another client, so the copy fails late; before that an operator
/// starts a migration.
#[test]
fn another_clients_migration_is_not_cancelled() {
    if !require_lab("another_clients_migration_is_not_cancelled") {
        return;
    }
    let (builder, scratch) = (small(Version::V10_0), Scratch::new());
    let (source, destination) = (counting(&builder), waiting(&builder));
    let holder = Qmp::connect(&destination.qmp_path(), WITHIN).unwrap();
    let mut towline = start(&format!("copy {} {}", qmp(&source), qmp(&destination)));
    // It holds the source's monitor from the preflight check on, so another client does not get a greeting
    // there.
    wait_until("a towline at the source's monitor", WITHIN, || {
        assert!(towline.runs()?, "it ended: {}", towline.stderr());
        Ok(Qmp::connect(&source.qmp_path(), std::time::Duration::from_millis(500)).is_err().then_some(()))
    })
    .unwrap();
    let parameters = json!({ "max-bandwidth": 64 << 10 });
    source.qmp().execute("migrate-set-parameters", parameters).unwrap();
    let other = format!("exec:cat > {}", scratch.text("theirs"));
    source.qmp().execute("migrate", json!({ "uri": other })).unwrap();
    assert_ended(&end(towline), 1, &["another client holds this monitor"]);
    let migration = source.qmp().execute("query-migrate", Value::Null).unwrap();
    assert_eq!(migration["status"], "active", "{migration}");
    drop(holder);
}

/// At its source it stays as the copy left it, for any result of the next one. (For a guest that runs
/// elsewhere see `records`.)
#[test]
fn a_copy_that_fails_early_does_not_run_what_an_earlier_one_paused() {
    if !require_lab("a_copy_that_fails_early_does_not_run_what_an_earlier_one_paused") {
        return;
    }
    let (scratch, source) = (Scratch::new(), counting(&small(Version::V10_0)));
    assert_ended(&end(start(&format!("copy {} {}", qmp(&source), scratch.text("first.img")))), 0, &[]);
    let nowhere = scratch.text("missing/guest.img");
    assert_ended(
        &end(start(&format!("copy --resume {} {nowhere}", qmp(&source)))),
        1,
        &["is not a directory"],
    );
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    // Nor does a copy that is cancelled under way.
    let image = scratch.text("guest.img");
    let mut towline = start(&format!("copy --resume {SLOW} {} {image}", qmp(&source)));
    wait_phase(&mut towline, "transfer");
    signal(towline.pid(), Signal::INT);
    assert_ended(&end(towline), 1, &["cancelled"]);
    assert!(!is_live(&source), "{:?}", source.qmp().status());
}

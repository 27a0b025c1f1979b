//! QEMUs that do not answer for a while, which decides nothing.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{BootSector, Builder, Proxy, Qemu, Version, require_lab};

use crate::support::{
    SentCopy, Suspended, WITHIN, assert_ended, assert_runs_nowhere, assert_runs_only_in, counting, end,
    is_live, listening, qmp, sent_to_a_suspended_destination, signal, small, start, wait_phase, waiting,
};

/// Longer than the timeout of a reply.
const LONG: Duration = Duration::from_secs(12);

/// A guest that dirties all of its memory, so the last pass is large.
fn large() -> Builder {
    let boot_sector =
        BootSector { fill_mib: 40, sweep_pages: 10_000, steps_per_tick: 0, ..BootSector::default() };
    Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(boot_sector)
}

/// QEMU sends its last pass with its main loop locked, and does not answer until that is done.
#[test]
fn a_last_pass_longer_than_the_reply_timeout_completes() {
    if !require_lab("a_last_pass_longer_than_the_reply_timeout_completes") {
        return;
    }
    let (source, (destination, address)) = (counting(&large()), listening(&large()));
    let proxy = Proxy::start(address).unwrap();
    proxy.limit(2 << 20);
    let towline = start(&format!("copy --downtime-limit 120000 {} tcp:{}", qmp(&source), proxy.address()));
    let finished = end(towline);
    assert_ended(&finished, 0, &[]);
    let migration = source.qmp().execute("query-migrate", Value::Null).unwrap();
    let downtime = Duration::from_millis(migration["downtime"].as_u64().unwrap());
    assert!(downtime > LONG, "the last pass took {downtime:?}: this tests nothing");
    assert_runs_only_in(&destination, &source);
}

/// Keeps a QEMU from answering for longer than the timeout of a reply.
fn silence(qemu: &Qemu) {
    let suspended = Suspended::new(qemu);
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        std::thread::sleep(LONG - begun.elapsed());
    }
    drop(suspended);
}

#[test]
fn a_source_that_pauses_during_a_copy_resumes() {
    if !require_lab("a_source_that_pauses_during_a_copy_resumes") {
        return;
    }
    let builder = small(Version::V10_0);
    let (source, destination) = (counting(&builder), waiting(&builder));
    let mut towline = start(&format!(
        "copy --max-bandwidth 1M --downtime-limit 5000 {} {}",
        qmp(&source),
        qmp(&destination)
    ));
    wait_phase(&mut towline, "transfer");
    source.qmp().wait_migration("active", WITHIN).unwrap();
    silence(&source);
    assert_ended(&end(towline), 0, &[]);
    assert_runs_only_in(&destination, &source);
}

/// The destination has everything, and its source does not report its completion: the text names the QEMU
/// that has the guest.
#[test]
fn a_source_that_is_silent_at_the_end_leaves_the_guest_at_its_destination() {
    if !require_lab("a_source_that_is_silent_at_the_end_leaves_the_guest_at_its_destination") {
        return;
    }
    let SentCopy { suspended, towline, source, destination } =
        sent_to_a_suspended_destination(&|source, destination| {
            start(&format!("copy {} {}", qmp(source), qmp(destination)))
        });
    let silent = Suspended::new(&source);
    drop(suspended);
    let finished = end(towline);
    drop(silent);
    assert_ended(
        &finished,
        3,
        &["it is not known whether its source still has it; whole at its destination"],
    );
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    assert_runs_nowhere(&source, &destination);
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert_runs_only_in(&destination, &source);
}

#[test]
fn a_source_that_pauses_during_postcopy_resumes() {
    if !require_lab("a_source_that_pauses_during_postcopy_resumes") {
        return;
    }
    let (source, destination) = (counting(&large()), waiting(&large()));
    let options = "--postcopy --max-bandwidth 24M --downtime-limit 1";
    let mut towline = start(&format!("move {options} {} {}", qmp(&source), qmp(&destination)));
    wait_phase(&mut towline, "transfer");
    source.qmp().execute("migrate-set-parameters", json!({ "max-postcopy-bandwidth": 1 << 20 })).unwrap();
    wait_phase(&mut towline, "switchover");
    silence(&source);
    source.qmp().execute("migrate-set-parameters", json!({ "max-postcopy-bandwidth": 0 })).unwrap();
    assert_ended(&end(towline), 0, &[]);
    assert!(source.wait_exit(WITHIN).unwrap().success());
    destination.qmp().wait_status("running", WITHIN).unwrap();
    destination.wait_counting(WITHIN).unwrap();
}

/// A cancellation races with the end of the first pass: one guest runs in any case.
#[test]
fn a_postcopy_cancelled_at_any_moment_of_its_first_pass_leaves_one_guest() {
    if !require_lab("a_postcopy_cancelled_at_any_moment_of_its_first_pass_leaves_one_guest") {
        return;
    }
    let builder = small(Version::V10_0);
    for step in 0..8 {
        let (source, destination) = (counting(&builder), waiting(&builder));
        let mut towline = start(&format!("move --postcopy {} {}", qmp(&source), qmp(&destination)));
        wait_phase(&mut towline, "transfer");
        std::thread::sleep(Duration::from_millis(8) * step);
        if towline.runs().unwrap() {
            signal(towline.pid(), Signal::INT);
        }
        let finished = end(towline);
        match finished.status.code() {
            Some(0) => {
                assert!(source.wait_exit(WITHIN).unwrap().success());
                destination.qmp().wait_status("running", WITHIN).unwrap();
            }
            _ => {
                assert_ended(&finished, 1, &["cancelled", "the guest: safe at its source"]);
                source.qmp().wait_status("running", WITHIN).unwrap();
                assert!(!is_live(&destination), "two guests run");
            }
        }
    }
}

//! The small guest, restored repeatedly: it runs, counts on, and each page is sent once.

use serde_json::Value;
use towline_lab::{Version, require_lab, wait_until};

use crate::support::{
    Scratch, WITHIN, assert_each_page_once, completed, events, number, prove_alive, qmp, run, small, start,
    statuses, store, wait_running, waiting,
};

/// The working set that a restore records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WorkingSet {
    /// The next restore begins with it.
    Kept,
    Removed,
}

/// Restores it `times` times, and checks it now and then.
fn restores(version: Version, options: &str, working_set: WorkingSet, times: u64) {
    let scratch = Scratch::new();
    let (builder, image) = (small(version), scratch.text("guest.img"));
    let count = store(&builder, &image);
    for time in 0..times {
        let destination = waiting(&builder);
        let finished = run(&format!("copy --postcopy {options} --json {image} {}", qmp(&destination)));
        let completed = completed(&finished);
        assert_eq!(completed["destination-state"], "running");
        assert_eq!(completed["postcopy"]["recoveries"], 0);
        assert_each_page_once(&completed);
        let statuses = statuses(&destination);
        assert!(statuses.iter().any(|status| status == "postcopy-active"), "restore {time}: {statuses:?}");
        assert!(!statuses.iter().any(|status| status == "postcopy-paused"), "restore {time}: {statuses:?}");
        assert_eq!(destination.qmp().status().unwrap(), "running");
        prove_alive(&destination, count);
        if working_set == WorkingSet::Removed {
            // There is none if the guest requested nothing.
            let _ = std::fs::remove_file(scratch.path("guest.img.working-set.json"));
        }
    }
}

#[test]
fn a_guest_runs_at_once_and_gets_each_page_once() {
    if require_lab("a_guest_runs_at_once_and_gets_each_page_once") {
        restores(Version::V10_0, "", WorkingSet::Removed, number("TOWLINE_SOAK_RESTORES", 2));
    }
}

#[test]
fn a_guest_with_a_preempt_channel_and_its_working_set_gets_each_page_once() {
    if require_lab("a_guest_with_a_preempt_channel_and_its_working_set_gets_each_page_once") {
        restores(Version::V10_0, "--postcopy-preempt", WorkingSet::Kept, number("TOWLINE_SOAK_RESTORES", 2));
    }
}

#[test]
fn a_guest_on_qemu_7_2_runs_at_once_and_gets_each_page_once() {
    if require_lab("a_guest_on_qemu_7_2_runs_at_once_and_gets_each_page_once") {
        restores(Version::V7_2, "--verify", WorkingSet::Kept, 1);
        restores(Version::V7_2, "--postcopy-preempt", WorkingSet::Kept, 1);
    }
}

#[test]
fn a_paused_guest_stays_paused_while_its_memory_arrives() {
    if !require_lab("a_paused_guest_stays_paused_while_its_memory_arrives") {
        return;
    }
    let scratch = Scratch::new();
    let (builder, image) = (small(Version::V10_0), scratch.text("guest.img"));
    let count = store(&builder, &image);
    let destination = waiting(&builder);
    let finished = run(&format!("copy --postcopy --paused --json {image} {}", qmp(&destination)));
    assert_eq!(completed(&finished)["destination-state"], "paused");
    assert_eq!(destination.qmp().status().unwrap(), "paused");
    destination.check_filled().unwrap();
    destination.qmp().execute("cont", Value::Null).unwrap();
    prove_alive(&destination, count);
}

#[test]
fn a_guest_counts_while_most_of_its_memory_is_missing() {
    if !require_lab("a_guest_counts_while_most_of_its_memory_is_missing") {
        return;
    }
    let scratch = Scratch::new();
    let (builder, image) = (small(Version::V10_0), scratch.text("guest.img"));
    let count = store(&builder, &image);
    let destination = waiting(&builder);
    // Eight seconds for 16 MiB, if the guest requests none of it.
    let page = scratch.text("page.html");
    let line =
        format!("copy --postcopy --max-bandwidth 2M --report {page} --json {image} {}", qmp(&destination));
    let mut towline = start(&line);
    wait_running(&mut towline);
    wait_until("a guest that counts on", WITHIN, || Ok((destination.counter()? > count + 1).then_some(())))
        .unwrap();
    let finished = towline.wait(WITHIN).unwrap();
    let told = events(&finished.stdout);
    let left = |event: &Value| event["event"] == "progress" && event["remaining"].as_u64() > Some(0);
    let ran = told.iter().position(|event| event["phase"] == "running").unwrap();
    assert!(told[ran..].iter().any(left), "it ran when everything was there: {}", finished.stdout);
    let completed = completed(&finished);
    assert!(completed["postcopy"]["faults"]["requests"].as_u64().unwrap() > 0, "{completed}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("Block times of vCPUs") && page.contains(" µs to "), "{page}");
    assert!(!page.contains("Downtime"), "the guest of an image was not stopped: {page}");
    assert_each_page_once(&completed);
    prove_alive(&destination, count);
}

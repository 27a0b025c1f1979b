//! `towline run`: guests from an image, in QEMUs that towline starts and supervises.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod changed;
mod clones;
mod detached;
mod disks;
mod disturbed;
mod faults;
mod filesystem;
mod forks;
mod instants;
mod many;
mod memory;
#[allow(dead_code, unused_imports, reason = "helpers of the tests of cards, of which these use a part")]
#[path = "../net/support.rs"]
mod network;
mod record;
mod reflinks;
mod standby;
#[allow(dead_code, unused_imports, reason = "helpers of the tests of stores, of which these use a part")]
#[path = "../store/support.rs"]
mod store;
mod stores;
mod support;
mod upgrades;
mod user;

use towline_lab::{Version, require_lab, require_qemu};

use crate::support::{Saved, WITHIN};

#[test]
fn a_saved_guest_runs_again_by_its_recorded_command_line() {
    let test = "a_saved_guest_runs_again_by_its_recorded_command_line";
    if !require_lab(test) {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let shown = saved.inspect();
    let words = shown["command-line"]["arguments"].as_array().unwrap();
    assert!(
        words.iter().any(|word| word == "-machine") && words.iter().all(|word| word != "-mon"),
        "{shown}"
    );

    let refused = saved.run(&["--name", "web"], &[]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    for text in ["refused:\n  kernel=", "\n  initrd=", " --set kernel=VALUE --set initrd=VALUE"] {
        assert!(refused.stderr.contains(text), "{text:?}: {}", refused.stderr);
    }
    assert!(!refused.stderr.contains("append="), "{}", refused.stderr);
    assert_eq!(saved.guests(), Vec::<String>::new());

    let settings = saved.settings();
    let mut run = saved.run(&["--name", "web", "--share"], &settings);
    saved.assert_runs(&mut run, "web");
    assert!(run.stdout().contains("memory-backend-file,id=pc.ram"), "{}", run.stdout());
    assert!(run.stderr().contains("its pages are not sent"), "{}", run.stderr());
    assert_eq!(saved.guests(), ["web"]);

    let taken = saved
        .run(&["--name", "web", "--copy"], &saved.settings_in("other-{name}.agent"))
        .wait(WITHIN)
        .unwrap();
    assert_eq!(taken.status.code(), Some(1), "{}", taken.stderr);
    assert!(taken.stderr.contains("name web is taken by process"), "{}", taken.stderr);
    assert_eq!(saved.guests(), ["web"]);

    saved.interrupt(run);
    saved.assert_intact();
}

#[test]
fn a_clone_that_does_not_start_ends_the_others() {
    if !require_lab("a_clone_that_does_not_start_ends_the_others") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let shared = saved.run(&["--name", "web", "--count", "2"], &saved.settings_in("agent"));
    let shared = shared.wait(WITHIN).unwrap();
    assert_eq!(shared.status.code(), Some(1), "{}", shared.stderr);
    assert!(shared.stderr.contains("web-0 and web-1 would both use"), "{}", shared.stderr);
    // Only the first clone's directory exists.
    std::fs::create_dir(saved.path("log-0")).unwrap();
    let file = saved.path("log-{n}").join("pid").display().to_string();
    let failed = saved.run_with_more(&["--name", "web", "--count", "2"], &["-pidfile", &file]);
    let failed = failed.wait(WITHIN).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", failed.stderr);
    assert!(failed.stderr.contains("guest web-1: QEMU"), "{}", failed.stderr);
    // The commands of both were printed.
    assert_eq!(
        failed.stdout.lines().filter(|line| line.contains("-machine")).count(),
        2,
        "{}",
        failed.stdout
    );
    assert!(!saved.directory("web-0").exists() && !saved.directory("web-1").exists());
    assert_eq!(saved.guests(), Vec::<String>::new());
    saved.assert_intact();
}

#[test]
fn memory_is_copied_on_request() {
    if !require_lab("memory_is_copied_on_request") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let page = saved.path("run.html").display().to_string();
    let mut run = saved.run(&["--copy", "--name", "web", "--report", &page], &saved.settings());
    saved.assert_runs(&mut run, "web");
    let page = std::fs::read_to_string(page).unwrap();
    for part in ["<th><i class=\"p0\"></i> start</th>", "> running</th>", "<td>done</td>"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!run.stdout().contains("memory-backend-file"), "{}", run.stdout());
    // A guest that ends on its own ends the command.
    saved.quit("web");
    run.wait_done(WITHIN).unwrap();
    assert_eq!(saved.guests(), Vec::<String>::new());
    assert!(!saved.directory("web").exists());
}

#[test]
#[ignore = "nightly"]
fn a_guest_of_the_newest_qemu_runs() {
    let test = "a_guest_of_the_newest_qemu_runs";
    if !require_qemu(test, &[Version::Newest]) {
        return;
    }
    let saved = Saved::new(Version::Newest);
    let mut run = saved.run(&["--name", "web", "--share"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    saved.interrupt(run);
    saved.assert_intact();
}

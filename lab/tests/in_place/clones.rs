//! Guests that run on the memory of their image.

use towline_lab::{Qemu, Version, require_lab, require_qemu};

use crate::support::{MIB, Saved, copy, events, milliseconds_to_running, notices, ram_pss, report_events};

/// Bytes that a restore may send: everything but RAM.
const SENT_MAX: u64 = 4 * MIB;
const CLONES: usize = 6;
/// Number of restores that are timed; `TOWLINE_IN_PLACE_RESTORES` sets it.
const RESTORES: usize = 5;

fn restores() -> usize {
    std::env::var("TOWLINE_IN_PLACE_RESTORES").map_or(RESTORES, |number| number.parse().unwrap())
}

fn assert_mapped(finished: &towline_lab::Finished, saved: &Saved) {
    assert!(finished.status.success(), "{}", finished.stderr);
    let expected = format!("memory is mapped from {}: its pages are not sent", saved.path().display());
    assert!(notices(finished).contains(&expected), "{:?}", notices(finished));
    for completed in events(finished, "completed") {
        let sent = completed["ram"]["transferred"].as_u64().unwrap();
        println!("sent {sent} bytes");
        assert!(sent <= SENT_MAX, "{sent} bytes were sent, expected at most {SENT_MAX}: {completed}");
    }
}

fn a_guest_runs_on_the_memory_of_its_image(version: Version) {
    let saved = Saved::new(version);
    let mut times = Vec::new();
    for turn in 0..restores() {
        let destination = saved.waiting(&saved.backend());
        report_events(&destination);
        let destinations = [destination];
        let finished = copy(if turn == 0 { &["--verify"] } else { &[] }, &saved, &destinations);
        assert_mapped(&finished, &saved);
        let [destination] = &destinations;
        times.push(milliseconds_to_running(destination));
        if turn == 0 {
            saved.assert_runs_in(destination);
            // What the guest writes is its own.
            destination.linux(crate::support::WITHIN).unwrap().fill(64 * MIB, 6).unwrap();
            println!(
                "RAM of a guest that wrote 64 MiB: {} KiB PSS",
                ram_pss(destination, &saved.path()) >> 10
            );
        }
    }
    saved.assert_intact();
    times.sort_by(f64::total_cmp);
    println!(
        "{version:?}: from migrate-incoming to running {:.1} ms (median of {}), {:.1} to {:.1} ms",
        times[times.len() / 2],
        times.len(),
        times[0],
        times[times.len() - 1]
    );
}

#[test]
fn a_guest_of_qemu_10_0_runs_on_the_memory_of_its_image() {
    if require_lab("a_guest_of_qemu_10_0_runs_on_the_memory_of_its_image") {
        a_guest_runs_on_the_memory_of_its_image(Version::V10_0);
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_of_the_newest_qemu_runs_on_the_memory_of_its_image() {
    let name = "a_guest_of_the_newest_qemu_runs_on_the_memory_of_its_image";
    if require_qemu(name, &[Version::Newest]) {
        a_guest_runs_on_the_memory_of_its_image(Version::Newest);
    }
}

/// Starts six guests out of one image, with a copy each or with one for all; prints their times and the
/// memory that they share.
fn six_guests(saved: &Saved, copies: &str, restore: impl Fn(&[Qemu])) {
    let clones: Vec<Qemu> = (0..CLONES).map(|_| saved.waiting(&saved.backend())).collect();
    clones.iter().for_each(report_events);
    restore(&clones);
    let mut times: Vec<f64> = clones.iter().map(milliseconds_to_running).collect();
    times.sort_by(f64::total_cmp);
    let pss: u64 = clones.iter().map(|clone| ram_pss(clone, &saved.path())).sum();
    println!(
        "{CLONES} guests {copies}: {times:.1?} ms from migrate-incoming to running, {} KiB of RAM together",
        pss >> 10
    );
    clones.iter().for_each(|clone| saved.assert_runs_in(clone));
    saved.assert_intact();
}

#[test]
#[ignore = "nightly"]
fn six_guests_share_the_memory_of_one_image() {
    if !require_lab("six_guests_share_the_memory_of_one_image") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    six_guests(&saved, "by a copy each", |clones| {
        for clone in clones {
            assert_mapped(&copy(&[], &saved, std::slice::from_ref(clone)), &saved);
        }
    });
    six_guests(&saved, "at once", |clones| {
        let finished = copy(&[], &saved, clones);
        assert_mapped(&finished, &saved);
        assert_eq!(events(&finished, "completed").len(), CLONES, "{}", finished.stdout);
    });
}

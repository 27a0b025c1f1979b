//! Guests of an image in an object store behind a delay: the times until they run.

use std::time::Instant;

use towline_lab::{Version, require_lab, wait_until};

use crate::store::{BUCKET, S3};
use crate::support::{Saved, WITHIN};

/// Delay of each response in milliseconds.
const DELAY_MS: u32 = 20;
/// Delay with which a guest's memory takes long to arrive.
const SLOW_MS: u32 = 300;

#[test]
fn guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host() {
    let test = "guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let saved = Saved::new(Version::V10_0);
    let mut fixture = s3.fixture();
    fixture.set("XDG_RUNTIME_DIR", saved.path("").to_str().unwrap());
    let image = format!("s3://{BUCKET}/vm/web");
    fixture.done(&["copy", &saved.image(), &image]);
    let (cache, binary) = (saved.path("cache").display().to_string(), saved.binary());
    let settings = saved.settings();
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect();
    s3.misbehave(0, 0, DELAY_MS);
    for (memory, what) in [("--postcopy", "cold"), ("--share", "cold"), ("--share", "file of the host")] {
        let options = ["run", &image, "--name", "web", "--qemu", &binary, "--cache-dir", &cache, memory];
        let begun = Instant::now();
        let mut run = fixture.start(&[&options[..], &settings].concat());
        wait_until("a guest that runs", WITHIN, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            Ok(run.stdout().contains("web runs, qmp:").then_some(()))
        })
        .unwrap();
        let ran = begun.elapsed();
        let mut guest = saved.agent("web");
        guest.wait_ticking(WITHIN).unwrap();
        println!(
            "{what}, {memory}, {DELAY_MS} ms for each response: {} ms from the command to RUNNING, {} ms to the first tick that is seen",
            ran.as_millis(),
            begun.elapsed().as_millis()
        );
        saved.assert_is_saved_guest(&mut guest);
        assert_eq!(run.stdout().contains("is copied to"), (memory, what) == ("--share", "cold"), "{what}");
        saved.interrupt(run);
    }
}

/// Credentials that expire while a guest waits for its memory, and are renewed.
#[test]
fn a_store_that_cannot_be_read_for_a_time_is_read_again() {
    let test = "a_store_that_cannot_be_read_for_a_time_is_read_again";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let saved = Saved::new(Version::V10_0);
    let mut fixture = s3.fixture();
    fixture.set("XDG_RUNTIME_DIR", saved.path("").to_str().unwrap());
    let image = format!("s3://{BUCKET}/vm/web");
    fixture.done(&["copy", &saved.image(), &image]);
    let (cache, binary) = (saved.path("cache").display().to_string(), saved.binary());
    let settings = saved.settings();
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect();
    let options =
        ["run", &image, "--name", "web", "--qemu", &binary, "--cache-dir", &cache, "--postcopy", "--json"];
    s3.misbehave(0, 0, SLOW_MS);
    let mut run = fixture.start(&[&options[..], &settings].concat());
    let mut wait_for = |text: &str| {
        wait_until(text, WITHIN, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            let output = run.stdout();
            assert!(
                !text.contains("again") || !output.contains("\"completed\""),
                "it was too fast: {output}"
            );
            Ok(output.contains(text).then_some(()))
        })
        .unwrap();
    };
    wait_for("\"event\":\"running\"");
    s3.misbehave(1, 403, 0);
    wait_for("reading is tried again");
    let refused = s3.state()["failed"].as_u64().unwrap();
    wait_until("further attempts", WITHIN, || {
        Ok((s3.state()["failed"].as_u64() > Some(refused + 2)).then_some(()))
    })
    .unwrap();
    s3.misbehave(0, 0, 0);
    wait_for("\"event\":\"completed\"");
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    saved.interrupt(run);
}

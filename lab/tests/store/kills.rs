//! Uploads that are killed or cancelled: an index never refers to a missing chunk.

use std::time::Instant;

use towline_lab::wait_until;

use crate::support::{BUCKET, Fixture, S3, WITHIN, number, uploaded};

/// Number of killed uploads; `cargo xtask soak uploads` has more.
const KILLS: u64 = 5;

#[test]
fn an_upload_that_is_killed_leaves_no_index_that_names_a_missing_chunk() {
    let (kills, seed) = (number("TOWLINE_SOAK_UPLOADS", KILLS), number("TOWLINE_SOAK_SEED", 1));
    println!("{kills} uploads are killed, seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let fixture = Fixture::new();
    let image = fixture.store("vm/a");
    // Duration of an upload that is not killed; the chunks of all later ones differ.
    let begun = Instant::now();
    fixture.done(&["copy", "mem:64M,seed=1000", &image]);
    let whole = begun.elapsed();
    std::fs::remove_file(fixture.path("vm/a.towline")).unwrap();
    let mut complete = 0;
    for kill in 0..kills {
        let from = format!("mem:64M,seed={}", kill + 1);
        let mut towline = fixture.start(&["copy", "--overwrite", &from, &image]);
        std::thread::sleep(whole.mul_f64(random.f64() * 1.1));
        towline.kill().unwrap();
        if fixture.path("vm/a.towline").exists() {
            fixture.done(&["inspect", "--verify", &image]);
            complete += 1;
        }
    }
    println!("{complete} of them had an image, each whole");
    // The next upload reuses the chunks that are there.
    let last = format!("mem:64M,seed={kills}");
    fixture.done(&["copy", "--overwrite", &last, &image]);
    let out = fixture.done(&["copy", &image, "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 64 << 8, "{out}");
}

#[test]
#[ignore = "nightly"]
fn an_upload_that_is_cancelled_leaves_no_index_and_is_resumed() {
    let Some(s3) = S3::start("an_upload_that_is_cancelled_leaves_no_index_and_is_resumed") else { return };
    let fixture = s3.fixture();
    let image = format!("s3://{BUCKET}/vm/a");
    let chunks = || s3.keys().iter().filter(|key| key.starts_with("vm/chunks/")).count();
    s3.set("rate=4000000");
    let slow = fixture.start(&["copy", "mem:64M,seed=7", &image]);
    wait_until("an upload under way", WITHIN, || Ok((chunks() > 8).then_some(()))).unwrap();
    towline_lab::signal(slow.pid(), rustix::process::Signal::INT);
    let finished = slow.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains("towline: cancelled"), "{}", finished.stderr);
    let keys = s3.keys();
    assert!(!keys.iter().any(|key| key.ends_with(".towline") || key.contains("/uploads/")), "{keys:?}");
    // Some chunks are there, and are not sent again.
    s3.set("");
    let again = fixture.done(&["copy", "mem:64M,seed=7", &image]);
    assert!(uploaded(&again, "known-chunks") > 8, "{again}");
    fixture.done(&["inspect", "--verify", &image]);
    assert_eq!(fixture.waiting(), [] as [std::path::PathBuf; 0]);
}

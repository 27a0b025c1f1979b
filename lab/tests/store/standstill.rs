//! A guest that runs on does not wait for the store, and a failed upload loses nothing.

use towline_lab::expect::qmp;
use towline_lab::{Builder, LinuxGuest, Qemu, Towline, Version, require_lab, wait_until};

use crate::support::{BUCKET, Fixture, S3, WITHIN, last_event, uploaded};

const MIB: u64 = 1 << 20;

fn builder() -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(128)
}

/// A guest with data that no compression makes smaller.
fn filled() -> (Qemu, LinuxGuest) {
    let source = builder().start().unwrap();
    let mut guest = source.linux(WITHIN).unwrap();
    guest.fill(24 * MIB, 5).unwrap();
    (source, guest)
}

/// Saves the guest to a store with a rate at which that takes seconds, and returns when the upload has begun.
fn begin_upload(s3: &S3, fixture: &Fixture, arguments: &[&str]) -> Towline {
    s3.set("rate=4000000");
    let copy = fixture.start(&[&["copy", "--json"], arguments].concat());
    wait_until("an upload", WITHIN, || {
        let is_uploading =
            copy.stdout().contains("\"upload\"") && s3.keys().iter().any(|key| key.contains("/chunks/"));
        Ok(is_uploading.then_some(()))
    })
    .unwrap();
    copy
}

fn assert_restored(fixture: &Fixture, image: &str, hash: &str) {
    let destination = builder().incoming_defer().start().unwrap();
    fixture.done(&["copy", image, &qmp(&destination)]);
    let mut guest = destination.linux(WITHIN).unwrap();
    guest.wait_ticking(WITHIN).unwrap();
    assert_eq!(guest.hash().unwrap(), hash);
}

#[test]
fn a_guest_runs_on_while_it_is_uploaded() {
    let test = "a_guest_runs_on_while_it_is_uploaded";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let (source, mut guest) = filled();
    let (fixture, hash, image) = (s3.fixture(), guest.hash().unwrap(), format!("s3://{BUCKET}/vm/a"));
    let mut copy = begin_upload(&s3, &fixture, &["--resume", &qmp(&source), &image]);
    guest.wait_ticking(WITHIN).unwrap();
    assert!(copy.runs().unwrap() && !s3.keys().contains(&"vm/a.towline".to_owned()), "uploaded too soon");
    let done = last_event(&copy.wait_done(WITHIN).unwrap());
    println!("{test}: the guest was stopped for {} ms", done["downtime"]);
    assert!(uploaded(&done, "sent-bytes") > 24 * MIB, "{done}");
    assert_eq!((&done["source-state"], &done["destination-state"]), (&"running".into(), &"stored".into()));
    assert_eq!(fixture.waiting(), [] as [std::path::PathBuf; 0]);
    assert_restored(&fixture, &image, &hash);
}

#[test]
fn a_failed_upload_leaves_the_guest_running_and_its_file_to_be_stored_later() {
    let test = "a_failed_upload_leaves_the_guest_running_and_its_file_to_be_stored_later";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let (source, mut guest) = filled();
    let (fixture, hash) = (s3.fixture(), guest.hash().unwrap());
    // One that is to run on, and one that is to stay paused if it is stored.
    for (name, options) in [("a", &["--resume"][..]), ("b", &[])] {
        let (from, image) = (qmp(&source), format!("s3://{BUCKET}/vm/{name}"));
        let copy = begin_upload(&s3, &fixture, &[options, &[from.as_str(), image.as_str()][..]].concat());
        s3.misbehave(1, 403, 0);
        let finished = copy.wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
        assert!(finished.stderr.contains("access is refused"), "{}", finished.stderr);
        assert!(finished.stderr.contains("the guest: safe at its source"), "{}", finished.stderr);
        guest.wait_ticking(WITHIN).unwrap();
        let is_of = |path: &std::path::PathBuf| {
            let file = path.file_name().unwrap().to_str().unwrap();
            file.starts_with(&format!("{name}-")) && file.ends_with(".img")
        };
        let file = fixture.waiting().into_iter().find(is_of).unwrap().to_str().unwrap().to_owned();
        assert!(finished.stderr.contains(&format!("`towline copy {file} {image}`")), "{}", finished.stderr);
        s3.set("");
        fixture.done(&["copy", &file, &image]);
        assert_restored(&fixture, &image, &hash);
    }
}

#[test]
fn a_live_snapshot_goes_to_a_store() {
    if !require_lab("a_live_snapshot_goes_to_a_store") {
        return;
    }
    let (source, mut guest) = filled();
    let (fixture, hash) = (Fixture::new(), guest.hash().unwrap());
    let image = fixture.store("vm/a");
    let done = fixture.done(&["copy", "--live", &qmp(&source), &image]);
    assert_eq!((&done["source-state"], &done["destination-state"]), (&"running".into(), &"stored".into()));
    guest.wait_ticking(WITHIN).unwrap();
    assert_restored(&fixture, &image, &hash);
}

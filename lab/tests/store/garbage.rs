//! Collection of unreferenced chunks, and its conflicts with uploads and readers.

use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use towline_lab::expect::wait_transferred;
use towline_lab::{signal, wait_until};

use crate::support::{BUCKET, Fixture, S3, WITHIN, last_event, uploaded};

fn age(fixture: &Fixture, name: &str, hours: u64) {
    let file = std::fs::File::options().write(true).open(fixture.path(name)).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
}

#[test]
fn only_unreferenced_chunks_are_removed() {
    let fixture = Fixture::new();
    fixture.done(&["copy", "mem:16M,seed=1", &fixture.store("vm/a")]);
    fixture.done(&["copy", "mem:16M,seed=2", &fixture.store("vm/b")]);
    let all = fixture.files("vm/chunks").len();
    std::fs::remove_file(fixture.path("vm/a.towline")).unwrap();
    let find = |more: &[&str]| fixture.done(&[&["store", "gc"], more, &[&fixture.store("vm")]].concat());
    // Young chunks may belong to an upload in progress.
    let found = find(&[]);
    assert_eq!((&found["images"], &found["garbage"]["objects"]), (&1.into(), &0.into()), "{found}");
    let young = found["young"]["chunks"].as_u64().unwrap();
    assert!(young > 0, "{found}");
    let found = find(&["--dry-run", "--min-age", "0"]);
    assert_eq!(found["garbage"]["objects"], young, "{found}");
    assert_eq!(fixture.files("vm/chunks").len(), all, "listing removes nothing");
    find(&["--min-age", "0"]);
    assert_eq!(fixture.files("vm/chunks").len() as u64, all as u64 - young);
    let out = fixture.done(&["copy", &fixture.store("vm/b"), "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 16 << 8, "{out}");
    assert!(fixture.files("vm/collections").is_empty());
}

#[test]
fn uploads_and_collections_exclude_each_other() {
    let fixture = Fixture::new();
    fixture.done(&["copy", "mem:8M,seed=1", &fixture.store("vm/a")]);
    let remove = ["store", "gc", "--min-age", "0", &fixture.store("vm")];
    let [upload, collection] =
        ["uploads", "collections"].map(|kind| format!("vm/{kind}/{}", "0123".repeat(8)));
    std::fs::create_dir_all(fixture.path("vm/uploads")).unwrap();
    std::fs::write(fixture.path(&upload), "another host").unwrap();
    let error = fixture.refused(&remove);
    assert!(error.contains("1 upload(s) are active") && error.contains("uploads/0123"), "{error}");
    // A lease that was not renewed for this long belongs to a process that has died.
    age(&fixture, &upload, 2);
    fixture.done(&remove);
    assert!(fixture.files("vm/uploads").is_empty());
    std::fs::create_dir_all(fixture.path("vm/collections")).unwrap();
    let owner = r#"{"host":"elsewhere","process":77,"began":"2026-01-02T03:04:05Z","renewals":0}"#;
    std::fs::write(fixture.path(&collection), owner).unwrap();
    // Neither an upload nor a second collection begins, and both name the owner of the first one.
    for error in
        [fixture.refused(&["copy", "mem:8M,seed=2", &fixture.store("vm/b")]), fixture.refused(&remove)]
    {
        assert!(
            error.contains("garbage is being removed there by process 77 of host \"elsewhere\""),
            "{error}"
        );
        assert!(error.contains("collections/0123"), "{error}");
    }
    assert_eq!(fixture.files("vm/collections").len(), 1, "the lease of the first one stays");
    age(&fixture, &collection, 2);
    fixture.done(&["copy", "mem:8M,seed=2", &fixture.store("vm/b")]);
    let removed = fixture.done(&remove);
    assert_eq!(removed["conditional-writes"], "create", "{removed}");
    assert!(fixture.files("vm/collections").is_empty());
}

#[test]
fn an_image_that_is_replaced_and_collected_is_read_to_its_end() {
    let fixture = Fixture::new();
    read_to_its_end(&fixture, &fixture.store("vm"), &|| fixture.files("vm/readers").len());
    assert!(fixture.files("vm/retired").is_empty() && fixture.files("vm/readers").is_empty());
}

#[test]
#[ignore = "nightly"]
fn an_image_in_s3_that_is_replaced_and_collected_is_read_to_its_end() {
    let Some(s3) = S3::start("an_image_in_s3_that_is_replaced_and_collected_is_read_to_its_end") else {
        return;
    };
    let readers = || s3.keys().iter().filter(|key| key.starts_with("vm/readers/")).count();
    read_to_its_end(&s3.fixture(), &format!("s3://{BUCKET}/vm"), &readers);
    let left = s3.keys();
    assert!(!left.iter().any(|key| key.contains("/retired/") || key.contains("/readers/")), "{left:?}");
}

/// Reads an image slowly while it is replaced, then collected with every chunk that no image refers to.
fn read_to_its_end(fixture: &Fixture, prefix: &str, readers: &dyn Fn() -> usize) {
    let image = format!("{prefix}/a");
    let first = fixture.done(&["copy", "mem:64M,seed=1", &image]);
    let sent = uploaded(&first, "sent-chunks");
    let mut slow = fixture.start(&["copy", "--json", "--max-bandwidth", "6M", &image, "mem:"]);
    wait_until("a reader", WITHIN, || Ok((readers() > 0).then_some(()))).unwrap();
    wait_transferred(&mut slow, 1, WITHIN);
    // It reads nothing more before the collection has ended, however long that takes.
    signal(slow.pid(), Signal::STOP);
    fixture.done(&["copy", "--overwrite", "mem:8M,seed=2", &image]);
    let remove = ["store", "gc", "--min-age", "0", prefix];
    let found = fixture.done(&remove);
    assert_eq!((&found["readers"], &found["garbage"]["objects"]), (&1.into(), &0.into()), "{found}");
    let kept = found["kept"]["chunks"].as_u64().unwrap();
    assert!(kept > 0 && kept <= sent, "{found}");
    signal(slow.pid(), Signal::CONT);
    let named = found["kept"]["readers"][0].as_str().unwrap();
    assert!(named.contains(&format!("process {} of host", slow.pid())), "{named}");
    let read = last_event(&slow.wait_done(WITHIN).unwrap());
    assert_eq!(read["memory"]["verified-pages"], 64 << 8, "{read}");
    // Once its reader has ended the old image is garbage, and its copied index with it.
    let found = fixture.done(&remove);
    assert_eq!(found["garbage"]["objects"], kept + 1, "{found}");
    fixture.done(&["inspect", "--verify", &image]);
}

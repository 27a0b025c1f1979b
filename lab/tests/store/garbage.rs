//! Collection of unreferenced chunks, and its conflicts with uploads and readers.

use std::time::{Duration, SystemTime};

use towline_lab::wait_until;

use crate::support::{BUCKET, Place, S3, WITHIN, last_event, uploaded};

fn age(place: &Place, name: &str, hours: u64) {
    let file = std::fs::File::options().write(true).open(place.path(name)).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours)).unwrap();
}

#[test]
fn only_what_no_image_names_is_removed() {
    let place = Place::new();
    place.done(&["copy", "mem:16M,seed=1", &place.store("vm/a")]);
    place.done(&["copy", "mem:16M,seed=2", &place.store("vm/b")]);
    let all = place.files("vm/chunks").len();
    std::fs::remove_file(place.path("vm/a.towline")).unwrap();
    let find = |more: &[&str]| place.done(&[&["inspect", &place.store("vm")], more].concat());
    // Young chunks may belong to an upload in progress.
    let found = find(&["--remove-garbage"]);
    assert_eq!((&found["images"], &found["garbage"]["objects"]), (&1.into(), &0.into()), "{found}");
    let young = found["young"]["chunks"].as_u64().unwrap();
    assert!(young > 0, "{found}");
    let found = find(&["--garbage", "--garbage-age", "0"]);
    assert_eq!(found["garbage"]["objects"], young, "{found}");
    assert_eq!(place.files("vm/chunks").len(), all, "listing removes nothing");
    find(&["--remove-garbage", "--garbage-age", "0"]);
    assert_eq!(place.files("vm/chunks").len() as u64, all as u64 - young);
    let out = place.done(&["copy", &place.store("vm/b"), "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 16 << 8, "{out}");
    assert!(place.files("vm/collections").is_empty());
}

#[test]
fn who_stores_and_who_removes_see_each_other() {
    let place = Place::new();
    place.done(&["copy", "mem:8M,seed=1", &place.store("vm/a")]);
    let remove = ["inspect", "--remove-garbage", "--garbage-age", "0", &place.store("vm")];
    std::fs::create_dir_all(place.path("vm/uploads")).unwrap();
    std::fs::write(place.path("vm/uploads/0123"), "somebody").unwrap();
    let error = place.refused(&remove);
    assert!(error.contains("1 upload(s) go on") && error.contains("uploads/0123"), "{error}");
    // A lease that was not renewed for this long belongs to a process that has died.
    age(&place, "vm/uploads/0123", 2);
    place.done(&remove);
    assert!(place.files("vm/uploads").is_empty());
    std::fs::create_dir_all(place.path("vm/collections")).unwrap();
    let owner = r#"{"host":"elsewhere","process":77,"began":"2026-01-02T03:04:05Z","renewals":0}"#;
    std::fs::write(place.path("vm/collections/0123"), owner).unwrap();
    // Neither an upload nor a second collection begins, and both name the owner of the first one.
    for error in [place.refused(&["copy", "mem:8M,seed=2", &place.store("vm/b")]), place.refused(&remove)] {
        assert!(
            error.contains("garbage is being removed there by process 77 of host \"elsewhere\""),
            "{error}"
        );
        assert!(error.contains("collections/0123"), "{error}");
    }
    assert_eq!(place.files("vm/collections").len(), 1, "the lease of the first one stays");
    age(&place, "vm/collections/0123", 2);
    place.done(&["copy", "mem:8M,seed=2", &place.store("vm/b")]);
    let removed = place.done(&remove);
    assert_eq!(removed["conditional-writes"], "create", "{removed}");
    assert!(place.files("vm/collections").is_empty());
}

#[test]
fn an_image_that_is_replaced_and_collected_is_read_to_its_end() {
    let place = Place::new();
    read_to_its_end(&place, &place.store("vm"), &|| place.files("vm/readers").len());
    assert!(place.files("vm/retired").is_empty() && place.files("vm/readers").is_empty());
}

#[test]
fn and_so_it_is_in_s3() {
    let Some(s3) = S3::start("and_so_it_is_in_s3") else { return };
    let readers = || s3.keys().iter().filter(|key| key.starts_with("vm/readers/")).count();
    read_to_its_end(&s3.place(), &format!("s3://{BUCKET}/vm"), &readers);
    let left = s3.keys();
    assert!(!left.iter().any(|key| key.contains("/retired/") || key.contains("/readers/")), "{left:?}");
}

/// Reads an image slowly while it is replaced, then collected with every chunk that no image refers to.
fn read_to_its_end(place: &Place, prefix: &str, readers: &dyn Fn() -> usize) {
    let image = format!("{prefix}/a");
    let first = place.done(&["copy", "mem:64M,seed=1", &image]);
    let sent = uploaded(&first, "sent-chunks");
    let slow = place.start(&["copy", "--json", "--max-bandwidth", "6M", &image, "mem:"]);
    wait_until("a reader", WITHIN, || Ok((readers() > 0).then_some(()))).unwrap();
    place.done(&["copy", "--overwrite", "mem:8M,seed=2", &image]);
    let remove = ["inspect", "--remove-garbage", "--garbage-age", "0", prefix];
    let found = place.done(&remove);
    assert_eq!((&found["readers"], &found["garbage"]["objects"]), (&1.into(), &0.into()), "{found}");
    let kept = found["kept"]["chunks"].as_u64().unwrap();
    assert!(kept > 0 && kept <= sent, "{found}");
    let named = found["kept"]["readers"][0].as_str().unwrap();
    assert!(named.contains(&format!("process {} of host", slow.pid())), "{named}");
    let read = last_event(&slow.wait_done(WITHIN).unwrap());
    assert_eq!(read["memory"]["verified-pages"], 64 << 8, "{read}");
    // Once its reader has ended the old image is garbage, and its copied index with it.
    let found = place.done(&remove);
    assert_eq!(found["garbage"]["objects"], kept + 1, "{found}");
    place.done(&["inspect", "--verify", &image]);
}

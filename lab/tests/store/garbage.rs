//! What nobody needs any more, and who is in whose way.

use std::time::{Duration, SystemTime};

use crate::support::Place;

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
    // Young ones may be somebody's who stores a guest right now.
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
    assert!(!place.path("vm/collection").exists());
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
    // One that has not been heard of for so long was broken off.
    age(&place, "vm/uploads/0123", 2);
    place.done(&remove);
    assert!(place.files("vm/uploads").is_empty());
    std::fs::write(place.path("vm/collection"), "somebody").unwrap();
    let error = place.refused(&["copy", "mem:8M,seed=2", &place.store("vm/b")]);
    assert!(error.contains("somebody removes garbage there"), "{error}");
    age(&place, "vm/collection", 2);
    place.done(&["copy", "mem:8M,seed=2", &place.store("vm/b")]);
}

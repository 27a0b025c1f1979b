//! Files of a killed towline, beside an image and in the directory for temporary files.

use std::os::unix::fs::MetadataExt as _;

use serde_json::{Value, json};
use towline_lab::expect::{assert_ended, qmp};
use towline_lab::{Towline, Version, require_lab, wait_until};

use crate::support::{Place, WITHIN, killed_copy};
use crate::{counting, guest};

/// Starts a slow copy, and waits for its staging file.
fn writing(place: &Place, image: &str) -> Towline {
    let towline = place.towline(&format!("copy --max-bandwidth 1M mem:64M {}", place.name(image)));
    let partial = place.name(&format!(".{image}.partial"));
    wait_until("a partial file", WITHIN, || {
        Ok(std::fs::metadata(&partial).is_ok_and(|found| found.blocks() > 0).then_some(()))
    })
    .unwrap();
    towline
}

#[test]
fn a_partial_image_is_removed_when_nobody_writes_it() {
    let place = Place::new();
    let mut killed = writing(&place, "killed.img");
    killed.kill().unwrap();
    let alive = writing(&place, "alive.img");
    let (left, written) = (place.name(".killed.img.partial"), place.name(".alive.img.partial"));

    let listed = place.run(&format!("repair {}", place.name("")));
    assert_ended(&listed, 0, &[]);
    let writer = format!("stays: process {} (", alive.pid());
    for text in [&left, "left by a writer that is gone; `towline repair IMAGE` removes it", &written, &writer]
    {
        assert!(listed.stdout.contains(text), "no {text:?} in {}", listed.stdout);
    }
    assert!(std::fs::exists(&left).unwrap() && std::fs::exists(&written).unwrap());

    let kept = place.run(&format!("repair {}", place.name("alive.img")));
    assert!(kept.stdout.contains(&writer), "{}", kept.stdout);
    let removed = place.run(&format!("repair --json {}", place.name("killed.img")));
    assert_ended(&removed, 0, &[]);
    let event: Value = serde_json::from_str(removed.stdout.trim()).unwrap();
    let partial = &event["partials"][0];
    assert_eq!(
        (&partial["path"], &partial["removed"], &partial["writer"]),
        (&json!(left), &json!(true), &Value::Null)
    );
    assert!(partial["allocated"].as_u64() > Some(0), "{event}");
    assert!(!std::fs::exists(&left).unwrap() && std::fs::exists(&written).unwrap());
    let nothing = place.run(&format!("repair {}", place.name("killed.img")));
    assert!(nothing.stdout.ends_with("killed.img: no partial files\n"), "{}", nothing.stdout);
    drop(alive);
}

/// The journal of its QEMU is not read: another one is copied.
#[test]
fn the_next_towline_removes_the_sockets_directories_of_a_killed_one() {
    if !require_lab("the_next_towline_removes_the_sockets_directories_of_a_killed_one") {
        return;
    }
    let (place, source, other) =
        (Place::new(), counting(guest(Version::V10_0)), counting(guest(Version::V10_0)));
    killed_copy(&place, &source);
    let left = place.temporary();
    assert_eq!(left.len(), 1, "{left:?}");
    // A running towline keeps its own.
    let third = counting(guest(Version::V10_0));
    let alive = place.copy_slowly(&third, &place.name("alive.img"));
    let now = place.temporary();
    assert!(now.len() == 1 && now != left, "{left:?}, then {now:?}");
    let finished = place.run(&format!("copy --resume {} {}", qmp(&other), place.name("other.img")));
    assert_ended(&finished, 0, &[]);
    assert_eq!(place.temporary(), now);
    drop(alive);
    killed_copy(&place, &other);
    assert_ended(&place.run(&format!("repair {}", qmp(&source))), 0, &[]);
    assert_eq!(place.temporary(), [""; 0]);
}

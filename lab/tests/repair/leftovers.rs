//! Files of a killed towline, beside an image and in the directory for temporary files.

use std::os::unix::fs::MetadataExt as _;

use serde_json::{Value, json};
use towline_lab::expect::{assert_ended, qmp};
use towline_lab::{Towline, Version, require_lab, wait_until};

use crate::support::{Fixture, WITHIN, killed_copy};
use crate::{counting, guest};

/// Starts a slow copy, and waits for its staging file.
fn writing(fixture: &Fixture, image: &str) -> Towline {
    let towline = fixture.towline(&format!("copy --max-bandwidth 1M mem:64M {}", fixture.name(image)));
    let partial = fixture.name(&format!(".{image}.partial"));
    wait_until("a partial file", WITHIN, || {
        Ok(std::fs::metadata(&partial).is_ok_and(|found| found.blocks() > 0).then_some(()))
    })
    .unwrap();
    towline
}

#[test]
fn a_staging_file_without_a_writer_is_removed() {
    let fixture = Fixture::new();
    let mut killed = writing(&fixture, "killed.img");
    killed.kill().unwrap();
    let alive = writing(&fixture, "alive.img");
    let (left, written) = (fixture.name(".killed.img.partial"), fixture.name(".alive.img.partial"));

    let listed = fixture.run(&format!("repair {}", fixture.name("")));
    assert_ended(&listed, 0, &[]);
    let writer = format!("in use by process {} (", alive.pid());
    for text in [&left, "left by a killed writer; `towline repair IMAGE` removes it", &written, &writer] {
        assert!(listed.stdout.contains(text), "no {text:?} in {}", listed.stdout);
    }
    assert!(std::fs::exists(&left).unwrap() && std::fs::exists(&written).unwrap());

    let kept = fixture.run(&format!("repair {}", fixture.name("alive.img")));
    assert!(kept.stdout.contains(&writer), "{}", kept.stdout);
    let removed = fixture.run(&format!("repair --json {}", fixture.name("killed.img")));
    assert_ended(&removed, 0, &[]);
    let event: Value = serde_json::from_str(removed.stdout.trim()).unwrap();
    let partial = &event["partials"][0];
    assert_eq!(
        (&partial["path"], &partial["removed"], &partial["writer"]),
        (&json!(left), &json!(true), &Value::Null)
    );
    assert!(partial["allocated"].as_u64() > Some(0), "{event}");
    assert!(!std::fs::exists(&left).unwrap() && std::fs::exists(&written).unwrap());
    let nothing = fixture.run(&format!("repair {}", fixture.name("killed.img")));
    assert!(nothing.stdout.ends_with("killed.img: no partial files\n"), "{}", nothing.stdout);
    drop(alive);
}

/// The journal of its QEMU is not read: another one is copied.
#[test]
fn the_next_towline_removes_the_sockets_directories_of_a_killed_one() {
    if !require_lab("the_next_towline_removes_the_sockets_directories_of_a_killed_one") {
        return;
    }
    let (fixture, source, other) =
        (Fixture::new(), counting(guest(Version::V10_0)), counting(guest(Version::V10_0)));
    killed_copy(&fixture, &source);
    let left = fixture.temporary();
    assert_eq!(left.len(), 1, "{left:?}");
    // A running towline keeps its own.
    let third = counting(guest(Version::V10_0));
    let alive = fixture.copy_slowly(&third, &fixture.name("alive.img"));
    let now = fixture.temporary();
    assert!(now.len() == 1 && now != left, "{left:?}, then {now:?}");
    let finished = fixture.run(&format!("copy --resume {} {}", qmp(&other), fixture.name("other.img")));
    assert_ended(&finished, 0, &[]);
    assert_eq!(fixture.temporary(), now);
    drop(alive);
    killed_copy(&fixture, &other);
    assert_ended(&fixture.run(&format!("repair {}", qmp(&source))), 0, &[]);
    assert_eq!(fixture.temporary(), [""; 0]);
}

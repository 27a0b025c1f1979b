//! `towline store`: listing, sizes, verification and removal, in a directory store, in S3 and with image
//! files.

use serde_json::Value;
use towline_lab::wait_until;

use crate::support::{BUCKET, Fixture, S3, WITHIN, last_event};

/// Runs a command of `towline store` that must succeed; returns its events.
fn events(fixture: &Fixture, arguments: &[&str]) -> Vec<Value> {
    let line = [&["store"], arguments, &["--json"]].concat();
    let finished = fixture.start(&line).wait_done(WITHIN).unwrap();
    finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn named<'a>(events: &'a [Value], name: &str) -> &'a Value {
    events.iter().find(|event| event["name"] == name).unwrap_or_else(|| panic!("no {name} in {events:?}"))
}

#[track_caller]
fn number(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or_else(|| panic!("no {key} in {event}"))
}

/// Lists two equal images and another one, verifies them, and removes them; `files` are the objects below the
/// prefix.
fn life_of_a_prefix(fixture: &Fixture, prefix: &str, objects: &dyn Fn() -> usize) {
    let image = |name: &str| format!("{prefix}/{name}");
    fixture.done(&["copy", "mem:16M,seed=1", &image("a")]);
    fixture.done(&["copy", &image("a"), &image("twin")]);
    fixture.done(&["copy", "mem:16M,seed=2", &image("other")]);
    let listed = events(fixture, &["du", prefix]);
    let (a, twin, other) = (named(&listed, "a"), named(&listed, "twin"), named(&listed, "other"));
    // The indexes name different sources, so their lengths differ by some bytes.
    assert!(number(a, "alone").abs_diff(number(twin, "alone")) < 1 << 10, "{a} {twin}");
    assert_eq!(number(a, "memory"), 16 << 20);
    // The twins share all of their chunks, so each has only its index for itself.
    assert!(number(a, "own") < 64 << 10 && number(a, "shared") > 1 << 20, "{a}");
    assert!(number(other, "own") > 1 << 20, "{other}");
    let total = listed.last().unwrap();
    assert_eq!((number(total, "images"), number(total, "unreferenced")), (3, 0), "{total}");
    let verified = events(fixture, &["verify", prefix]);
    assert_eq!(verified.iter().filter(|event| event["event"] == "verified").count(), 3);
    events(fixture, &["rm", &image("a"), &image("other")]);
    let left = events(fixture, &["ls", prefix]);
    assert_eq!(left.iter().filter(|event| event["event"] == "image").count(), 1, "{left:?}");
    assert!(number(left.last().unwrap(), "unreferenced") > 1 << 20, "{left:?}");
    let all = objects();
    let dry = events(fixture, &["gc", "--dry-run", "--min-age", "0", prefix]);
    assert_eq!(objects(), all, "a dry run removes nothing");
    let garbage = number(&dry.last().unwrap()["garbage"], "objects");
    events(fixture, &["gc", "--min-age", "0", prefix]);
    assert_eq!(objects() as u64, all as u64 - garbage);
    // The twin has kept the chunks that it shared.
    let out = fixture.done(&["copy", &image("twin"), "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 16 << 8, "{out}");
    let error = fixture.refused(&["store", "rm", &image("a")]);
    assert!(error.contains("there is no such image"), "{error}");
}

#[test]
fn a_prefix_in_a_directory_is_listed_verified_and_collected() {
    let fixture = Fixture::new();
    life_of_a_prefix(&fixture, &fixture.store("vm"), &|| fixture.files("vm").len());
}

#[test]
#[ignore = "nightly"]
fn a_prefix_in_s3_is_listed_verified_and_collected() {
    let Some(s3) = S3::start("a_prefix_in_s3_is_listed_verified_and_collected") else { return };
    life_of_a_prefix(&s3.fixture(), &format!("s3://{BUCKET}/vm"), &|| s3.keys().len());
}

#[test]
#[ignore = "nightly"]
fn an_image_that_a_restore_reads_is_not_removed() {
    let fixture = Fixture::new();
    let image = fixture.store("vm/a");
    fixture.done(&["copy", "mem:64M,seed=1", &image]);
    let slow = fixture.start(&["copy", "--json", "--max-bandwidth", "6M", &image, "mem:"]);
    // A lease that is being written has another name.
    let is_lease = |path: &std::path::PathBuf| !path.to_string_lossy().contains('#');
    wait_until("a reader", WITHIN, || Ok(fixture.files("vm/readers").iter().any(is_lease).then_some(())))
        .unwrap();
    let error = fixture.refused(&["store", "rm", &image]);
    assert!(error.contains(&format!("it is being read by process {} of host", slow.pid())), "{error}");
    let listed = events(&fixture, &["ls", &fixture.store("vm")]);
    assert_eq!(named(&listed, "a")["readers"].as_array().unwrap().len(), 1, "{listed:?}");
    let read = last_event(&slow.wait_done(WITHIN).unwrap());
    assert_eq!(read["memory"]["verified-pages"], 64 << 8, "{read}");
    events(&fixture, &["rm", &image]);
}

#[test]
fn image_files_that_are_read_or_that_have_increments_are_not_removed() {
    let fixture = Fixture::new();
    let (base, increment) = (fixture.name("monday.img"), fixture.name("tuesday.img"));
    fixture.done(&["copy", "mem:64M,seed=1", &base]);
    // A page a second: on a slow machine, too, most of its chunks are those of the base.
    fixture.done(&["copy", "--base", &base, "mem:64M,seed=1,dirty=4K", &increment]);
    let listed = events(&fixture, &["du", &fixture.name("")]);
    let (whole, small) = (named(&listed, "monday.img"), named(&listed, "tuesday.img"));
    assert_eq!(small["bases"], serde_json::json!([base]));
    assert!(number(small, "own") < number(whole, "own"), "{small} {whole}");
    let error = fixture.refused(&["store", "rm", &base]);
    assert!(error.contains("tuesday.img is based on it: remove that first"), "{error}");
    let slow = fixture.start(&["copy", "--json", "--max-bandwidth", "6M", &increment, "mem:"]);
    wait_until("a reader", WITHIN, || Ok(slow.stdout().contains("transfer").then_some(()))).unwrap();
    let error = fixture.refused(&["store", "rm", &increment]);
    assert!(error.contains(&format!("it is in use by process {} (", slow.pid())), "{error}");
    slow.wait_done(WITHIN).unwrap();
    events(&fixture, &["rm", &increment, &base]);
    assert_eq!(fixture.files(""), Vec::<std::path::PathBuf>::new());
}

#[test]
fn damaged_images_of_a_prefix_are_named() {
    let fixture = Fixture::new();
    fixture.done(&["copy", "mem:8M,seed=1", &fixture.store("vm/a")]);
    fixture.done(&["copy", "mem:8M,seed=2", &fixture.store("vm/b")]);
    let of_a = events(&fixture, &["rm", &fixture.store("vm/b")]);
    assert_eq!(of_a[0]["event"], "removed-image");
    fixture.done(&["copy", "mem:8M,seed=2", &fixture.store("vm/b")]);
    let index = std::fs::read(fixture.path("vm/b.towline")).unwrap();
    std::fs::write(fixture.path("vm/b.towline"), &index[..index.len() / 2]).unwrap();
    let error = fixture.refused(&["store", "verify", &fixture.store("vm")]);
    assert!(error.contains("/vm/b: "), "{error}");
    let finished = fixture.start(&["store", "ls", &fixture.store("vm")]).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stdout);
    assert!(finished.stdout.contains("cannot be read"), "{}", finished.stdout);
}

#[test]
fn an_unencrypted_endpoint_and_a_missing_bucket_are_explained_at_once() {
    let Some(s3) = S3::start("an_unencrypted_endpoint_and_a_missing_bucket_are_explained_at_once") else {
        return;
    };
    let mut fixture = s3.fixture();
    let error = fixture.refused(&["store", "ls", "s3://no-such-bucket/vm"]);
    assert!(error.contains("there is no such bucket") && !error.contains('<'), "{error}");
    let error = fixture.refused(&["inspect", "s3://no-such-bucket/vm/a"]);
    assert!(error.contains("there is no such bucket") && !error.contains('<'), "{error}");
    s3.misbehave(0, 503, 0);
    fixture.set("AWS_ALLOW_HTTP", "false");
    let error = fixture.refused(&["copy", "mem:8M", &format!("s3://{BUCKET}/vm/a")]);
    assert!(error.contains("AWS_ENDPOINT_URL is an http:// address"), "{error}");
    assert!(error.contains("set AWS_ALLOW_HTTP=true"), "{error}");
    assert_eq!(s3.state()["requests"], 0, "it is refused before any request");
}

#[test]
fn a_store_that_is_named_as_a_directory_is_said_to_be_one() {
    let fixture = Fixture::new();
    fixture.done(&["copy", "mem:4M", &fixture.store("vm/a")]);
    for command in ["ls", "du", "verify", "gc"] {
        let finished = fixture.start(&["store", command, &fixture.name("vm")]).wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(2), "{}{}", finished.stdout, finished.stderr);
        let named = format!("name it store:{}", fixture.name("vm"));
        assert!(finished.stderr.contains(&named), "{}", finished.stderr);
    }
}

//! A real S3 server: uploads and restores, temporary failures, and permanent ones.

use crate::support::{BUCKET, S3, SECRET, uploaded};

#[test]
fn an_image_goes_through_s3_and_comes_back_over_http() {
    let Some(s3) = S3::start("an_image_goes_through_s3_and_comes_back_over_http") else { return };
    let fixture = s3.fixture();
    let image = format!("s3://{BUCKET}/vm/a");
    let first = fixture.done(&["copy", "mem:48M,seed=3", &image]);
    assert!(uploaded(&first, "sent-chunks") > 100, "{first}");
    let out = fixture.done(&["copy", "--multifd-channels", "2", &image, "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 48 << 8, "{out}");
    // The maximum number of parallel requests, or a few.
    assert!(s3.state()["most"].as_u64() > Some(2), "{}", s3.state());
    // Read-only, and without credentials.
    let web = format!("http://127.0.0.1:{}/{BUCKET}/vm/a", s3.port());
    let out = fixture.done(&["copy", &web, "mem:"]);
    assert_eq!(out["memory"]["verified-pages"], 48 << 8, "{out}");
    // A second image with the same content.
    let again = fixture.done(&["copy", &image, &format!("s3://{BUCKET}/vm/b")]);
    assert_eq!(uploaded(&again, "sent-chunks"), 0, "{again}");
    let error = fixture.refused(&["copy", "mem:8M", &image]);
    assert!(error.contains("it exists already"), "{error}");
    let keys = s3.keys();
    let others: Vec<_> = keys.iter().filter(|key| !key.starts_with("vm/chunks/")).collect();
    assert_eq!(others, ["vm/a.towline", "vm/b.towline"]);
    s3.request("DELETE", &format!("/{BUCKET}/vm/a.towline"));
    s3.request("DELETE", &format!("/{BUCKET}/vm/b.towline"));
    let prefix = format!("s3://{BUCKET}/vm");
    let removed = fixture.done(&["store", "gc", "--min-age", "0", &prefix]);
    assert_eq!(removed["garbage"]["objects"], keys.len() as u64 - 2, "{removed}");
    assert!(s3.keys().is_empty(), "{:?}", s3.keys());
}

#[test]
fn requests_to_a_throttled_or_failing_server_are_retried() {
    let Some(s3) = S3::start("requests_to_a_throttled_or_failing_server_are_retried") else {
        return;
    };
    let fixture = s3.fixture();
    for status in [503, 500, 429] {
        let image = format!("s3://{BUCKET}/vm/{status}");
        s3.misbehave(5, status, 0);
        fixture.done(&["copy", &format!("mem:16M,seed={status}"), &image]);
        let out = fixture.done(&["copy", &image, "mem:"]);
        assert_eq!(out["memory"]["verified-pages"], 16 << 8, "{out}");
        assert!(s3.state()["failed"].as_u64() > Some(10), "{}", s3.state());
    }
}

#[test]
fn a_refusal_of_the_server_is_reported_before_a_guest_is_touched() {
    let Some(s3) = S3::start("a_refusal_of_the_server_is_reported_before_a_guest_is_touched") else { return };
    let fixture = s3.fixture();
    let error = fixture.refused(&["copy", "mem:8M", "s3://no-such-bucket/vm/a"]);
    assert!(error.contains("s3://no-such-bucket/vm"), "{error}");
    s3.misbehave(1, 403, 0);
    let error = fixture.refused(&["copy", "mem:8M", &format!("s3://{BUCKET}/vm/a")]);
    assert!(error.contains("credentials come from the environment"), "{error}");
    assert!(!error.contains(SECRET));
}

#[test]
fn nothing_is_removed_by_a_listing_that_may_be_cut_off() {
    let Some(s3) = S3::start("nothing_is_removed_by_a_listing_that_may_be_cut_off") else { return };
    let fixture = s3.fixture();
    let prefix = format!("s3://{BUCKET}/vm");
    for name in ["a", "b", "c"] {
        let seed = format!("mem:4M,seed={}", name.as_bytes()[0]);
        fixture.done(&["copy", &seed, &format!("{prefix}/{name}")]);
    }
    let keys = s3.keys();
    for form in ["token", "marker", "v1"] {
        s3.set(&format!("cut={form}"));
        for command in [
            &["store", "gc", "--min-age", "0", &prefix][..],
            &["store", "ls", &prefix],
            &["store", "du", &prefix],
            &["store", "verify", &prefix],
            &["copy", "mem:4M", &format!("{prefix}/d")],
        ] {
            let error = fixture.refused(command);
            assert!(error.contains("list of objects is truncated"), "{form}, {command:?}: {error}");
        }
        s3.set("");
        let left: Vec<_> = s3.keys().into_iter().filter(|key| !key.contains("/uploads/")).collect();
        assert_eq!(left, keys, "{form}");
    }
    fixture.done(&["store", "verify", &prefix]);
}

#[test]
fn a_listing_that_ends_early_without_a_word_is_continued() {
    let Some(s3) = S3::start("a_listing_that_ends_early_without_a_word_is_continued") else { return };
    let fixture = s3.fixture();
    let prefix = format!("s3://{BUCKET}/vm");
    // Before, among and after the directories in the order of keys.
    for name in ["a", "b", "d", "e", "v", "w"] {
        let seed = format!("mem:4M,seed={}", name.as_bytes()[0]);
        fixture.done(&["copy", &seed, &format!("{prefix}/{name}")]);
    }
    let keys = s3.keys();
    s3.set("cut=silent");
    let listed = fixture.done(&["store", "ls", &prefix]);
    assert_eq!(listed["images"], 6, "{listed}");
    let removed = fixture.done(&["store", "gc", "--min-age", "0", &prefix]);
    assert_eq!(removed["garbage"]["objects"], 0, "{removed}");
    s3.request("DELETE", &format!("/{BUCKET}/vm/w.towline"));
    let removed = fixture.done(&["store", "gc", "--min-age", "0", &prefix]);
    assert!(removed["garbage"]["objects"].as_u64() > Some(2), "{removed}");
    fixture.done(&["store", "verify", &prefix]);
    s3.set("");
    let left = s3.keys();
    assert_eq!(left.len() as u64 + removed["garbage"]["objects"].as_u64().unwrap() + 1, keys.len() as u64);
}

#[test]
fn a_write_that_conflicts_with_another_request_is_tried_again() {
    let Some(s3) = S3::start("a_write_that_conflicts_with_another_request_is_tried_again") else { return };
    let fixture = s3.fixture();
    let image = format!("s3://{BUCKET}/vm/a");
    s3.set("conflicts=2");
    fixture.done(&["copy", "mem:4M", &image]);
    fixture.done(&["inspect", "--verify", &image]);
    s3.set("conflicts=100");
    let error = fixture.refused(&["copy", "mem:4M", &format!("s3://{BUCKET}/vm/b")]);
    assert!(error.contains("vm/b.towline: the store reports a conflict with another request"), "{error}");
}

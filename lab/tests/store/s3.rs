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
    let removed = fixture.done(&["inspect", "--remove-garbage", "--garbage-age", "0", &prefix]);
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

//! Credentials: their sources, and that they never appear in any output.

use crate::support::{BUCKET, Fixture, S3, SECRET};

/// Runs towline with all logs enabled, and searches all of its output.
fn assert_no_secret(fixture: &Fixture, arguments: &[&str]) {
    let finished = fixture.start(arguments).wait(crate::support::WITHIN).unwrap();
    for text in [&finished.stdout, &finished.stderr] {
        assert!(!text.contains(SECRET), "{arguments:?} says it");
    }
    assert!(finished.status.code().is_some_and(|code| code < 3), "{}", finished.stderr);
}

#[test]
fn a_secret_is_in_no_output_whatever_happens() {
    let Some(s3) = S3::start("a_secret_is_in_no_output_whatever_happens") else { return };
    let mut fixture = s3.fixture();
    fixture.set("TOWLINE_LOG", "trace");
    fixture.set("AWS_SESSION_TOKEN", &format!("{SECRET}-token"));
    let image = format!("s3://{BUCKET}/vm/a");
    assert_no_secret(&fixture, &["copy", "mem:4M", &image]);
    assert!(s3.keys().contains(&"vm/a.towline".to_owned()));
    assert_no_secret(&fixture, &["copy", "--json", &image, "mem:"]);
    assert_no_secret(&fixture, &["inspect", "--verify", &image]);
    assert_no_secret(&fixture, &["store", "gc", "--dry-run", &format!("s3://{BUCKET}/vm")]);
    assert_no_secret(&fixture, &["copy", &image, "mem:8M,backing=x"]);
    assert_no_secret(&fixture, &["copy", "mem:4M", "s3://no-such-bucket/a"]);
    assert_no_secret(&fixture, &["copy", "mem:4M", &format!("s3://key:{SECRET}@{BUCKET}/a")]);
    assert_no_secret(&fixture, &["inspect", &format!("https://host/a?sig={SECRET}")]);
    s3.misbehave(1, 403, 0);
    assert_no_secret(&fixture, &["copy", "mem:4M", &image]);
    // The server has ended.
    drop(s3);
    fixture.set("AZURE_STORAGE_ACCOUNT_NAME", "account");
    fixture.set("AZURE_STORAGE_ACCOUNT_KEY", SECRET);
    assert_no_secret(&fixture, &["inspect", "az://container/a"]);
}

#[test]
fn credentials_are_read_from_a_profile() {
    let Some(s3) = S3::start("credentials_are_read_from_a_profile") else { return };
    let mut fixture = Fixture::new();
    fixture.set("AWS_ENDPOINT_URL", &format!("http://127.0.0.1:{}", s3.port()));
    fixture.set("AWS_ALLOW_HTTP", "true");
    fixture.set("AWS_PROFILE", "lab");
    std::fs::create_dir(fixture.path(".aws")).unwrap();
    let keys = format!("[lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = {SECRET}\n");
    std::fs::write(fixture.path(".aws/credentials"), keys).unwrap();
    std::fs::write(fixture.path(".aws/config"), "[profile lab]\nregion = eu-central-1\n").unwrap();
    fixture.done(&["copy", "mem:4M", &format!("s3://{BUCKET}/vm/a")]);
    fixture.done(&["inspect", "--verify", &format!("s3://{BUCKET}/vm/a")]);
}

//! Credentials: their sources, and that they never appear in any output.

use crate::support::{BUCKET, Place, S3, SECRET};

/// Runs towline with all logs enabled, and searches all of its output.
fn says_no_secret(place: &Place, arguments: &[&str]) {
    let finished = place.start(arguments).wait(crate::support::WITHIN).unwrap();
    for text in [&finished.stdout, &finished.stderr] {
        assert!(!text.contains(SECRET), "{arguments:?} says it");
    }
    assert!(finished.status.code().is_some_and(|code| code < 3), "{}", finished.stderr);
}

#[test]
fn a_secret_is_in_no_output_whatever_happens() {
    let Some(s3) = S3::start("a_secret_is_in_no_output_whatever_happens") else { return };
    let mut place = s3.place();
    place.set("TOWLINE_LOG", "trace");
    place.set("AWS_SESSION_TOKEN", &format!("{SECRET}-token"));
    let image = format!("s3://{BUCKET}/vm/a");
    says_no_secret(&place, &["copy", "mem:4M", &image]);
    assert!(s3.keys().contains(&"vm/a.towline".to_owned()));
    says_no_secret(&place, &["copy", "--json", &image, "mem:"]);
    says_no_secret(&place, &["inspect", "--verify", &image]);
    says_no_secret(&place, &["inspect", "--garbage", &format!("s3://{BUCKET}/vm")]);
    says_no_secret(&place, &["copy", &image, "mem:8M,backing=x"]);
    says_no_secret(&place, &["copy", "mem:4M", "s3://no-such-bucket/a"]);
    says_no_secret(&place, &["copy", "mem:4M", &format!("s3://key:{SECRET}@{BUCKET}/a")]);
    says_no_secret(&place, &["inspect", &format!("https://host/a?sig={SECRET}")]);
    s3.misbehave(1, 403, 0);
    says_no_secret(&place, &["copy", "mem:4M", &image]);
    // No server any more.
    drop(s3);
    place.set("AZURE_STORAGE_ACCOUNT_NAME", "account");
    place.set("AZURE_STORAGE_ACCOUNT_KEY", SECRET);
    says_no_secret(&place, &["inspect", "az://container/a"]);
}

#[test]
fn a_profile_of_the_usual_files_is_found() {
    let Some(s3) = S3::start("a_profile_of_the_usual_files_is_found") else { return };
    let mut place = Place::new();
    place.set("AWS_ENDPOINT_URL", &format!("http://127.0.0.1:{}", s3.port()));
    place.set("AWS_ALLOW_HTTP", "true");
    place.set("AWS_PROFILE", "lab");
    std::fs::create_dir(place.path(".aws")).unwrap();
    let keys = format!("[lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = {SECRET}\n");
    std::fs::write(place.path(".aws/credentials"), keys).unwrap();
    std::fs::write(place.path(".aws/config"), "[profile lab]\nregion = eu-central-1\n").unwrap();
    place.done(&["copy", "mem:4M", &format!("s3://{BUCKET}/vm/a")]);
    place.done(&["inspect", "--verify", &format!("s3://{BUCKET}/vm/a")]);
}

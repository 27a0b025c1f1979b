//! A disk that fills up, and a directory that accepts no file.

use towline_lab::{Towline, require_lab, skip};

use crate::support::{Fixture, WITHIN, assert_ended, assert_runs, assert_safe, counting, guest, qmp};

/// Shell script: mounts a filesystem of this size that only the command and its children see, runs towline's
/// command line, lists the files that are left, and exits as towline did.
const IN_A_SMALL_FILESYSTEM: &str =
    r#"mount -t tmpfs -o size=$1 none "$2" && shift 2 && { "$@"; status=$?; ls -A "$0"; exit $status; }"#;

/// Returns true if this user may mount; if not, prints the skip of `name`.
fn may_mount(name: &str, fixture: &Fixture) -> bool {
    let probe = std::process::Command::new("unshare")
        .args(["-m", "mount", "-t", "tmpfs", "none"])
        .arg(fixture.path(""))
        .output();
    match probe {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            skip(name, &format!("mounts are refused: {}", String::from_utf8_lossy(&output.stderr).trim()));
            false
        }
        Err(error) => {
            skip(name, &format!("no unshare(1): {error}"));
            false
        }
    }
}

fn in_small_filesystem(fixture: &Fixture, size: &str, line: &str) -> Towline {
    let directory = fixture.name("");
    fixture.start(&["unshare", "-m", "sh", "-c", IN_A_SMALL_FILESYSTEM, &directory, size, &directory], line)
}

#[test]
fn a_full_disk_costs_the_image_and_not_the_guest() {
    const NAME: &str = "a_full_disk_costs_the_image_and_not_the_guest";
    let fixture = Fixture::new();
    if !require_lab(NAME) || !may_mount(NAME, &fixture) {
        return;
    }
    let source = counting(guest());
    let image = fixture.name("guest.img");
    // Full at once, in the middle, and near the end.
    for (size, options) in
        [("64k", "--resume"), ("4m", "--multifd-channels 0"), ("16m", "--multifd-channels 2")]
    {
        let towline =
            in_small_filesystem(&fixture, size, &format!("copy {options} {} {image}", qmp(&source)));
        let finished = towline.wait(WITHIN).unwrap();
        println!("{size}: {}", finished.stderr);
        assert_safe(
            &finished,
            &[&image, "No space left on device", "free some space or choose another filesystem"],
        );
        assert_eq!(finished.stdout, "", "what was left in the full filesystem");
        assert_runs(&source);
        fixture.assert_holds(&[]);
    }
    // With enough space it works, from the same source.
    assert_ended(&fixture.run(&format!("copy --resume {} {image}", qmp(&source))), 0, &[]);
    assert_runs(&source);
}

/// Whichever of the threads fails first, and whichever reports: the reason is that of the store.
#[test]
fn a_full_store_is_named_as_the_reason() {
    const NAME: &str = "a_full_store_is_named_as_the_reason";
    let fixture = Fixture::new();
    if !require_lab(NAME) || !may_mount(NAME, &fixture) {
        return;
    }
    let source = counting(guest());
    let image = format!("store:{}", fixture.name("vm/a"));
    for (size, options) in [
        ("64k", "--resume"),
        ("512k", "--multifd-channels 0"),
        ("512k", "--multifd-channels 2"),
        ("256k", "--multifd-channels 4"),
    ] {
        let line = format!("copy {options} {} {image}", qmp(&source));
        let finished = in_small_filesystem(&fixture, size, &line).wait(WITHIN).unwrap();
        println!("{size}: {}", finished.stderr);
        assert_safe(&finished, &["No space left on device", "free some space"]);
        assert!(!finished.stderr.contains("cancelled"), "{}", finished.stderr);
        assert_runs(&source);
    }
}

#[test]
fn a_directory_that_accepts_no_file_is_refused_at_once() {
    if !require_lab("a_directory_that_accepts_no_file_is_refused_at_once") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    std::fs::create_dir(fixture.path("directory")).unwrap();
    for (name, text) in [
        ("missing/guest.img", "is not a directory; create it, or correct the path"),
        ("directory", "is a directory, expected a regular file or nothing"),
        ("directory/", "does not name a file"),
    ] {
        let finished = fixture.run(&format!("copy {} {}", qmp(&source), fixture.name(name)));
        assert_safe(&finished, &[&fixture.name(name), text]);
    }
    let status = source.qmp().execute("query-migrate", serde_json::Value::Null).unwrap();
    assert_eq!(status["status"], serde_json::Value::Null, "a migration of the source");
    assert_runs(&source);
    fixture.assert_holds(&["directory"]);
}

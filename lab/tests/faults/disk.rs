//! A disk that fills up, and a directory that accepts no file.

use towline_lab::{Towline, require_lab, skip};

use crate::support::{Place, WITHIN, assert_ended, assert_runs, assert_safe, counting, guest, qmp};

/// Shell script: mounts a filesystem of this size that only the command and its children see, runs towline's command
/// line, lists the files that are left, and exits as towline did.
const IN_A_SMALL_FILESYSTEM: &str =
    r#"mount -t tmpfs -o size=$1 none "$2" && shift 2 && { "$@"; code=$?; ls -A "$0"; exit $code; }"#;

/// Returns true if this user may mount; if not, prints the skip of `name`.
fn may_mount(name: &str, place: &Place) -> bool {
    let probe = std::process::Command::new("unshare")
        .args(["-m", "mount", "-t", "tmpfs", "none"])
        .arg(place.path(""))
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

fn in_small_filesystem(place: &Place, size: &str, line: &str) -> Towline {
    let directory = place.name("");
    place.start(&["unshare", "-m", "sh", "-c", IN_A_SMALL_FILESYSTEM, &directory, size, &directory], line)
}

#[test]
fn a_full_disk_costs_the_image_and_not_the_guest() {
    const NAME: &str = "a_full_disk_costs_the_image_and_not_the_guest";
    let place = Place::new();
    if !require_lab(NAME) || !may_mount(NAME, &place) {
        return;
    }
    let source = counting(guest());
    let image = place.name("guest.img");
    // Full at once, in the middle, and near the end.
    for (size, options) in
        [("64k", "--resume"), ("4m", "--multifd-channels 0"), ("16m", "--multifd-channels 2")]
    {
        let towline = in_small_filesystem(&place, size, &format!("copy {options} {} {image}", qmp(&source)));
        let finished = towline.wait(WITHIN).unwrap();
        println!("{size}: {}", finished.stderr);
        assert_safe(
            &finished,
            &[&image, "No space left on device", "make room there or choose another place"],
        );
        assert_eq!(finished.stdout, "", "what was left in the full filesystem");
        assert_runs(&source);
        place.assert_holds(&[]);
    }
    // With enough space it works, from the same source.
    assert_ended(&place.run(&format!("copy --resume {} {image}", qmp(&source))), 0, &[]);
    assert_runs(&source);
}

#[test]
fn a_place_that_takes_no_file_is_refused_at_once() {
    if !require_lab("a_place_that_takes_no_file_is_refused_at_once") {
        return;
    }
    let (place, source) = (Place::new(), counting(guest()));
    std::fs::create_dir(place.path("directory")).unwrap();
    for (name, text) in [
        ("missing/guest.img", "is no directory; create it, or correct the path"),
        ("directory", "is a directory, expected a regular file or nothing"),
        ("directory/", "does not name a file"),
    ] {
        let finished = place.run(&format!("copy {} {}", qmp(&source), place.name(name)));
        assert_safe(&finished, &[&place.name(name), text]);
    }
    let status = source.qmp().execute("query-migrate", serde_json::Value::Null).unwrap();
    assert_eq!(status["status"], serde_json::Value::Null, "the source was told nothing");
    assert_runs(&source);
    place.assert_holds(&["directory"]);
}

//! `towline store` and `--report`: mistakes and hostile names.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn towline(directory: &TempDir, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(words).current_dir(directory.path()).env_remove("TOWLINE_LOG").output().unwrap()
}

/// Runs towline with `--json`, which must end with this exit status. Returns its events.
#[track_caller]
fn events(directory: &TempDir, words: &[&str], status: i32) -> Vec<Value> {
    let output = towline(directory, &[words, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(status), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // A copy that is done has no exit status in its event.
    let exit = events.last().unwrap()["exit"].as_i64().unwrap_or(0);
    assert_eq!(exit, i64::from(status), "{:?}", events.last());
    events
}

fn directory_with_image() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    events(&directory, &["copy", "mem:8M", "a.img"], 0);
    directory
}

/// No stream moves: the file's chunks are uploaded.
#[test]
fn an_uploaded_file_is_reported_as_such() {
    let directory = directory_with_image();
    let output = towline(&directory, &["copy", "a.img", "store:vm/a"]);
    assert!(output.status.success());
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(report.contains("\n  uploaded  "), "{report}");
    assert!(!report.contains("\n  moved  "), "{report}");
    let output = towline(&directory, &["copy", "store:vm/a", "b.img"]);
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(report.contains("\n  moved  ") && !report.contains("moved        0 B"), "{report}");
}

#[test]
fn a_verification_without_an_image_fails() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("empty")).unwrap();
    for place in ["empty", "store:empty", "store:empty/typo", "typo.img"] {
        events(&directory, &["store", "verify", place], 1);
    }
    let output = towline(&directory, &["store", "verify", "store:empty"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no image of this name or below it"));
    assert_eq!(events(&directory, &["store", "ls", "empty"], 0)[0]["images"], 0);
}

#[test]
fn objects_of_other_programs_do_not_end_a_verification() {
    let directory = directory_with_image();
    events(&directory, &["copy", "a.img", "store:vm/a"], 0);
    let path = |name: &str| directory.path().join("vm").join(name);
    fs::write(path("x y.towline"), b"foreign").unwrap();
    // `a` must not be verified in its place.
    fs::write(path("a.towline.towline"), b"damaged").unwrap();
    let found = events(&directory, &["store", "verify", "store:vm"], 1);
    let results: Vec<_> = found
        .iter()
        .filter(|event| event["event"] == "verified")
        .map(|event| event["error"].is_null())
        .collect();
    let names: Vec<_> = found.iter().filter_map(|event| event["image"].as_str()).collect();
    assert_eq!(names, ["store:vm/a", "store:vm/a.towline", "store:vm/x y"]);
    assert_eq!(results, [true, false, false], "{found:?}");
}

#[test]
fn an_image_and_the_images_below_its_name_are_verified() {
    let directory = directory_with_image();
    events(&directory, &["copy", "a.img", "store:vm"], 0);
    let names = |place: &str, status| -> Vec<String> {
        let found = events(&directory, &["store", "verify", place], status);
        found.iter().filter_map(|event| event["image"].as_str().map(str::to_owned)).collect()
    };
    assert_eq!(names("store:vm", 0), ["store:vm"]);
    events(&directory, &["copy", "a.img", "store:vm/b"], 0);
    assert_eq!(names("store:vm", 0), ["store:vm", "store:vm/b"]);
    fs::write(directory.path().join("vm/b.towline"), b"damaged").unwrap();
    assert_eq!(names("store:vm", 1), ["store:vm", "store:vm/b"]);
    fs::remove_file(directory.path().join("vm.towline")).unwrap();
    assert_eq!(names("store:vm", 1), ["store:vm/b"]);
}

#[test]
fn the_last_event_of_a_collection_has_an_exit_status() {
    let directory = directory_with_image();
    events(&directory, &["copy", "a.img", "store:vm/a"], 0);
    for words in [&["store", "gc", "--dry-run", "store:vm"][..], &["store", "gc", "store:vm"]] {
        let found = events(&directory, words, 0);
        assert_eq!((&found[0]["event"], &found[0]["outcome"]), (&"inspected".into(), &"done".into()));
    }
}

#[test]
fn names_and_manifests_cannot_control_a_terminal() {
    let directory = directory_with_image();
    let hostile = "\u{1b}]0;x\u{7}\nevil.img";
    events(&directory, &["copy", "a.img", hostile], 0);
    for words in [["store", "ls", "."], ["store", "verify", "."], ["store", "rm", "none\u{1b}[2J\nx"]] {
        let output = towline(&directory, &words);
        let text = [output.stdout, output.stderr].concat();
        let control: Vec<_> = text.iter().filter(|byte| byte.is_ascii_control() && **byte != b'\n').collect();
        assert!(control.is_empty(), "{words:?}: {}", String::from_utf8_lossy(&text));
        let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
        assert!(!lines.iter().any(|line| line.starts_with(b"evil") || *line == b"x"), "{words:?}");
    }
}

#[test]
fn nothing_is_removed_by_a_command_line_with_an_error() {
    let directory = directory_with_image();
    let found = events(&directory, &["store", "rm", "a.img", "null:"], 2);
    assert_eq!(found[0]["reason"], "usage");
    assert!(directory.path().join("a.img").exists());
    symlink("a.img", directory.path().join("link.img")).unwrap();
    let found = events(&directory, &["store", "rm", "link.img"], 1);
    assert!(found[0]["error"].as_str().unwrap().contains("a symbolic link"), "{found:?}");
    assert!(directory.path().join("a.img").exists());
}

#[test]
fn a_missing_store_is_an_error_and_is_not_created() {
    let directory = tempfile::tempdir().unwrap();
    for words in
        [&["store", "gc", "store:typo"][..], &["store", "rm", "store:typo/a"], &["store", "ls", "typo"]]
    {
        events(&directory, words, 1);
    }
    assert!(!directory.path().join("typo").exists());
    fs::write(directory.path().join(".a.img.partial"), b"p").unwrap();
    events(&directory, &["store", "gc", "--min-age", "1", "."], 2);
    assert!(directory.path().join(".a.img.partial").exists());
    // What cannot be removed is counted, and does not end the collection.
    fs::create_dir(directory.path().join("sub")).unwrap();
    let found = events(&directory, &["store", "gc", "."], 0);
    assert_eq!(found[0]["event"], "removed", "{found:?}");
}

#[test]
fn a_report_does_not_replace_an_image() {
    let directory = directory_with_image();
    let before = fs::read(directory.path().join("a.img")).unwrap();
    for words in [
        ["copy", "mem:8M", "new.img", "--report", "new.img"],
        ["copy", "mem:8M", "new.img", "--report", "./new.img"],
        ["copy", "mem:8M", "new.img", "--report", "a.img"],
        ["copy", "a.img", "new.img", "--report", "a.img"],
    ] {
        events(&directory, &words, 2);
        assert!(!directory.path().join("new.img").exists());
    }
    assert_eq!(fs::read(directory.path().join("a.img")).unwrap(), before);
    for _ in 0..2 {
        events(&directory, &["copy", "a.img", "b.img", "--overwrite", "--report", "page.html"], 0);
    }
    assert!(fs::read_to_string(directory.path().join("page.html")).unwrap().starts_with("<!doctype html>"));
}

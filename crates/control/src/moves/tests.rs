use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rustix::process::{geteuid, getpid};
use tempfile::TempDir;

use super::*;
use crate::procfs::start_time;
use record_file::list;

const ID: [u8; 16] = [0xab; 16];

/// A runtime directory.
struct TestDirectory(TempDir);

impl TestDirectory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn directory(&self) -> RuntimeDirectory {
        RuntimeDirectory::below(self.0.path()).unwrap()
    }

    fn file_names(&self) -> Vec<String> {
        let mut names = self.directory().names();
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    fn path(&self, record: &MoveRecord) -> PathBuf {
        self.directory().path().join(record.name())
    }

    fn file(&self, record: MoveRecord) -> RecordFile {
        RecordFile::new(self.directory(), record)
    }
}

/// A QEMU that runs for as long as this test.
pub(super) fn running() -> MoveEnd {
    let pid = getpid().as_raw_pid();
    MoveEnd::Qemu { socket: "/run/vm/b.qmp".into(), pid: Some(pid), start_time: start_time(pid).ok() }
}

pub(super) fn peer() -> MoveEnd {
    MoveEnd::Peer { address: "tcp:10.0.0.1:4444".into() }
}

pub(super) fn record(source: MoveEnd, destination: MoveEnd) -> MoveRecord {
    let guest_plan = GuestPlan { live: true, run: true, quit: true, shared_memory: false };
    MoveRecord::new(Id::of(ID), source, destination, Decision::Acknowledge, guest_plan)
}

fn sleeper() -> Child {
    Command::new("sleep").arg("60").spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn record_exists_until_it_is_removed() {
    let place = TestDirectory::new();
    let mut file = place.file(record(peer(), running()));
    file.write(file.record().clone()).unwrap();
    let path = place.path(file.record());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    file.write(file.record().at_stage(Decision::Run)).unwrap();
    let (records, bad) = list(&place.directory());
    assert!(bad.is_empty(), "{bad:?}");
    assert_eq!(records, [file.record().clone()]);
    assert_eq!((records[0].role, records[0].stage), (Role::Destination, Decision::Run));
    assert_eq!(place.file_names(), [format!("move-{}-destination.json", "ab".repeat(16))]);
    file.remove().unwrap();
    assert_eq!(place.file_names(), [""; 0]);
}

#[test]
fn both_ends_of_a_move_on_one_host_have_separate_records() {
    let place = TestDirectory::new();
    let mut files = [place.file(record(running(), peer())), place.file(record(peer(), running()))];
    for file in &mut files {
        file.write(file.record().clone()).unwrap();
    }
    assert_eq!(names_of(&place.directory(), &Id::of(ID)).len(), 2);
}

#[test]
fn record_in_use_is_refused_with_its_owner() {
    let place = TestDirectory::new();
    let mut file = place.file(record(peer(), running()));
    file.write(file.record().clone()).unwrap();
    let name = file.record().name();
    // Each later state is locked as well.
    for stage in [Decision::Acknowledge, Decision::Run] {
        file.write(file.record().at_stage(stage)).unwrap();
        assert!(is_locked(&place.directory(), &name));
        let error = RecordFile::open(&place.directory(), &name).unwrap_err();
        let expected = format!(
            "another towline (process {}) works on move {}: wait until it has ended, or end it first",
            getpid().as_raw_pid(),
            "ab".repeat(16)
        );
        assert_eq!(error.to_string(), expected);
    }
    drop(file);
    let opened = RecordFile::open(&place.directory(), &name).unwrap();
    assert_eq!(opened.record().stage, Decision::Run);
}

/// A host that lost its power may leave one.
#[test]
fn empty_record_that_nobody_works_on_is_removed() {
    let place = TestDirectory::new();
    let mut file = place.file(record(peer(), running()));
    file.write(file.record().clone()).unwrap();
    let path = place.path(file.record());
    fs::write(&path, "").unwrap();
    assert_eq!(list(&place.directory()).1.len(), 1, "its owner has it locked");
    assert!(path.exists());
    drop(file);
    let (records, bad) = list(&place.directory());
    assert!(records.is_empty() && bad.is_empty(), "{records:?} {bad:?}");
    assert!(!path.exists());
}

#[test]
fn truncated_and_foreign_records_are_refused_and_kept() {
    let place = TestDirectory::new();
    let mut file = place.file(record(peer(), running()));
    file.write(file.record().clone()).unwrap();
    let path = place.path(file.record());
    let text = fs::read_to_string(&path).unwrap();
    let error = |text: &str| {
        fs::write(&path, text).unwrap();
        let (records, bad) = list(&place.directory());
        assert!(records.is_empty(), "{records:?}");
        let [error] = <[Error; 1]>::try_from(bad).unwrap();
        error
    };
    let reason = |text: &str| match error(text) {
        Error::Format { reason, .. } => reason,
        other => panic!("{other}"),
    };
    for cut in [1, text.len() / 2, text.len() - 2] {
        let found = reason(&text[..cut]);
        assert!(found.contains("EOF"), "cut at {cut}: {found}");
    }
    assert_eq!(reason(&text.replace("\"version\":1", "\"version\":2")), "version 2");
    assert!(reason(&text.replace("\"stage\"", "\"stadium\"")).contains("stadium"));
    // Those of other versions are of the QEMU that they name; one that ends early may be of any.
    let newer = error(&text.replace("\"version\":1", "\"version\":2,\"added\":[]"));
    let is_of = |error: &Error, end: &MoveEnd| error.may_be_of(|recorded| recorded.may_be_same_qemu(end));
    let another = MoveEnd::Qemu { socket: "/run/vm/c.qmp".into(), pid: Some(1), start_time: Some(0) };
    assert!(is_of(&newer, &running()) && !is_of(&newer, &another));
    assert!(is_of(&error(&text[..text.len() / 2]), &another));
    let other = "cd".repeat(16);
    assert_eq!(reason(&text.replace(&"ab".repeat(16), &other)), format!("it is of move {other}"));
    assert!(reason(&text.replace(&"ab".repeat(16), "../x")).contains("32 hexadecimal digits"));
    fs::write(&path, &text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o622)).unwrap();
    assert!(reason(&text).contains("only its owner can write"));
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    if geteuid().is_root() {
        chown(&path, Some(12345), None).unwrap();
        assert_eq!(reason(&text), "it belongs to user 12345");
    }
    assert!(path.exists());
}

#[test]
fn symbolic_links_and_pipes_are_not_records() {
    let place = TestDirectory::new();
    let name = record(peer(), running()).name();
    let path = place.directory().path().join(&name);
    let elsewhere = place.0.path().join("elsewhere");
    fs::write(&elsewhere, serde_json::to_string(&record(peer(), running())).unwrap()).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert!(matches!(list(&place.directory()).1.as_slice(), [Error::Io { .. }]));
    assert!(RecordFile::open(&place.directory(), &name).is_err());
    // The first record of a move takes nobody's place, and does not follow the link.
    let before = fs::read_to_string(&elsewhere).unwrap();
    let mut file = RecordFile::new(place.directory(), record(peer(), running()));
    let error = file.write(record(peer(), running())).unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists));
    file.remove().unwrap();
    assert!(path.is_symlink());
    assert_eq!(fs::read_to_string(&elsewhere).unwrap(), before);
    fs::remove_file(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(
        matches!(list(&place.directory()).1.as_slice(), [Error::Format { .. }]),
        "it does not wait for a writer"
    );
}

/// A file system of one page, which something else has filled.
#[test]
fn record_on_a_full_disk_leaves_the_previous_one() {
    let place = TestDirectory::new();
    in_small_file_system("record_on_a_full_disk_leaves_the_previous_one", place.0.path(), || {
        without_room(&place);
    });
}

/// Runs a test while `base` is a file system of 32 KiB, or skips it.
pub(crate) fn in_small_file_system(name: &str, base: &Path, test: impl FnOnce()) {
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=32k,mode=755", "tmpfs"]).arg(base).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED {name}: only root may mount a file system");
        return;
    }
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    assert!(Command::new("umount").arg("-l").arg(base).status().unwrap().success());
    outcome.unwrap();
}

/// Fills the file system of a directory.
pub(crate) fn fill(directory: &RuntimeDirectory) {
    fs::write(directory.path().join("filler"), vec![0_u8; 1 << 20]).unwrap_err();
}

fn without_room(place: &TestDirectory) {
    let mut file = place.file(record(peer(), running()));
    file.write(file.record().clone()).unwrap();
    fill(&place.directory());
    let error = file.write(file.record().at_stage(Decision::Run)).unwrap_err();
    assert!(matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(28)), "{error}");
    let (records, bad) = list(&place.directory());
    assert!(bad.is_empty(), "{bad:?}");
    assert_eq!(records[0].stage, Decision::Acknowledge);
    assert_eq!(file.record().stage, Decision::Acknowledge);
    // Nothing without a name is left, and it is locked as before.
    assert_eq!(place.file_names(), ["filler".to_owned(), file.record().name()]);
    assert!(is_locked(&place.directory(), &file.record().name()));
    file.remove().unwrap();
}

#[test]
fn a_guest_that_is_part_of_an_undecided_move_is_not_sent() {
    let (source, other) = (running(), peer());
    for (stage, is_paused_since, expected) in [
        (Decision::Acknowledge, false, true),
        (Decision::Run, false, true),
        (Decision::Run, true, true),
        (Decision::Left, false, false),
        (Decision::Left, true, true),
    ] {
        let record = record(source.clone(), other.clone()).at_stage(stage);
        assert_eq!(forbids(&record, &source, is_paused_since), expected, "{stage:?} {is_paused_since}");
        assert!(!forbids(&record, &other, is_paused_since), "it is the destination");
    }
}

#[test]
fn record_of_a_left_source_is_removed_with_its_qemu() {
    let place = TestDirectory::new();
    let child = sleeper();
    let pid = i32::try_from(child.id()).unwrap();
    let source = MoveEnd::Qemu { socket: "a".into(), pid: Some(pid), start_time: start_time(pid).ok() };
    let mut file = place.file(record(source.clone(), peer()));
    file.write(file.record().at_stage(Decision::Left)).unwrap();
    drop(file);
    let other = running();
    sweep(&place.directory(), &other);
    assert_eq!(list(&place.directory()).0.len(), 1, "its QEMU runs");
    assert!(!source.has_exited());
    end(child);
    assert!(source.has_exited());
    sweep(&place.directory(), &other);
    assert_eq!(place.file_names(), [""; 0]);
}

#[test]
fn record_of_an_undecided_move_outlives_its_qemu() {
    let place = TestDirectory::new();
    let child = sleeper();
    let pid = i32::try_from(child.id()).unwrap();
    let destination = MoveEnd::Qemu { socket: "b".into(), pid: Some(pid), start_time: start_time(pid).ok() };
    let mut file = place.file(record(peer(), destination));
    file.write(file.record().clone()).unwrap();
    drop(file);
    end(child);
    sweep(&place.directory(), &peer());
    assert_eq!(list(&place.directory()).0.len(), 1);
}

#[test]
fn record_is_removed_when_both_local_qemus_have_exited() {
    let (place, children) = (TestDirectory::new(), [sleeper(), sleeper()]);
    let ends = children.each_ref().map(|child| {
        let pid = i32::try_from(child.id()).unwrap();
        MoveEnd::Qemu { socket: "b".into(), pid: Some(pid), start_time: start_time(pid).ok() }
    });
    // By two towlines, each of which knows one end.
    for (source, destination) in [(ends[0].clone(), peer()), (peer(), ends[1].clone())] {
        let mut file = place.file(record(source, destination));
        file.write(file.record().clone()).unwrap();
    }
    let [source, destination] = children;
    end(source);
    sweep(&place.directory(), &peer());
    assert_eq!(place.file_names().len(), 2, "the destination's QEMU runs");
    end(destination);
    sweep(&place.directory(), &peer());
    assert_eq!(place.file_names(), [""; 0]);
}

#[test]
fn old_temporary_files_of_killed_writers_are_removed() {
    let place = TestDirectory::new();
    let path = place.directory().path().join(".move-x.json.1-0");
    fs::write(&path, "{").unwrap();
    list(&place.directory());
    assert!(path.exists(), "its writer may be about to name it");
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
    list(&place.directory());
    assert!(!Path::new(&path).exists());
}

#[test]
fn process_ids_of_another_pid_namespace_are_no_evidence() {
    let gone = MoveEnd::Qemu { socket: "/run/vm/b.qmp".into(), pid: Some(i32::MAX), start_time: Some(1) };
    let here = record(gone.clone(), peer());
    assert!(here.has_exited(&gone));
    let mut text: serde_json::Value = serde_json::to_value(&here).unwrap();
    for namespace in [serde_json::json!("pid:[1]"), serde_json::Value::Null] {
        text["owner"]["pid-namespace"] = namespace;
        let there = MoveRecord::parse(&text.to_string()).unwrap();
        assert!(!there.has_exited(&gone), "{text}");
    }
}

/// The id of an incoming move comes from its peer.
#[test]
fn second_move_with_the_same_id_is_refused_and_keeps_the_first() {
    let place = TestDirectory::new();
    let mut first = place.file(record(peer(), running()));
    first.write(first.record().at_stage(Decision::Acknowledge)).unwrap();
    let mut second = RecordFile::new(place.directory(), record(peer(), running()));
    assert!(second.write(record(peer(), running()).at_stage(Decision::Run)).is_err());
    second.remove().unwrap();
    let (records, _) = list(&place.directory());
    assert_eq!(records.iter().map(|record| record.stage).collect::<Vec<_>>(), [Decision::Acknowledge]);
}

#[test]
fn unidentified_qemu_is_compared_by_socket() {
    let known = running();
    let MoveEnd::Qemu { socket, .. } = known.clone() else { unreachable!() };
    let unknown = MoveEnd::Qemu { socket, pid: None, start_time: None };
    assert!(
        known.may_be_same_qemu(&unknown) && unknown.may_be_same_qemu(&known) && !known.is_same_qemu(&unknown)
    );
    let other = MoveEnd::Qemu { socket: "/run/vm/other.qmp".into(), pid: None, start_time: None };
    assert!(!known.may_be_same_qemu(&other));
}

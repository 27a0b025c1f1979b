use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

use std::process::Command;

use rustix::process::{PidfdFlags, Resource, Rlimit, geteuid, getpid, getrlimit, pidfd_open, setrlimit};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::procfs::{own_process, start_time};

/// A runtime directory, and a socket's path in it.
struct TestDirectory {
    base: TempDir,
    socket: PathBuf,
}

impl TestDirectory {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let socket = base.path().join("qmp");
        fs::write(&socket, "").unwrap();
        Self { base, socket }
    }

    fn directory(&self) -> RuntimeDirectory {
        RuntimeDirectory::below(self.base.path()).unwrap()
    }

    fn open(&self, process: &Arc<Process>) -> Result<(Journal, Option<i32>), Error> {
        Journal::open(&self.directory(), &self.socket, process)
    }

    fn names(&self) -> Vec<String> {
        self.directory().names().into_iter().filter(|name| !name.starts_with('.')).collect()
    }

    fn only_file(&self) -> PathBuf {
        let names = self.names();
        assert_eq!(names.len(), 1, "{names:?}");
        self.directory().path().join(&names[0])
    }
}

/// A process that runs: this one.
fn running() -> Arc<Process> {
    let pid = getpid();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let (pid, start_time) = own_process();
    Arc::new(Process::Known { pid, start_time, pidfd })
}

fn unknown() -> Arc<Process> {
    Arc::new(Process::Unknown { reason: "a test".into() })
}

fn record() -> UndoRecord {
    let parameters = [("max-bandwidth".to_owned(), ChangedValue { before: Some(json!(1)), set: json!(2) })];
    UndoRecord::Settings { capabilities: BTreeMap::new(), parameters: parameters.into() }
}

#[test]
fn records_stay_until_they_are_done() {
    for process in [running(), unknown()] {
        let place = TestDirectory::new();
        let (journal, owner) = place.open(&process).unwrap();
        assert_eq!(owner, None);
        let first = journal.write(&record()).unwrap();
        let second = journal
            .write(&UndoRecord::Migration { to: "unix:a".into(), begun_ms: 1, seen_ms: None })
            .unwrap();
        first.done();
        drop((first, second, journal));
        // As after a kill, which drops the lock as well.
        let (journal, owner) = place.open(&process).unwrap();
        assert_eq!(owner, Some(getpid().as_raw_pid()));
        let records = journal.records();
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].1, UndoRecord::Migration { to: "unix:a".into(), begun_ms: 1, seen_ms: None });
        let third = journal.write(&record()).unwrap();
        assert_eq!(journal.records()[0].1, record(), "the newest first");
        third.done();
        records[0].0.done();
        drop((records, third, journal));
        assert_eq!(place.names(), [""; 0]);
    }
}

#[test]
fn running_owner_of_a_journal_is_named() {
    let place = TestDirectory::new();
    let (_journal, _) = place.open(&running()).unwrap();
    let error = place.open(&running()).unwrap_err();
    let expected = format!(
        "another towline (process {}) works on QEMU at {}: wait until it has ended, or end it first",
        std::process::id(),
        place.socket.display()
    );
    assert_eq!(error.to_string(), expected);
}

/// A lock can be missing, as between two hosts; the owner's process is evidence as well.
#[test]
fn owner_without_lock_is_refused_while_its_process_runs() {
    let place = TestDirectory::new();
    let (journal, _) = place.open(&running()).unwrap();
    let _ = journal.write(&record()).unwrap();
    drop(journal);
    let path = place.only_file();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let (own, own_start) = own_process();
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace(&format!("\"pid\":{own}"), &format!("\"pid\":{pid}"));
    let start = start_time(pid).unwrap();
    fs::write(
        &path,
        text.replace(&format!("\"start-time\":{own_start}"), &format!("\"start-time\":{start}")),
    )
    .unwrap();
    let error = place.open(&running()).unwrap_err();
    assert!(matches!(error, Error::InUse { pid: Some(found), .. } if found == pid), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(place.open(&running()).unwrap().1, Some(pid));
}

#[test]
fn truncated_last_line_is_ignored() {
    let place = TestDirectory::new();
    let (journal, _) = place.open(&running()).unwrap();
    let _ = journal.write(&record()).unwrap();
    let _ =
        journal.write(&UndoRecord::Migration { to: "unix:ä".into(), begun_ms: 1, seen_ms: None }).unwrap();
    drop(journal);
    let path = place.only_file();
    let text = fs::read_to_string(&path).unwrap();
    let last = text.trim_end().rfind('\n').unwrap() + 1;
    for cut in last..text.len() - 1 {
        // Within the "ä" too.
        fs::write(&path, &text.as_bytes()[..cut]).unwrap();
        let (journal, owner) = place.open(&running()).unwrap();
        assert_eq!(owner, Some(getpid().as_raw_pid()), "cut at {cut}");
        let records: Vec<_> = journal.records().into_iter().map(|(_, record)| record).collect();
        assert_eq!(records, [record()], "cut at {cut}");
        drop(journal);
        let (journal, _) = place.open(&running()).unwrap();
        assert_eq!(journal.records().len(), 1, "read again behind the cut at {cut}");
    }
}

/// Variable of a process that has the limit of the next test to itself.
const LIMITED: &str = "TOWLINE_JOURNAL_LIMITED";

/// A file system that is full writes a part of a line.
#[test]
fn a_line_that_could_not_be_written_leaves_the_others_readable() {
    if std::env::var_os(LIMITED).is_none() {
        // With the signal for a file that would be too large ignored.
        let test = "journal::tests::a_line_that_could_not_be_written_leaves_the_others_readable";
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" --exact \"$1\""]);
        let output =
            command.arg(std::env::current_exe().unwrap()).arg(test).env(LIMITED, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let place = TestDirectory::new();
    let (journal, _) = place.open(&running()).unwrap();
    let first = journal.write(&record()).unwrap();
    let bytes = fs::metadata(place.only_file()).unwrap().len();
    let unlimited = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(bytes + 20), ..unlimited }).unwrap();
    let error = journal.write(&record()).unwrap_err();
    setrlimit(Resource::Fsize, unlimited).unwrap();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    let last = journal.write(&UndoRecord::migration("unix:a")).unwrap();
    drop((first, last, journal));
    let (journal, _) = place.open(&running()).unwrap();
    assert_eq!(journal.records().len(), 2);
}

/// As `towline moves` has it, which looks at the changes of a QEMU.
#[test]
fn a_lock_of_one_that_only_looks_is_awaited() {
    let place = TestDirectory::new();
    let (journal, _) = place.open(&running()).unwrap();
    let _ = journal.write(&record()).unwrap();
    drop(journal);
    let looks = File::open(place.only_file()).unwrap();
    flock(&looks, FlockOperation::NonBlockingLockShared).unwrap();
    thread::scope(|scope| {
        let opened = scope.spawn(|| place.open(&running()).map(|(_, owner)| owner));
        thread::sleep(Duration::from_millis(100));
        drop(looks);
        assert_eq!(opened.join().unwrap().unwrap(), Some(getpid().as_raw_pid()));
    });
}

/// A connection to it would wait for as long as its queue is full.
#[test]
fn the_protection_of_a_qemu_that_accepts_no_connection_is_found() {
    let place = TestDirectory::new();
    let protection = ProtectionRecord {
        ferry_pid: 1,
        ferry_start_time: 1,
        cards: Vec::new(),
        guest: "a".into(),
        generation: 1,
        arbiter: "/srv/arbiter".parse().unwrap(),
        claimant: crate::arbiter::Claimant::new(),
    };
    let (journal, _) = place.open(&running()).unwrap();
    let _ = journal.write(&UndoRecord::Protection(protection.clone())).unwrap();
    assert_eq!(leftover_protection(&place.directory(), &place.socket), None, "its towline lives");
    let _inherited_by_a_process_that_is_being_started = journal.state().file.0.try_clone().unwrap();
    drop(journal);
    let link = place.base.path().join("link");
    symlink(&place.socket, &link).unwrap();
    for monitor in [&place.socket, &link] {
        assert_eq!(leftover_protection(&place.directory(), monitor), Some(protection.clone()));
    }
    fs::write(place.base.path().join("other"), "").unwrap();
    assert_eq!(leftover_protection(&place.directory(), &place.base.path().join("other")), None);
}

#[test]
fn another_version_is_refused_and_kept() {
    let place = TestDirectory::new();
    let (journal, _) = place.open(&running()).unwrap();
    let _ = journal.write(&record()).unwrap();
    drop(journal);
    let path = place.only_file();
    let text = fs::read_to_string(&path).unwrap().replace("\"version\":1", "\"version\":2");
    fs::write(&path, &text).unwrap();
    let error = place.open(&running()).unwrap_err();
    assert!(matches!(&error, Error::Format { line: 1, reason, .. } if reason == "version 2"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

/// A socket of another QEMU may get the inode of a removed one.
#[test]
fn journal_of_another_socket_with_this_inode_is_not_used() {
    let place = TestDirectory::new();
    let (journal, _) = place.open(&unknown()).unwrap();
    let _ = journal.write(&record()).unwrap();
    drop(journal);
    let path = place.only_file();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("/qmp\"", "/older\"")).unwrap();
    let (journal, owner) = place.open(&unknown()).unwrap();
    assert_eq!((owner, journal.records().len()), (None, 0));
}

#[test]
fn journals_of_exited_qemus_are_removed_with_their_directories() {
    let place = TestDirectory::new();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let pidfd = pidfd_open(rustix::process::Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let process = Arc::new(Process::Known { pid, start_time: start_time(pid).unwrap(), pidfd });
    let left = place.base.path().join("left");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("source.sock"), "").unwrap();
    let (journal, _) = place.open(&process).unwrap();
    let _ = journal.write(&UndoRecord::directory(&left).unwrap()).unwrap();
    drop(journal);
    sweep(&place.directory());
    assert!(left.exists() && place.names().len() == 1, "it runs");
    child.kill().unwrap();
    child.wait().unwrap();
    sweep(&place.directory());
    assert_eq!(place.names(), [""; 0]);
    assert!(!left.exists());
}

/// A file that replaced a recorded directory must not be removed.
#[test]
fn only_the_recorded_directory_is_removed() {
    let place = TestDirectory::new();
    let (recorded, other) = (place.base.path().join("recorded"), place.base.path().join("other"));
    fs::create_dir(&recorded).unwrap();
    fs::create_dir(&other).unwrap();
    let record = UndoRecord::directory(&recorded).unwrap();
    fs::remove_dir(&recorded).unwrap();
    symlink(&other, &recorded).unwrap();
    assert!(record.remove_files().unwrap().is_ok());
    assert!(recorded.is_symlink() && other.exists());
    assert!(record_of(&other).remove_files().unwrap().is_ok());
    assert!(!other.exists());
    assert!(UndoRecord::migration("").remove_files().is_none());
}

fn record_of(path: &Path) -> UndoRecord {
    UndoRecord::directory(path).unwrap()
}

fn reason(base: &Path) -> String {
    match RuntimeDirectory::below(base).unwrap_err() {
        RuntimeDirectoryError::Unsafe { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

#[test]
fn missing_directories_are_created_privately() {
    let base = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::below(base.path()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(directory.path(), base.path().join("towline/journal"));
    assert_eq!((mode(directory.path()), mode(&base.path().join("towline"))), (0o700, 0o755));
    RuntimeDirectory::below(base.path()).unwrap();
}

#[test]
fn symbolic_links_are_refused() {
    let (base, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(elsewhere.path(), base.path().join("towline")).unwrap();
    assert_eq!(reason(base.path()), "it is a symbolic link or no directory");
    fs::remove_file(base.path().join("towline")).unwrap();
    fs::create_dir(base.path().join("towline")).unwrap();
    symlink(elsewhere.path(), base.path().join("towline/journal")).unwrap();
    assert_eq!(reason(base.path()), "it is a symbolic link or no directory");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    // The runtime directory itself must not be a symbolic link either.
    let link = elsewhere.path().join("run");
    symlink(base.path(), &link).unwrap();
    assert_eq!(reason(&link), "it is a symbolic link or no directory");
}

#[test]
fn directories_that_others_can_write_are_refused() {
    let base = tempfile::tempdir().unwrap();
    RuntimeDirectory::below(base.path()).unwrap();
    for (path, mode, expected) in [
        ("towline/journal", 0o750, "its mode is 0750, expected 0700"),
        ("towline/journal", 0o707, "its mode is 0707, expected 0700"),
        ("towline", 0o777, "its mode is 0777, expected 0755"),
        ("", 0o1777, "its mode is 1777, expected 1755"),
    ] {
        let path = base.path().join(path);
        let before = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        assert_eq!(reason(base.path()), expected);
        fs::set_permissions(&path, before).unwrap();
    }
    RuntimeDirectory::below(base.path()).unwrap();
}

#[test]
fn directories_of_others_are_refused() {
    let own = geteuid();
    let base = tempfile::tempdir().unwrap();
    let (path, owner) = if own.is_root() {
        fs::create_dir_all(base.path().join("towline")).unwrap();
        chown(base.path().join("towline"), Some(12345), None).unwrap();
        (base.path(), 12345)
    } else {
        // Root's.
        (Path::new("/"), 0)
    };
    assert_eq!(reason(path), format!("its owner is user {owner}, expected {}", own.as_raw()));
}

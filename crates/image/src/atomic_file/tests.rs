//! On the filesystem of the temporary directory, with a real crash.

use std::io::{BufRead, BufReader, Read, Seek};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::fs::{FileType, Mode};
use tempfile::TempDir;

use super::*;

/// Path of the file to be written by a child process.
const CHILD_PATH: &str = "TOWLINE_TEST_ATOMIC_FILE";

fn directory() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("guest.img");
    (directory, path)
}

fn names(directory: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(directory.path()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_name_appears_with_commit() {
    let (directory, path) = directory();
    let mut file = AtomicFile::open(&path, Existing::Refuse).unwrap();
    file.write_all_at(b"memory", 0).unwrap();
    assert_eq!(names(&directory), [".guest.img.partial"]);
    if let Some(direct) = file.direct.take() {
        assert_eq!(direct.metadata().unwrap().len(), 6, "the same file");
    } else {
        eprintln!("no direct I/O in {}", directory.path().display());
    }
    file.commit().unwrap();
    assert_eq!(names(&directory), ["guest.img"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"memory");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn nothing_is_left_without_commit() {
    let (directory, path) = directory();
    let file = AtomicFile::open(&path, Existing::Refuse).unwrap();
    file.write_all_at(b"memory", 1 << 20).unwrap();
    drop(file);
    assert_eq!(names(&directory), [""; 0]);
}

#[test]
fn a_second_writer_is_refused_while_the_first_is_active() {
    let (_directory, path) = directory();
    let first = AtomicFile::open(&path, Existing::Refuse).unwrap();
    let error = AtomicFile::open(&path, Existing::Refuse).unwrap_err();
    assert!(matches!(&error, Error::Busy { path: busy, .. } if *busy == path), "{error}");
    drop(first);
    AtomicFile::open(&path, Existing::Refuse).unwrap().commit().unwrap();
}

#[test]
fn a_file_is_free_although_a_process_that_is_being_started_has_its_descriptor() {
    let (_directory, path) = directory();
    let first = AtomicFile::open(&path, Existing::Refuse).unwrap();
    let inherited = first.file().try_clone().unwrap();
    first.commit().unwrap();
    let second = AtomicFile::open(&path, Existing::Replace).unwrap();
    let also_inherited = second.replaced.as_ref().unwrap().0.try_clone().unwrap();
    drop(second);
    AtomicFile::open(&path, Existing::Replace).unwrap();
    drop((inherited, also_inherited));
}

#[test]
fn concurrent_writers_are_serialized() {
    let (directory, path) = directory();
    let commits = std::thread::scope(|scope| {
        let write = || {
            let mut commits = 0;
            for _ in 0..50 {
                match AtomicFile::open(&path, Existing::Replace) {
                    Ok(file) => {
                        assert_eq!(file.file().metadata().unwrap().len(), 0);
                        file.write_all_at(b"whole", 0).unwrap();
                        file.commit().unwrap();
                        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
                        commits += 1;
                    }
                    Err(Error::Busy { .. }) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
            commits
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(write)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>()
    });
    assert!(commits > 0);
    assert_eq!(names(&directory), ["guest.img"]);
}

#[test]
fn an_existing_file_is_refused_or_replaced_at_once() {
    let (directory, path) = directory();
    std::fs::write(&path, "old").unwrap();
    let error = AtomicFile::open(&path, Existing::Refuse).unwrap_err();
    assert!(matches!(&error, Error::Exists { path: taken } if *taken == path), "{error}");
    let mut old = File::open(&path).unwrap();
    let file = AtomicFile::open(&path, Existing::Replace).unwrap();
    file.write_all_at(b"new", 0).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    file.commit().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
    let mut still = String::new();
    old.rewind().unwrap();
    old.read_to_string(&mut still).unwrap();
    assert_eq!((still.as_str(), names(&directory)), ("old", vec!["guest.img".into()]));
}

#[test]
fn a_file_that_appears_meanwhile_is_not_overwritten() {
    let (directory, path) = directory();
    let file = AtomicFile::open(&path, Existing::Refuse).unwrap();
    std::fs::write(&path, "theirs").unwrap();
    assert!(matches!(file.commit(), Err(Error::Exists { .. })));
    assert_eq!(names(&directory), ["guest.img"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
}

#[test]
fn a_commit_fails_if_the_partial_was_removed() {
    let (directory, path) = directory();
    let file = AtomicFile::open(&path, Existing::Refuse).unwrap();
    std::fs::remove_file(directory.path().join(".guest.img.partial")).unwrap();
    let other = AtomicFile::open(&path, Existing::Refuse).unwrap();
    assert!(matches!(file.commit(), Err(Error::PartialGone { .. })));
    assert_eq!(names(&directory), [".guest.img.partial"], "the other writer's");
    other.commit().unwrap();
}

#[test]
fn only_regular_files_are_replaced() {
    let (directory, path) = directory();
    let other = directory.path().join("other");
    std::fs::write(&other, "theirs").unwrap();
    let refused = |found| {
        let error = AtomicFile::open(&path, Existing::Replace).unwrap_err();
        assert!(matches!(&error, Error::NotRegular { found: kind, .. } if *kind == found), "{error}");
    };
    let partial = directory.path().join(".guest.img.partial");
    for name in [&path, &partial] {
        std::fs::create_dir(name).unwrap();
        refused("directory");
        std::fs::remove_dir(name).unwrap();
        symlink(&other, name).unwrap();
        refused("symbolic link");
        std::fs::remove_file(name).unwrap();
        fs::mknodat(fs::CWD, name, FileType::Fifo, Mode::RUSR, 0).unwrap();
        refused("FIFO");
        std::fs::remove_file(name).unwrap();
    }
    std::fs::hard_link(&other, &partial).unwrap();
    refused("file with several names");
    assert_eq!(std::fs::read(&other).unwrap(), b"theirs");
    let error = AtomicFile::open(Path::new("/dev/null"), Existing::Replace).unwrap_err();
    assert!(matches!(error, Error::NotRegular { found: "character device", .. }), "{error}");
}

#[test]
fn a_path_without_directory_or_name_is_an_error() {
    let (directory, path) = directory();
    let missing = directory.path().join("missing");
    let error = AtomicFile::open(&missing.join("x"), Existing::Refuse).unwrap_err();
    assert!(matches!(&error, Error::NoDirectory { directory, .. } if *directory == missing), "{error}");
    std::fs::write(&path, "").unwrap();
    let error = AtomicFile::open(&path.join("x"), Existing::Refuse).unwrap_err();
    assert!(matches!(&error, Error::NoDirectory { directory, .. } if *directory == path), "{error}");
    for path in ["/", "..", "a/", ""] {
        let error = AtomicFile::open(Path::new(path), Existing::Refuse).unwrap_err();
        assert!(matches!(error, Error::NoName { .. }), "{error}");
    }
    let error = AtomicFile::open(&directory.path().join("x".repeat(250)), Existing::Refuse).unwrap_err();
    assert!(matches!(error, Error::Io { op: "create", .. }), "{error}");
}

#[test]
fn kernel_errors_have_a_remedy() {
    let text = |errno| failed("create", Path::new("/x/y"), errno).to_string();
    assert!(text(Errno::ROFS).starts_with("/x/y: create: the filesystem is mounted read-only; choose"));
    assert!(text(Errno::ACCESS).starts_with("/x/y: create: not permitted; write as"));
    assert!(text(Errno::DQUOT).starts_with("/x/y: create: no space left; free some"));
}

#[test]
fn a_sidecar_is_written_whole() {
    let (directory, path) = directory();
    write_sidecar(&path, b"{}", Existing::Refuse).unwrap();
    assert!(matches!(write_sidecar(&path, b"[]", Existing::Refuse), Err(Error::Exists { .. })));
    write_sidecar(&path, b"[1]", Existing::Replace).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"[1]");
    assert_eq!(names(&directory), ["guest.img"]);
}

#[test]
fn a_file_with_a_shared_lock_is_not_replaced() {
    let (directory, path) = directory();
    std::fs::write(&path, "base").unwrap();
    let user = LockedFile(File::open(&path).unwrap());
    fs::flock(&user.0, FlockOperation::LockShared).unwrap();
    let error = AtomicFile::open(&path, Existing::Replace).unwrap_err();
    assert!(matches!(&error, Error::InUse { path: used, .. } if *used == path), "{error}");
    assert!(error.to_string().contains("process"), "{error}");
    assert_eq!(names(&directory), ["guest.img"], "the partial is gone");
    // Nor can it be locked while it is being replaced.
    drop(user);
    let file = AtomicFile::open(&path, Existing::Replace).unwrap();
    let user = File::open(&path).unwrap();
    assert!(fs::flock(&user, FlockOperation::NonBlockingLockShared).is_err());
    // Another file in use is renamed to that name: detected at the last moment.
    let other = directory.path().join("other");
    std::fs::write(&other, "needed").unwrap();
    let needed = File::open(&other).unwrap();
    fs::flock(&needed, FlockOperation::LockShared).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert!(matches!(file.commit(), Err(Error::InUse { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"needed");
    assert_eq!(names(&directory), ["guest.img"]);
}

/// Kills its process on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Child process of the next test, not a test itself.
#[test]
fn child_that_writes_until_killed() {
    let Some(path) = std::env::var_os(CHILD_PATH) else { return };
    let file = AtomicFile::open(Path::new(&path), Existing::Replace).unwrap();
    file.write_all_at(b"half a guest", 0).unwrap();
    println!("\nwriting");
    // Ends with the parent.
    let _ = std::io::stdin().read(&mut [0]);
    std::process::abort();
}

#[test]
fn a_killed_writer_leaves_the_old_file_and_a_partial_to_take_over() {
    let (directory, path) = directory();
    std::fs::write(&path, "old").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "atomic_file::tests::child_that_writes_until_killed", "--nocapture"]);
    child.env(CHILD_PATH, &path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Killed(child.spawn().unwrap());
    let output = BufReader::new(child.0.stdout.take().unwrap());
    assert!(output.lines().map_while(std::io::Result::ok).any(|line| line == "writing"));
    assert!(matches!(AtomicFile::open(&path, Existing::Replace), Err(Error::Busy { .. })));
    drop(child);
    assert_eq!(names(&directory), [".guest.img.partial", "guest.img"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    let file = AtomicFile::open(&path, Existing::Replace).unwrap();
    assert_eq!(file.file().metadata().unwrap().len(), 0);
    file.write_all_at(b"new", 0).unwrap();
    file.commit().unwrap();
    assert_eq!(names(&directory), ["guest.img"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

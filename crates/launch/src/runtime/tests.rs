use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn root() -> (tempfile::TempDir, RuntimeRoot) {
    let parent = tempfile::tempdir().unwrap();
    let root = RuntimeRoot::at(parent.path().join("towline"));
    (parent, root)
}

fn name(text: &str) -> GuestName {
    text.parse().unwrap()
}

/// Leaves the directory of a guest as a process does that is killed.
fn leave(mut directory: GuestDirectory) {
    directory.keep();
    // A process that another test starts has it, too, until it executes its program.
    rustix::fs::flock(&directory.lock, FlockOperation::Unlock).unwrap();
}

/// All guests that run, or the first error of one.
fn list(root: &RuntimeRoot) -> Result<Vec<RunningGuest>, RuntimeError> {
    root.guests()?.into_iter().collect()
}

#[test]
fn names_are_no_paths() {
    for text in ["", ".", "..", "a/b", "-a", "a b", "é", &"a".repeat(NAME_BYTES_MAX + 1)] {
        assert!(text.parse::<GuestName>().is_err(), "{text}");
    }
    assert_eq!(name("web-1.test_2").as_str(), "web-1.test_2");
}

#[test]
fn a_name_is_taken_until_its_directory_is_dropped() {
    let (_parent, root) = root();
    let first = root.claim(&name("a")).unwrap();
    first
        .write_state(&first.new_state(std::process::id(), Lifetime::WithOwner, None, None).unwrap())
        .unwrap();
    let error = root.claim(&name("a")).unwrap_err();
    assert!(matches!(error, RuntimeError::Taken { .. }), "{error}");
    std::fs::write(first.path().join("qemu.log"), "of the first").unwrap();
    leave(first);
    let second = root.claim(&name("a")).unwrap();
    assert!(!second.log_path().exists(), "what the first left is removed");
    second.create_log().unwrap();
    let path = second.path().to_owned();
    drop(second);
    assert!(!path.exists());
    root.claim(&name("a")).unwrap();
}

#[test]
fn a_directory_of_others_is_refused() {
    let (_parent, root) = root();
    leave(root.claim(&name("a")).unwrap());
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set(&root.path().join("a"), 0o750);
    assert!(matches!(root.claim(&name("a")), Err(RuntimeError::NotPrivate { mode: 0o750, .. })));
    set(root.path(), 0o777);
    assert!(matches!(root.claim(&name("b")), Err(RuntimeError::NotPrivate { mode: 0o777, .. })));
    assert!(matches!(list(&root), Err(RuntimeError::NotPrivate { mode: 0o777, .. })));
    assert!(matches!(root.find(&name("a")), Err(RuntimeError::NotPrivate { mode: 0o777, .. })));
}

#[test]
fn a_root_that_others_may_write_to_is_not_the_users() {
    let parent = tempfile::tempdir().unwrap();
    let set = |mode| {
        std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        is_own(parent.path())
    };
    assert!(set(0o700) && set(0o755));
    assert!(!set(0o770) && !set(0o702));
    assert!(!is_own(Path::new("relative")));
}

#[test]
fn symbolic_links_are_not_followed() {
    let (parent, root) = root();
    leave(root.claim(&name("a")).unwrap());
    let elsewhere = parent.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, root.path().join("b")).unwrap();
    assert!(matches!(root.claim(&name("b")), Err(RuntimeError::Io { operation: "open it", .. })));
    std::fs::remove_file(root.path().join("a/lock")).unwrap();
    symlink(elsewhere.join("lock"), root.path().join("a/lock")).unwrap();
    assert!(root.claim(&name("a")).is_err());
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

#[test]
fn only_guests_that_run_are_listed() {
    let (_parent, root) = root();
    assert_eq!(list(&root).unwrap(), []);
    let directory = root.claim(&name("a")).unwrap();
    let image = Some(PathBuf::from("/srv/a.img"));
    let state = directory.new_state(std::process::id(), Lifetime::Detached, image, None).unwrap();
    directory.write_state(&state).unwrap();
    let ended = root.claim(&name("b")).unwrap();
    let other = RunningGuest { name: "b".into(), start_time: state.start_time + 1, ..state.clone() };
    ended.write_state(&other).unwrap();
    let damaged = root.claim(&name("c")).unwrap();
    let damaged = damaged.path().join(STATE);
    std::fs::write(&damaged, "{").unwrap();
    // It may be that of a guest which runs.
    assert!(matches!(list(&root), Err(RuntimeError::State { path, pid: None, .. }) if path == damaged));
    std::fs::remove_file(damaged).unwrap();
    assert_eq!(list(&root).unwrap(), [state]);
    let taken = root.claim(&name("a")).unwrap_err().to_string();
    let pid = std::process::id();
    assert_eq!(taken, format!("name a is taken by process {pid} (started by process {pid})"));
}

#[test]
fn the_state_of_an_image_whose_path_is_not_utf_8_is_listed() {
    use std::os::unix::ffi::OsStringExt as _;

    let (_parent, root) = root();
    let directory = root.claim(&name("a")).unwrap();
    let image = PathBuf::from(std::ffi::OsString::from_vec(b"/srv/\xff/a.img".to_vec()));
    let state = directory.new_state(std::process::id(), Lifetime::Detached, Some(image), None).unwrap();
    directory.write_state(&state).unwrap();
    let listed = list(&root).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].image.as_deref(), Some(Path::new("/srv/\u{fffd}/a.img")));
}

#[test]
fn directories_of_guests_that_ended_a_day_ago_are_removed() {
    let (_parent, root) = root();
    let names = ["running", "recent", "old"].map(name);
    let [running, recent, old] = names.each_ref().map(|name| root.claim(name).unwrap());
    let paths = [&running, &recent, &old].map(|directory| directory.path().to_owned());
    let day_ago = std::time::SystemTime::now() - 2 * ENDED_KEPT;
    for directory in [&running, &recent, &old] {
        let log = directory.create_log().unwrap();
        if directory.name() != &names[1] {
            log.set_modified(day_ago).unwrap();
        }
    }
    [recent, old].into_iter().for_each(leave);
    let _next = root.claim(&name("next")).unwrap();
    assert_eq!(paths.each_ref().map(|path| path.exists()), [true, true, false]);
    drop(running);
}

/// As `claim` does with all that it finds.
#[test]
fn a_name_is_not_taken_by_a_process_that_removes_what_was_left() {
    let (_parent, root) = root();
    leave(root.claim(&name("a")).unwrap());
    let directory = open_private(CWD, root.path(), root.path()).unwrap();
    let removing = root.try_claim(directory.as_fd(), &name("a")).unwrap().unwrap();
    thread::scope(|scope| {
        let claiming = scope.spawn(|| root.claim(&name("a")).map(drop));
        thread::sleep(2 * RETRY_INTERVAL);
        drop(removing);
        claiming.join().unwrap().unwrap();
    });
}

#[test]
fn a_state_of_another_version_concerns_only_its_own_guest() {
    let (_parent, root) = root();
    let write = |name: &str, pid: u32, version: u32| {
        let directory = root.claim(&name.parse().unwrap()).unwrap();
        let state = directory.new_state(std::process::id(), Lifetime::Detached, None, None).unwrap();
        let state = RunningGuest { pid, ..state };
        let json = state.to_json().unwrap().replace("\"version\":1", &format!("\"version\":{version}"));
        std::fs::write(directory.path().join(STATE), json).unwrap();
        directory
    };
    let own = std::process::id();
    let _own = write("own", own, 1);
    let foreign = write("foreign", 1, 2);
    let pid = Some(own.cast_signed());
    let elsewhere = Path::new("/run/b.qmp");
    let is_refused = |found: Result<_, RuntimeError>| matches!(found, Err(RuntimeError::State { pid: Some(1), path, .. }) if path == foreign.path().join(STATE));
    assert_eq!(root.find_qemu(pid, elsewhere).unwrap().unwrap().name, "own");
    assert_eq!(root.find_qemu(Some(own.cast_signed() + 1), elsewhere).unwrap(), None);
    assert_eq!(root.find_qemu(None, elsewhere).unwrap(), None);
    assert!(is_refused(root.find_qemu(Some(1), elsewhere)));
    assert!(is_refused(root.find_qemu(None, &foreign.qmp_path())));
    assert_eq!(root.find(&name("own")).unwrap().unwrap().name, "own");
    assert!(is_refused(root.find(&name("foreign"))));
    assert!(list(&root).is_err());
    let found: Vec<_> = root.guests().unwrap().into_iter().flatten().map(|guest| guest.name).collect();
    assert_eq!(found, ["own"]);
    // Its QEMU and its launcher have ended.
    leave(foreign);
    assert_eq!(list(&root).unwrap().len(), 1);
}

//! Upgrades that are refused, and new QEMUs that fail: the guest continues in the old one.

use towline_lab::{Finished, Qemu, Towline, Version, require_lab, towline, wait_until};

use crate::support::{Guest, Memory, WITHIN, builder, events, named_file, program};

/// Program that waits until no QEMU has locks of a file, and locks it until it is killed. The bytes are those of
/// `RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE` (QEMU's block/file-posix.c).
const LOCK: &str = "
import fcntl, struct, sys, time
drive = open(sys.argv[1], 'r+b')
fcntl.fcntl(drive, fcntl.F_OFD_SETLKW, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 100, 200, 0))
print('locked', flush=True)
time.sleep(1000)
";

fn failed(guest: &Guest, options: &[&str], arguments: &[&str], expected: &str) -> Finished {
    let finished = guest.upgrade(options, arguments).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains(expected), "{expected:?} is not in {}", finished.stderr);
    let last = &events(&finished, "failed")[0];
    assert_eq!(last["guest-state"]["source"], "has-it", "{last}");
    finished
}

#[test]
fn a_new_qemu_that_does_not_start_leaves_the_guest_where_it_is() {
    if !require_lab("a_new_qemu_that_does_not_start_leaves_the_guest_where_it_is") {
        return;
    }
    let guest = Guest::boot(|place| builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place));
    failed(&guest, &["--qemu", "/nowhere/qemu"], &[], "/nowhere/qemu cannot be started");
    failed(&guest, &["--qemu", "/usr/bin/true"], &[], "/usr/bin/true is not a QEMU");
    // An option that the new one does not have, a value that it refuses, and a machine type that it does not
    // know.
    failed(&guest, &[], &["-no-such-option"], "no-such-option");
    failed(&guest, &[], &["-device", "no-such-device"], "no-such-device");
    guest.assert_untouched();
    let old = program(Version::V7_2);
    let finished = guest.upgrade(&["--qemu", &old, "--copy"], &[]).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    guest.assert_untouched();
}

#[test]
fn a_guest_that_would_not_fit_is_refused_before_it_stops() {
    if !require_lab("a_guest_that_would_not_fit_is_refused_before_it_stops") {
        return;
    }
    let guest = Guest::boot(|place| builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place));
    guest.first.qmp().take_events();
    // Another number of processors.
    failed(&guest, &[], &["-smp", "3"], "does not fit");
    // A reply comes after the earlier events.
    guest.first.qmp().status().unwrap();
    let events = guest.first.qmp().take_events();
    assert!(events.iter().all(|event| event["event"] != "STOP"), "{events:?}");
    guest.assert_untouched();
    let dry = guest.upgrade(&["--dry-run"], &[]).wait_done(WITHIN).unwrap();
    assert_eq!(events_named(&dry, "failed"), 0);
    guest.assert_untouched();
}

/// A difference that no query shows: a field of the device state depends on a property that is not compared.
#[test]
fn a_new_qemu_that_fails_to_load_leaves_the_guest_where_it_is() {
    if !require_lab("a_new_qemu_that_fails_to_load_leaves_the_guest_where_it_is") {
        return;
    }
    let guest = Guest::boot(|place| {
        let builder = Qemu::builder(Version::V10_0).cpu("Nehalem").linux().processors(2);
        named_file(builder, "pc-i440fx-10.0", place, 256)
    });
    guest.first.qmp().take_events();
    let other = ["-global", "PIIX4_PM.acpi-pci-hotplug-with-bridge-support=off"];
    failed(&guest, &[], &other, "could not load the guest");
    guest.first.qmp().status().unwrap();
    let events = guest.first.qmp().take_events();
    assert!(events.iter().any(|event| event["event"] == "STOP"), "it was not stopped: {events:?}");
    guest.assert_untouched();
    guest.upgrade(&[], &[]).wait_done(WITHIN).unwrap();
    guest.assert_ticks();
}

fn events_named(finished: &Finished, name: &str) -> usize {
    events(finished, name).len()
}

#[test]
fn private_memory_is_refused_with_a_remedy() {
    if !require_lab("private_memory_is_refused_with_a_remedy") {
        return;
    }
    let guest = Guest::boot(|place| builder(Version::V10_0, Version::V10_0, Memory::Private, place));
    let finished = failed(&guest, &[], &[], "cannot be mapped by another QEMU");
    assert!(finished.stderr.contains("--copy"), "{}", finished.stderr);
    guest.assert_untouched();
}

#[test]
fn memory_that_an_exit_would_discard_is_refused() {
    if !require_lab("memory_that_an_exit_would_discard_is_refused") {
        return;
    }
    let guest = Guest::boot(|place| {
        let path = place.join("ram").display().to_string();
        let object =
            format!("memory-backend-file,id=pc.ram,size=256M,mem-path={path},share=on,discard-data=on");
        let machine = format!("{},memory-backend=pc.ram", Version::V10_0.machine());
        builder(Version::V10_0, Version::V10_0, Memory::Private, place)
            .machine(&machine)
            .args(["-object", &object])
    });
    failed(&guest, &[], &[], "discard-data=on");
    guest.assert_untouched();
}

/// Each is named with the setting that changes it.
#[test]
fn ports_and_networks_of_the_host_are_refused_by_name() {
    if !require_lab("ports_and_networks_of_the_host_are_refused_by_name") {
        return;
    }
    let guest = Guest::boot(|place| {
        let network = ["-netdev", "user,id=n0,hostfwd=tcp:127.0.0.1:0-:22"];
        let card = ["-device", "virtio-net-pci,netdev=n0,romfile="];
        builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place).args(network).args(card)
    });
    let finished =
        failed(&guest, &[], &[], "netdev.n0.hostfwd=tcp:127.0.0.1:0-:22: the old QEMU listens there");
    assert!(finished.stderr.contains("set another address"), "{}", finished.stderr);
    guest.assert_untouched();
    let finished =
        guest.upgrade(&["--set", "netdev.n0.hostfwd=tcp:127.0.0.1:0-:23"], &[]).wait_done(WITHIN).unwrap();
    assert!(!events(&finished, "completed").is_empty());
    guest.assert_ticks();
}

/// Another process has the lock of the second drive when the new QEMU should run the guest, and has already
/// locked the first one. The old QEMU does not get the lock either, and says so; it has the guest, and runs
/// it once the lock is free.
#[test]
fn a_drive_that_another_process_has_locked_leaves_the_guest_in_the_old_qemu() {
    if !require_lab("a_drive_that_another_process_has_locked_leaves_the_guest_in_the_old_qemu") {
        return;
    }
    let guest = Guest::boot(|place| {
        let drives = ["one", "two"].map(|id| {
            let path = place.join(id);
            std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
            [
                "-drive".to_owned(),
                format!("file={},format=raw,if=none,id={id}", path.display()),
                "-device".to_owned(),
                format!("virtio-blk-pci,drive={id}"),
            ]
        });
        builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place).args(drives.into_iter().flatten())
    });
    let python = std::path::Path::new("/usr/bin/python3");
    let mut other =
        Towline::start(python, ["-c".as_ref(), LOCK.as_ref(), guest.place.path().join("two").as_os_str()])
            .unwrap();
    let finished = guest.upgrade(&["--log", "warn,towline_control=debug"], &[]).wait(WITHIN).unwrap();
    wait_until("the lock", WITHIN, || Ok(other.stdout().contains("locked").then_some(()))).unwrap();
    assert_eq!(finished.status.code(), Some(3), "{}", finished.stderr);
    let last = &events(&finished, "failed")[0];
    assert_eq!(last["guest-state"]["to-do"], "run-source", "{last}");
    assert!(finished.stderr.contains("refuses cont: Failed to lock"), "{}", finished.stderr);
    // Nothing of the new QEMU is left, and its locks are free.
    assert_eq!(guest.qemus(), Vec::<u32>::new());
    let refused = guest.first.qmp().execute("cont", serde_json::Value::Null).unwrap_err();
    assert!(refused.to_string().contains("lock"), "{refused}");
    other.kill().unwrap();
    // A towline that is killed between these leaves a record with which the old QEMU may run the guest.
    let withdrawn = finished.stderr.find("withdrew the decision to run the guest").unwrap();
    let ended = finished.stderr.find("ended the new QEMU").unwrap();
    assert!(withdrawn < ended, "{}", finished.stderr);
    // A new QEMU that has ended proves nothing alone: only the operator can tell that it never ran the
    // guest.
    let (_, rest) = finished.stderr.split_once("`towline resume ").unwrap();
    let (id, rest) = rest.split_once(' ').unwrap();
    assert!(rest.starts_with("--run-here=source` runs the guest in the old QEMU"), "{rest}");
    let undecided = towline(["resume", id]).unwrap().wait(WITHIN).unwrap();
    assert_eq!(undecided.status.code(), Some(3), "{}", undecided.stderr);
    assert!(undecided.stderr.contains("--run-here=source"), "{}", undecided.stderr);
    towline(["resume", id, "--run-here=source"]).unwrap().wait_done(WITHIN).unwrap();
    guest.assert_untouched();
}

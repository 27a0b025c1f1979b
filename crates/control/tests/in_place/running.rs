//! Memory of another QEMU, which runs the guest.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use towline_channel::{Address, Cancel, ConnectOptions, Listener};
use towline_control::in_place::{Error, MappingKind, Presence, TransferReason, of_running};
use towline_control::qemu::Qemu;
use towline_migration::{Incoming, Relay, Session, incoming, outgoing};
use towline_qmp::commands::{
    Capability, CapabilityState, Migrate, MigrateIncoming, MigrateSetCapabilities, MigrationStatus, RunState,
};

use crate::common::{self, TestQemu, WAIT, binaries};
use crate::support::{
    MEMORY_MIB, MIB, assert_mapped, maps_ranges, memfd_of, reason, waiting, with_memfd, with_memory,
};

#[test]
fn memory_of_a_running_qemu_is_proven_for_another() {
    let all = binaries("memory_of_a_running_qemu_is_proven_for_another");
    let Some(newer) = all.first() else { return };
    for binary in &all {
        let (old_process, mut old) = with_memfd(binary);
        let (other_process, _other) = with_memfd(binary);
        let shared = |process: &TestQemu| format!("mem-path={},share=on", memfd_of(process));
        let (_process, mut new) = waiting(newer, "mem", &shared(&old_process));
        assert_mapped(&of_running(&mut new, &mut old).unwrap(), "mem", MappingKind::Running);
        // Of another QEMU's memory.
        let (_process, mut new) = waiting(newer, "mem", &shared(&other_process));
        let presence = of_running(&mut new, &mut old).unwrap();
        if maps_ranges(&old) {
            assert!(matches!(reason(&presence), TransferReason::OtherFile { .. }), "{presence:?}");
        } else {
            assert!(matches!(reason(&presence), TransferReason::NotSharedWithSource { .. }), "{presence:?}");
        }
        let private = format!("mem-path={},share=off", memfd_of(&old_process));
        let (_process, mut new) = waiting(newer, "mem", &private);
        assert_eq!(*reason(&of_running(&mut new, &mut old).unwrap()), TransferReason::Private);
        let (_process, mut new) = with_memory(newer, "mem", "memory-backend-ram", &["-incoming", "defer"]);
        let found = "memory-backend-ram".into();
        assert_eq!(*reason(&of_running(&mut new, &mut old).unwrap()), TransferReason::BackendType { found });
    }
}

/// An old QEMU that waits reports no addresses, so its memory may be the running guest's.
#[test]
fn shared_memory_of_an_old_qemu_that_waits_is_refused() {
    let all = binaries("shared_memory_of_an_old_qemu_that_waits_is_refused");
    let Some(binary) = all.iter().find(|binary| binary.expected_major == Some(7)) else { return };
    let (old_process, mut old) = with_memfd(binary);
    let memfd = memfd_of(&old_process);
    let (_process, mut new) = waiting(binary, "mem", &format!("mem-path={memfd},share=on"));
    let error = of_running(&mut new, &mut old).unwrap_err();
    assert!(matches!(&error, Error::UndecidedMemory { block, .. } if block == "mem"), "{error}");
    let (_process, mut new) = waiting(binary, "mem", &format!("mem-path={memfd},share=off"));
    assert!(matches!(reason(&of_running(&mut new, &mut old).unwrap()), TransferReason::OldQemu { .. }));
}

/// Both blocks have one size, and nothing else tells them apart.
#[test]
fn memory_of_an_old_qemu_with_two_blocks_of_one_size_is_refused() {
    let all = binaries("memory_of_an_old_qemu_with_two_blocks_of_one_size_is_refused");
    let (Some(newer), Some(binary)) =
        (all.first(), all.iter().find(|binary| binary.expected_major == Some(7)))
    else {
        return;
    };
    let spare = format!("memory-backend-ram,id=spare,size={MEMORY_MIB}M");
    let (old_process, mut old) =
        with_memory(binary, "mem", "memory-backend-memfd,share=on", &["-object", &spare]);
    let (_process, mut new) = waiting(newer, "mem", &format!("mem-path={},share=on", memfd_of(&old_process)));
    let error = of_running(&mut new, &mut old).unwrap_err();
    assert!(
        matches!(&error, Error::ForeignMemory { reason: TransferReason::NoAddress { .. }, .. }),
        "{error}"
    );
}

#[test]
fn memory_that_an_exit_would_discard_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ram");
    for binary in binaries("memory_that_an_exit_would_discard_is_refused") {
        let newer = binaries("").remove(0);
        let backend = |more: &str| format!("mem-path={},share=on{more}", path.display());
        let file = |more: &str| format!("memory-backend-file,{}", backend(more));
        for (of_old, of_new, discards) in
            [("", "", None), (",discard-data=on", "", Some(0)), ("", ",discard-data=on", Some(1))]
        {
            let (old_process, mut old) = with_memory(&binary, "mem", &file(of_old), &[]);
            let (new_process, mut new) = waiting(&newer, "mem", &backend(of_new));
            let sockets = [old_process.path("qmp"), new_process.path("qmp")];
            match (of_running(&mut new, &mut old), discards) {
                (Ok(presence), None) => assert_mapped(&presence, "mem", MappingKind::Running),
                (Err(Error::DiscardsData { socket, backend }), Some(side)) => {
                    let expected: &PathBuf = &sockets[side];
                    assert_eq!((Path::new(&socket), backend.as_str()), (expected.as_path(), "mem"));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A range of the file that is not the block's, within its memory or beside it.
#[test]
fn other_memory_of_a_running_guest_is_refused() {
    let name = "other_memory_of_a_running_guest_is_refused";
    let Some(binary) = binaries(name).into_iter().find(|binary| binary.expected_major != Some(7)) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ram");
    std::fs::File::create(&path).unwrap().set_len(3 * MEMORY_MIB * MIB).unwrap();
    let at = |offset: u64| format!("mem-path={},offset={offset},share=on", path.display());
    let backend = format!("memory-backend-file,{}", at(0));
    let (_old_process, mut old) = with_memory(&binary, "mem", &backend, &[]);
    let half = MEMORY_MIB * MIB / 2;
    let (_process, mut new) = waiting(&binary, "mem", &at(half));
    let error = of_running(&mut new, &mut old).unwrap_err();
    let is_of_block = matches!(&error, Error::ForeignMemory { block, reason: TransferReason::Offset { .. }, .. } if block == "mem");
    assert!(is_of_block, "{error}");
    let (_process, mut new) = waiting(&binary, "mem", &at(2 * half));
    let presence = of_running(&mut new, &mut old).unwrap();
    assert!(matches!(reason(&presence), TransferReason::Offset { .. }), "{presence:?}");
}

/// The memory of a descriptor.
fn content(memfd: &str) -> Vec<u8> {
    let bytes = std::fs::read(memfd).unwrap();
    assert_eq!(bytes.len() as u64, MEMORY_MIB * MIB);
    bytes
}

/// Has `old` send all of its guest, and leaves out what `new` has.
fn relay(presence: &Presence, old: &mut Qemu, new: &mut Qemu, directory: &Path) -> u64 {
    let (cancel, deadline) = (Cancel::new().unwrap(), Instant::now() + WAIT);
    let (there, here) = (directory.join("there"), directory.join("here"));
    new.stop().unwrap();
    new.client().execute(&MigrateIncoming::on_uri(format!("unix:{}", there.display()))).unwrap();
    let plain = ConnectOptions::default();
    let out = outgoing::connect(&Address::Unix(there), 0, [0; 16], &plain, deadline, &cancel).unwrap();
    let listener = Listener::bind(&Address::Unix(here.clone())).unwrap();
    let return_path = CapabilityState { capability: Capability::RETURN_PATH, state: true };
    old.client().execute(&MigrateSetCapabilities { capabilities: vec![return_path] }).unwrap();
    old.client().execute(&Migrate::to_uri(format!("unix:{}", here.display()))).unwrap();
    let arriving = incoming::Connections::single(Arc::from(listener.accept(deadline, &cancel).unwrap()));
    let session = Arc::<Session>::default();
    let relay = Relay::new(Arc::clone(&session), out, outgoing::LaneOptions::default()).unwrap();
    let sink = presence.sink(&relay);
    let engine = Incoming::new(session, Arc::default(), incoming::Options::default());
    engine.run(&arriving, &sink).unwrap();
    assert!(sink.dropped_pages() >= MEMORY_MIB * MIB / 4096, "{} pages", sink.dropped_pages());
    relay.statistics().snapshot().transferred
}

/// The old QEMU knows nothing of it, and sends all pages.
#[test]
fn a_guest_continues_in_another_qemu_on_the_same_memory() {
    let all = binaries("a_guest_continues_in_another_qemu_on_the_same_memory");
    for binary in &all {
        let newer = if binary.expected_major == Some(7) { &all[0] } else { binary };
        let directory = tempfile::tempdir().unwrap();
        let (process, mut old) = with_memfd(binary);
        old.cont().unwrap();
        let memfd = memfd_of(&process);
        let is_written = || content(&memfd).iter().any(|byte| *byte != 0).then_some(());
        common::until("firmware that writes", is_written);
        old.stop().unwrap();
        let before = content(&memfd);
        let (_process, mut new) = waiting(newer, "mem", &format!("mem-path={memfd},share=on"));
        let presence = of_running(&mut new, &mut old).unwrap();
        assert_mapped(&presence, "mem", MappingKind::Running);
        let sent = relay(&presence, &mut old, &mut new, directory.path());
        println!("{}: {sent} bytes were sent", old.version_text());
        assert!(sent < 4 * MIB, "{sent} bytes were sent");
        common::until("the source's end", || {
            (old.migration().unwrap().status == Some(MigrationStatus::COMPLETED)).then_some(())
        });
        assert_eq!(new.status().unwrap().status, RunState::PAUSED);
        assert!(content(&memfd) == before, "loading has written into the memory");
        new.cont().unwrap();
        assert_eq!(new.status().unwrap().status, RunState::RUNNING);
    }
}

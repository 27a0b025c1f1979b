//! Memory that stock QEMU maps, and proofs that it is what it should be.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

#[path = "../../qmp/tests/common/mod.rs"]
mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use common::{Binary, TestQemu, WAIT, binaries, skipped};
use tempfile::TempDir;
use towline_channel::{Address, Cancel, ConnectOptions, Listener};
use towline_control::in_place::{
    Error, Kind, Presence, Reason, Reflink, Verify, may_map, of_image, of_reflink, of_running, offer,
};
use towline_control::plan::{Destination, Observer, Request, Source, copy};
use towline_control::qemu::Qemu;
use towline_image::Image;
use towline_migration::synthetic::{BLOCK_NAME, Shape};
use towline_migration::{Incoming, Relay, Session, incoming, outgoing};
use towline_protocol::mapped_ram::MappedRamHeader;
use towline_qmp::commands::{
    Capability, CapabilityState, HumanMonitorCommand, Migrate, MigrateIncoming, MigrateSetCapabilities,
    MigrationStatus, RunState,
};

const MIB: u64 = 1 << 20;
const MEMORY_MIB: u64 = 64;
/// Known to each QEMU here.
const MACHINE: &str = "pc-q35-7.2";

struct Silent;

impl Observer for Silent {}

/// An image of a synthetic guest, a quarter of whose pages are zero.
struct Stored {
    directory: TempDir,
    image: Image,
}

impl Stored {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest.img");
        let source = Source::Memory(Shape::of_length(MEMORY_MIB * MIB));
        let (to, cancel) = (Destination::Image(path.clone()), Cancel::new().unwrap());
        copy(&source, &to, &Request::default(), &cancel, &Silent).unwrap();
        Self { directory, image: Image::open(&path).unwrap() }
    }

    fn mapped(&self) -> MappedRamHeader {
        self.image.ram_blocks()[0].mapped.unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn map(&self, binary: &Binary, properties: &str) -> (TestQemu, Qemu) {
        let (path, offset) = (self.image.path().display(), self.mapped().pages_offset);
        waiting(binary, BLOCK_NAME, &format!("mem-path={path},offset={offset},{properties}"))
    }
}

/// A QEMU whose memory is this backend.
fn with_memory(binary: &Binary, id: &str, backend: &str, more: &[&str]) -> (TestQemu, Qemu) {
    let (machine, memory) = (format!("{MACHINE},memory-backend={id}"), MEMORY_MIB.to_string());
    let object = format!("{backend},id={id},size={MEMORY_MIB}M");
    let arguments = ["-machine", &machine, "-m", &memory, "-S", "-object", &object];
    let process = TestQemu::start(binary, &[&arguments[..], more].concat());
    let qemu = Qemu::new(process.client()).unwrap();
    (process, qemu)
}

/// A QEMU that waits for a guest, with memory of a file.
fn waiting(binary: &Binary, id: &str, properties: &str) -> (TestQemu, Qemu) {
    with_memory(binary, id, &format!("memory-backend-file,{properties}"), &["-incoming", "defer"])
}

/// A QEMU whose memory other processes can map.
fn with_memfd(binary: &Binary) -> (TestQemu, Qemu) {
    with_memory(binary, "mem", "memory-backend-memfd,share=on", &[])
}

/// Its memory, as another process opens it.
fn memfd_of(process: &TestQemu) -> String {
    let descriptors = Path::new("/proc").join(process.child.id().to_string()).join("fd");
    let entries = std::fs::read_dir(descriptors).unwrap().map(|entry| entry.unwrap().path());
    let is_memory = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:memory-backend-memfd")
    };
    entries.into_iter().find(is_memory).unwrap().display().to_string()
}

fn maps_ranges(qemu: &Qemu) -> bool {
    let version = &qemu.facts().version.qemu;
    (version.major, version.minor) >= (8, 2)
}

/// The reason for which the only block with a backend is sent.
fn reason(presence: &Presence) -> &Reason {
    assert!(presence.is_empty(), "{presence:?}");
    let mut reasons = presence.sent().iter().map(|sent| &sent.reason);
    reasons.find(|reason| **reason != Reason::NoBackend).unwrap()
}

#[track_caller]
fn assert_mapped(presence: &Presence, block: &str, kind: Kind) {
    let [mapped] = presence.mapped() else { panic!("{presence:?}") };
    assert_eq!((mapped.block.as_str(), mapped.bytes, mapped.kind), (block, MEMORY_MIB * MIB, kind));
}

#[test]
fn memory_of_an_image_is_proven_or_a_reason_is_given() {
    let stored = Stored::new();
    for binary in binaries("memory_of_an_image_is_proven_or_a_reason_is_given") {
        if binary.expected_major == Some(7) {
            let flat = stored.path("flat");
            let arguments = format!("mem-path={},share=off", flat.display());
            let (_process, mut qemu) = waiting(&binary, BLOCK_NAME, &arguments);
            let presence = of_image(&mut qemu, &stored.image).unwrap();
            assert!(matches!(reason(&presence), Reason::OldQemu { .. }), "{presence:?}");
            continue;
        }
        let (process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
        assert_mapped(&of_image(&mut qemu, &stored.image).unwrap(), BLOCK_NAME, Kind::CopyOnWrite);
        drop(qemu);
        assert!(may_map(&process.path("qmp"), stored.image.path()));
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off,prealloc=on");
        let presence = of_image(&mut qemu, &stored.image).unwrap();
        assert_eq!(*reason(&presence), Reason::PrivateCopies { bytes: MEMORY_MIB * MIB });
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=on");
        assert_eq!(*reason(&of_image(&mut qemu, &stored.image).unwrap()), Reason::ReadOnly);
        for properties in ["share=on", "share=off"] {
            let (_process, mut qemu) = stored.map(&binary, properties);
            let error = of_image(&mut qemu, &stored.image).unwrap_err();
            assert!(
                matches!(&error, Error::ImageWritable { backend, .. } if backend == BLOCK_NAME),
                "{error}"
            );
        }
        // By another name of it, which QEMU's own description does not show.
        let alias = stored.path("alias");
        std::fs::hard_link(stored.image.path(), &alias).unwrap();
        let offset = stored.mapped().pages_offset;
        let properties = format!("mem-path={},offset={offset},share=off", alias.display());
        let (_process, mut qemu) = waiting(&binary, BLOCK_NAME, &properties);
        std::fs::remove_file(&alias).unwrap();
        let error = of_image(&mut qemu, &stored.image).unwrap_err();
        assert!(matches!(error, Error::ImageWritable { .. }), "{error}");
    }
}

/// By any backend, at any place in the file, of any QEMU, and by a name that is gone.
#[test]
fn an_image_that_any_backend_could_change_is_refused() {
    let stored = Stored::new();
    let alias = stored.path("alias");
    for binary in binaries("an_image_that_any_backend_could_change_is_refused") {
        for path in [stored.image.path(), &alias] {
            std::fs::hard_link(stored.image.path(), &alias).unwrap();
            let spare = format!("memory-backend-file,share=on,mem-path={},id=spare,size=8M", path.display());
            let arguments = ["-incoming", "defer", "-object", &spare];
            let (_process, mut qemu) = with_memory(&binary, BLOCK_NAME, "memory-backend-ram", &arguments);
            std::fs::remove_file(&alias).unwrap();
            let error = of_image(&mut qemu, &stored.image).unwrap_err();
            assert!(matches!(&error, Error::ImageWritable { backend, .. } if backend == "spare"), "{error}");
        }
    }
}

/// Memory of no file, and of one that is not the image, as of huge pages.
#[test]
fn memory_of_no_image_is_not_expected_to_be_mapped() {
    let stored = Stored::new();
    let file = format!("memory-backend-file,share=on,mem-path={}", stored.path("memory").display());
    for binary in binaries("memory_of_no_image_is_not_expected_to_be_mapped") {
        for backend in ["memory-backend-ram", &file] {
            let (process, mut qemu) = with_memory(&binary, BLOCK_NAME, backend, &["-incoming", "defer"]);
            let presence = of_image(&mut qemu, &stored.image).unwrap();
            assert!(
                presence.is_empty() && presence.sent().iter().all(|sent| !sent.is_unexpected),
                "{presence:?}"
            );
            let notices = std::cell::RefCell::new(Vec::new());
            let notice = |text: &str| notices.borrow_mut().push(text.to_owned());
            let cancel = Cancel::new().unwrap();
            let offered = offer(&mut qemu, &stored.image, Verify::Nothing, &cancel, &notice).unwrap();
            assert!(offered.is_none() && notices.into_inner().is_empty());
            drop(qemu);
            // A new file is looked at, so that the guest is sent as fast as into any other memory.
            assert_eq!(may_map(&process.path("qmp"), stored.image.path()), backend == file);
        }
    }
    assert!(!may_map(Path::new("/nowhere/qmp"), stored.image.path()));
}

/// As stock QEMU leaves an image of a running guest: the bit of a page is cleared, its old content stays.
#[test]
fn an_image_with_old_content_is_not_mapped() {
    let stored = Stored::new();
    let mapped = stored.mapped();
    let file = std::fs::File::options().read(true).write(true).open(stored.image.path()).unwrap();
    let mut bits = vec![0; (MEMORY_MIB * MIB / 4096 / 8) as usize];
    file.read_exact_at(&mut bits, mapped.bitmap_offset).unwrap();
    let is_zero = |page: &u64| bits[(page / 8) as usize] >> (page % 8) & 1 == 0;
    let page = (0..MEMORY_MIB * MIB / 4096).find(is_zero).unwrap();
    let offset = mapped.pages_offset + page * 4096;
    file.write_all_at(&[7], offset + 100).unwrap();
    for binary in binaries("an_image_with_old_content_is_not_mapped") {
        if binary.expected_major == Some(7) {
            continue;
        }
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
        let presence = of_image(&mut qemu, &stored.image).unwrap();
        let path = stored.image.path().to_owned();
        assert_eq!(*reason(&presence), Reason::StaleContent { path, offset });
    }
}

#[test]
fn an_image_that_is_being_replaced_is_not_mapped() {
    let stored = Stored::new();
    let Some(binary) = binaries("an_image_that_is_being_replaced_is_not_mapped").into_iter().next() else {
        return;
    };
    let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
    let file = std::fs::File::open(stored.image.path()).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let presence = of_image(&mut qemu, &stored.image).unwrap();
    assert_eq!(*reason(&presence), Reason::Locked { path: stored.image.path().to_owned() });
    drop(file);
    let presence = of_image(&mut qemu, &stored.image).unwrap();
    assert_mapped(&presence, BLOCK_NAME, Kind::CopyOnWrite);
    let file = std::fs::File::open(stored.image.path()).unwrap();
    let lock = || rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert!(lock().is_err(), "it stays for as long as the proof is held");
    presence.check_unchanged().unwrap();
    // A length that stays.
    let written = std::fs::File::options().read(true).write(true).open(stored.image.path()).unwrap();
    let (mut byte, at) = ([0], stored.mapped().pages_offset);
    written.read_exact_at(&mut byte, at).unwrap();
    let is_noticed = || {
        written.write_all_at(&byte, at).unwrap();
        matches!(presence.check_unchanged(), Err(Error::Changed { .. })).then_some(())
    };
    // The kernel's clock for files ticks every few milliseconds.
    common::until("a changed image is noticed", is_noticed);
    drop(presence);
    lock().unwrap();
}

#[test]
fn damage_of_mapped_memory_is_found_before_it_is_used() {
    let stored = Stored::new();
    let file = std::fs::File::options().write(true).open(stored.image.path()).unwrap();
    let mapped = stored.mapped();
    let page = (0..).map(|page| page * 4096).find(|offset| {
        let mut word = [0; 8];
        stored.image.file().read_exact_at(&mut word, mapped.pages_offset + offset).unwrap();
        word != [0; 8]
    });
    let Some(binary) = binaries("damage_of_mapped_memory_is_found_before_it_is_used").into_iter().next()
    else {
        return;
    };
    let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
    let cancel = Cancel::new().unwrap();
    let image = || Image::open(stored.image.path()).unwrap().verify_on_read().unwrap();
    let offered = offer(&mut qemu, &image(), Verify::All, &cancel, &|_| {}).unwrap();
    assert!(offered.is_some());
    file.write_all_at(&[0x55; 8], mapped.pages_offset + page.unwrap() + 64).unwrap();
    let error = offer(&mut qemu, &image(), Verify::All, &cancel, &|_| {}).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)) && error.to_string().contains("guest.img"), "{error}");
    // Without a comparison it is not looked for.
    assert!(offer(&mut qemu, &image(), Verify::Nothing, &cancel, &|_| {}).unwrap().is_some());
}

#[test]
fn a_reflink_may_be_mapped_shared() {
    let name = "a_reflink_may_be_mapped_shared";
    let stored = Stored::new();
    let path = stored.path("reflink.img");
    let reflink = match Reflink::create(&stored.image, &path) {
        Ok(reflink) => reflink,
        Err(error) => {
            assert!(matches!(&error, Error::Reflink { .. }), "{error}");
            assert!(!path.exists(), "nothing is left");
            return skipped(name, &error.to_string());
        }
    };
    for binary in binaries(name).into_iter().filter(|binary| binary.expected_major != Some(7)) {
        let offset = stored.mapped().pages_offset;
        let properties = format!("mem-path={},offset={offset},share=on", path.display());
        let (_process, mut qemu) = waiting(&binary, BLOCK_NAME, &properties);
        assert_mapped(&of_reflink(&mut qemu, &reflink).unwrap(), BLOCK_NAME, Kind::Reflink);
        let presence = of_image(&mut qemu, &stored.image).unwrap();
        assert!(matches!(reason(&presence), Reason::OtherFile { .. }), "{presence:?}");
    }
}

#[test]
fn memory_of_a_running_qemu_is_proven_for_another() {
    let all = binaries("memory_of_a_running_qemu_is_proven_for_another");
    let Some(newer) = all.first() else { return };
    for binary in &all {
        let (old_process, mut old) = with_memfd(binary);
        let (other_process, _other) = with_memfd(binary);
        let shared = |process: &TestQemu| format!("mem-path={},share=on", memfd_of(process));
        let (_process, mut new) = waiting(newer, "mem", &shared(&old_process));
        assert_mapped(&of_running(&mut new, &mut old).unwrap(), "mem", Kind::Running);
        // Of another QEMU's memory.
        let (_process, mut new) = waiting(newer, "mem", &shared(&other_process));
        let presence = of_running(&mut new, &mut old).unwrap();
        match maps_ranges(&old) {
            true => assert!(matches!(reason(&presence), Reason::OtherFile { .. }), "{presence:?}"),
            false => assert!(matches!(reason(&presence), Reason::NotOfTheOther { .. }), "{presence:?}"),
        }
        let private = format!("mem-path={},share=off", memfd_of(&old_process));
        let (_process, mut new) = waiting(newer, "mem", &private);
        assert_eq!(*reason(&of_running(&mut new, &mut old).unwrap()), Reason::Private);
        let (_process, mut new) = with_memory(newer, "mem", "memory-backend-ram", &["-incoming", "defer"]);
        let found = "memory-backend-ram".into();
        assert_eq!(*reason(&of_running(&mut new, &mut old).unwrap()), Reason::BackendType { found });
    }
}

/// An old QEMU that waits reports no addresses, so that its memory may be the running guest's.
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
    assert!(matches!(reason(&of_running(&mut new, &mut old).unwrap()), Reason::OldQemu { .. }));
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
    assert!(matches!(&error, Error::ForeignMemory { reason: Reason::NoAddress { .. }, .. }), "{error}");
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
                (Ok(presence), None) => assert_mapped(&presence, "mem", Kind::Running),
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
    let is_of_block =
        matches!(&error, Error::ForeignMemory { block, reason: Reason::Offset { .. }, .. } if block == "mem");
    assert!(is_of_block, "{error}");
    let (_process, mut new) = waiting(&binary, "mem", &at(2 * half));
    let presence = of_running(&mut new, &mut old).unwrap();
    assert!(matches!(reason(&presence), Reason::Offset { .. }), "{presence:?}");
}

/// A guest every other page of which is zero, as an image.
struct Striped {
    directory: TempDir,
    image: Image,
    /// Its memory.
    memory: Vec<u8>,
}

impl Striped {
    fn new(binary: &Binary) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pages = 0..MEMORY_MIB * MIB / 4096;
        let byte = |page: u64| if page % 2 == 1 { 1 + (page % 255) as u8 } else { 0 };
        let memory: Vec<u8> = pages.flat_map(|page| vec![byte(page); 4096]).collect();
        let (path, ram) = (directory.path().join("guest.img"), directory.path().join("source"));
        std::fs::write(&ram, &memory).unwrap();
        let backend = format!("memory-backend-file,share=on,mem-path={}", ram.display());
        let (process, qemu) = with_memory(binary, BLOCK_NAME, &backend, &[]);
        drop(qemu);
        let source = Source::Qmp(process.path("qmp"));
        let (to, cancel) = (Destination::Image(path.clone()), Cancel::new().unwrap());
        copy(&source, &to, &Request::default(), &cancel, &Silent).unwrap();
        Self { directory, image: Image::open(&path).unwrap(), memory }
    }

    fn pages_offset(&self) -> u64 {
        let mut blocks = self.image.ram_blocks().iter();
        blocks.find(|block| block.name == BLOCK_NAME).unwrap().mapped.unwrap().pages_offset
    }

    /// Restores it into a QEMU with this memory. Returns the notices, and whether QEMU has loaded the file itself.
    fn restore(&self, binary: &Binary, backend: &str, stream: bool) -> (Vec<String>, bool) {
        let (process, qemu) = waiting(binary, BLOCK_NAME, backend);
        drop(qemu);
        let (source, to) =
            (Source::Image(self.image.path().to_owned()), Destination::Qmp(process.path("qmp")));
        let (request, cancel) = (Request { stream, ..Request::default() }, Cancel::new().unwrap());
        let notices = Notices::default();
        let report = copy(&source, &to, &request, &cancel, &notices).unwrap();
        let found = self.directory.path().join("found");
        let command_line = format!("pmemsave 0 {} \"{}\"", self.memory.len(), found.display());
        process.client().execute(&HumanMonitorCommand { command_line }).unwrap();
        let found = std::fs::read(found).unwrap();
        // Below it is memory of firmware and screen.
        let differs = |page: &usize| found[page * 4096..][..4096] != self.memory[page * 4096..][..4096];
        let wrong: Vec<usize> = (256..found.len() / 4096).filter(differs).collect();
        assert!(wrong.is_empty(), "{backend}: {} wrong pages, first {}", wrong.len(), wrong[0]);
        (notices.0.into_inner().unwrap(), report.loaded_by_qemu)
    }
}

#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Observer for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

/// QEMU leaves the zero pages of an image, and those of lanes, as it finds them.
#[test]
fn memory_with_other_content_gets_zero_pages_as_well() {
    for binary in binaries("memory_with_other_content_gets_zero_pages_as_well") {
        let striped = Striped::new(&binary);
        let is_old = binary.expected_major == Some(7);
        let directory = striped.directory.path().display();
        let used = striped.directory.path().join("used");
        let restore = |backend: &str, stream| striped.restore(&binary, backend, stream);
        let assert_told = |(notices, loaded): (Vec<String>, bool)| {
            let expected = format!("memory backend {BLOCK_NAME:?} of QEMU may have old content");
            assert!(!loaded && notices.iter().any(|text| text.starts_with(&expected)), "{notices:?}");
        };
        for stream in [false, true] {
            std::fs::write(&used, vec![0x5a; striped.memory.len()]).unwrap();
            assert_told(restore(&format!("mem-path={},share=on", used.display()), stream));
            std::fs::write(&used, vec![0x5a; striped.memory.len()]).unwrap();
            assert_told(restore(&format!("mem-path={},share=off", used.display()), stream));
            // Zeros, and known to be.
            std::fs::remove_file(&used).unwrap();
            for backend in [format!("mem-path={directory}"), format!("mem-path={},share=on", used.display())]
            {
                let (notices, loaded) = restore(&backend, stream);
                assert_eq!(notices, [""; 0], "{backend}");
                assert_eq!(loaded, !is_old && !stream, "{backend}");
            }
        }
        if is_old {
            continue;
        }
        let (path, offset) = (striped.image.path().display(), striped.pages_offset());
        let mapped = |offset: u64| format!("mem-path={path},offset={offset},share=off,readonly=on,rom=off");
        for stream in [false, true] {
            assert_told(restore(&mapped(offset - 4096), stream));
        }
        // As stock QEMU leaves an image of a running guest.
        let file = std::fs::File::options().write(true).open(striped.image.path()).unwrap();
        file.write_all_at(&[7; 4096], offset + 8 * MIB).unwrap();
        for stream in [false, true] {
            assert_told(restore(&mapped(offset), stream));
        }
    }
}

/// The memory behind a descriptor.
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
    let relay = Relay::new(Arc::clone(&session), out);
    let sink = presence.sink(&relay);
    let engine = Incoming::new(session, Arc::default(), incoming::Options::default());
    engine.run(&arriving, &sink).unwrap();
    assert!(sink.dropped_pages() >= MEMORY_MIB * MIB / 4096, "{} pages", sink.dropped_pages());
    relay.statistics().snapshot().transferred
}

/// The old QEMU knows nothing of it, and sends all pages.
#[test]
fn a_guest_goes_on_in_another_qemu_on_the_same_memory() {
    let all = binaries("a_guest_goes_on_in_another_qemu_on_the_same_memory");
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
        assert_mapped(&presence, "mem", Kind::Running);
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

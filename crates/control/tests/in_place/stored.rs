//! Memory of an image, or of a reflink of one.

use std::os::unix::fs::FileExt;
use std::path::Path;

use towline_channel::Cancel;
use towline_control::in_place::{
    Error, IfUnmapped, MappedImage, MappingKind, Reflink, TransferReason, Verify, find_mapped_memory,
    may_map, of_image, of_reflink,
};
use towline_control::qemu::{Process, Qemu};
use towline_image::Image;
use towline_image::atomic_file::LockedFile;
use towline_memload::BLOCK_NAME;

use crate::common::{self, TestQemu, binaries, skipped};
use crate::support::{MEMORY_MIB, MIB, Stored, assert_mapped, reason, waiting, with_memory};

#[test]
fn memory_of_an_image_is_proven_or_a_reason_is_given() {
    let stored = Stored::new();
    for binary in binaries("memory_of_an_image_is_proven_or_a_reason_is_given") {
        if binary.expected_major == Some(7) {
            let flat = stored.path("flat");
            let arguments = format!("mem-path={},share=off", flat.display());
            let (_process, mut qemu) = waiting(&binary, BLOCK_NAME, &arguments);
            let presence = of_image(&mut qemu, &stored.image).unwrap();
            assert!(matches!(reason(&presence), TransferReason::OldQemu { .. }), "{presence:?}");
            continue;
        }
        let (process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
        assert_mapped(&of_image(&mut qemu, &stored.image).unwrap(), BLOCK_NAME, MappingKind::CopyOnWrite);
        drop(qemu);
        assert!(may_map(&process.path("qmp"), stored.image.path()));
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off,prealloc=on");
        let presence = of_image(&mut qemu, &stored.image).unwrap();
        assert_eq!(*reason(&presence), TransferReason::PrivateCopies { bytes: MEMORY_MIB * MIB });
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=on");
        assert_eq!(*reason(&of_image(&mut qemu, &stored.image).unwrap()), TransferReason::ReadOnly);
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

/// The kernel shows the mapping: a QEMU that does not reply is not asked.
#[test]
fn mapped_memory_is_proven_without_a_query() {
    let stored = Stored::new();
    for binary in binaries("mapped_memory_is_proven_without_a_query") {
        if binary.expected_major == Some(7) {
            continue;
        }
        let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
        let Process::Known { pid, .. } = *qemu.process() else { panic!("{:?}", qemu.process()) };
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        assert_mapped(&of_image(&mut qemu, &stored.image).unwrap(), BLOCK_NAME, MappingKind::CopyOnWrite);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
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

/// A machine without processors has no threads by which its process is identified.
#[test]
fn a_shared_file_of_a_qemu_that_cannot_be_seen_is_refused() {
    let stored = Stored::new();
    // It could have been another name of the image when QEMU opened it.
    let other = stored.path("other");
    for binary in binaries("a_shared_file_of_a_qemu_that_cannot_be_seen_is_refused") {
        let inspect = |path: &Path, share: &str| {
            let file =
                format!("memory-backend-file,id=spare,size=8M,mem-path={},share={share}", path.display());
            let arguments = ["-machine", "none", "-incoming", "defer", "-object", &file];
            let process = TestQemu::start(&binary, &arguments);
            let mut qemu = Qemu::new(process.client()).unwrap();
            of_image(&mut qemu, &stored.image)
        };
        let error = inspect(&other, "on").unwrap_err();
        let is_undecided = matches!(
            &error,
            Error::UndecidedFile { backend, reason: TransferReason::UnknownProcess { .. }, .. } if backend == "spare"
        );
        assert!(is_undecided, "{error}");
        // QEMU creates a new file in a directory, and does not write to one that it maps for itself.
        assert!(inspect(stored.image.path().parent().unwrap(), "on").unwrap().is_empty());
        assert!(inspect(&other, "off").unwrap().is_empty());
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
            let image = MappedImage {
                image: &stored.image,
                reflink: None,
                verify: Verify::Nothing,
                if_unmapped: IfUnmapped::Send,
            };
            let offered = find_mapped_memory(&mut qemu, image, &cancel, &notice).unwrap();
            assert!(offered.is_none() && notices.into_inner().is_empty());
            drop(qemu);
            // A new file is inspected, so the guest is sent as fast as into any other memory.
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
        assert_eq!(*reason(&presence), TransferReason::StaleContent { path, offset });
    }
}

#[test]
fn an_image_that_is_being_replaced_is_not_mapped() {
    let stored = Stored::new();
    let Some(binary) = binaries("an_image_that_is_being_replaced_is_not_mapped").into_iter().next() else {
        return;
    };
    let (_process, mut qemu) = stored.map(&binary, "share=off,readonly=on,rom=off");
    let file = LockedFile(std::fs::File::open(stored.image.path()).unwrap());
    rustix::fs::flock(&file.0, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let presence = of_image(&mut qemu, &stored.image).unwrap();
    assert_eq!(*reason(&presence), TransferReason::Locked { path: stored.image.path().to_owned() });
    drop(file);
    let presence = of_image(&mut qemu, &stored.image).unwrap();
    assert_mapped(&presence, BLOCK_NAME, MappingKind::CopyOnWrite);
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
    // A process that another test starts has the descriptor until it executes its program.
    common::until("the lock is released", || lock().ok());
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
    let find = |qemu: &mut Qemu, verify: Verify| {
        let image = image();
        let mapped = MappedImage { image: &image, reflink: None, verify, if_unmapped: IfUnmapped::Send };
        find_mapped_memory(qemu, mapped, &cancel, &|_| {})
    };
    let offered = find(&mut qemu, Verify::All).unwrap();
    assert!(offered.is_some());
    file.write_all_at(&[0x55; 8], mapped.pages_offset + page.unwrap() + 64).unwrap();
    let error = find(&mut qemu, Verify::All).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)) && error.to_string().contains("guest.img"), "{error}");
    // Without a comparison it is not looked for.
    assert!(find(&mut qemu, Verify::Nothing).unwrap().is_some());
}

#[test]
fn a_reflink_may_be_mapped_shared() {
    let name = "a_reflink_may_be_mapped_shared";
    let stored = Stored::new();
    for binary in binaries(name).into_iter().filter(|binary| binary.expected_major != Some(7)) {
        let reflink = match Reflink::create(&stored.image) {
            Ok(reflink) => reflink,
            Err(error) => {
                assert!(matches!(&error, Error::Reflink { .. }), "{error}");
                return skipped(name, &error.to_string());
            }
        };
        let (path, offset) = (reflink.path().display(), stored.mapped().pages_offset);
        let properties = format!("mem-path={path},offset={offset},share=on");
        let (_process, mut qemu) = waiting(&binary, BLOCK_NAME, &properties);
        let presence = of_image(&mut qemu, &stored.image).unwrap();
        assert!(matches!(reason(&presence), TransferReason::OtherFile { .. }), "{presence:?}");
        assert_mapped(&of_reflink(&mut qemu, reflink).unwrap(), BLOCK_NAME, MappingKind::Reflink);
    }
}

//! Images that change, or are others than they seem, before or while guests run from them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;

use towline_lab::{Version, require_lab, skip};

use crate::filesystem::Filesystem;

use crate::support::{MIB, Saved, WITHIN};

/// Bytes of a guest's memory that differ in the later image.
const LATER: u64 = 16 * MIB;

fn sidecar(image: &Path) -> String {
    format!("{}.manifest.json", image.display())
}

/// Saves the same guest at a later time, with other memory.
fn save_later(saved: &Saved) -> std::path::PathBuf {
    let mut run = saved.run(&["--name", "later"], &saved.settings());
    saved.assert_runs(&mut run, "later");
    saved.agent("later").fill(LATER, 6).unwrap();
    let later = saved.path("later.img");
    let monitor = format!("qmp:{}", saved.directory("later").join("qmp.sock").display());
    let copy = ["copy".to_owned(), monitor, later.display().to_string()];
    saved.towline(copy).wait_done(WITHIN).unwrap();
    saved.interrupt(run);
    later
}

/// The guest is that of the image that was opened, even if another file has its name when QEMU opens it.
#[test]
fn an_image_that_is_replaced_while_qemu_starts_is_not_mixed_with_the_other() {
    if !require_lab("an_image_that_is_replaced_while_qemu_starts_is_not_mixed_with_the_other") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let (later, image, away) = (save_later(&saved), saved.path("guest.img"), saved.path("away.img"));
    // Renamed as another program does, which does not know the lock.
    let names = [(&image, &away), (&later, &image)];
    let moves = names.map(|(from, to)| {
        format!("mv {} {}; mv {} {}", from.display(), to.display(), sidecar(from), sidecar(to))
    });
    let swap = format!("[ \"$1\" = --version ] || {{ {}; }}", moves.join("; "));
    let binary = saved.path("qemu");
    fs::write(&binary, format!("#!/bin/sh\n{swap}\nexec {} \"$@\"\n", saved.binary())).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    let swap_back = || {
        for (from, to) in [(&image, &later), (&away, &image)] {
            fs::rename(from, to).unwrap();
            fs::rename(sidecar(from), sidecar(to)).unwrap();
        }
    };
    let qemu = binary.display().to_string();
    let options = ["--name", "web", "--qemu", &qemu];
    let refused = saved.run_image(&saved.image(), &[&options[..], &["--share"]].concat());
    let refused = refused.wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}{}", refused.stdout, refused.stderr);
    let reason = "the file was replaced after QEMU had opened it, or is another one";
    assert!(refused.stderr.contains(reason), "{}", refused.stderr);
    swap_back();
    let mut sent = saved.run_image(&saved.image(), &options);
    saved.assert_runs(&mut sent, "web");
    assert!(sent.stderr().contains(reason), "{}", sent.stderr());
    saved.interrupt(sent);
    swap_back();
    saved.assert_intact();
}

/// The file of an image in a store is used only if it belongs to that image.
#[test]
fn a_file_of_another_image_is_not_used_for_that_of_a_store() {
    if !require_lab("a_file_of_another_image_is_not_used_for_that_of_a_store") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let later = save_later(&saved);
    let (store, cache) = (format!("store:{}", saved.path("vm/web").display()), saved.path("cache"));
    let copy = ["copy", &saved.image(), &store].map(str::to_owned);
    saved.towline(copy).wait_done(WITHIN).unwrap();
    let cache_dir = cache.display().to_string();
    let run = |lines: &[&str]| {
        let mut run = saved.run_image(&store, &["--name", "web", "--cache-dir", &cache_dir, "--share"]);
        saved.assert_runs(&mut run, "web");
        let output = run.stdout() + &run.stderr();
        assert!(lines.iter().all(|line| output.contains(line)), "{output}");
        saved.interrupt(run);
        output
    };
    let copied = "is copied to";
    run(&[copied]);
    let entries = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
    let file = entries.into_iter().find(|path| path.extension().is_some_and(|end| end == "img")).unwrap();
    assert!(!run(&[]).contains(copied));
    // By its name it is the same.
    fs::copy(&later, &file).unwrap();
    fs::copy(sidecar(&later), sidecar(&file)).unwrap();
    run(&["is not the file of", "it has another device state", copied]);
    assert!(!run(&[]).contains(copied));
    File::options().write(true).open(&file).unwrap().set_len(MIB).unwrap();
    run(&["is not the file of", copied]);
    assert!(!run(&[]).contains(copied));
}

/// A change that breaks the promise is reported: guests run from what the file is.
#[test]
fn an_image_that_changes_under_its_guest_is_named() {
    if !require_lab("an_image_that_changes_under_its_guest_is_named") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let file = File::options().read(true).write(true).open(saved.image()).unwrap();
    let length = file.metadata().unwrap().len();
    let mut run = saved.run(&["--name", "web", "--share"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    let mut last = [0];
    file.read_exact_at(&mut last, length - 1).unwrap();
    file.write_all_at(&[!last[0]], length - 1).unwrap();
    towline_lab::signal(run.pid(), rustix::process::Signal::INT);
    let written = run.wait_done(WITHIN).unwrap();
    let changed = "guest.img was changed while its memory was in use: ";
    assert!(written.stderr.contains(&format!("{changed}it was written")), "{}", written.stderr);
    let inspect = ["inspect", "--verify", &saved.image()].map(str::to_owned);
    let damaged = saved.towline(inspect).wait(WITHIN).unwrap();
    assert_eq!(damaged.status.code(), Some(1), "{}", damaged.stdout);
    file.write_all_at(&last, length - 1).unwrap();
    saved.assert_intact();

    let mut run = saved.run(&["--name", "web", "--share"], &saved.settings());
    saved.assert_runs(&mut run, "web");
    file.set_len(64 * MIB).unwrap();
    // Its kernel's code is in pages that it has not written.
    let ended = run.wait(WITHIN).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", ended.stdout);
    let expected = format!("{changed}it has {} bytes, expected {length}", 64 * MIB);
    assert!(
        ended.stderr.contains("QEMU of web ended") && ended.stderr.contains(&expected),
        "{}",
        ended.stderr
    );
    assert_eq!(saved.guests(), Vec::<String>::new());
}

#[test]
fn directories_without_room_are_refused() {
    let test = "directories_without_room_are_refused";
    if !require_lab(test) {
        return;
    }
    let small = match Filesystem::new("tmpfs", 32) {
        Ok(small) => small,
        Err(error) => return skip(test, &format!("{error:#}")),
    };
    let saved = Saved::new(Version::V10_0);
    let disk = saved.path("disk.raw");
    fs::write(&disk, vec![0; MIB as usize]).unwrap();
    let (room, binary) = (small.path().display().to_string(), saved.binary());
    let store = format!("store:{}", saved.path("vm/web").display());
    let copy = ["copy", &saved.image(), &store].map(str::to_owned);
    saved.towline(copy).wait_done(WITHIN).unwrap();
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let overlays = ["--overlay", "--overlay-dir", &room];
    let image = saved.image();
    for (image, options, more, expected) in [
        (&image, &overlays[..], &["--", "-drive", &drive][..], "choose another with --overlay-dir"),
        (&store, &["--cache-dir", &room, "--share"], &[], "choose another with --cache-dir"),
    ] {
        let words = [&["run", image, "--name", "web", "--qemu", &binary], options].concat();
        let words = words.into_iter().map(str::to_owned).chain(saved.set());
        let words = words.chain(more.iter().map(|word| (*word).to_owned()));
        let refused = saved.towline_within(&small.prefix(), words).wait(WITHIN).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{}{}", refused.stdout, refused.stderr);
        assert!(refused.stderr.contains("free") && refused.stderr.contains(expected), "{}", refused.stderr);
        assert_eq!(saved.guests(), Vec::<String>::new());
    }
}

/// A backend with huge pages: none are needed where its memory is mapped, and with `--copy` QEMU itself needs
/// them.
#[test]
#[ignore = "nightly"]
fn memory_with_huge_pages_is_mapped_without_them() {
    if !require_lab("memory_with_huge_pages_is_mapped_without_them") {
        return;
    }
    let words = "-object memory-backend-memfd,id=m0,size=512M -machine memory-backend=m0";
    let arguments: Vec<String> = words.split(' ').map(str::to_owned).collect();
    let saved = Saved::of(&crate::support::Recipe { arguments: &arguments, ..Default::default() });
    // More than any host has.
    let huge = ["object.m0.hugetlb=on", "object.m0.hugetlbsize=1G"].map(str::to_owned);
    let settings = [saved.settings(), huge.to_vec()].concat();
    let mut run = saved.run(&["--name", "web", "--share"], &settings);
    saved.assert_runs(&mut run, "web");
    assert!(!run.stdout().contains("hugetlb"), "{}", run.stdout());
    saved.interrupt(run);
    let copied = saved.run(&["--name", "web", "--copy"], &settings).wait(WITHIN).unwrap();
    assert_eq!(copied.status.code(), Some(1), "{}", copied.stdout);
    assert!(copied.stderr.contains("ended at its start"), "{}", copied.stderr);
    saved.assert_intact();
}

//! Incremental images of real guests: content, restore, and damage.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{Qemu, Version, require_lab, wait_until};

use crate::instant::wait_migration_failed;
use crate::support::{
    Fixture, SLOW, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, migrate,
    qmp, save, set, signal, small_guest, wait_transferred, waiting,
};

const CHUNK: u64 = 2 << 20;
/// Bitmaps, device state and its description of an image, and the filesystem's overhead.
const FRAME_BYTES_MAX: u64 = 1 << 20;

/// Offset and length of `pc.ram` in an image, read by hand: be64 length, be32 version, be64 page size, be64
/// bitmap offset and be64 pages offset follow a block's name.
fn ram(image: &Path) -> (u64, u64) {
    let (mut head, file) = (vec![0; 4096], File::open(image).unwrap());
    file.read_exact_at(&mut head, 0).unwrap();
    let name = head.windows(7).position(|window| window == b"\x06pc.ram").unwrap() + 1;
    let number = |at: usize| u64::from_be_bytes(head[name + 6 + at..][..8].try_into().unwrap());
    (number(28), number(0))
}

/// All chunks of an image's `pc.ram`.
fn chunks(image: &Path) -> Vec<Vec<u8>> {
    let ((offset, length), file) = (ram(image), File::open(image).unwrap());
    let chunk = |at: u64| {
        let mut bytes = vec![0; CHUNK.min(length - at) as usize];
        file.read_exact_at(&mut bytes, offset + at).unwrap();
        bytes
    };
    (0..length).step_by(CHUNK as usize).map(chunk).collect()
}

fn allocated(image: &Path) -> u64 {
    std::fs::metadata(image).unwrap().blocks() * 512
}

/// Chunks of `pc.ram` that differ between two complete images.
fn different(first: &Path, second: &Path) -> Vec<usize> {
    let (first, second) = (chunks(first), chunks(second));
    assert_eq!(first.len(), second.len());
    (0..first.len()).filter(|&chunk| first[chunk] != second[chunk]).collect()
}

/// Copies a running guest onto a base.
fn store_on(fixture: &Fixture, source: &Qemu, base: &str, image: &str, options: &str) {
    let space = if options.is_empty() { "" } else { " " };
    let line =
        format!("copy{space}{options} --base {} {} {}", fixture.name(base), qmp(source), fixture.name(image));
    assert_ended(&fixture.run(&line), 0, &[]);
}

#[test]
fn a_linux_is_stored_in_increments_and_restored_from_a_chain_of_three() {
    if !require_lab("a_linux_is_stored_in_increments_and_restored_from_a_chain_of_three") {
        return;
    }
    let fixture = Fixture::new();
    let builder = Qemu::builder(Version::V10_0).linux();
    let (source, mut linux) = builder.boot(WITHIN).unwrap();
    linux.fill(96 << 20, 7).unwrap();
    assert_ended(
        &fixture.run(&format!("copy --resume {} {}", qmp(&source), fixture.name("first.img"))),
        0,
        &[],
    );
    linux.dirty(64 << 20, 4 << 20).unwrap();
    wait_until("a guest that wrote", WITHIN, || Ok((linux.dirtied_pages()? > 0).then_some(()))).unwrap();
    linux.stop_dirtying().unwrap();
    store_on(&fixture, &source, "first.img", "second.img", "--resume --multifd-channels 8");
    let (hash, tick) = (linux.hash().unwrap(), linux.tick().unwrap());
    store_on(&fixture, &source, "second.img", "third.img", "--multifd-channels 0");

    let destination = waiting(&builder);
    let line = format!("copy --verify --paused {} {}", fixture.name("third.img"), qmp(&destination));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    destination.qmp().execute("cont", Value::Null).unwrap();
    let mut linux = destination.linux(WITHIN).unwrap();
    assert!(linux.wait_ticking(WITHIN).unwrap() > tick);
    assert_eq!(linux.hash().unwrap(), hash);
    linux.check().unwrap();

    // Content of the increments, by a comparison of the complete images that they represent.
    for name in ["second", "third"] {
        let (image, whole) =
            (fixture.name(&format!("{name}.img")), fixture.name(&format!("{name}-whole.img")));
        assert_ended(&fixture.run(&format!("copy {image} {whole}")), 0, &[]);
    }
    for (base, image, whole) in [
        ("first.img", "second.img", "second-whole.img"),
        ("second-whole.img", "third.img", "third-whole.img"),
    ] {
        let changed = different(&fixture.path(base), &fixture.path(whole)).len() as u64;
        let (holds, may) = (allocated(&fixture.path(image)), changed * CHUNK + FRAME_BYTES_MAX);
        println!(
            "{image}: {changed} chunks changed, {} KiB held, {} KiB as a whole",
            holds >> 10,
            allocated(&fixture.path(whole)) >> 10
        );
        assert!(changed > 0 && holds <= may, "{image} holds {holds} bytes, {changed} chunks changed");
    }
    inspects_the_chain(&fixture);
}

fn inspects_the_chain(fixture: &Fixture) {
    let finished = fixture.run(&format!("inspect --verify --json {}", fixture.name("third.img")));
    assert_ended(&finished, 0, &[]);
    let facts: Value = serde_json::from_str(finished.stdout.trim()).unwrap();
    assert_eq!(facts["loadable-by-qemu"], false, "{facts}");
    let paths: Vec<_> = facts["chain"].as_array().unwrap().iter().map(|link| &link["path"]).collect();
    assert_eq!(
        paths,
        ["third.img", "second.img", "first.img"].map(|name| json!(fixture.name(name))).each_ref()
    );
    assert!(facts["chain"].as_array().unwrap().iter().all(|link| link["chunks-read"].as_u64() > Some(0)));
    let finished = fixture.run(&format!("inspect {}", fixture.name("third.img")));
    for text in ["an incremental image, which towline restores", "chain         3 images", "first.img"] {
        assert!(finished.stdout.contains(text), "{text:?} is not in {}", finished.stdout);
    }
}

/// A small guest in a chain of three files, each with chunks that are read from it: the last fill of memory
/// is in the middle one.
fn chain(fixture: &Fixture) -> Qemu {
    let source = counting(guest());
    let first = format!("copy --resume {} {}", qmp(&source), fixture.name("first.img"));
    assert_ended(&fixture.run(&first), 0, &[]);
    store_on(fixture, &source, "first.img", "second.img", "--resume");
    store_on(fixture, &source, "second.img", "third.img", "");
    source
}

#[test]
fn no_qemu_mistakes_a_chain_for_a_whole_image() {
    if !require_lab("no_qemu_mistakes_a_chain_for_a_whole_image") {
        return;
    }
    let fixture = Fixture::new();
    let source = chain(&fixture);
    let (chain, flat) = (fixture.path("third.img"), fixture.path("flat.img"));
    let loads = |image: &Path| {
        let destination = waiting(&guest().paused());
        set(&destination, &["+mapped-ram"], json!({}));
        let uri = json!({ "uri": format!("file:{}", image.display()) });
        destination.qmp().execute("migrate-incoming", uri).unwrap();
        destination
    };
    let refuses = loads(&chain);
    assert!(!refuses.wait_exit(WITHIN).unwrap().success());
    assert!(refuses.stderr().contains("x-towline-incremental"), "{}", refuses.stderr());
    assert_ended(&fixture.run(&format!("copy {} {}", chain.display(), flat.display())), 0, &[]);
    let destination = loads(&flat);
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    let streamed = waiting(&guest());
    let line = format!("copy --paused --verify {} {}", chain.display(), qmp(&streamed));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_eq!(streamed.memory_hash().unwrap(), source.memory_hash().unwrap());
}

#[test]
fn damage_in_any_file_of_a_chain_is_named() {
    if !require_lab("damage_in_any_file_of_a_chain_is_named") {
        return;
    }
    let fixture = Fixture::new();
    drop(chain(&fixture));
    // The guest's counter is in chunk 0, its sweep in chunk 1; memory that was filled once follows.
    let layers = [("third.img", 0), ("third.img", 1), ("first.img", 4)];
    for (name, chunk) in layers {
        let (offset, _) = ram(&fixture.path(name));
        let at = offset + chunk * CHUNK + 0x11_0008;
        flip(&fixture.path(name), at);
        let (image, damaged) = (fixture.name("third.img"), fixture.name(name));
        let text = format!("{damaged}: block \"pc.ram\", chunk {chunk} (from byte {:#x})", chunk * CHUNK);
        let destination = waiting(&guest());
        let finished = fixture.run(&format!("copy --verify {image} {}", qmp(&destination)));
        assert_safe(&finished, &[&text, "the image is damaged there"]);
        assert_waits(&destination);
        assert_ended(&fixture.run(&format!("inspect --verify {image}")), 1, &[&text]);
        flip(&fixture.path(name), at);
    }
    assert_ended(&fixture.run(&format!("inspect --verify {}", fixture.name("third.img"))), 0, &[]);
    // A chunk of the middle image, which is read where it is the newest.
    let (offset, _) = ram(&fixture.path("second.img"));
    flip(&fixture.path("second.img"), offset + 0x11_0008);
    let text = format!("{}: block \"pc.ram\", chunk 0 (from byte 0x0)", fixture.name("second.img"));
    assert_ended(&fixture.run(&format!("inspect --verify {}", fixture.name("second.img"))), 1, &[&text]);
}

fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

#[test]
fn a_missing_or_replaced_base_is_named_and_refused() {
    if !require_lab("a_missing_or_replaced_base_is_named_and_refused") {
        return;
    }
    let fixture = Fixture::new();
    drop(chain(&fixture));
    let (image, base, away) =
        (fixture.name("third.img"), fixture.path("first.img"), fixture.path("away.img"));
    let sidecar = |path: &Path| format!("{}.manifest.json", path.display());
    let put = |from: &Path, to: &Path| {
        std::fs::rename(from, to).unwrap();
        std::fs::rename(sidecar(from), sidecar(to)).unwrap();
    };
    let destination = waiting(&guest());
    let refused = |texts: &[&str]| {
        for line in [
            format!("copy {image} {}", qmp(&destination)),
            format!("copy {image} {}", fixture.name("new.img")),
        ] {
            assert_safe(&fixture.run(&line), texts);
        }
        assert_ended(&fixture.run(&format!("inspect {image}")), 1, texts);
        assert_waits(&destination);
    };
    put(&base, &away);
    let second = fixture.name("second.img");
    let first = base.display().to_string();
    refused(&[
        &second,
        "an incremental image, and its base cannot be used",
        &first,
        "No such file",
        "bring the base back",
    ]);
    // The same guest at another moment, under the base's name.
    save(&fixture, guest(), "first.img");
    refused(&[
        &second,
        "its base",
        &first,
        "is not the image that it was made on: its content is",
        "expected",
    ]);
    std::fs::remove_file(sidecar(&base)).unwrap();
    refused(&[&second, "its content is unknown (it has no manifest)"]);
    std::fs::remove_file(&base).unwrap();
    put(&away, &base);
    // The whole chain may be in another directory, as long as the files are together.
    let moved = fixture.path("moved");
    std::fs::create_dir(&moved).unwrap();
    for name in ["first.img", "second.img", "third.img"] {
        put(&fixture.path(name), &moved.join(name));
    }
    let line = format!("copy --verify {} {}", moved.join("third.img").display(), qmp(&destination));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_runs(&destination);
    // Without its own manifest its base is unknown.
    std::fs::remove_file(sidecar(&moved.join("third.img"))).unwrap();
    let finished = fixture.run(&format!("inspect {}", moved.join("third.img").display()));
    assert_ended(&finished, 1, &["an incremental image, but there is no manifest beside it"]);
}

#[test]
fn an_invalid_base_is_refused_and_the_guest_runs_on() {
    if !require_lab("an_invalid_base_is_refused_and_the_guest_runs_on") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, small_guest(), "small.img");
    let source = counting(guest());
    let (from, small, image) = (qmp(&source), fixture.name("small.img"), fixture.name("new.img"));
    let finished = fixture.run(&format!("copy --base {small} {from} {image}"));
    assert_safe(
        &finished,
        &[
            "new.img: the guest has \"pc.ram\" of 67108864 bytes, its base",
            &small,
            "has \"pc.ram\" of 16777216 bytes",
        ],
    );
    let finished = fixture.run(&format!("copy --overwrite --base {small} {small} {small}"));
    assert_safe(&finished, &["the image would replace", &small]);
    let finished = fixture.run(&format!("copy --base {small} {small} null:"));
    assert_ended(&finished, 2, &["--base is for an image that is to be stored"]);
    // The length of a chain is limited.
    let mut base = "small.img".to_owned();
    for link in 1..16 {
        let next = format!("{link:02}.img");
        assert_ended(
            &fixture.run(&format!("copy --base {} {small} {}", fixture.name(&base), fixture.name(&next))),
            0,
            &[],
        );
        base = next;
    }
    let line = format!("copy --base {} {small} {image}", fixture.name(&base));
    assert_safe(&fixture.run(&line), &["based on more images than the 16 that a chain may have"]);
    let destination = waiting(&small_guest());
    assert_ended(
        &fixture.run(&format!("copy --verify {} {}", fixture.name(&base), qmp(&destination))),
        0,
        &[],
    );
    assert_runs(&destination);
    assert!(!fixture.path("new.img").exists());
    assert_runs(&source);
}

#[test]
fn a_killed_towline_leaves_no_incomplete_increment() {
    if !require_lab("a_killed_towline_leaves_no_incomplete_increment") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(guest());
    let (from, first, second) = (qmp(&source), fixture.name("first.img"), fixture.name("second.img"));
    assert_ended(&fixture.run(&format!("copy --resume {from} {first}")), 0, &[]);
    for how in [Signal::INT, Signal::KILL] {
        let slow = format!("copy --json --resume {SLOW} --multifd-channels 0 --base {first} {from} {second}");
        let mut towline = fixture.towline(&slow);
        wait_transferred(&mut towline, 1 << 20);
        signal(towline.pid(), how);
        let finished = towline.wait(WITHIN).unwrap();
        assert_ne!(finished.status.code(), Some(0));
        assert!(!fixture.path("second.img").exists(), "{how:?}");
        assert_runs(&source);
    }
    wait_migration_failed(&source);
    // The next copy reuses the files that the killed one left.
    store_on(&fixture, &source, "first.img", "second.img", "");
    assert_ended(&fixture.run(&format!("inspect --verify {second}")), 0, &[]);
    let destination = waiting(&guest());
    assert_ended(&fixture.run(&format!("copy --paused {second} {}", qmp(&destination))), 0, &[]);
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    let names = ["first.img", "first.img.manifest.json", "second.img", "second.img.manifest.json"];
    assert_eq!(fixture.files("work"), names);
}

/// A stream of stock QEMU's own `migrate`, stored on a base.
#[test]
fn a_stream_is_stored_on_a_base_too() {
    if !require_lab("a_stream_is_stored_on_a_base_too") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(guest());
    let first = fixture.name("first.img");
    assert_ended(&fixture.run(&format!("copy --resume {} {first}", qmp(&source))), 0, &[]);
    let socket = fixture.name("in.sock");
    let mut towline =
        fixture.towline(&format!("copy --base {first} unix:{socket} {}", fixture.name("second.img")));
    crate::support::wait_stderr(&mut towline, "listening on ");
    set(&source, &["+return-path", "-multifd"], json!({ "max-bandwidth": 1_u64 << 40 }));
    migrate(&source, &format!("unix:{socket}"));
    assert_ended(&towline.wait(WITHIN).unwrap(), 0, &[]);
    source.qmp().wait_migration("completed", WITHIN).unwrap();
    let destination = waiting(&guest());
    let line = format!("copy --paused --verify {} {}", fixture.name("second.img"), qmp(&destination));
    assert_ended(&fixture.run(&line), 0, &[]);
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    assert!(allocated(&fixture.path("second.img")) < allocated(&fixture.path("first.img")));
}

//! Images that are truncated or damaged, and files that are not images.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use towline_lab::{BootSector, require_lab};

use crate::support::{
    Fixture, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, migrate, qmp,
    save, waiting,
};

/// Offsets of the parts of an image, read by hand: be64 length, be32 version, be64 page size, be64 bitmap
/// offset and be64 pages offset follow a block's name.
struct Layout {
    name: u64,
    bitmap: u64,
    pages: u64,
    device_state: u64,
    length: u64,
    devices: Vec<(String, u64)>,
}

impl Layout {
    fn of(image: &Path) -> Self {
        let (mut head, file) = (vec![0; 4096], File::open(image).unwrap());
        file.read_exact_at(&mut head, 0).unwrap();
        let name = head.windows(7).position(|window| window == b"\x06pc.ram").unwrap() + 1;
        let number = |at: usize| u64::from_be_bytes(head[name + 6 + at..][..8].try_into().unwrap());
        let manifest = std::fs::read(image.with_extension("img.manifest.json")).unwrap();
        let state = serde_json::from_slice::<Value>(&manifest).unwrap()["device_state"].take();
        let devices = state["devices"].as_array().unwrap().iter();
        let device = |device: &Value| {
            (device["name"].as_str().unwrap().to_owned(), device["offset"].as_u64().unwrap())
        };
        Self {
            name: name as u64,
            bitmap: number(20),
            pages: number(28),
            device_state: state["offset"].as_u64().unwrap(),
            length: file.metadata().unwrap().len(),
            devices: devices.map(device).collect(),
        }
    }
}

#[test]
fn a_truncated_image_is_reported_with_its_end() {
    if !require_lab("a_truncated_image_is_reported_with_its_end") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let (image, destination) = (fixture.path("guest.img"), waiting(&guest()));
    let layout = Layout::of(&image);
    let file = File::options().write(true).open(&image).unwrap();
    // From the end on, as truncated bytes are not restored.
    for (length, texts) in [
        (layout.length - 10, ["the device state at byte", "the stream ends inside the device state"]),
        (layout.device_state + 100, ["the device state at byte", "the stream ends inside the device state"]),
        (layout.pages + 5000, ["truncated: it ends at byte", "inside"]),
        (layout.bitmap + 16, ["truncated: it ends at byte", "inside"]),
        (layout.name + 3, ["truncated: it ends at byte", "inside"]),
        (10, ["truncated: it ends at byte 0xa", "inside"]),
        (0, ["not an image: it is empty", "correct the path"]),
    ] {
        let guest = if length == 0 { "the guest: not touched" } else { "the guest: in its image" };
        file.set_len(length).unwrap();
        let name = image.display().to_string();
        for line in [
            format!("copy --stream {name} {}", qmp(&destination)),
            format!("copy {name} {}", qmp(&destination)),
            format!("copy --overwrite {name} {}", fixture.name("other.img")),
        ] {
            let finished = fixture.run(&line);
            println!("{length:#x}: {}", finished.stderr.trim());
            assert_safe(&finished, &[&[name.as_str()], &texts[..], &[guest]].concat());
        }
        let finished = fixture.run(&format!("inspect {name}"));
        assert_ended(&finished, 1, &[&[name.as_str()], &texts[..]].concat());
        assert_waits(&destination);
    }
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    // None of it reached the destination, so it can load the next guest.
    save(&fixture, guest(), "whole.img");
    assert_ended(
        &fixture.run(&format!("copy --stream {} {}", fixture.name("whole.img"), qmp(&destination))),
        0,
        &[],
    );
    assert_runs(&destination);
}

#[test]
fn files_that_are_not_images_are_refused() {
    if !require_lab("files_that_are_not_images_are_refused") {
        return;
    }
    let (fixture, destination) = (Fixture::new(), waiting(&guest()));
    std::fs::write(fixture.path("text"), "The quick brown fox jumps over the lazy dog.\n").unwrap();
    std::fs::create_dir(fixture.path("directory")).unwrap();
    for (name, text) in [
        ("text", "not an image: it begins with \"The \""),
        ("directory", "not a regular file"),
        ("missing", "No such file or directory"),
    ] {
        let path = fixture.name(name);
        let finished = fixture.run(&format!("copy --stream {path} {}", qmp(&destination)));
        assert_safe(&finished, &[&path, text]);
        assert!(!finished.stderr.contains("the other end"), "there is none: {}", finished.stderr);
        assert_ended(&fixture.run(&format!("inspect {path}")), 1, &[&path, text]);
    }
    assert_waits(&destination);
    fixture.assert_holds(&["directory", "text"]);
}

/// QEMU's own `migrate exec:cat>file` writes no mapped-ram file. The message names the command that converts
/// it, and that works.
#[test]
fn an_ordinary_stream_in_a_file_can_be_converted() {
    if !require_lab("an_ordinary_stream_in_a_file_can_be_converted") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let (stream, image) = (fixture.name("guest.stream"), fixture.name("guest.img"));
    source.qmp().execute("stop", Value::Null).unwrap();
    migrate(&source, &format!("exec:cat>{stream}"));
    source.qmp().wait_migration("completed", WITHIN).unwrap();
    let destination = waiting(&guest());
    let text = "a migration stream, but not one with mapped-ram: convert it with `towline copy --return-path off exec:'cat";
    let finished = fixture.run(&format!("copy --stream {stream} {}", qmp(&destination)));
    assert_safe(&finished, &[&stream, text]);
    // The line is split at spaces, so `<` separates the words of the shell.
    let finished = fixture.run(&format!("copy --return-path off exec:cat<{stream} {image}"));
    assert_ended(&finished, 0, &[]);
    assert_ended(
        &fixture.run(&format!("copy --verify --stream --run {image} {}", qmp(&destination))),
        0,
        &[],
    );
    assert_runs(&destination);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json", "guest.stream"]);
}

/// Changes one bit of a file.
fn flip(path: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

#[test]
fn one_wrong_bit_of_memory_is_found_and_never_runs() {
    if !require_lab("one_wrong_bit_of_memory_is_found_and_never_runs") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let (image, layout) = (fixture.path("guest.img"), Layout::of(&fixture.path("guest.img")));
    let name = image.display().to_string();
    // In the third chunk of 2 MiB, and in a zero of a page with content.
    for (offset, chunk) in [
        (BootSector::FILL_ADDRESS + (3 << 20) + 8, "block \"pc.ram\", chunk 2 (from byte 0x400000)"),
        (BootSector::FILL_ADDRESS + (15 << 20) + 4000, "block \"pc.ram\", chunk 8 (from byte 0x1000000)"),
    ] {
        flip(&image, layout.pages + offset);
        for options in ["--stream", "--stream --multifd-channels 0", "--resume"] {
            let destination = waiting(&guest());
            let finished = fixture.run(&format!("copy --verify {options} {name} {}", qmp(&destination)));
            assert_safe(
                &finished,
                &[&name, chunk, "its BLAKE3 is", "the manifest says", "the image is damaged there"],
            );
            assert_waits(&destination);
        }
        assert_ended(
            &fixture.run(&format!("inspect --verify {name}")),
            1,
            &[&name, chunk, "the image is damaged there"],
        );
        let finished = fixture.run(&format!("copy --verify {name} {}", fixture.name("copy.img")));
        assert_safe(&finished, &[chunk]);
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
        flip(&image, layout.pages + offset);
    }
    assert_ended(&fixture.run(&format!("inspect --verify {name}")), 0, &[]);
}

/// A page whose bit is cleared would be a zero page for the guest, though the file still has its content.
#[test]
fn a_cleared_bit_of_a_page_bitmap_is_found_and_never_runs() {
    if !require_lab("a_cleared_bit_of_a_page_bitmap_is_found_and_never_runs") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let (image, layout) = (fixture.path("guest.img"), Layout::of(&fixture.path("guest.img")));
    let name = image.display().to_string();
    flip(&image, layout.bitmap + (BootSector::FILL_ADDRESS + (3 << 20)) / 4096 / 8);
    let text = "block \"pc.ram\": the BLAKE3 of its page bitmap is";
    for options in ["--stream", "--stream --multifd-channels 0", "--resume"] {
        let destination = waiting(&guest());
        let finished = fixture.run(&format!("copy --verify {options} {name} {}", qmp(&destination)));
        assert_safe(&finished, &[&name, text, "the manifest", "the image is damaged there"]);
        assert_waits(&destination);
    }
    assert_ended(&fixture.run(&format!("inspect --verify {name}")), 1, &[&name, text]);
    let finished = fixture.run(&format!("copy --verify {name} {}", fixture.name("copy.img")));
    assert_safe(&finished, &[text]);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

#[test]
fn one_wrong_bit_of_device_state_names_the_device() {
    if !require_lab("one_wrong_bit_of_device_state_names_the_device") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let (image, layout) = (fixture.path("guest.img"), Layout::of(&fixture.path("guest.img")));
    let name = image.display().to_string();
    let destination = waiting(&guest());
    let mut named = 0;
    for (device, offset) in &layout.devices {
        // After the section's header (type, ID, counted name, instance, version): its first field.
        let at = layout.device_state + offset + 5 + 1 + device.len() as u64 + 8 + 1;
        flip(&image, at);
        let wanted = format!("in device {device:?}");
        for line in [
            format!("inspect --verify {name}"),
            format!("copy --stream --verify {name} {}", qmp(&destination)),
        ] {
            let finished = fixture.run(&line);
            assert_ended(&finished, 1, &[&name, "the device state", &wanted]);
            named += 1;
        }
        flip(&image, at);
        if named == 8 {
            break;
        }
    }
    assert_waits(&destination);
    // The same without --verify: device state is small and always compared.
    flip(&image, layout.device_state + 200);
    assert_safe(
        &fixture.run(&format!("copy --stream {name} {}", qmp(&destination))),
        &[&name, "the device state"],
    );
    assert_waits(&destination);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

#[test]
fn a_missing_or_foreign_manifest_is_refused() {
    if !require_lab("a_missing_or_foreign_manifest_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(guest());
    for name in ["one.img", "two.img"] {
        assert_ended(&fixture.run(&format!("copy --resume {} {}", qmp(&source), fixture.name(name))), 0, &[]);
    }
    save(&fixture, guest().memory_mib(96), "large.img");
    let (one, destination) = (fixture.name("one.img"), waiting(&guest()));
    let manifest = |name: &str| fixture.path(&format!("{name}.manifest.json"));
    for (other, text) in [
        ("two.img", "the manifest is of another image of such a guest"),
        ("large.img", "the manifest belongs to another image"),
    ] {
        std::fs::copy(manifest(other), manifest("one.img")).unwrap();
        let finished = fixture.run(&format!("copy --stream {one} {}", qmp(&destination)));
        assert_safe(&finished, &[&one, "manifest", text]);
        assert_ended(&fixture.run(&format!("inspect {one}")), 1, &[&one, text]);
    }
    std::fs::remove_file(manifest("one.img")).unwrap();
    let finished = fixture.run(&format!("copy --stream --verify {one} {}", qmp(&destination)));
    let sidecar = manifest("one.img").display().to_string();
    assert_safe(&finished, &[&one, "there is no manifest beside it", &sidecar]);
    assert_ended(
        &fixture.run(&format!("inspect --verify {one}")),
        1,
        &[&one, "there is no manifest beside it"],
    );
    assert_waits(&destination);
    assert_runs(&source);
    // Without --verify it is an image as QEMU writes it, and restored with a notice.
    let finished = fixture.run(&format!("copy --stream {one} {}", qmp(&destination)));
    assert_ended(&finished, 0, &["has no manifest"]);
    assert_runs(&destination);
}

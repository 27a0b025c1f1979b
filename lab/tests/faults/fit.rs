//! A guest that the waiting QEMU could not load is refused before anything is sent, with both values.

use towline_lab::{BootSector, Builder, Qemu, Version, require_lab};

use crate::support::{
    Fixture, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, qmp, save,
    waiting,
};

/// Copies to a QEMU that does not fit, which is refused and still waits.
fn refused(fixture: &Fixture, source: &str, destination: &Qemu, options: &str, texts: &[&str]) {
    let finished = fixture.run(&format!("copy {options} {source} {}", qmp(destination)));
    assert_safe(&finished, &[&["the guest does not fit QEMU on "], texts].concat());
    assert!(!finished.stderr.contains("note:"), "nothing was moved: {}", finished.stderr);
    assert_waits(destination);
    let answer = destination.qmp().execute("query-migrate", serde_json::Value::Null).unwrap();
    assert_eq!(answer["status"], serde_json::Value::Null, "a migration at the destination");
}

fn pc() -> Builder {
    guest().machine("pc-i440fx-10.0")
}

#[test]
fn another_machine_type_or_memory_size_is_refused() {
    if !require_lab("another_machine_type_or_memory_size_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(guest());
    save(&fixture, guest(), "guest.img");
    let image = fixture.name("guest.img");
    let machine = "the guest's machine type is pc-q35-10.0, there it is pc-i440fx-10.0 (start it with -machine pc-q35-10.0)";
    let memory = "RAM block \"pc.ram\" has 64 MiB (67108864 bytes) in the guest and 96 MiB (100663296 bytes) there (memory size, -m";
    for (builder, text) in [(pc(), machine), (guest().memory_mib(96), memory)] {
        let destination = waiting(&builder);
        for (from, options) in
            [(qmp(&source), "--resume"), (image.clone(), "--stream"), (image.clone(), "--verify")]
        {
            refused(&fixture, &from, &destination, options, &[text]);
        }
    }
    assert_runs(&source);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

#[test]
fn a_missing_device_is_named_by_its_memory() {
    if !require_lab("a_missing_device_is_named_by_its_memory") {
        return;
    }
    let fixture = Fixture::new();
    let display = ["-device", "VGA,vgamem_mb=8"];
    let source = counting(guest().args(display));
    let destination = waiting(&guest());
    let text = "the destination has no RAM block \"0000:00:01.0/vga.vram\" of 8 MiB (8388608 bytes) (a device or memory backend is missing";
    refused(&fixture, &qmp(&source), &destination, "--multifd-channels 0", &[text]);
    refused(&fixture, &qmp(&source), &destination, "--resume", &[text]);
    assert_runs(&source);
    // The same two fit once the device is there.
    let destination = waiting(&guest().args(display));
    assert_ended(&fixture.run(&format!("copy {} {}", qmp(&source), qmp(&destination))), 0, &[]);
    assert_runs(&destination);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    fixture.assert_holds(&[]);
}

/// Lanes carry it, and each QEMU compares it with its own: towline gives each what it expects.
#[test]
fn a_guest_moves_to_a_qemu_with_another_uuid() {
    if !require_lab("a_guest_moves_to_a_qemu_with_another_uuid") {
        return;
    }
    let fixture = Fixture::new();
    let uuid = |last: &str| format!("5e1fd0d2-0000-4000-8000-00000000000{last}");
    let source = counting(guest().args(["-uuid".into(), uuid("1")]));
    let destination = waiting(&guest().args(["-uuid".into(), uuid("2")]));
    let line = format!("move --multifd-channels 2 {} {}", qmp(&source), qmp(&destination));
    let note = format!("the guest's uuid is {}, there it is {}", uuid("1"), uuid("2"));
    assert_ended(&fixture.run(&line), 0, &[&note]);
    assert_runs(&destination);
}

/// All reasons are reported at once.
#[test]
fn all_reasons_are_reported_at_once() {
    if !require_lab("all_reasons_are_reported_at_once") {
        return;
    }
    let fixture = Fixture::new();
    let source = counting(guest());
    let boot_sector = BootSector { fill_mib: 1, ..BootSector::default() };
    let other = Qemu::builder(Version::V7_2).memory_mib(48).boot_sector(boot_sector);
    let destination = waiting(&other);
    let texts = [
        "the guest's machine type is pc-q35-10.0, there it is pc-q35-7.2",
        "RAM block \"pc.ram\" has 64 MiB (67108864 bytes) in the guest and 48 MiB (50331648 bytes) there",
    ];
    refused(&fixture, &qmp(&source), &destination, "--resume", &texts);
    assert_runs(&source);
    fixture.assert_holds(&[]);
}

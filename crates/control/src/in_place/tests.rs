//! The proof against lists of mappings in a made-up `/proc`.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use towline_qmp::commands::Version;
use towline_qmp::{CommandError, Commands, Server};

use super::file_id::FileId;
use super::maps::{Detail, FilePart, MapsEntry, has_shared, mappings, range_at};
use super::proof::{BackendObject, check_backend, may_change_file, prove};
use super::{MappingKind, TransferReason};

const MIB: u64 = 1 << 20;
const PATH: &str = "/images/guest.img";
/// Of the image.
const FILE: FileId = FileId { major: 0xfe, minor: 0, inode: 4711 };
/// Of `pc.ram` in QEMU, and in the image.
const ADDRESS: u64 = 0x7f2a_0000_0000;
const OFFSET: u64 = MIB;
const BYTES: u64 = 512 * MIB;
const WANTED: FilePart = FilePart { file: FILE, offset: OFFSET, length: BYTES };

/// A `/proc` with one process, 99.
struct FakeProc(TempDir);

impl FakeProc {
    fn new(lines: &[String]) -> Self {
        let directory = TempDir::new().unwrap();
        let process = directory.path().join("99");
        std::fs::create_dir(&process).unwrap();
        let code = "55d0c0000000-55d0c0001000 r-xp 00000000 fe:00 77                         /usr/bin/qemu\n";
        let stack = "7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]\n";
        let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        std::fs::write(process.join("smaps"), format!("{code}Anonymous: 8 kB\n{text}{stack}")).unwrap();
        let is_mapping = |line: &&str| line.contains('-');
        let maps: String = text.lines().filter(is_mapping).map(|line| format!("{line}\n")).collect();
        std::fs::write(process.join("maps"), format!("{code}{maps}{stack}")).unwrap();
        Self(directory)
    }

    fn prove_at(&self, kind: MappingKind, address: u64, detail: Detail) -> Result<(), TransferReason> {
        prove(kind, WANTED, range_at(&self.mappings(detail), address, BYTES)?)
    }

    fn mappings(&self, detail: Detail) -> Vec<MapsEntry> {
        mappings(&self.0.path().join("99"), detail).unwrap()
    }

    fn prove(&self, kind: MappingKind) -> Result<(), TransferReason> {
        self.prove_at(kind, ADDRESS, Detail::PrivateCopies)
    }
}

/// A line of `smaps` and the fields that follow it.
fn mapping(start: u64, bytes: u64, permissions: &str, offset: u64, file: &str) -> Vec<String> {
    let end = start + bytes;
    let fields =
        ["Size:             524288 kB", "Anonymous:             0 kB", "Swap:                  0 kB"];
    [format!("{start:x}-{end:x} {permissions} {offset:08x} {file}")]
        .into_iter()
        .chain(fields.map(str::to_owned))
        .collect()
}

fn image_lines() -> Vec<String> {
    mapping(ADDRESS, BYTES, "rw-p", OFFSET, &format!("fe:00 4711        {PATH}"))
}

#[test]
fn the_range_of_the_image_is_proven() {
    let private = FakeProc::new(&image_lines());
    assert_eq!(private.prove(MappingKind::CopyOnWrite), Ok(()));
    // Two lines that continue each other, as after mprotect(2) of a part.
    let file = format!("fe:00 4711 {PATH}");
    let first = mapping(ADDRESS, 2 * MIB, "rw-p", OFFSET, &file);
    let second = mapping(ADDRESS + 2 * MIB, BYTES - 2 * MIB, "rw-p", OFFSET + 2 * MIB, &file);
    let split = FakeProc::new(&[first, second].concat());
    assert_eq!(split.prove(MappingKind::CopyOnWrite), Ok(()));
    // The whole file in one mapping, the block within it.
    let whole = FakeProc::new(&mapping(ADDRESS - OFFSET, BYTES + 8 * MIB, "rw-p", 0, &file));
    assert_eq!(whole.prove(MappingKind::CopyOnWrite), Ok(()));
    // The same file without its name: it is still the open one.
    let deleted = mapping(ADDRESS, BYTES, "rw-p", OFFSET, &format!("fe:00 4711 {PATH} (deleted)"));
    assert_eq!(FakeProc::new(&deleted).prove(MappingKind::CopyOnWrite), Ok(()));
}

#[test]
fn shared_memory_of_a_reflink_or_a_running_qemu_is_proven() {
    let shared = mapping(ADDRESS, BYTES, "rw-s", OFFSET, "fe:00 4711 /memfd:memory-backend-memfd (deleted)");
    for kind in [MappingKind::Reflink, MappingKind::Running] {
        let found = FakeProc::new(&shared).prove_at(kind, ADDRESS, Detail::Mappings);
        assert_eq!(found, Ok(()));
        // With the fields it is the same file.
        assert_eq!(FakeProc::new(&shared).prove(kind), Ok(()));
        let error = FakeProc::new(&image_lines()).prove(kind).unwrap_err();
        assert_eq!(error, TransferReason::Private);
    }
}

/// Each wrong list, and the reason for which the pages are sent.
#[test]
fn wrong_mappings_are_not_proven() {
    use TransferReason::{
        Anonymous, NotContiguous, NotMapped, Offset, OtherFile, PrivateCopies, ReadOnly, WritableImage,
    };
    let file = format!("fe:00 4711 {PATH}");
    let at = |permissions: &str, offset: u64, file: &str| mapping(ADDRESS, BYTES, permissions, offset, file);
    let other = |path: &str, found: FileId| OtherFile { path: path.into(), found, expected: FILE };
    let elsewhere = |found| Offset { path: PATH.into(), found, expected: OFFSET };
    let half = BYTES / 2;
    let parts = |one: Vec<String>, two: Vec<String>| [one, two].concat();
    let first = || mapping(ADDRESS, half, "rw-p", OFFSET, &file);
    let next =
        |permissions: &str, offset: u64, file: &str| mapping(ADDRESS + half, half, permissions, offset, file);
    let copies = |line: usize, text: &str| {
        let mut lines = image_lines();
        text.clone_into(&mut lines[line]);
        lines
    };
    let replaced = format!("{PATH} (deleted)");
    let cases: Vec<(&str, Vec<String>, TransferReason)> = vec![
        (
            "inode",
            at("rw-p", OFFSET, &format!("fe:00 4712 {PATH}")),
            other(PATH, FileId { inode: 4712, ..FILE }),
        ),
        (
            "device",
            at("rw-p", OFFSET, &format!("fe:01 4711 {PATH}")),
            other(PATH, FileId { minor: 1, ..FILE }),
        ),
        (
            "replaced",
            at("rw-p", OFFSET, &format!("fe:00 4700 {replaced}")),
            other(&replaced, FileId { inode: 4700, ..FILE }),
        ),
        ("a page off", at("rw-p", OFFSET + 4096, &file), elsewhere(OFFSET + 4096)),
        ("a page early", at("rw-p", OFFSET - 4096, &file), elsewhere(OFFSET - 4096)),
        ("the file's begin", at("rw-p", 0, &file), elsewhere(0)),
        ("shared", at("rw-s", OFFSET, &file), WritableImage),
        ("read-only", at("r--p", OFFSET, &file), ReadOnly),
        ("no file", at("rw-p", 0, "00:00 0 "), Anonymous),
        ("nothing", Vec::new(), NotMapped),
        ("a short mapping", mapping(ADDRESS, BYTES - 4096, "rw-p", OFFSET, &file), NotMapped),
        (
            "a gap",
            parts(first(), mapping(ADDRESS + half + 4096, half, "rw-p", OFFSET + half, &file)),
            NotMapped,
        ),
        ("the first half twice", parts(first(), next("rw-p", OFFSET, &file)), NotContiguous),
        ("halves a page apart", parts(first(), next("rw-p", OFFSET + half + 4096, &file)), NotContiguous),
        (
            "halves of two files",
            parts(first(), next("rw-p", OFFSET + half, "fe:00 4712 /other")),
            NotContiguous,
        ),
        ("a shared half", parts(first(), next("rw-s", OFFSET + half, &file)), NotContiguous),
        ("a read-only half", parts(first(), next("r--p", OFFSET + half, &file)), ReadOnly),
        ("half a file", parts(first(), next("rw-p", 0, "00:00 0 ")), Anonymous),
        ("private pages", copies(2, "Anonymous:            12 kB"), PrivateCopies { bytes: 12 << 10 }),
        ("pages in swap", copies(3, "Swap:                  4 kB"), PrivateCopies { bytes: 4 << 10 }),
    ];
    for (what, lines, expected) in cases {
        assert_eq!(FakeProc::new(&lines).prove(MappingKind::CopyOnWrite), Err(expected), "{what}");
    }
}

#[test]
fn private_copies_have_to_be_reported() {
    let lines: Vec<_> = image_lines().into_iter().filter(|line| line.contains('-')).collect();
    let found = FakeProc::new(&lines).prove(MappingKind::CopyOnWrite);
    assert_eq!(found, Err(TransferReason::PrivateCopiesUnknown));
    let found = FakeProc::new(&image_lines()).prove_at(MappingKind::CopyOnWrite, ADDRESS, Detail::Mappings);
    assert_eq!(found, Err(TransferReason::PrivateCopiesUnknown));
}

/// Two blocks of one size, each mapped where the other one is.
#[test]
fn blocks_in_another_order_are_not_proven() {
    let file = format!("fe:00 4711 {PATH}");
    let (first, second) = (OFFSET, OFFSET + BYTES);
    let swapped = FakeProc::new(
        &[
            mapping(ADDRESS, BYTES, "rw-p", second, &file),
            mapping(ADDRESS + 2 * BYTES, BYTES, "rw-p", first, &file),
        ]
        .concat(),
    );
    for (address, expected, found) in [(ADDRESS, first, second), (ADDRESS + 2 * BYTES, second, first)] {
        let wanted = FilePart { offset: expected, ..WANTED };
        let range = range_at(&swapped.mappings(Detail::PrivateCopies), address, BYTES).unwrap();
        let reason = prove(MappingKind::CopyOnWrite, wanted, range).unwrap_err();
        assert_eq!(reason, TransferReason::Offset { path: PATH.into(), found, expected });
    }
}

/// A QEMU before 8.2 reports no addresses: the file decides.
#[test]
fn memory_without_an_address_is_found_by_its_file() {
    let memfd = "00:01 9 /memfd:memory-backend-memfd (deleted)";
    let old = FakeProc::new(&mapping(ADDRESS, BYTES, "rw-s", 0, memfd));
    let mappings = old.mappings(Detail::Mappings);
    let file = FileId { major: 0, minor: 1, inode: 9 };
    assert!(has_shared(&mappings, file, 0, BYTES));
    assert!(!has_shared(&mappings, FileId { inode: 10, ..file }, 0, BYTES));
    assert!(!has_shared(&mappings, file, 4096, BYTES));
    let private = FakeProc::new(&mapping(ADDRESS, BYTES, "rw-p", 0, memfd));
    let mappings = private.mappings(Detail::Mappings);
    assert!(!has_shared(&mappings, file, 0, BYTES));
}

fn backend() -> BackendObject {
    BackendObject {
        id: "pc.ram".into(),
        kind: "memory-backend-file".into(),
        bytes: BYTES,
        path: Some(PATH.into()),
        offset: Some(OFFSET),
        readonly: true,
        rom: Some("off".into()),
        ..BackendObject::default()
    }
}

fn version(text: &str) -> Version {
    let numbers: Vec<u32> = text.split('.').map(|number| number.parse().unwrap()).collect();
    let numbers = json!({ "major": numbers[0], "minor": numbers[1], "micro": numbers[2] });
    serde_json::from_value(json!({ "qemu": numbers, "package": "" })).unwrap()
}

#[test]
fn backends_that_cannot_map_the_image_are_not_examined() {
    let check = |backend: &BackendObject, qemu: &str| check_backend(backend, BYTES, &version(qemu));
    for qemu in ["8.2.0", "10.0.13", "11.1.3"] {
        assert_eq!(check(&backend(), qemu), Ok(()));
        assert_eq!(check(&BackendObject { readonly: false, rom: None, ..backend() }, qemu), Ok(()));
    }
    let ram = BackendObject { kind: "memory-backend-ram".into(), ..backend() };
    let cases = [
        (check(&ram, "10.0.2"), TransferReason::BackendType { found: "memory-backend-ram".into() }),
        (check(&backend(), "8.1.5"), TransferReason::OldQemu { found: "8.1.5".into() }),
        (check(&backend(), "7.2.22"), TransferReason::OldQemu { found: "7.2.22".into() }),
        (
            check(&BackendObject { bytes: BYTES + 4096, ..backend() }, "10.0.2"),
            TransferReason::Size { found: BYTES + 4096, expected: BYTES },
        ),
        (check(&BackendObject { rom: Some("auto".into()), ..backend() }, "10.0.2"), TransferReason::ReadOnly),
        (
            check(&BackendObject { rom: Some("on".into()), readonly: false, ..backend() }, "10.0.2"),
            TransferReason::ReadOnly,
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, Err(expected));
    }
}

#[test]
fn only_a_file_that_is_open_for_reading_stays_as_it_is() {
    assert!(!may_change_file(&backend()));
    let writable = BackendObject { readonly: false, ..backend() };
    assert!(may_change_file(&writable), "a balloon discards memory of the file");
    assert!(may_change_file(&BackendObject { share: true, ..writable.clone() }));
    assert!(!may_change_file(&BackendObject { kind: "memory-backend-memfd".into(), ..writable }));
}

#[test]
fn reasons_name_the_way_out() {
    let reason = TransferReason::Offset { path: PATH.into(), found: 0, expected: OFFSET };
    let expected =
        "QEMU maps /images/guest.img from byte 0 on, expected 1048576: start QEMU with offset=1048576";
    assert_eq!(reason.to_string(), expected);
}

/// The monitor of a QEMU that maps an image, on a busy host.
struct LateMonitor(String);

impl Commands for LateMonitor {
    fn names(&self) -> &[&'static str] {
        &["query-memdev", "qom-get"]
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        match (name, arguments.get("property").and_then(Value::as_str)) {
            ("query-memdev", _) => {
                thread::sleep(Duration::from_millis(2500));
                Ok(json!([{ "id": "mem", "size": BYTES, "prealloc": false, "share": false }]))
            }
            (_, Some("type")) => Ok(json!("memory-backend-file")),
            (_, Some("mem-path")) => Ok(self.0.as_str().into()),
            _ => Err(CommandError::generic("no such property")),
        }
    }
}

/// A process that was confined by then could not examine it.
#[test]
fn a_qemu_that_replies_late_is_known_to_map_the_image() {
    let directory = TempDir::new().unwrap();
    let [socket, image] = ["qmp", "guest.img"].map(|name| directory.path().join(name));
    std::fs::write(&image, "image").unwrap();
    let monitor = LateMonitor(image.to_str().unwrap().to_owned());
    let _server = Server::start(&socket, Arc::new(monitor)).unwrap();
    assert!(super::may_map(&socket, &image));
}

//! Guest memory that is mapped from a file.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde_json::Value;
use towline_lab::{Qmp, Version};
use towline_launch::{
    CommandLine, MappedBlock, MappedMemory, MemoryFileError, QemuVersion, RunningQemu, Sharing,
};

use crate::support::{Place, VERSIONS, WITHIN, versions};

const RAM_BYTES: u64 = 64 << 20;
/// A word of the file, at this guest address.
const ADDRESS: u64 = 0x20_0000;
const WORD: u64 = 0x1122_3344_5566_7788;

fn image(path: &Path, offset: u64) {
    let file = File::create(path).unwrap();
    file.set_len(offset + RAM_BYTES).unwrap();
    file.write_all_at(&WORD.to_le_bytes(), offset + ADDRESS).unwrap();
}

fn word(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset + ADDRESS).unwrap();
    u64::from_le_bytes(bytes)
}

/// The version as the launcher knows it.
fn number(version: Version) -> QemuVersion {
    let command = version.command();
    let output = std::process::Command::new(command.get_program())
        .arg("--version")
        .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut numbers = text.split("version ").nth(1).unwrap().split('.').map(|number| number.parse().unwrap());
    QemuVersion { major: numbers.next().unwrap(), minor: numbers.next().unwrap() }
}

fn start(place: &Place, version: Version, memory: &MappedMemory) -> Result<RunningQemu, MemoryFileError> {
    let host = place.host();
    let arguments = ["-machine", version.machine(), "-m", "64", "-cpu", "Nehalem", "-nodefaults"];
    let mut guest = CommandLine::parse(arguments).unwrap().trust(&host).unwrap();
    memory.apply(&mut guest, number(version))?;
    let mut launcher = place.launcher("web");
    launcher.is_paused = true;
    Ok(launcher.start(&guest, &host).unwrap())
}

/// Reads the guest's word.
fn read(monitor: &Qmp) -> u64 {
    let text = monitor.hmp(&format!("xp /1gx {ADDRESS:#x}")).unwrap();
    let word = text.split("0x").last().unwrap().trim();
    u64::from_str_radix(word, 16).unwrap()
}

fn memory(path: &Path, offset: u64, sharing: Sharing) -> MappedMemory {
    let block = MappedBlock { id: "pc.ram".into(), path: path.into(), offset, length: RAM_BYTES };
    MappedMemory { blocks: vec![block], sharing }
}

#[test]
fn a_guest_reads_its_memory_from_an_image_and_does_not_change_it() {
    let offset = 1 << 20;
    for version in versions("a_guest_reads_its_memory_from_an_image_and_does_not_change_it", &VERSIONS) {
        let place = Place::new(version);
        let path = place.path("guest.img");
        image(&path, offset);
        let started = start(&place, version, &memory(&path, offset, Sharing::CopyOnWrite));
        if version == Version::V7_2 {
            let Err(MemoryFileError::Version { property, .. }) = started else { panic!("{started:?}") };
            assert_eq!(property, "rom");
            continue;
        }
        let qemu = started.unwrap();
        let monitor = Qmp::connect(&qemu.qmp_path(), WITHIN).unwrap();
        assert_eq!(read(&monitor), WORD);
        let backends = monitor.execute("query-memdev", Value::Null).unwrap();
        assert_eq!((&backends[0]["id"], &backends[0]["share"]), (&"pc.ram".into(), &false.into()));
        assert_eq!(backends[0]["size"], RAM_BYTES);
        // The firmware runs and writes to its memory.
        monitor.execute("cont", Value::Null).unwrap();
        monitor.wait_event("RESUME", WITHIN).unwrap();
        monitor.execute("quit", Value::Null).unwrap();
        assert!(qemu.wait(WITHIN).unwrap().success());
        assert_eq!(word(&path, offset), WORD);
        let file = std::fs::read(&path).unwrap();
        let written = file.iter().filter(|byte| **byte != 0).count();
        assert_eq!(written, 8, "only the word of the test is in the file");
    }
}

#[test]
fn a_guest_shares_its_memory_with_a_file_of_its_own() {
    for version in versions("a_guest_shares_its_memory_with_a_file_of_its_own", &VERSIONS) {
        let place = Place::new(version);
        let path = place.path("guest.ram");
        image(&path, 0);
        let qemu = start(&place, version, &memory(&path, 0, Sharing::Shared)).unwrap();
        let monitor = Qmp::connect(&qemu.qmp_path(), WITHIN).unwrap();
        assert_eq!(read(&monitor), WORD);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&(!WORD).to_le_bytes(), ADDRESS).unwrap();
        assert_eq!(read(&monitor), !WORD);
        let backends = monitor.execute("query-memdev", Value::Null).unwrap();
        assert_eq!(backends[0]["share"], true);
    }
}

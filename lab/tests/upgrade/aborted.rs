//! Memory after a load that is given up: the new QEMU of an upgrade maps the memory of the old one while it
//! loads, and must not have written to it when the upgrade is undone.
//!
//! ```text
//!   old QEMU, stopped ── migrate (x-ignore-shared) ─► the stream's bytes ─► its sections
//!   new QEMU on the same memory ◄── the first N bytes, then the end ── hash of the memory: as before?
//! ```
//! QEMU's own capability is used at both ends, so this is a fact of QEMU. `TOWLINE_UPGRADE_BOUNDARIES` is the
//! number of boundaries; 0 is all of them. The first at which the memory differs is the point of no return of
//! a load.

use std::path::{Path, PathBuf};

use serde_json::json;
use towline_lab::expect::number;
use towline_lab::{Builder, Qemu, Version, require_lab, wait_until};

use crate::support::{WITHIN, directory, named_file};

const MEMORY_MIB: u64 = 256;
const BOUNDARIES: u64 = 8;
/// `QEMU_VM_SECTION_FULL`, `QEMU_VM_SECTION_FOOTER`, `QEMU_VM_EOF` (QEMU's migration/savevm.h).
const FULL: u8 = 4;
const FOOTER: u8 = 0x7e;
const GUID: &str = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
const OTHER_GUID: &str = "00000000-d1d1-4bf6-bf41-b9bb6c91fb87";

/// A section of the device state.
#[derive(Debug)]
struct Section {
    name: String,
    /// End of the section.
    end: usize,
}

/// A guest with devices whose rings and buffers are in its memory.
fn guest(place: &Path, guid: &str) -> Builder {
    let disk = place.join("disk").display().to_string();
    let devices = [
        format!("vmgenid,guid={guid}"),
        "virtio-blk-pci,drive=disk".to_owned(),
        "virtio-net-pci,netdev=n0,romfile=".to_owned(),
        "e1000,netdev=n1,romfile=".to_owned(),
        "virtio-rng-pci".to_owned(),
        "virtio-balloon-pci".to_owned(),
        "virtio-serial-pci".to_owned(),
        "qemu-xhci".to_owned(),
        "usb-kbd".to_owned(),
        "ide-hd,drive=sata".to_owned(),
    ];
    let devices = devices.into_iter().flat_map(|device| ["-device".to_owned(), device]);
    let drives = ["disk", "sata"].map(|id| format!("file={disk}-{id},format=raw,if=none,id={id}"));
    let drives = drives.into_iter().flat_map(|drive| ["-drive".to_owned(), drive]);
    let networks = ["-netdev", "user,id=n0", "-netdev", "user,id=n1"].map(str::to_owned);
    let builder = Qemu::builder(Version::V10_0).cpu("Nehalem").linux().processors(2);
    let builder = named_file(builder, Version::V10_0.machine(), place, MEMORY_MIB);
    builder.args(drives).args(networks).args(devices)
}

fn leave_out_shared(qemu: &Qemu) {
    let on = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
    qemu.qmp().execute("migrate-set-capabilities", on).unwrap();
}

fn hash(place: &Path) -> blake3::Hash {
    blake3::hash(&std::fs::read(place.join("ram")).unwrap())
}

/// The sections of the device state, which follow the memory's.
fn sections(stream: &[u8]) -> Vec<Section> {
    let word = |at: usize| u32::from_be_bytes(stream[at..at + 4].try_into().unwrap());
    let header = |at: usize| -> Option<(u32, String)> {
        let length = usize::from(*stream.get(at + 5)?);
        let name = stream.get(at + 6..at + 6 + length)?;
        let is_name = !name.is_empty() && name.iter().all(|byte| byte.is_ascii_graphic());
        (stream[at] == FULL && is_name).then(|| (word(at + 1), String::from_utf8_lossy(name).into_owned()))
    };
    let is_begin =
        |at: &usize| stream[at - 5] == FOOTER && header(*at).is_some_and(|(_, name)| name == "timer");
    let mut at = (5..stream.len()).find(is_begin).expect("a section of timers follows the memory");
    let mut sections = Vec::new();
    while let Some((id, name)) = header(at) {
        let is_end = |end: &usize| {
            stream[*end] == FOOTER
                && word(end + 1) == id
                && (header(end + 5).is_some() || stream[end + 5] != FULL)
        };
        let end = (at..stream.len() - 6).find(is_end).unwrap_or_else(|| panic!("{name} has no end")) + 5;
        sections.push(Section { name, end });
        at = end;
    }
    sections
}

/// Has a new QEMU load the first bytes of the stream, and gives that up. Returns its last migration state.
fn load(place: &Path, guid: &str, stream: &[u8]) -> String {
    let part: PathBuf = place.join("part");
    std::fs::write(&part, stream).unwrap();
    let new = guest(place, guid).incoming_defer().start().unwrap();
    leave_out_shared(&new);
    // It loads and stays paused.
    new.qmp().execute("stop", json!(null)).unwrap();
    let uri = format!("exec:cat {}", part.display());
    new.qmp().execute("migrate-incoming", json!({ "uri": uri })).unwrap();
    let ended = wait_until("the end of a load", WITHIN, || {
        if new.exited()?.is_some() {
            return Ok(Some("exited".to_owned()));
        }
        let Ok(migration) = new.qmp().execute("query-migrate", json!(null)) else { return Ok(None) };
        let status = migration["status"].as_str().unwrap_or_default().to_owned();
        Ok(["completed", "failed"].contains(&status.as_str()).then_some(status))
    });
    ended.unwrap()
}

#[test]
#[ignore = "nightly"]
fn memory_is_bit_equal_after_a_load_that_is_given_up_at_any_section() {
    if !require_lab("memory_is_bit_equal_after_a_load_that_is_given_up_at_any_section") {
        return;
    }
    let place = directory();
    let place = place.path();
    for id in ["disk", "sata"] {
        let path = place.join(format!("disk-{id}"));
        std::fs::File::create(path).unwrap().set_len(16 << 20).unwrap();
    }
    let stream = place.join("stream");
    let (old, mut linux) = guest(place, GUID).boot(WITHIN).unwrap();
    linux.fill(32 << 20, 3).unwrap();
    drop(linux);
    old.qmp().execute("stop", json!(null)).unwrap();
    leave_out_shared(&old);
    let uri = format!("exec:cat >{}", stream.display());
    old.qmp().execute("migrate", json!({ "uri": uri })).unwrap();
    old.qmp().wait_migration("completed", WITHIN).unwrap();
    let before = hash(place);
    let bytes = std::fs::read(&stream).unwrap();
    let sections = sections(&bytes);
    let names: Vec<&str> = sections.iter().map(|section| section.name.as_str()).collect();
    assert!(sections.len() > 20 && names.iter().any(|name| name.contains("virtio-net")), "{names:?}");
    let wanted = match number("TOWLINE_UPGRADE_BOUNDARIES", BOUNDARIES) {
        0 => sections.len(),
        wanted => usize::try_from(wanted).unwrap(),
    };
    let step = sections.len().div_ceil(wanted).max(1);
    let mut boundaries = 0;
    // The last one is that of everything but the end mark.
    for section in sections.iter().rev().step_by(step).rev() {
        let status = load(place, GUID, &bytes[..section.end]);
        assert_ne!(status, "completed", "after {}", section.name);
        assert!(
            hash(place) == before,
            "a load that is aborted after {} has changed the memory",
            section.name
        );
        boundaries += 1;
    }
    // The whole load does not change it either: the point of no return is `cont`.
    assert_eq!(load(place, GUID, &bytes), "completed");
    assert!(hash(place) == before, "a load has changed the memory");
    // A vmgenid with another value is a write that this test has to see.
    assert_eq!(load(place, OTHER_GUID, &bytes), "completed");
    let is_written = hash(place) != before;
    println!("{boundaries} of {} boundaries; another vmgenid writes: {is_written}", sections.len());
    assert!(is_written, "a vmgenid of another value was not written");
}

//! QEMUs and images of these tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use towline_channel::Cancel;
use towline_control::in_place::{MappingKind, Presence, TransferReason};
use towline_control::plan::{CopyRequest, Destination, Observer, ProcessGuest, ProcessSource, Source, copy};
use towline_control::qemu::Qemu;
use towline_image::Image;
use towline_memload::{BLOCK_NAME, Shape, Synthetic};
use towline_migration::{Guest, Result};
use towline_protocol::mapped_ram::MappedRamHeader;

use crate::common::{Binary, TestQemu};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const MEMORY_MIB: u64 = 16;
/// Known to each QEMU here.
pub(crate) const MACHINE: &str = "pc-q35-7.2";

pub(crate) struct Silent;

impl Observer for Silent {}

/// A synthetic guest of this size.
#[derive(Debug)]
struct OfSize(u64);

struct OfProcess(Synthetic);

impl ProcessSource for OfSize {
    fn name(&self) -> &str {
        "mem"
    }

    fn create(&self) -> Result<Box<dyn ProcessGuest>> {
        Ok(Box::new(OfProcess(Synthetic::new(Shape::of_length(self.0))?)))
    }
}

impl ProcessGuest for OfProcess {
    fn run(&self, send: &mut dyn FnMut(&dyn Guest)) -> Result<()> {
        self.0.run(|guest| send(guest))
    }
}

/// An image of a synthetic guest, a quarter of whose pages are zero.
pub(crate) struct Stored {
    directory: TempDir,
    pub(crate) image: Image,
}

impl Stored {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest.img");
        let source = Source::Process(Arc::new(OfSize(MEMORY_MIB * MIB)));
        let (to, cancel) = (Destination::Image(path.clone()), Cancel::new().unwrap());
        copy(&source, &to, &CopyRequest::default(), &cancel, &Silent).unwrap();
        Self { directory, image: Image::open(&path).unwrap() }
    }

    pub(crate) fn mapped(&self) -> MappedRamHeader {
        self.image.ram_blocks()[0].mapped.unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn map(&self, binary: &Binary, properties: &str) -> (TestQemu, Qemu) {
        let (path, offset) = (self.image.path().display(), self.mapped().pages_offset);
        waiting(binary, BLOCK_NAME, &format!("mem-path={path},offset={offset},{properties}"))
    }
}

/// A QEMU whose memory is this backend.
pub(crate) fn with_memory(binary: &Binary, id: &str, backend: &str, more: &[&str]) -> (TestQemu, Qemu) {
    let (machine, memory) = (format!("{MACHINE},memory-backend={id}"), MEMORY_MIB.to_string());
    let object = format!("{backend},id={id},size={MEMORY_MIB}M");
    let arguments = ["-machine", &machine, "-m", &memory, "-S", "-object", &object];
    let process = TestQemu::start(binary, &[&arguments[..], more].concat());
    let qemu = Qemu::new(process.client()).unwrap();
    (process, qemu)
}

/// A QEMU that waits for a guest, with memory of a file.
pub(crate) fn waiting(binary: &Binary, id: &str, properties: &str) -> (TestQemu, Qemu) {
    with_memory(binary, id, &format!("memory-backend-file,{properties}"), &["-incoming", "defer"])
}

/// A QEMU whose memory other processes can map.
pub(crate) fn with_memfd(binary: &Binary) -> (TestQemu, Qemu) {
    with_memory(binary, "mem", "memory-backend-memfd,share=on", &[])
}

/// Name of its memory, as another process opens it.
pub(crate) fn memfd_of(process: &TestQemu) -> String {
    let descriptors = Path::new("/proc").join(process.child.id().to_string()).join("fd");
    let entries = std::fs::read_dir(descriptors).unwrap().map(|entry| entry.unwrap().path());
    let is_memory = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:memory-backend-memfd")
    };
    entries.into_iter().find(is_memory).unwrap().display().to_string()
}

pub(crate) fn maps_ranges(qemu: &Qemu) -> bool {
    let version = &qemu.facts().version.qemu;
    (version.major, version.minor) >= (8, 2)
}

/// The reason for which the only block with a backend is sent.
pub(crate) fn reason(presence: &Presence) -> &TransferReason {
    assert!(presence.is_empty(), "{presence:?}");
    let mut reasons = presence.sent().iter().map(|sent| &sent.reason);
    reasons.find(|reason| **reason != TransferReason::NoBackend).unwrap()
}

#[track_caller]
pub(crate) fn assert_mapped(presence: &Presence, block: &str, kind: MappingKind) {
    let [mapped] = presence.mapped() else { panic!("{presence:?}") };
    assert_eq!((mapped.block.as_str(), mapped.bytes, mapped.kind), (block, MEMORY_MIB * MIB, kind));
}

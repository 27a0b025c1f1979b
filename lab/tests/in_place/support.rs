//! Helpers of these tests: an image of a Linux guest, and QEMUs that map it.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::expect::qmp;
use towline_lab::{Builder, Finished, Qemu, Version, towline};

/// Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;
/// Memory of the guests.
pub(crate) const MEMORY_MIB: u64 = 512;
/// The part of it that the guest fills and hashes.
const FILLED: u64 = 96 * MIB;
/// Name of the guest's RAM block, and with that the id of a backend for it.
pub(crate) const RAM: &str = "pc.ram";

/// An image of a guest that ran.
pub(crate) struct Saved {
    directory: TempDir,
    version: Version,
    /// Hash of what the guest filled.
    pub(crate) hash: String,
    /// Value of the counter at some earlier time.
    pub(crate) tick: u64,
}

/// A `memory-backend-file` of the guest's RAM.
#[derive(Debug, Clone)]
pub(crate) struct Backend {
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
    /// More properties.
    pub(crate) properties: String,
}

impl Backend {
    fn argument(&self) -> String {
        let Self { path, offset, properties } = self;
        let path = path.display();
        format!(
            "memory-backend-file,id={RAM},size={MEMORY_MIB}M,mem-path={path},offset={offset},{properties}"
        )
    }
}

/// A guest with 512 MiB that migrates between versions.
pub(crate) fn guest(version: Version) -> Builder {
    let builder = Qemu::builder(version).machine(Version::V10_0.machine()).cpu("Nehalem");
    builder.linux().memory_mib(MEMORY_MIB).processors(2)
}

impl Saved {
    /// Boots a guest, fills a part of its memory, and has towline store it.
    pub(crate) fn new(version: Version) -> Self {
        Self::of(version, 5)
    }

    /// As [`Saved::new`], of a guest that fills its memory from this seed.
    pub(crate) fn of(version: Version, seed: u64) -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        let (source, mut linux) = guest(version).boot(WITHIN).unwrap();
        linux.fill(FILLED, seed).unwrap();
        let (hash, tick) = (linux.hash().unwrap(), linux.wait_ticking(WITHIN).unwrap());
        drop(linux);
        let saved = Self { directory, version, hash, tick };
        let image = saved.path().display().to_string();
        towline(["copy", &qmp(&source), &image]).unwrap().wait_done(WITHIN).unwrap();
        saved
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("guest.img")
    }

    /// Addresses of some of the guest's pages that are zero, each after one that is not.
    pub(crate) fn zero_pages_behind_data(&self) -> Vec<u64> {
        let (file, begin) = (std::fs::File::open(self.path()).unwrap(), self.backend().offset);
        let is_zero = |page: u64| {
            let mut content = vec![0; 4096];
            file.read_exact_at(&mut content, begin + page).unwrap();
            content.iter().all(|byte| *byte == 0)
        };
        let pages = (16 * MIB..MEMORY_MIB * MIB).step_by(4096);
        let found: Vec<u64> = pages.filter(|page| is_zero(*page) && !is_zero(page - 4096)).take(64).collect();
        assert!(found.len() > 8, "{found:?}");
        found
    }

    /// The backend that maps the guest's RAM copy-on-write.
    pub(crate) fn backend(&self) -> Backend {
        let properties = "share=off,readonly=on,rom=off".to_owned();
        Backend { path: self.path(), offset: pages_offset(&self.path()), properties }
    }

    /// A QEMU with this memory that waits for the guest.
    pub(crate) fn waiting(&self, backend: &Backend) -> Qemu {
        let machine = format!("{},memory-backend={RAM}", Version::V10_0.machine());
        let arguments = ["-object".to_owned(), backend.argument()];
        guest(self.version).machine(&machine).args(arguments).incoming_defer().start().unwrap()
    }

    /// The guest runs on in this QEMU, with the memory that it had.
    pub(crate) fn assert_runs_in(&self, qemu: &Qemu) {
        let mut linux = qemu.linux(WITHIN).unwrap();
        assert!(linux.wait_ticking(WITHIN).unwrap() > self.tick);
        assert_eq!(linux.hash().unwrap(), self.hash);
    }

    /// The file is what it was.
    pub(crate) fn assert_intact(&self) {
        let image = self.path().display().to_string();
        towline(["inspect", "--verify", &image]).unwrap().wait_done(WITHIN).unwrap();
    }
}

/// Where the pages of the first block, which is the guest's RAM, begin in an image: `docs/image.md`.
fn pages_offset(image: &Path) -> u64 {
    use std::io::Read;

    let mut head = vec![0; 4096];
    std::fs::File::open(image).unwrap().read_exact(&mut head).unwrap();
    let name = [&[RAM.len() as u8], RAM.as_bytes()].concat();
    let at = head.windows(name.len()).position(|bytes| bytes == name).unwrap() + name.len();
    // Length, version, page size, bitmap offset, pages offset.
    let number = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
    assert_eq!(number(at), MEMORY_MIB * MIB);
    number(at + 8 + 4 + 8 + 8)
}

/// Runs `towline copy --json` to its end.
pub(crate) fn copy(options: &[&str], saved: &Saved, destinations: &[Qemu]) -> Finished {
    let image = saved.path().display().to_string();
    let names: Vec<String> = destinations.iter().map(qmp).collect();
    let line = ["copy", "--json"].into_iter().chain(options.iter().copied()).chain([image.as_str()]);
    towline(line.chain(names.iter().map(String::as_str))).unwrap().wait(WITHIN).unwrap()
}

/// Events of this kind.
pub(crate) fn events(finished: &Finished, kind: &str) -> Vec<Value> {
    let events = finished.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == kind).collect()
}

/// Texts of the notices.
pub(crate) fn notices(finished: &Finished) -> Vec<String> {
    let text = |event: Value| event["text"].as_str().unwrap().to_owned();
    events(finished, "notice").into_iter().map(text).collect()
}

/// Has QEMU report the state of its migration.
pub(crate) fn report_events(qemu: &Qemu) {
    let on = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    qemu.qmp().execute("migrate-set-capabilities", on).unwrap();
    qemu.qmp().take_events();
}

/// Milliseconds from `migrate-incoming`, at which QEMU says `setup`, until the guest ran.
pub(crate) fn milliseconds_to_running(qemu: &Qemu) -> f64 {
    let time = |event: &Value| {
        let part = |name: &str| event["timestamp"][name].as_f64().unwrap();
        part("seconds") * 1e3 + part("microseconds") / 1e3
    };
    let ran = qemu.qmp().wait_event("RESUME", WITHIN).unwrap();
    let events = qemu.qmp().take_events();
    let begun = events.iter().find(|event| event["data"]["status"] == "setup").unwrap();
    time(&ran) - time(begun)
}

/// Proportional set size of the guest's RAM in a QEMU that maps it from this file, in bytes.
pub(crate) fn ram_pss(qemu: &Qemu, image: &Path) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", qemu.pid())).unwrap();
    let image = image.to_str().unwrap();
    let (mut is_ram, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(pss) = line.strip_prefix("Pss:").filter(|_| is_ram) {
            kib += pss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap();
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_ram = line.ends_with(image);
        }
    }
    assert!(kib > 0, "QEMU {} maps no {image}", qemu.pid());
    kib << 10
}

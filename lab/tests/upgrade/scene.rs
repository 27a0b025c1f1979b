//! A guest that counts in memory that the test reads, in either QEMU, and upgrades of it.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::expect::events;
use towline_lab::{
    BootSector, Builder, MemoryBackend, Qemu, Qmp, Towline, Version, running_qemus, towline_binary,
    wait_until,
};

use crate::support::{LongestGap, WITHIN, directory, kill, named_file};

pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(500);
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);
const MEMORY_MIB: u64 = 32;
/// Guest-physical address of the small guest's counter, which is its place in the file of the memory.
const COUNTER_ADDRESS: u64 = 0x11_0008;

/// The guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Backing {
    File,
    /// A memfd of QEMU 10.0, which sends its pages in any case.
    Memfd,
    /// A memfd of QEMU 7.2, which does not.
    MemfdOf7,
}

/// State of the guest in a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Gone,
    Runs,
    Paused,
    Waits,
    Busy,
}

/// A guest that counts, and does nothing else.
pub(crate) fn small_guest() -> Builder {
    small_guest_of(Version::V10_0)
}

fn small_guest_of(version: Version) -> Builder {
    let boot_sector = BootSector { words_per_page: 4, ..BootSector::default() };
    Qemu::builder(version).boot_sector(boot_sector)
}

/// Value of the guest's counter.
pub(crate) fn counter(memory: &File) -> u64 {
    let mut word = [0; 8];
    memory.read_exact_at(&mut word, COUNTER_ADDRESS).unwrap();
    u64::from_le_bytes(word)
}

/// The guest of one run.
pub(crate) struct Scene {
    place: TempDir,
    pub(crate) old: Qemu,
    /// The guest's memory.
    memory: File,
    has_drives: bool,
}

impl Scene {
    pub(crate) fn new(backing: Backing, has_drives: bool) -> Self {
        let place = directory();
        let drives = if has_drives { drives(place.path()) } else { Vec::new() };
        let builder = match backing {
            // The default of 7.2 has features that 10.0 has dropped.
            Backing::MemfdOf7 => small_guest_of(Version::V7_2).cpu("Nehalem"),
            _ => small_guest_of(Version::V10_0),
        };
        let builder = builder.args(drives);
        match backing {
            Backing::File => {
                let mut scene = Self::on(builder, place, MEMORY_MIB);
                scene.has_drives = has_drives;
                scene
            }
            Backing::Memfd | Backing::MemfdOf7 => {
                let memfd = MemoryBackend::Memfd { prealloc: false };
                let old = builder.memory_mib(MEMORY_MIB).memory_backend(memfd).start().unwrap();
                let memory = memfd_of(old.pid());
                Self { place, old, memory, has_drives }.counting()
            }
        }
    }

    /// A guest whose memory is a file.
    pub(crate) fn on(builder: Builder, place: TempDir, mib: u64) -> Self {
        let old = named_file(builder, Version::V10_0.machine(), place.path(), mib).start().unwrap();
        let memory = File::open(place.path().join("ram")).unwrap();
        Self { place, old, memory, has_drives: false }.counting()
    }

    fn counting(self) -> Self {
        self.old.wait_counting(WITHIN).unwrap();
        assert!(self.is_counting(), "the counter is not where it is looked for");
        self
    }

    /// Begins to look for the longest time in which the guest does not count.
    pub(crate) fn watch(&self) -> LongestGap {
        let memory = self.memory.try_clone().unwrap();
        LongestGap::begin(move || counter(&memory))
    }

    pub(crate) fn towline(&self, words: &[&str]) -> Towline {
        let directory = format!("XDG_RUNTIME_DIR={}", self.place.path().display());
        let program = towline_binary().unwrap().display().to_string();
        let words = [directory, program].into_iter().chain(words.iter().map(|word| (*word).to_owned()));
        Towline::start("/usr/bin/env".as_ref(), words).unwrap()
    }

    pub(crate) fn upgrade(&self) -> Towline {
        let old = format!("qmp:{}", self.old.qmp_path().display());
        let program = crate::support::program(Version::V10_0);
        self.towline(&["upgrade", "--json", "--qemu", &program, &old])
    }

    /// The guest's counter, whichever QEMU runs it.
    fn counter(&self) -> u64 {
        counter(&self.memory)
    }

    pub(crate) fn is_counting(&self) -> bool {
        let before = self.counter();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if self.counter() != before {
                return true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        false
    }

    /// New QEMUs: process and monitor.
    pub(crate) fn new_qemus(&self) -> Vec<(u32, std::path::PathBuf)> {
        let qemus = running_qemus(self.place.path()).into_iter();
        qemus.map(|(directory, pid)| (pid, directory.join("qmp.sock"))).collect()
    }

    /// Processes that map the guest's memory, in any state.
    pub(crate) fn processes_with_memory(&self) -> Vec<String> {
        // Device, inode: columns 3 and 4 of `/proc/PID/maps`.
        let found = self.memory.metadata().unwrap();
        let (major, minor) = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        let (device, inode) = (format!("{major:02x}:{minor:02x}"), found.ino().to_string());
        let is_memory = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.get(3) == Some(&device.as_str()) && words.get(4) == Some(&inode.as_str())
        };
        let maps = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let processes = std::fs::read_dir("/proc").unwrap();
        let names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let pids = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        pids.filter(|pid| maps(pid).lines().any(is_memory)).collect()
    }

    /// Checks that the QEMU that runs the guest has the locks of its drives.
    pub(crate) fn has_its_locks(&self) -> Result<(), String> {
        for (format, _) in DRIVES.iter().filter(|_| self.has_drives) {
            let path = self.place.path().join(format);
            let opened = Command::new("qemu-io").args(["-f", format, "-c", "quit"]).arg(&path).output();
            let opened = opened.unwrap();
            let text = String::from_utf8_lossy(&opened.stderr) + String::from_utf8_lossy(&opened.stdout);
            if opened.status.success() || !text.contains("lock") {
                return Err(format!("the guest runs without the lock of {}: {text}", path.display()));
            }
        }
        Ok(())
    }

    /// Checks that the guest's QEMU has the monitor under the name that it always has.
    pub(crate) fn has_its_monitor(&self) -> Result<(), String> {
        let path = self.old.qmp_path();
        let status = Qmp::connect(&path, REPLY_TIMEOUT).and_then(|qmp| qmp.status());
        match status {
            Ok(status) if status == "running" => Ok(()),
            other => Err(format!("{}: {other:?}", path.display())),
        }
    }

    fn state_of_old(&self) -> State {
        if self.old.exited().unwrap().is_some() {
            return State::Gone;
        }
        match self.old.qmp().execute_within("query-status", json!(null), REPLY_TIMEOUT) {
            Ok(status) => state(&status),
            Err(_) if self.old.exited().unwrap().is_some() => State::Gone,
            Err(_) => State::Busy,
        }
    }

    /// State of the guest in the new QEMU, whose monitor is free once towline has ended.
    fn state_of_new(&self) -> State {
        let Some((pid, monitor)) = self.new_qemus().pop() else { return State::Gone };
        let asked = Qmp::connect(&monitor, REPLY_TIMEOUT)
            .and_then(|qmp| qmp.execute_within("query-status", json!(null), REPLY_TIMEOUT));
        match asked {
            Ok(status) => state(&status),
            Err(_) if std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()) => {
                State::Busy
            }
            Err(_) => State::Gone,
        }
    }

    /// Waits until both are stable.
    pub(crate) fn settled(&self) -> (State, State) {
        let settled = wait_until("QEMUs that do not change", WITHIN, || {
            let states = (self.state_of_old(), self.state_of_new());
            Ok((states.0 != State::Busy && states.1 != State::Busy).then_some(states))
        });
        settled.unwrap()
    }

    /// Ids of undecided moves of this guest.
    pub(crate) fn moves(&self) -> Vec<String> {
        let finished = self.towline(&["moves", "--json"]).wait(WITHIN).unwrap();
        let place = self.place.path().display().to_string();
        let own = |event: &Value| event["event"] == "move" && event.to_string().contains(&place);
        let moves = events(&finished.stdout).into_iter().filter(own);
        moves.map(|event| event["id"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for (pid, _) in self.new_qemus() {
            kill(pid);
        }
    }
}

/// Formats of the drives, and their ids.
const DRIVES: [(&str, &str); 2] = [("raw", "one"), ("qcow2", "two")];

/// QEMU's options for new drives.
fn drives(place: &Path) -> Vec<String> {
    let mut options = Vec::new();
    for (format, id) in DRIVES {
        let path = place.join(format).display().to_string();
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format, &path, "16M"]).status();
        assert!(made.unwrap().success());
        options.extend(["-drive".into(), format!("file={path},format={format},if=none,id={id}")]);
        options.extend(["-device".into(), format!("virtio-blk-pci,drive={id},id=disk-{id}")]);
    }
    options
}

/// The memfd of a QEMU.
fn memfd_of(pid: u32) -> File {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut paths = descriptors.map(|entry| entry.unwrap().path());
    let is_memory = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memory-backend"))
    };
    File::open(paths.find(is_memory).unwrap()).unwrap()
}

fn state(status: &Value) -> State {
    match status["status"].as_str() {
        Some("running") => State::Runs,
        Some("paused" | "postmigrate") => State::Paused,
        Some("inmigrate" | "prelaunch") => State::Waits,
        _ => State::Busy,
    }
}

//! Helpers of these tests: a guest on memory that another QEMU can map, and upgrades of it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use towline_lab::{
    Builder, Finished, LinuxGuest, MemoryBackend, Qemu, Qmp, Towline, Version, running_qemus, towline_binary,
    wait_until,
};

/// Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;
/// The part of the memory that guests fill and hash.
const FILLED: u64 = 64 * MIB;

/// Memory of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// A memfd of QEMU's.
    Memfd,
    /// A file with a name.
    NamedFile,
    /// QEMU's default.
    Private,
}

/// A guest, whichever QEMU has it.
pub(crate) struct Guest {
    pub(crate) place: TempDir,
    /// The QEMU that it was started in.
    pub(crate) first: Qemu,
    pub(crate) hash: String,
    pub(crate) tick: u64,
}

/// Description of a Linux guest that migrates between versions.
pub(crate) fn builder(version: Version, machine: Version, memory: Memory, place: &Path) -> Builder {
    let builder = Qemu::builder(version).machine(machine.machine()).cpu("Nehalem").linux().processors(2);
    match memory {
        Memory::Memfd => builder.memory_backend(MemoryBackend::Memfd { prealloc: false }),
        Memory::NamedFile => named_file(builder, machine.machine(), place, 256),
        Memory::Private => builder,
    }
}

/// Backs the memory by a file of that size.
pub(crate) fn named_file(builder: Builder, machine: &str, place: &Path, mib: u64) -> Builder {
    let path = place.join("ram").display().to_string();
    let object = format!("memory-backend-file,id=pc.ram,size={mib}M,mem-path={path},share=on");
    let machine = format!("{machine},memory-backend=pc.ram");
    builder.memory_mib(mib).machine(&machine).args(["-object".to_owned(), object])
}

pub(crate) fn directory() -> TempDir {
    // Memory: what a guest writes to its file must not wait for a disk.
    tempfile::Builder::new().prefix("towline-lab-").tempdir_in("/dev/shm").unwrap()
}

/// The program of a version, as a user names it.
pub(crate) fn program(version: Version) -> String {
    version.command().get_program().to_str().unwrap().to_owned()
}

impl Guest {
    /// Boots it and fills a part of its memory.
    pub(crate) fn boot(builder: impl FnOnce(&Path) -> Builder) -> Self {
        let place = directory();
        let (first, mut linux) = builder(place.path()).boot(WITHIN).unwrap();
        linux.fill(FILLED, 5).unwrap();
        let (hash, tick) = (linux.hash().unwrap(), linux.wait_ticking(WITHIN).unwrap());
        Self { place, first, hash, tick }
    }

    /// Starts `towline upgrade`.
    pub(crate) fn upgrade(&self, options: &[&str], arguments: &[&str]) -> Towline {
        let directory = format!("XDG_RUNTIME_DIR={}", self.place.path().display());
        let program = towline_binary().unwrap().display().to_string();
        let monitor = format!("qmp:{}", self.first.qmp_path().display());
        let mut words = vec![directory, program, "upgrade".into(), "--json".into()];
        words.extend(options.iter().map(|option| (*option).to_owned()));
        words.push(monitor);
        if !arguments.is_empty() {
            words.push("--".into());
            words.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        }
        // `env` is replaced by towline, under the same process id.
        Towline::start("/usr/bin/env".as_ref(), words).unwrap()
    }

    /// Upgrades it to this version.
    pub(crate) fn upgrade_to(&self, version: Version) -> Value {
        self.upgrade_with(version, &[])
    }

    pub(crate) fn upgrade_with(&self, version: Version, options: &[&str]) -> Value {
        let program = program(version);
        let options = [&["--qemu", program.as_str()], options].concat();
        let finished = self.upgrade(&options, &[]).wait(WITHIN).unwrap();
        towline_lab::expect::completed(&finished)
    }

    /// A monitor of the QEMU that has the guest, under the name that it always has.
    pub(crate) fn monitor(&self) -> Qmp {
        let path = self.first.directory().join("lab.qmp");
        wait_until("the guest's monitor", WITHIN, || Ok(Qmp::connect(&path, WITHIN).ok())).unwrap()
    }

    /// The agent, by the serial port under the name that it always has.
    pub(crate) fn linux(&self) -> LinuxGuest {
        let path = self.first.serial_path();
        let mut linux =
            wait_until("the guest's serial port", WITHIN, || Ok(LinuxGuest::connect_at(&path).ok())).unwrap();
        linux.wait_ready(WITHIN).unwrap();
        linux
    }

    /// Checks that the guest runs in a QEMU of this version, with the memory that it had.
    pub(crate) fn assert_runs_in(&self, version: Version) {
        let monitor = self.monitor();
        let found = monitor.execute("query-version", Value::Null).unwrap();
        let major = found["qemu"]["major"].as_u64().unwrap();
        let machine = version.machine();
        assert!(machine.contains(&format!("-{major}.")), "{found}, expected that of {machine}");
        assert_eq!(monitor.status().unwrap(), "running");
        self.assert_ticks();
    }

    /// Checks that the guest runs, with the memory that it had.
    pub(crate) fn assert_ticks(&self) {
        let mut linux = self.linux();
        assert!(linux.wait_ticking(WITHIN).unwrap() > self.tick);
        assert_eq!(linux.hash().unwrap(), self.hash);
    }

    /// Checks that the first QEMU still runs the guest, and that nothing of a new one is left.
    pub(crate) fn assert_untouched(&self) {
        assert!(self.first.exited().unwrap().is_none());
        assert_eq!(self.first.qmp().status().unwrap(), "running");
        self.assert_ticks();
        assert_eq!(self.qemus(), Vec::<u32>::new());
        let names = std::fs::read_dir(self.first.directory()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        let staging = names.iter().find(|name| name.to_string_lossy().contains(".towline-"));
        assert_eq!(staging, None);
    }

    /// Processes of the QEMUs that towline started and that run.
    pub(crate) fn qemus(&self) -> Vec<u32> {
        running_qemus(self.place.path()).into_values().collect()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // They outlive their towline, and must not outlive the test.
        for pid in self.qemus() {
            kill(pid);
        }
    }
}

fn is_qemu(pid: u32) -> bool {
    let is_running = |status: String| !status.lines().any(|line| line.starts_with("State:\tZ"));
    let name = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&name).contains("qemu")
        && std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(is_running)
}

/// Kills a process and waits until it has ended.
pub(crate) fn kill(pid: u32) {
    let process = Pid::from_raw(pid.cast_signed()).unwrap();
    if kill_process(process, Signal::KILL).is_ok() {
        let ended = wait_until("the end of a QEMU", WITHIN, || Ok((!is_qemu(pid)).then_some(())));
        ended.unwrap();
    }
}

/// Events of this kind.
pub(crate) fn events(finished: &Finished, kind: &str) -> Vec<Value> {
    let events = towline_lab::expect::events(&finished.stdout);
    events.into_iter().filter(|event| event["event"] == kind).collect()
}

/// The longest time in which a counter did not change.
pub(crate) struct LongestGap {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl LongestGap {
    pub(crate) fn begin(counter: impl Fn() -> u64 + Send + 'static) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let ends = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut last, mut longest) = (counter(), Duration::ZERO);
            let mut since = Instant::now();
            while !ends.load(SeqCst) {
                let now = counter();
                longest = longest.max(since.elapsed());
                if now != last {
                    (last, since) = (now, Instant::now());
                }
                // The resolution of the measurement: no event tells that a counter has changed.
                std::thread::sleep(Duration::from_micros(100));
            }
            longest
        });
        Self { stop, thread }
    }

    pub(crate) fn end(self) -> Duration {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

//! The machine: its description without names or dates, its memory, its threads, and CPU time from the kernel's accounting.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapOptions};
use rustix::fs::{Advice as FileAdvice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

pub(crate) const MIB: u64 = 1 << 20;
const PAGE_BYTES: usize = 4096;
/// Ticks of a second in `/proc` (`USER_HZ`, 100 on every Linux that QEMU supports).
const TICKS_PER_SECOND: f64 = 100.0;
/// Indices of the busy times in the line `cpu` of `/proc/stat`.
const BUSY: [usize; 6] = [0, 1, 2, 5, 6, 7];

/// Returns one line per property.
pub(crate) fn describe() -> Vec<String> {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let memory_gib = memory("MemTotal:").unwrap_or_default() as f64 / f64::from(1 << 30);
    let is_virtual = read("/proc/cpuinfo").contains(" hypervisor");
    let huge = |name: &str| {
        let text = read(&format!("/sys/kernel/mm/transparent_hugepage/{name}"));
        text.split(['[', ']']).nth(1).unwrap_or("not available").to_owned()
    };
    vec![
        format!(
            "{processors} processors, {memory_gib:.0} GiB, {} virtual machine, Linux {}",
            if is_virtual { "a" } else { "not a" },
            read("/proc/sys/kernel/osrelease")
        ),
        format!("transparent huge pages: {}, for shared memory: {}", huge("enabled"), huge("shmem_enabled")),
        format!("load average at the start: {}", read("/proc/loadavg")),
    ]
}

/// Returns the value of this line of `/proc/meminfo`, in bytes.
pub(crate) fn memory(key: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib = text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next());
    let kib: u64 = kib.with_context(|| format!("/proc/meminfo has no {key}"))?.parse()?;
    Ok(kib << 10)
}

/// Returns the user and system time of all threads of a process, also exited ones, in steps of 10 ms. To be read before the
/// process is waited for.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before may contain anything, also spaces.
    let (_, fields) = text.rsplit_once(')').context("/proc/PID/stat without a name")?;
    let mut ticks = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    let mut next = || ticks.next().context("/proc/PID/stat is too short");
    Ok((next()?? + next()??) / TICKS_PER_SECOND)
}

/// Returns the user and system time of those threads of a process that run and whose name begins with `name`.
pub(crate) fn thread_seconds(pid: u32, name: &str) -> Result<f64> {
    let mut nanoseconds = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("the process has exited")? {
        let path = task?.path();
        // A thread may end meanwhile.
        let Ok(comm) = fs::read_to_string(path.join("comm")) else { continue };
        let Ok(times) = fs::read_to_string(path.join("schedstat")) else { continue };
        if comm.starts_with(name) {
            nanoseconds += times.split_whitespace().next().context("schedstat is empty")?.parse::<f64>()?;
        }
    }
    Ok(nanoseconds / 1e9)
}

/// Returns the CPU time of this process in seconds.
pub(crate) fn own_seconds() -> f64 {
    clock_seconds(ClockId::ProcessCPUTime)
}

/// Returns the CPU time of the calling thread in seconds.
pub(crate) fn own_thread_seconds() -> f64 {
    clock_seconds(ClockId::ThreadCPUTime)
}

fn clock_seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the CPU time of the whole machine in seconds.
pub(crate) fn all_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let numbers: Vec<f64> = fields.filter_map(|number| number.parse().ok()).collect();
    Ok(BUSY.iter().filter_map(|index| numbers.get(*index)).sum::<f64>() / TICKS_PER_SECOND)
}

/// Returns the name of the filesystem of `path`.
pub(crate) fn filesystem(path: &Path) -> String {
    let output = Command::new("stat").args(["--file-system", "--format", "%T"]).arg(path).output();
    output.map_or_else(|_| "?".into(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Touches as much memory as a guest of this size needs, and a quarter more, in huge pages, and frees it. The host of a virtual machine
/// reclaims freed memory within seconds, and the next touch then costs up to 30 µs for each 4 KiB, which would dominate the figure of
/// one contender. After this call the memory is backed by the host, and each contender only pays for its own first touch.
pub(crate) fn prefault(bytes: u64) -> Result<()> {
    let mut memory = MmapOptions::new().len(usize::try_from(bytes / 4 * 5)?).map_anon()?;
    // A kernel without huge pages uses small ones, for QEMU too.
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
    Ok(())
}

/// Runs each of these in its own thread. Returns the first error.
pub(crate) fn at_once<W: FnOnce() -> Result<()> + Send>(works: impl IntoIterator<Item = W>) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = works.into_iter().map(|work| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })
}

/// Where a file's data are before a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cache {
    Cached,
    Dropped,
}

impl Cache {
    pub(crate) const BOTH: [Self; 2] = [Self::Cached, Self::Dropped];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cached => "image in the page cache",
            Self::Dropped => "image not in the page cache",
        }
    }

    /// Reads the file's data once, without its holes, or writes them back and drops them.
    pub(crate) fn prepare(self, path: &Path) -> Result<()> {
        let file = File::open(path)?;
        if self == Self::Dropped {
            file.sync_all()?;
            return Ok(fadvise(&file, 0, None, FileAdvice::DontNeed)?);
        }
        let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
        loop {
            at = match seek(&file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let end = seek(&file, SeekFrom::Hole(at))?;
            while at < end {
                let length = usize::try_from(end - at)?.min(buffer.len());
                file.read_exact_at(&mut buffer[..length], at)?;
                at += length as u64;
            }
        }
    }
}

//! Description of the machine, without names or dates.

use std::path::Path;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapOptions};

const PAGE_BYTES: usize = 4096;
/// Ticks of a second in `/proc/PID/stat` (`USER_HZ`, 100 on every Linux that QEMU supports).
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns one line per property.
pub(crate) fn describe() -> Vec<String> {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let memory = read("/proc/meminfo");
    let memory_kib =
        memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    let memory_gib =
        memory_kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() / f64::from(1 << 20);
    let virtual_machine = if read("/proc/cpuinfo").contains(" hypervisor") {
        "a virtual machine"
    } else {
        "not a virtual machine"
    };
    let huge = |name: &str| {
        let text = read(&format!("/sys/kernel/mm/transparent_hugepage/{name}"));
        text.split(['[', ']']).nth(1).unwrap_or("not available").to_owned()
    };
    vec![
        format!(
            "{processors} processors, {memory_gib:.0} GiB, {virtual_machine}, Linux {}",
            read("/proc/sys/kernel/osrelease")
        ),
        format!("transparent huge pages: {}, for shared memory: {}", huge("enabled"), huge("shmem_enabled")),
        format!("load average at the start: {}", read("/proc/loadavg")),
    ]
}

/// Returns the memory that is free or in the page cache, in bytes.
pub(crate) fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next());
    let kib: u64 = kib.context("/proc/meminfo has no MemAvailable")?.parse()?;
    Ok(kib << 10)
}

/// Returns the user and system time of all threads of a process, also exited ones, in steps of 10 ms. To be read before the
/// process is waited for.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before may contain anything, also spaces.
    let (_, fields) = text.rsplit_once(')').context("/proc/PID/stat without a name")?;
    let mut ticks = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    let mut next = || ticks.next().context("/proc/PID/stat is too short");
    Ok((next()?? + next()??) / TICKS_PER_SECOND)
}

/// Returns the user and system time of those threads of a process that run and whose name begins with `name`.
pub(crate) fn thread_seconds(pid: u32, name: &str) -> Result<f64> {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = task?.path();
        // A thread may end meanwhile.
        let Ok(comm) = std::fs::read_to_string(path.join("comm")) else { continue };
        let Ok(times) = std::fs::read_to_string(path.join("schedstat")) else { continue };
        if comm.starts_with(name) {
            nanoseconds += times.split_whitespace().next().context("schedstat is empty")?.parse::<f64>()?;
        }
    }
    Ok(nanoseconds / 1e9)
}

/// Returns the name of the filesystem of `path`.
pub(crate) fn filesystem(path: &Path) -> String {
    let Ok(statistics) = rustix::fs::statfs(path) else { return "an unknown filesystem".into() };
    match statistics.f_type {
        0xEF53 => "ext4".into(),
        0x0102_1994 => "tmpfs".into(),
        0x5846_5342 => "XFS".into(),
        0x9123_683E => "Btrfs".into(),
        0x794C_7630 => "overlayfs".into(),
        other => format!("a filesystem of type {other:#x}"),
    }
}

/// Touches this amount of memory, in huge pages, and frees it. The host of a virtual machine reclaims freed memory within seconds, and
/// the next touch then costs up to 30 µs for each 4 KiB, which would dominate the figure of one contender. After this call the
/// memory is backed by the host, and each contender only pays for its own first touch.
pub(crate) fn prefault(bytes: u64) -> Result<()> {
    let mut memory = MmapOptions::new().len(usize::try_from(bytes)?).map_anon()?;
    // A kernel without huge pages uses small ones, for QEMU too.
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
    Ok(())
}

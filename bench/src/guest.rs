//! Stock QEMUs, a guest's counter, and towline as a user runs it: what the benchmarks of migrations share.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use towline_lab::expect::events;
use towline_lab::{BootSector, Builder, MemoryBackend, Qemu, Qmp, Towline, Version};

use crate::machine;
use crate::options::Bench;

/// Timeout of everything that a guest, QEMU or towline does.
pub(crate) const WITHIN: Duration = Duration::from_secs(300);
/// Interval of checks of a process or a counter.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Interval of queries for a migration's end, long enough not to load QEMU.
const QUERY_INTERVAL: Duration = Duration::from_millis(2);
/// Practically unlimited; QEMU's default is 128 MiB/s.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// Random words that fill a page.
const WORDS_PER_PAGE: u32 = 1024;

impl Bench {
    /// Waits until `condition` returns a value.
    pub(crate) fn wait<T>(&self, what: &str, condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        self.wait_each(POLL_INTERVAL, what, condition)
    }

    fn wait_each<T>(
        &self,
        interval: Duration,
        what: &str,
        mut condition: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + WITHIN;
        loop {
            self.cancel.check()?;
            if let Some(value) = condition()? {
                return Ok(value);
            }
            ensure!(Instant::now() < deadline, "{what}: not within {} s", WITHIN.as_secs());
            std::thread::sleep(interval);
        }
    }

    /// Migrates to this address. Returns the reply of `query-migrate` at the end.
    pub(crate) fn migrate(&self, qmp: &Qmp, uri: &str) -> Result<Value> {
        qmp.execute("migrate", json!({ "uri": uri }))?;
        self.migrated(qmp)
    }

    /// Waits until a QEMU reports that its migration is complete. Returns the reply.
    pub(crate) fn migrated(&self, qmp: &Qmp) -> Result<Value> {
        self.wait_each(QUERY_INTERVAL, "QEMU's own migration", || {
            let info = qmp.execute("query-migrate", Value::Null)?;
            match info["status"].as_str() {
                Some("completed") => Ok(Some(info)),
                Some("failed") => bail!("QEMU's own migration failed: {}", info["error-desc"]),
                _ => Ok(None),
            }
        })
    }

    /// Starts a `towline copy` with these arguments.
    pub(crate) fn copy<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Result<Copying> {
        let arguments = ["copy", "--json"].into_iter().chain(arguments);
        let started = Instant::now();
        let process = Towline::start(&self.options.towline, arguments)?;
        Ok(Copying { started, process })
    }

    /// Starts a QEMU with the lab's smallest guest, which fills its memory, and waits until it has. It is stopped, so that its
    /// counting does not use the processors.
    pub(crate) fn filled(&self, builder: Builder) -> Result<Qemu> {
        let qemu = builder.start()?;
        self.wait("the guest to fill its memory", || Ok(qemu.filled()?.then_some(())))?;
        stop(&qemu)?;
        Ok(qemu)
    }
}

/// Returns the builder of a QEMU with the lab's smallest guest, which fills this much memory.
pub(crate) fn small(fill_mib: u64, backend: MemoryBackend) -> Builder {
    let words_per_page = WORDS_PER_PAGE;
    let guest =
        BootSector { fill_mib, words_per_page, sweep_pages: 0, steps_per_tick: 0, ..BootSector::default() };
    Qemu::builder(Version::V10_0).memory_backend(backend).boot_sector(guest)
}

/// Stops the guest, also after a migration.
pub(crate) fn stop(qemu: &Qemu) -> Result<()> {
    if qemu.qmp().status()? == "postmigrate" {
        // QEMU requires `cont` before it migrates the guest again.
        qemu.qmp().execute("cont", Value::Null)?;
    }
    qemu.qmp().execute("stop", Value::Null)?;
    Ok(())
}

/// Sets capabilities and parameters of a migration, without a limit of its rate.
pub(crate) fn configure(qmp: &Qmp, capabilities: &[(&str, bool)], mut parameters: Value) -> Result<()> {
    let capability = |(name, state): &(&str, bool)| json!({ "capability": name, "state": state });
    let capabilities: Vec<Value> = capabilities.iter().map(capability).collect();
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities }))?;
    parameters["max-bandwidth"] = BANDWIDTH_UNLIMITED.into();
    qmp.execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// Has a waiting QEMU listen at this address, or load from it.
pub(crate) fn incoming(qemu: &Qemu, uri: &str) -> Result<()> {
    qemu.qmp().execute_within("migrate-incoming", json!({ "uri": uri }), WITHIN)?;
    Ok(())
}

/// Has a waiting QEMU listen at a Unix socket. Returns its address.
pub(crate) fn listen(qemu: &Qemu) -> Result<String> {
    let uri = format!("unix:{}", qemu.directory().join("live.sock").display());
    incoming(qemu, &uri)?;
    Ok(uri)
}

/// Returns the number of this name in a reply.
pub(crate) fn number(reply: &Value, name: &str) -> Result<f64> {
    reply[name].as_f64().with_context(|| format!("{reply} has no number {name}"))
}

/// A QEMU, and the counter of its guest or of the one that it waits for.
pub(crate) struct Machine {
    pub(crate) qemu: Qemu,
    pub(crate) counter: Counter,
}

/// Address of a file for towline and QEMU.
pub(crate) fn file(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// A running `towline copy`.
pub(crate) struct Copying {
    pub(crate) started: Instant,
    process: Towline,
}

/// A successful copy.
pub(crate) struct Copied {
    /// Time from the process's start to its end.
    pub(crate) took: Duration,
    pub(crate) cpu_seconds: f64,
    /// Its event `completed`.
    pub(crate) event: Value,
}

impl Copying {
    /// Returns true while it is running.
    pub(crate) fn runs(&mut self) -> Result<bool> {
        self.process.runs()
    }

    /// Fails with its error if it has ended with one.
    pub(crate) fn check(&mut self) -> Result<()> {
        let error = if self.runs()? { String::new() } else { self.process.stderr() };
        ensure!(error.is_empty(), "{}", error.lines().next().unwrap_or_default());
        Ok(())
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self, bench: &Bench) -> Result<Copied> {
        let (pid, mut cpu_seconds) = (self.process.pid(), 0.0);
        let took = bench.wait_each(QUERY_INTERVAL, "towline's end", || {
            // The last time that it is there: `runs` waits for it.
            cpu_seconds = machine::cpu_seconds(pid).unwrap_or(cpu_seconds);
            Ok((!self.runs()?).then(|| self.started.elapsed()))
        })?;
        let finished = self.process.wait(WITHIN)?;
        if !finished.status.success() {
            bail!("{}", finished.stderr.lines().next().unwrap_or("towline failed without an error"));
        }
        let event = events(&finished.stdout).into_iter().find(|event| event["event"] == "completed");
        let event = event.context("towline ended without the event `completed`")?;
        Ok(Copied { took, cpu_seconds, event })
    }
}

/// A 64-bit counter in a guest's memory, read through `/proc/PID/mem` of its QEMU, whose monitor does not respond while it loads.
pub(crate) struct Counter {
    memory: File,
    address: u64,
}

impl Counter {
    /// Opens the counter at this guest-physical address, which QEMU translates (`gpa2hva`).
    pub(crate) fn at(qemu: &Qemu, guest_address: u64) -> Result<Self> {
        let address = qemu.qmp().hmp_number(&format!("gpa2hva {guest_address:#x}"))?;
        Self::open(qemu.pid().into(), address)
    }

    /// Opens the counter at this offset of the guest's RAM block, which the QEMU of this process maps from the file.
    pub(crate) fn mapped_from(path: &Path, offset: u64, pid: u64) -> Result<Self> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let path = path.to_str().context("path of the file")?;
        let mapping = maps.lines().find(|line| line.ends_with(path));
        let start = mapping.and_then(|line| line.split_once('-')).map(|(start, _)| start);
        let start = start.and_then(|start| u64::from_str_radix(start, 16).ok());
        Self::open(pid, start.context("QEMU does not map the file")? + offset)
    }

    fn open(pid: u64, address: u64) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let memory = File::open(&path).with_context(|| format!("{path} cannot be read"))?;
        Ok(Self { memory, address })
    }

    /// Reads the counter; 0 while its page has not arrived (postcopy), for which the kernel reports an input error.
    pub(crate) fn read(&self) -> Result<u64> {
        let mut word = [0; 8];
        match self.memory.read_exact_at(&mut word, self.address) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => Ok(0),
            read => {
                read.context("the guest's memory cannot be read")?;
                Ok(u64::from_le_bytes(word))
            }
        }
    }

    /// Waits until the guest has counted beyond `past`.
    pub(crate) fn tick(&self, bench: &Bench, past: u64) -> Result<()> {
        bench.wait("the guest's first tick", || Ok((self.read()? > past).then_some(())))
    }
}

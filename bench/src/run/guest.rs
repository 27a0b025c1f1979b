//! The stored guest, and a `towline run` of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;
use towline_lab::{Builder, Qemu, Towline, Version};

use super::parameters::{DATA_PERCENT, Parameters, WITHIN};
use crate::counter::Counter;

const MIB: u64 = 1 << 20;
/// Memory of the guest's kernel in MiB.
const KERNEL_MIB: u64 = 128;
/// Interval of reads of a counter, and of towline's output.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// RAM of a q35 that begins at 4 GiB if the guest has more than it can have below.
const ABOVE: u64 = 4 << 30;
const BELOW_MAX: u64 = 2 << 30;
/// Options of QEMU that name the guest's kernel.
const KERNEL: [&str; 3] = ["-kernel", "-initrd", "-append"];

/// A Linux guest in an image.
pub(super) struct Stored {
    directory: TempDir,
    version: Version,
    memory_mib: u64,
    /// Its kernel: options and values.
    kernel: Vec<String>,
    tick: u64,
    tick_address: u64,
}

/// Times of one run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrival {
    /// From the start of the process until the monitor of its QEMU answered.
    pub(super) answered: Duration,
    /// From then until the guest ran.
    pub(super) running: Duration,
    /// From the monitor's answer until the guest's counter stepped.
    pub(super) tick: Duration,
    /// From the start of the process until then.
    pub(super) whole: Duration,
}

impl Stored {
    /// Boots and fills the guest, and saves it.
    pub(super) fn make(parameters: &Parameters, version: Version, memory_mib: u64) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("towline-bench-").tempdir_in(&parameters.directory)?;
        let data_mib = (memory_mib * DATA_PERCENT / 100).min(memory_mib.saturating_sub(KERNEL_MIB)).max(1);
        eprintln!("run: booting {memory_mib} MiB, and filling {data_mib} MiB");
        let source = builder(version, memory_mib).start()?;
        let mut agent = source.linux(WITHIN)?;
        agent.fill(data_mib * MIB, 1)?;
        let tick_address = agent.tick_address()?;
        drop(agent);
        let kernel = kernel(&source)?;
        let mut stored = Self { directory, version, memory_mib, kernel, tick: 0, tick_address };
        let from = format!("qmp:{}", source.qmp_path().display());
        Towline::start(&parameters.towline, ["copy", &from, &stored.image()])?.wait_done(WITHIN)?;
        // The guest is paused since it was saved.
        stored.tick = Counter::at(&source, tick_address)?.read()?;
        Ok(stored)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join("guest.img")
    }

    fn image(&self) -> String {
        self.path().display().to_string()
    }

    /// Arguments of `towline run`. The command line of a QEMU that another program starts is not recorded, and is given as a whole.
    fn arguments(&self) -> Vec<String> {
        let binary = self.version.command().get_program().to_string_lossy().into_owned();
        let mut words = ["run", "--json", "--share", "--name", "bench", "--qemu"].map(str::to_owned).to_vec();
        words.extend([binary, self.image()]);
        if self.version == Version::V10_0 {
            for option in self.kernel.chunks_exact(2) {
                words
                    .extend(["--set".into(), format!("{}={}", option[0].trim_start_matches('-'), option[1])]);
            }
            return words;
        }
        let memory = format!("{}M", self.memory_mib);
        let own =
            ["--", "-nodefaults", "-no-user-config", "-no-reboot", "-machine", Version::V10_0.machine()];
        let rest = ["-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-m", &memory, "-smp", "1"];
        let ports = ["-serial", "null", "-serial", "null"];
        words.extend(own.iter().chain(&rest).chain(&ports).map(|word| (*word).to_owned()));
        words.extend(self.kernel.iter().cloned());
        words
    }

    /// Runs the guest until its counter steps, and ends it.
    pub(super) fn run(&self, towline: &Path) -> Result<Arrival> {
        let runtime = format!("XDG_RUNTIME_DIR={}", self.directory.path().display());
        let program = towline.display().to_string();
        let started = Instant::now();
        let words = [runtime, program].into_iter().chain(self.arguments());
        let mut towline = Towline::start("/usr/bin/env".as_ref(), words)?;
        let running = wait("the guest to run", || {
            ensure!(towline.runs()?, "towline has ended: {}{}", towline.stdout(), towline.stderr());
            let events = towline.stdout();
            let event = events.lines().find(|line| line.contains(r#""event":"running""#));
            Ok(event.map(serde_json::from_str::<Value>).transpose()?)
        })?;
        let seen = Instant::now();
        let number = |name: &str| running[name].as_u64().with_context(|| format!("event without {name}"));
        ensure!(running["memory"] == "mapped", "memory is not mapped: {running}");
        let (answered, ran) = (number("answered-us")?, number("running-us")?);
        let (answered, ran) = (Duration::from_micros(answered), Duration::from_micros(ran));
        let counter = Counter::mapped_from(&self.path(), self.offset(), number("pid")?)?;
        wait("the guest's first tick", || Ok((counter.read()? > self.tick).then_some(())))?;
        let ticked = Instant::now();
        // Ended by SIGKILL with towline's process.
        towline.kill()?;
        let running = ran.saturating_sub(answered);
        Ok(Arrival { answered, running, tick: running + (ticked - seen), whole: ticked - started })
    }

    /// Offset of the counter in the guest's RAM block.
    fn offset(&self) -> u64 {
        if self.tick_address < ABOVE { self.tick_address } else { self.tick_address - ABOVE + BELOW_MAX }
    }
}

fn builder(version: Version, memory_mib: u64) -> Builder {
    let builder = Qemu::builder(version).machine(Version::V10_0.machine()).cpu("Nehalem");
    builder.linux().memory_mib(memory_mib)
}

/// The options of a QEMU that name its kernel, each with its value.
fn kernel(qemu: &Qemu) -> Result<Vec<String>> {
    let bytes = fs::read(format!("/proc/{}/cmdline", qemu.pid()))?;
    let words: Vec<_> =
        bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let mut found = Vec::new();
    for option in KERNEL {
        let at = words.iter().position(|word| word == option);
        let at = at.with_context(|| format!("the guest has no {option}"))?;
        found.extend_from_slice(&words[at..at + 2]);
    }
    Ok(found)
}

fn wait<T>(what: &str, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + WITHIN;
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {} s", WITHIN.as_secs());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

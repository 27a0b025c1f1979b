//! The demonstration: a running Linux is saved to a file and goes on in another QEMU.
//!
//! Both QEMUs are stock; towline is the release build, run as a user would. The guest itself reports the hash of its
//! memory and its counter before and after.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::qemu::{Qemu, Version};
use crate::towline::Towline;

const MEMORY_MIB: u64 = 1024;
const FILL_MIB: u64 = 512;
const MIB: u64 = 1 << 20;
const PAGE_SIZE: u64 = 4096;
const SEED: u64 = 2024;
const LANES: &str = "4";
const BOOT_WITHIN: Duration = Duration::from_secs(120);
const COPY_WITHIN: Duration = Duration::from_secs(300);

/// The steps, each printed with its time, and a table of sizes.
pub fn run(towline: &Path) -> Result<()> {
    let builder = Qemu::builder(Version::V10_0).linux().memory_mib(MEMORY_MIB).processors(2);
    let directory = tempfile::Builder::new().prefix("towline-demo-").tempdir()?;
    let image = directory.path().join("guest.img");
    let image_uri = format!("file:{}", image.display());

    let source = step(&format!("boot Linux in QEMU 10.0, {MEMORY_MIB} MiB"), || builder.clone().start())?;
    let mut guest = step("wait for the guest's agent", || source.linux(BOOT_WITHIN))?;
    step(&format!("fill {FILL_MIB} MiB with random data in the guest"), || guest.fill(FILL_MIB * MIB, SEED))?;
    let hash = step("hash them in the guest", || guest.hash())?;
    let tick = guest.wait_ticking(BOOT_WITHIN)?;
    println!("    the guest says {hash} and counts at {tick}");

    let from = format!("qmp:{}", source.qmp_path().display());
    let line = ["copy", &from, &image_uri, "--multifd-channels", LANES];
    step("towline copy qmp:SOURCE file:IMAGE --multifd-channels 4", || run_towline(towline, &line))?;
    let migrated = source.qmp().execute("query-migrate", Value::Null)?;
    let report = step("towline inspect IMAGE", || run_towline(towline, &["inspect", &path(&image)]))?;
    print!("{}", indented(&report));
    source.kill()?;

    let destination = step("start a second QEMU with -incoming defer", || builder.incoming_defer().start())?;
    let to = format!("qmp:{}", destination.qmp_path().display());
    let line = ["copy", &path(&image), &to, "--multifd-channels", LANES];
    step("towline copy IMAGE qmp:DESTINATION --multifd-channels 4", || run_towline(towline, &line))?;
    destination.qmp().wait_status("running", BOOT_WITHIN)?;
    let mut guest = step("wait for the guest's agent", || destination.linux(BOOT_WITHIN))?;
    let tick_now = guest.wait_ticking(BOOT_WITHIN)?;
    ensure!(tick_now > tick, "the guest counts at {tick_now}, expected more than {tick}");
    let hash_now = step("hash the memory in the guest again", || guest.hash())?;
    ensure!(hash_now == hash, "the guest's memory has the hash {hash_now}, expected {hash}");
    println!("    the guest says {hash_now} and counts at {tick_now}: it never noticed\n");
    sizes(&image, &migrated)
}

/// Runs one step and prints its name and duration.
fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let outcome = work();
    let mark = if outcome.is_ok() { "done" } else { "FAILED" };
    println!("{:>8.2} s  {mark}  {what}", started.elapsed().as_secs_f64());
    outcome
}

fn run_towline(towline: &Path, arguments: &[&str]) -> Result<String> {
    Ok(Towline::start(towline, arguments)?.wait_done(COPY_WITHIN)?.stdout)
}

fn sizes(image: &Path, migrated: &Value) -> Result<()> {
    let metadata = std::fs::metadata(image)?;
    let pages = |kind: &str| migrated["ram"][kind].as_u64().unwrap_or_default();
    let row = |name: &str, value: String| println!("  {name:<44} {value:>16}");
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / MIB as f64);
    row("guest RAM", mib(MEMORY_MIB * MIB));
    row("image, apparent size", mib(metadata.len()));
    row("image, allocated on disk", mib(metadata.blocks() * 512));
    row("plain pages, as the source QEMU counted", format!("{} ", pages("normal")));
    row("  in bytes", mib(pages("normal") * PAGE_SIZE));
    row("zero pages, as the source QEMU counted", format!("{} ", pages("duplicate")));
    Ok(())
}

fn path(image: &Path) -> String {
    image.display().to_string()
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

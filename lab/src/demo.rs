//! The demonstration: a Linux guest is saved, restored and moved while it counts.
//!
//! All QEMUs are stock; towline is run as a user would, and each command is printed before it begins. The guest itself
//! reports the hash of its memory and its counter before and after.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::linux::LinuxGuest;
use crate::qemu::{Builder, Qemu, Version};
use crate::towline::Towline;

const MEMORY_MIB: u64 = 512;
const FILL_MIB: u64 = 256;
const MIB: u64 = 1 << 20;
const SEED: u64 = 2024;
/// Offset in the image that is in the middle of its memory.
const CONTENT_FROM: u64 = 128 * MIB;
const BOOT_WITHIN: Duration = Duration::from_secs(120);
const COPY_WITHIN: Duration = Duration::from_secs(300);

/// A running demonstration.
struct Demo<'a> {
    towline: &'a Path,
    directory: tempfile::TempDir,
    builder: Builder,
}

/// The memory of the guest as it reports it.
struct State {
    hash: String,
    tick: u64,
}

/// Shows a save, a damaged image, an instant restore and a live move.
///
/// # Errors
/// A step failed, or the guest is not what it was.
pub fn run(towline: &Path) -> Result<()> {
    let builder = Qemu::builder(Version::V10_0).linux().memory_mib(MEMORY_MIB).processors(2);
    let directory = tempfile::Builder::new().prefix("towline-demo-").tempdir()?;
    let demo = Demo { towline, directory, builder };
    println!("towline is {}; files are in {}\n", towline.display(), demo.directory.path().display());

    let source =
        step(&format!("start QEMU 10.0 with a Linux of {MEMORY_MIB} MiB"), || demo.builder.clone().start())?;
    let mut guest = step("wait until it has booted", || source.linux(BOOT_WITHIN))?;
    step(&format!("have it fill {FILL_MIB} MiB with random data"), || guest.fill(FILL_MIB * MIB, SEED))?;
    let before = state(&mut guest)?;
    println!("      its memory has the hash {}, and it counts: {}", before.hash, before.tick);

    let image = demo.path("guest.img");
    heading("A save: the guest continues to run");
    demo.towline(&["copy", "--resume", &qmp(&source), &image])?;
    show_size(&image)?;
    demo.damage(&image)?;
    let restored = demo.instant_restore(&image)?;
    let mut guest = restored.linux(BOOT_WITHIN)?;
    demo.compare(&mut guest, &before)?;
    // The agent has one connection.
    drop(guest);
    source.kill()?;
    demo.live_move(&restored, &before)?;
    println!("\nNext: README.md has recipes, `towline --help` the commands, docs/README.md the guides;");
    println!("try `towline run`, which starts QEMU by itself, or `towline net` and `towline vsock`.");
    Ok(())
}

impl Demo<'_> {
    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Changes a byte of a copy of the image, which `inspect --verify` has to find.
    fn damage(&self, image: &str) -> Result<()> {
        heading("A damaged byte: it is found, and named");
        let copy = self.path("damaged.img");
        self.towline(&["copy", image, &copy])?;
        let file = File::options().read(true).write(true).open(&copy)?;
        let offset = content(&file)?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset)?;
        step(&format!("change the byte at {offset:#x} of {copy}"), || {
            Ok(file.write_all_at(&[byte[0] ^ 0x10], offset)?)
        })?;
        let words = ["inspect", "--verify", copy.as_str()];
        println!("  $ towline {}", words.join(" "));
        let finished = Towline::start(self.towline, words)?.wait(COPY_WITHIN)?;
        ensure!(finished.status.code() == Some(1), "a damaged image was not found: {}", finished.stdout);
        print!("{}", indented(&finished.stderr));
        Ok(())
    }

    fn instant_restore(&self, image: &str) -> Result<Qemu> {
        heading("An instant restore: the guest runs at once, its memory follows");
        let destination = self.waiting()?;
        self.towline(&["copy", "--postcopy", image, &qmp(&destination)])?;
        Ok(destination)
    }

    /// Moves the guest, and shows its counter before and after.
    fn live_move(&self, source: &Qemu, before: &State) -> Result<()> {
        heading("A live move: the guest counts while it changes its QEMU");
        let destination = self.waiting()?;
        let mut guest = source.linux(BOOT_WITHIN)?;
        let from = guest.wait_ticking(BOOT_WITHIN)?;
        println!("      it counts: {from}");
        self.towline(&["move", &qmp(source), &qmp(&destination)])?;
        let mut guest = destination.linux(BOOT_WITHIN)?;
        let to = guest.wait_ticking(BOOT_WITHIN)?;
        ensure!(to > from, "the guest counts {to} after the move, and {from} before");
        println!("      it counts: {to}");
        self.compare(&mut guest, before)
    }

    fn waiting(&self) -> Result<Qemu> {
        let builder = self.builder.clone();
        step("start a second QEMU with -incoming defer", || builder.incoming_defer().start())
    }

    /// The guest has the same memory, and has counted on.
    fn compare(&self, guest: &mut LinuxGuest, before: &State) -> Result<()> {
        let State { hash, tick } = state(guest)?;
        ensure!(hash == before.hash, "the guest's memory has the hash {hash}, expected {}", before.hash);
        ensure!(tick > before.tick, "the guest counts {tick}, expected more than {}", before.tick);
        println!("      its memory has the same hash, and it counts: {tick}");
        Ok(())
    }

    /// Prints and runs a command, and prints its report.
    fn towline(&self, words: &[&str]) -> Result<()> {
        println!("  $ towline {}", words.join(" "));
        std::io::stdout().flush()?;
        let finished = Towline::start(self.towline, words)?.wait_done(COPY_WITHIN)?;
        print!("{}", indented(&finished.stdout));
        Ok(())
    }
}

/// Returns the offset of a byte in the memory of an image that is not zero: pages of zeros are not stored.
fn content(image: &File) -> Result<u64> {
    let mut page = [0; 4096];
    for offset in (CONTENT_FROM..image.metadata()?.len()).step_by(page.len()) {
        image.read_at(&mut page, offset)?;
        if let Some(index) = page.iter().position(|byte| *byte != 0) {
            return Ok(offset + index as u64);
        }
    }
    anyhow::bail!("the image has no content behind {CONTENT_FROM:#x}")
}

fn qmp(qemu: &Qemu) -> String {
    format!("qmp:{}", qemu.qmp_path().display())
}

fn state(guest: &mut LinuxGuest) -> Result<State> {
    let tick = guest.wait_ticking(BOOT_WITHIN)?;
    Ok(State { hash: guest.hash()?, tick })
}

fn heading(text: &str) {
    println!("\n{text}");
}

/// Prints a step as it begins, runs it, and prints its duration.
fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    print!("  {what} … ");
    std::io::stdout().flush()?;
    let started = Instant::now();
    let outcome = work();
    let mark = if outcome.is_ok() { "" } else { " FAILED after" };
    println!("{mark} {:.1} s", started.elapsed().as_secs_f64());
    outcome
}

fn show_size(image: &str) -> Result<()> {
    let metadata = std::fs::metadata(PathBuf::from(image)).context("the image")?;
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    println!(
        "      the image is {:.0} MiB long and occupies {:.0} MiB: zero pages are holes",
        mib(metadata.len()),
        mib(metadata.blocks() * 512)
    );
    Ok(())
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("      {line}\n")).collect()
}

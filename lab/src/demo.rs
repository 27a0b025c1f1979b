//! The demonstration: a Linux guest is saved, restored and moved while it counts and talks.
//!
//! ```text
//!   br0 ── tap0, tap1, tap2 ── towline net, for each QEMU ── source ─► guest.img ─► restored ─► moved
//! ```
//! Without root the guest has no network card. All QEMUs are stock; towline is run as a user would, and each command is printed before it begins. The guest itself
//! reports the hash of its memory and its counter before and after.

mod network;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::linux::LinuxGuest;
use crate::paths;
use crate::qemu::{Builder, MemoryBackend, Qemu, Version};
use crate::towline::Towline;
use network::{Card, Hub, Talk};

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
    /// None: no network can be made here.
    hub: Option<Hub>,
}

/// A QEMU with its card.
struct Machine {
    qemu: Qemu,
    _card: Option<Card>,
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
    let builder = builder.memory_backend(MemoryBackend::Memfd { prealloc: false });
    let directory = tempfile::Builder::new().prefix("towline-demo-").tempdir()?;
    let shown = towline.strip_prefix(paths::workspace()).unwrap_or(towline).display();
    println!("towline is {shown}; files are in {}", directory.path().display());
    let hub = match Hub::new() {
        Ok(hub) => Some(hub),
        Err(error) => {
            println!("the guest has no network card: {error:#}");
            None
        }
    };
    let mut demo = Demo { towline, directory, builder, hub };

    heading("A guest: stock QEMU, Linux, and a network card by towline");
    let source =
        demo.start(&format!("start QEMU 10.0 with a Linux of {MEMORY_MIB} MiB"), demo.builder.clone())?;
    let mut guest = step("wait until it has booted", || source.qemu.linux(BOOT_WITHIN))?;
    if demo.hub.is_some() {
        Hub::set_up(&mut guest, BOOT_WITHIN)?;
    }
    step(&format!("have it fill {FILL_MIB} MiB with random data"), || guest.fill(FILL_MIB * MIB, SEED))?;
    let before = state(&mut guest)?;
    println!("      its memory has the hash {}, and it counts: {}", before.hash, before.tick);

    let image = demo.path("guest.img");
    heading("A save: the guest continues to run");
    demo.towline(&["copy", "--resume", &qmp(&source.qemu), &image])?;
    show_size(&image)?;
    demo.damage(&image)?;
    source.qemu.kill()?;
    drop(guest);
    drop(source);
    let restored = demo.instant_restore(&image)?;
    let mut guest = restored.qemu.linux(BOOT_WITHIN)?;
    demo.compare(&mut guest, &before)?;
    // The agent has one connection.
    drop(guest);
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

    /// Starts a QEMU, with a card of its own.
    fn start(&mut self, what: &str, builder: Builder) -> Result<Machine> {
        let Some(hub) = &mut self.hub else {
            return Ok(Machine { qemu: step(what, || builder.start())?, _card: None });
        };
        let command = hub.prepare_card(self.directory.path())?;
        println!("  $ towline {} &", command.words.join(" "));
        let card = hub.start_card(self.towline, command)?;
        let builder = builder.args([
            "-chardev".to_owned(),
            format!("socket,id=net0,path={},reconnect=1", card.socket.display()),
            "-netdev".to_owned(),
            "vhost-user,id=n0,chardev=net0".to_owned(),
            "-device".to_owned(),
            "virtio-net-pci,id=card,netdev=n0,mac=52:54:00:07:00:02".to_owned(),
        ]);
        Ok(Machine { qemu: step(what, || builder.start())?, _card: Some(card) })
    }

    fn instant_restore(&mut self, image: &str) -> Result<Machine> {
        heading("An instant restore: the guest runs at once, its memory follows");
        let destination = self.waiting()?;
        self.towline(&["copy", "--postcopy", image, &qmp(&destination.qemu)])?;
        Ok(destination)
    }

    /// Moves the guest, and shows its counter before and after, and what its connection noticed.
    fn live_move(&mut self, source: &Machine, before: &State) -> Result<()> {
        heading("A live move: the guest counts, and keeps its connection, while it changes its QEMU");
        let destination = self.waiting()?;
        let mut guest = source.qemu.linux(BOOT_WITHIN)?;
        let from = guest.wait_ticking(BOOT_WITHIN)?;
        println!("      it counts: {from}");
        let talk = self.hub.as_ref().map(Hub::talk).transpose()?;
        self.towline(&["move", &qmp(&source.qemu), &qmp(&destination.qemu)])?;
        let mut guest = destination.qemu.linux(BOOT_WITHIN)?;
        let to = guest.wait_ticking(BOOT_WITHIN)?;
        ensure!(to > from, "the guest counts {to} after the move, and {from} before");
        println!("      it counts: {to}");
        if let Some(talked) = talk.map(Talk::end).transpose()? {
            println!(
                "      one TCP connection, {} echoes: the slowest took {} ms",
                talked.exchanges,
                talked.longest.as_millis()
            );
        }
        self.compare(&mut guest, before)
    }

    fn waiting(&mut self) -> Result<Machine> {
        let builder = self.builder.clone().incoming_defer();
        self.start("start a second QEMU with -incoming defer", builder)
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

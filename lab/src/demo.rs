//! The demonstration: a Linux guest is saved, restored and moved while it counts and talks.
//!
//! ```text
//!   br0 ── tap0, tap1, tap2 ── towline net, for each QEMU ── source ─► guest.img ─► restored ─► moved
//! ```
//! Without root the guest has no network card. All QEMUs are stock; each command is printed before it is run,
//! as it can be typed in the workspace's directory. The guest itself reports the hash of its memory and its
//! counter before and after. The files stay.

mod network;
mod shown;

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::expect::qmp;
use crate::linux::LinuxGuest;
use crate::paths;
use crate::qemu::{Builder, MemoryBackend, Qemu, Version};
use crate::towline::Towline;
use network::{Hub, Talk};
use shown::{fact, heading, relative, step};

const MEMORY_MIB: u64 = 512;
const FILL_MIB: u64 = 256;
const MIB: u64 = 1 << 20;
const SEED: u64 = 2024;
/// Offset in the image that is in the middle of its memory.
const CONTENT_FROM: u64 = 128 * MIB;
const BOOT_WITHIN: Duration = Duration::from_secs(120);
const COPY_WITHIN: Duration = Duration::from_secs(300);
/// Directory of the files, beside those of the build.
const DIRECTORY: &str = "demo-files";

/// A running demonstration.
struct Demo<'a> {
    towline: &'a Path,
    directory: PathBuf,
    builder: Builder,
    /// None: no network can be made here.
    hub: Option<Hub>,
}

/// A QEMU, and the card that serves it until its end.
struct Machine {
    qemu: Qemu,
    _card: Option<Towline>,
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
    let started = Instant::now();
    // Relative paths are short enough for sockets, wherever the workspace is.
    std::env::set_current_dir(paths::workspace())?;
    let (build, target) = (towline.parent().context("a build")?, towline.ancestors().nth(2));
    let directory = PathBuf::from(relative(&target.context("a target directory")?.join(DIRECTORY).display()));
    if directory.exists() {
        std::fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())?;
    }
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    heading(&format!("Files are in {}, and these commands are run in this directory", directory.display()));
    println!("  $ export PATH=$PWD/{}:$PATH", relative(&build.display()));
    let builder = Qemu::builder(Version::V10_0).linux().memory_mib(MEMORY_MIB).processors(2);
    let builder = builder.memory_backend(MemoryBackend::Memfd { prealloc: false });
    let hub = Hub::new().inspect_err(|error| fact(&format!("the guest has no network card: {error:#}"))).ok();
    let mut demo = Demo { towline, directory, builder, hub };

    heading("A guest: Linux in a stock QEMU, with a network card by towline");
    let source = demo.start("a", demo.builder.clone())?;
    let mut guest = step("it boots", || source.qemu.linux(BOOT_WITHIN))?;
    if demo.hub.is_some() {
        Hub::set_up(&mut guest, BOOT_WITHIN)?;
    }
    step(&format!("it fills {FILL_MIB} MiB with random data"), || guest.fill(FILL_MIB * MIB, SEED))?;
    let before = state(&mut guest)?;
    fact(&format!("its memory has the hash {}, and its clock ticks: {}", before.hash, before.tick));

    let image = demo.path("guest.img");
    heading("A save: the guest continues to run");
    demo.towline(&["copy", "--resume", &qmp(&source.qemu), &image])?;
    show_size(&image)?;
    demo.damage(&image)?;
    source.qemu.kill()?;
    drop(guest);
    drop(source);
    heading("An instant restore: the guest runs at once, its memory follows");
    let restored = demo.waiting("b")?;
    demo.towline(&["copy", "--postcopy", &image, &qmp(&restored.qemu)])?;
    let mut guest = restored.qemu.linux(BOOT_WITHIN)?;
    compare(&mut guest, &before)?;
    // The agent has one connection.
    drop(guest);
    demo.live_move(&restored, &before)?;
    println!("\nDone in {:.0} s. Next:", started.elapsed().as_secs_f64());
    println!("  $ towline inspect {image}");
    println!("  $ towline move --help");
    println!("README.md has a block to paste and five recipes; docs/README.md lists the guides.");
    Ok(())
}

impl Demo<'_> {
    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Changes a byte of a copy of the image, which `inspect --verify` has to find.
    fn damage(&self, image: &str) -> Result<()> {
        heading("A damaged byte: it is found, and named");
        let copy = self.path("damaged.img");
        self.towline(&["copy", image, &copy])?;
        let file = File::open(&copy)?;
        let offset = content(&file)?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset)?;
        let line = format!(
            "printf '\\{:03o}' | dd of={copy} bs=1 seek={offset} conv=notrunc status=none",
            byte[0] ^ 0x10
        );
        println!("  $ {line}");
        let status = Command::new("sh").args(["-c", &line]).status()?;
        ensure!(status.success(), "{line}: {status}");
        let words = ["inspect", "--verify", copy.as_str()];
        shown::command(["towline"].into_iter().chain(words));
        let finished = Towline::start(self.towline, words)?.wait(COPY_WITHIN)?;
        ensure!(finished.status.code() == Some(1), "a damaged image was not found: {}", finished.stdout);
        shown::output(&finished.stderr);
        std::fs::remove_file(&copy)?;
        Ok(())
    }

    /// Starts a QEMU, with its own card.
    fn start(&mut self, name: &str, builder: Builder) -> Result<Machine> {
        let directory = self.directory.join(name);
        let mut builder = builder.directory(&directory);
        let mut card = None;
        if let Some(hub) = &mut self.hub {
            let socket = self.directory.join(format!("{name}-net.sock"));
            card = Some(hub.start_card(self.towline, &socket)?);
            let chardev = format!("socket,id=net0,path={},reconnect=1", socket.display());
            builder = builder.args(["-chardev", &chardev, "-netdev", "vhost-user,id=n0,chardev=net0"]);
            builder = builder.args(["-device", "virtio-net-pci,id=card,netdev=n0,mac=52:54:00:07:00:02"]);
        }
        shown::background(&builder.command(&directory)?);
        Ok(Machine { qemu: builder.start()?, _card: card })
    }

    /// Moves the guest, and shows its counter before and after, and what its connection noticed.
    fn live_move(&mut self, source: &Machine, before: &State) -> Result<()> {
        heading(
            "A live move: the guest's clock ticks on, and its connection lasts, while it changes its QEMU",
        );
        let destination = self.waiting("c")?;
        let mut guest = source.qemu.linux(BOOT_WITHIN)?;
        let from = guest.wait_ticking(BOOT_WITHIN)?;
        fact(&format!("its clock ticks: {from}"));
        let talk = self.hub.as_ref().map(Hub::talk).transpose()?;
        self.towline(&["move", &qmp(&source.qemu), &qmp(&destination.qemu)])?;
        let mut guest = destination.qemu.linux(BOOT_WITHIN)?;
        let to = guest.wait_ticking(BOOT_WITHIN)?;
        ensure!(to > from, "the guest counts {to} after the move, and {from} before");
        fact(&format!("its clock ticks: {to}"));
        if let Some(talked) = talk.map(Talk::end).transpose()? {
            fact(&format!(
                "its TCP connection lasts: {} echoes, of which the slowest took {} ms",
                talked.exchanges,
                talked.longest.as_millis()
            ));
        }
        compare(&mut guest, before)
    }

    /// Starts a QEMU that waits for a guest.
    fn waiting(&mut self, name: &str) -> Result<Machine> {
        self.start(name, self.builder.clone().incoming_defer())
    }

    /// Prints and runs a command, and prints its report.
    fn towline(&self, words: &[&str]) -> Result<()> {
        shown::command(["towline"].into_iter().chain(words.iter().copied()));
        let finished = Towline::start(self.towline, words)?.wait_done(COPY_WITHIN)?;
        shown::output(&finished.stdout);
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
    anyhow::bail!("the image has no content after {CONTENT_FROM:#x}")
}

fn state(guest: &mut LinuxGuest) -> Result<State> {
    let tick = guest.wait_ticking(BOOT_WITHIN)?;
    Ok(State { hash: guest.hash()?, tick })
}

/// The guest has the same memory, and has counted on.
fn compare(guest: &mut LinuxGuest, before: &State) -> Result<()> {
    let State { hash, tick } = state(guest)?;
    ensure!(hash == before.hash, "the guest's memory has the hash {hash}, expected {}", before.hash);
    ensure!(tick > before.tick, "the guest counts {tick}, expected more than {}", before.tick);
    fact(&format!("its memory has the same hash, and its clock ticks: {tick}"));
    Ok(())
}

fn show_size(image: &str) -> Result<()> {
    let metadata = std::fs::metadata(PathBuf::from(image)).context("the image")?;
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    fact(&format!(
        "the image is {:.0} MiB long and occupies {:.0} MiB: zero pages are holes",
        mib(metadata.len()),
        mib(metadata.blocks() * 512)
    ));
    Ok(())
}

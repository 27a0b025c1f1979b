//! Pages of `--report` in a browser: pictures of them, light, dark and narrow, below `target/report-browser`, to be looked at.
//!
//! ```text
//!   Linux in a QEMU ── towline move --report ──► another QEMU     move.html ─┐
//!   an image ── towline run --count --report ──► clones           run.html ──┴► headless chromium ─► move-light.png, …
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use towline_lab::{Qemu, Towline, Version};

use crate::command::{cargo, run as run_command, target_directory};
use crate::setup::apt;

const COPY_WITHIN: Duration = Duration::from_secs(120);
const BOOT_WITHIN: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 512;
const MIB: u64 = 1 << 20;
/// Content of the guest's memory, and the rate of the move, for several samples.
const FILL: u64 = 192 * MIB;
const SEED: u64 = 1;
const RATE: &str = "48M";
/// Load of the guest meanwhile, in bytes per second and in bytes.
const DIRTY_RATE: u64 = 16 * MIB;
const DIRTY: u64 = 32 * MIB;
const CLONES: &str = "6";
/// A picture of an empty page is smaller.
const PICTURE_MIN: u64 = 20 << 10;
/// The first line of every PNG.
const PNG: &[u8] = b"\x89PNG\r\n";
/// Pictures, and what makes the browser prefer those colours.
const SCHEMES: [(&str, &[&str]); 2] =
    [("light", &[]), ("dark", &["--force-dark-mode", "--blink-settings=preferredColorScheme=0"])];
/// Width of a phone, in a frame: the browser's own windows are wider.
const NARROW: u32 = 400;

/// Makes the pages and their pictures.
pub(super) fn run() -> Result<()> {
    apt::require(&["chromium", "fonts-dejavu-core"])?;
    let is_debug = std::env::var_os("TOWLINE_SOAK_DEBUG").is_some();
    let (profile, build) = if is_debug { ("dev", "debug") } else { ("release", "release") };
    run_command(&mut cargo(["build", "--package", "towline-cli", "--profile", profile]))?;
    let target = target_directory()?;
    let directory = target.join("report-browser");
    fs::create_dir_all(&directory)?;
    let towline = target.join(build).join("towline");
    let pages = [("move", move_page as MakePage), ("run", run_page)];
    for (name, make) in pages {
        let page = directory.join(format!("{name}.html"));
        make(&towline, &page)?;
        let mut pictures = Vec::new();
        for (scheme, options) in SCHEMES {
            pictures.push(picture(&page, &directory.join(format!("{name}-{scheme}.png")), options)?);
        }
        ensure!(pictures[0] != pictures[1], "{name}: the page looks the same, light and dark");
        let frame = directory.join(format!("{name}-narrow.html"));
        let html = format!(
            "<!doctype html><body style=\"margin:0\"><iframe src=\"{name}.html\" width=\"{NARROW}\" height=\"1500\" style=\"border:0\"></iframe>"
        );
        fs::write(&frame, html)?;
        picture(&frame, &directory.join(format!("{name}-narrow.png")), &[])?;
    }
    println!("report-browser: look at the pictures in {}", directory.display());
    Ok(())
}

/// Makes a page by running this towline.
type MakePage = fn(&Path, &Path) -> Result<()>;

/// Moves a guest that writes its memory from one QEMU to another, with a page about it.
fn move_page(towline: &Path, page: &Path) -> Result<()> {
    let builder = Qemu::builder(Version::V10_0).linux().memory_mib(MEMORY_MIB).processors(2);
    let source = builder.clone().start()?;
    let destination = builder.incoming_defer().start()?;
    let mut guest = source.linux(BOOT_WITHIN)?;
    guest.fill(FILL, SEED)?;
    guest.dirty(DIRTY_RATE, DIRTY)?;
    let page = page.display().to_string();
    let ends = [&source, &destination].map(|qemu| format!("qmp:{}", qemu.qmp_path().display()));
    let words = ["move", "--max-bandwidth", RATE, "--report", &page, &ends[0], &ends[1]];
    Towline::start(towline, words)?.wait_done(COPY_WITHIN)?;
    Ok(())
}

/// A process that ends with this.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs clones of a guest without an operating system, with a page about them.
fn run_page(towline: &Path, page: &Path) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name);
    let text = |path: PathBuf| path.display().to_string();
    let (socket, image) = (text(path("a.qmp")), text(path("guest.img")));
    let mut qemu = Version::V10_0.command();
    qemu.args(["-machine", "q35", "-m", "256", "-display", "none"]);
    qemu.args(["-qmp", &format!("unix:{socket},server=on,wait=off")]).stdin(Stdio::null());
    let qemu = Killed(qemu.spawn().context("QEMU")?);
    Towline::start(towline, ["copy", &format!("qmp:{socket}"), &image])?.wait_done(COPY_WITHIN)?;
    drop(qemu);
    let page_text = page.display().to_string();
    let name = format!("report-{}", std::process::id());
    let options = ["--name", &name, "--count", CLONES, "--report", &page_text];
    // The page of before would be taken for the new one.
    let _ = fs::remove_file(page);
    let run = Towline::start(towline, ["run", image.as_str()].into_iter().chain(options))?;
    towline_lab::wait_until("the page", COPY_WITHIN, || Ok(page.exists().then_some(())))?;
    // With it the guests end.
    drop(run);
    Ok(())
}

/// Draws the page; fails if the browser has anything to say about it.
fn picture(page: &Path, picture: &Path, options: &[&str]) -> Result<Vec<u8>> {
    let profile = tempfile::tempdir()?;
    let mut browser = Command::new("timeout");
    browser.args(["--kill-after=5", "120", "chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]);
    // Nothing can be loaded: no name resolves.
    browser.args(["--hide-scrollbars", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]);
    browser.args(["--window-size=1000,1500", &format!("--user-data-dir={}", profile.path().display())]);
    browser.args(options).arg(format!("--screenshot={}", picture.display()));
    let output = browser.arg(format!("file://{}", page.display())).output().context("chromium")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "chromium ended with {}: {text}", output.status);
    if let Some(line) = text.lines().find(|line| line.contains("CONSOLE")) {
        bail!("{}: {line}", page.display());
    }
    let bytes = fs::read(picture).with_context(|| picture.display().to_string())?;
    ensure!(bytes.starts_with(PNG) && bytes.len() as u64 >= PICTURE_MIN, "{} is empty", picture.display());
    Ok(bytes)
}

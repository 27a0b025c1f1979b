//! The page of `--report` in a browser: pictures of it, light and dark, below `target/report-browser`, to be looked at.
//!
//! ```text
//!   a QEMU ── towline copy --report ──► another QEMU      page.html ─► headless chromium ─► light.png, dark.png
//! ```

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use towline_lab::{Qemu, Towline, Version};

use crate::command::{cargo, run as run_command, target_directory};
use crate::setup::apt;

const COPY_WITHIN: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 512;
/// Slow enough for several samples.
const RATE: &str = "2M";
/// A picture of an empty page is smaller.
const PICTURE_MIN: u64 = 20 << 10;
/// The first line of every PNG.
const PNG: &[u8] = b"\x89PNG\r\n";
/// Pictures, and what makes the browser prefer those colours.
const SCHEMES: [(&str, &[&str]); 2] =
    [("light", &[]), ("dark", &["--force-dark-mode", "--blink-settings=preferredColorScheme=0"])];

/// Makes a page and its pictures.
pub(super) fn run() -> Result<()> {
    apt::require(&["chromium", "fonts-dejavu-core"])?;
    let is_debug = std::env::var_os("TOWLINE_SOAK_DEBUG").is_some();
    let (profile, build) = if is_debug { ("dev", "debug") } else { ("release", "release") };
    run_command(&mut cargo(["build", "--package", "towline-cli", "--profile", profile]))?;
    let target = target_directory()?;
    let directory = target.join("report-browser");
    fs::create_dir_all(&directory)?;
    let page = directory.join("page.html");
    report(&target.join(build).join("towline"), &page)?;
    let mut pictures = Vec::new();
    for (scheme, options) in SCHEMES {
        pictures.push(picture(&page, &directory.join(format!("{scheme}.png")), options)?);
    }
    ensure!(pictures[0] != pictures[1], "the page looks the same, light and dark");
    println!("report-browser: look at light.png and dark.png in {}", directory.display());
    Ok(())
}

/// Copies a guest from one QEMU to another, with a page about it.
fn report(towline: &Path, page: &Path) -> Result<()> {
    let builder = Qemu::builder(Version::V10_0).memory_mib(MEMORY_MIB);
    let source = builder.clone().start()?;
    let destination = builder.incoming_defer().start()?;
    let page = page.display().to_string();
    let ends = [&source, &destination].map(|qemu| format!("qmp:{}", qemu.qmp_path().display()));
    let words = ["copy", "--max-bandwidth", RATE, "--report", &page, &ends[0], &ends[1]];
    Towline::start(towline, words)?.wait_done(COPY_WITHIN)?;
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

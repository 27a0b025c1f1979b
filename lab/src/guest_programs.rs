//! Programs of this machine in a Linux guest: `socat`, `perl` and others that are not part of towline.
//!
//! Linux accepts several concatenated archives as its initramfs, so they follow the guest's own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cpio::Archive;

/// Writes the archive into `directory`.
pub(crate) fn archive(base: &Path, programs: &[PathBuf], directory: &Path) -> Result<PathBuf> {
    let mut files: BTreeSet<PathBuf> = programs.iter().cloned().collect();
    for program in programs {
        files.extend(libraries(program)?);
    }
    let mut archive = Archive::default();
    let directories: BTreeSet<&Path> = files.iter().flat_map(|file| file.ancestors().skip(1)).collect();
    for directory in directories.into_iter().filter(|directory| directory.parent().is_some()) {
        archive.directory(relative(directory)?);
    }
    for file in &files {
        let content = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        archive.file(relative(file)?, 0o755, &content);
    }
    let mut content = std::fs::read(base)?;
    content.extend(archive.finish());
    let made = directory.join("initramfs");
    std::fs::write(&made, content)?;
    Ok(made)
}

fn relative(path: &Path) -> Result<&str> {
    path.to_str()
        .and_then(|path| path.strip_prefix('/'))
        .with_context(|| format!("{} is odd", path.display()))
}

/// Returns the libraries that the dynamic linker would load for a program, and the linker.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd cannot be started")?;
    ensure!(
        output.status.success(),
        "ldd {}: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let paths = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(paths.map(PathBuf::from).collect())
}

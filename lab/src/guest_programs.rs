//! Programs of this machine in a Linux guest: `socat`, `perl`, or the very binary under test.
//!
//! ```text
//!   host   ldd PROGRAM ─► cpio of bin/PROGRAM and its libraries, after the guest's initramfs    guest   /bin/PROGRAM
//! ```
//! Linux accepts several concatenated archives as its initramfs. Limits: the guest's processor must have the features that the
//! host's code was compiled for (`-cpu max` has them); files that a program opens at run time are missing.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::paths;

/// Script that packs the working directory with the busybox that it is given, as the set-up packs the guest's own archive.
const PACK: &str = "find . -mindepth 1 | \"$0\" cpio -o -H newc -R 0:0";

/// Writes `base` with these programs into `directory`.
pub(crate) fn archive(base: &Path, programs: &[PathBuf], directory: &Path) -> Result<PathBuf> {
    let tree = TempDir::new_in(directory)?;
    for program in programs {
        let name = program.file_name().context("a program has a name")?;
        place(program, &tree.path().join("bin").join(name))?;
        for library in libraries(program)? {
            place(&library, &tree.path().join(library.strip_prefix("/")?))?;
        }
    }
    let made = directory.join("initramfs");
    fs::copy(base, &made).with_context(|| format!("{} cannot be copied", base.display()))?;
    let mut pack = Command::new("sh");
    pack.args(["-c", PACK]).arg(paths::lab_directory().join("busybox/bin/busybox")).current_dir(&tree);
    let packed = pack.stdout(File::options().append(true).open(&made)?).output()?;
    ensure!(packed.status.success(), "cpio fails: {}", String::from_utf8_lossy(&packed.stderr));
    Ok(made)
}

fn place(file: &Path, at: &Path) -> Result<()> {
    fs::create_dir_all(at.parent().expect("it is below the tree"))?;
    fs::copy(file, at).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok(())
}

/// Files that the program's loader opens, itself included.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd cannot be started")?;
    let message = String::from_utf8_lossy(&output.stdout);
    // It fails for a static program.
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(message.lines().filter_map(path).collect())
}

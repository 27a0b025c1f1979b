//! Programs of this machine in a guest: on a disk, with the libraries that they load.
//!
//! ```text
//!   host   ldd PROGRAM ─► tar of bin/PROGRAM and its libraries ─► a raw disk    guest   tar -x -f /dev/vda
//! ```
//! So the very binary under test runs there, with all its libraries. Limits: the guest's processor must have
//! the features that the host's code was compiled for (`-cpu max` has them); files that a program opens at
//! run time are missing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::{NamedTempFile, TempDir};

use crate::LinuxGuest;

/// An emulated disk gives some hundred MiB in a second.
const UNPACK_WITHIN: Duration = Duration::from_secs(60);

/// A disk with programs, for one or more guests. Dropping it removes its file.
pub struct ProgramDisk {
    file: NamedTempFile,
}

impl ProgramDisk {
    /// Packs these programs, which will be in the guest's `/bin`.
    pub fn pack(programs: &[&Path]) -> Result<Self> {
        let tree = tempfile::Builder::new().prefix("towline-lab-").tempdir()?;
        for program in programs {
            let name = program.file_name().context("a program has a name")?;
            place(&tree, Path::new("bin").join(name).as_path(), program)?;
            for library in libraries(program)? {
                place(&tree, library.strip_prefix("/")?, &library)?;
            }
        }
        let file = tempfile::Builder::new().prefix("towline-lab-").suffix(".tar").tempfile()?;
        let tar =
            Command::new("tar").arg("-cf").arg(file.path()).arg("-C").arg(tree.path()).arg(".").status()?;
        ensure!(tar.success(), "tar ends with {tar}");
        Ok(Self { file })
    }

    /// Arguments of QEMU ([`Builder::args`](crate::Builder::args)) that make it the guest's first disk.
    pub fn arguments(&self) -> [String; 4] {
        let path = self.file.path().display();
        let drive = format!("id=programs,if=none,format=raw,readonly=on,file={path}");
        ["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=programs".into()]
    }
}

impl LinuxGuest {
    /// Unpacks the guest's [`ProgramDisk`] into its root.
    pub fn unpack_programs(&mut self) -> Result<()> {
        self.shell("busybox tar -x -f /dev/vda -C /", UNPACK_WITHIN).map(drop)
    }
}

fn place(tree: &TempDir, at: &Path, file: &Path) -> Result<()> {
    let at = tree.path().join(at);
    std::fs::create_dir_all(at.parent().expect("it is below the tree"))?;
    std::fs::copy(file, &at).with_context(|| format!("{} cannot be read", file.display()))?;
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

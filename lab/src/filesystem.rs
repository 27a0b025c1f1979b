//! A filesystem in a file, mounted in a separate namespace that ends when its [`Filesystem`] is dropped.
//!
//! ```text
//!   unshare --mount sh -c 'mount …; sleep'     holds the mount; dies with this process, and the mount with its last user
//!   nsenter --mount --root PROGRAM             a towline inside it
//! ```
//! All other paths are those of the host. Limits: needs root, the kernel's driver and its `mkfs`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::process;
use crate::wait::wait_until;

const MADE_WITHIN: Duration = Duration::from_secs(30);

/// A mounted filesystem; see the module's picture.
pub struct Filesystem {
    holder: Child,
    directory: TempDir,
}

impl Filesystem {
    /// Creates a filesystem of this kind (`xfs`, `btrfs`, `ext4`, `tmpfs`) with this capacity.
    ///
    /// # Errors
    /// The filesystem cannot be made here: the reason for which a test is skipped.
    pub fn new(kind: &str, mib: u64) -> Result<Self> {
        let directory = TempDir::with_prefix("towline-lab-")?;
        let (file, mount) = (directory.path().join("filesystem"), directory.path().join("mounted"));
        std::fs::create_dir(&mount)?;
        let (file, mount) = (file.display().to_string(), mount.display().to_string());
        let script = match kind {
            "tmpfs" => format!("mount -t tmpfs -o size={mib}M,mode=0755 tmpfs {mount}"),
            _ => {
                let truncate = format!("truncate -s {mib}M {file}");
                format!("{truncate} && mkfs.{kind} -q {file} && mount -t {kind} -o loop {file} {mount}")
            }
        };
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("{script} && exec sleep infinity")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let holder = process::spawn(command).context("unshare cannot be started")?;
        let mut filesystem = Self { holder, directory };
        let mounts = format!("/proc/{}/mounts", filesystem.holder.id());
        wait_until("mounted filesystem", MADE_WITHIN, || {
            let ended = filesystem.holder.try_wait()?;
            ensure!(
                ended.is_none(),
                "no {kind} can be mounted here (root, its driver and mkfs.{kind} are needed)"
            );
            let found = std::fs::read_to_string(&mounts).unwrap_or_default();
            Ok(found.contains(&format!(" {mount} ")).then_some(()))
        })?;
        Ok(filesystem)
    }

    /// Path for programs inside the namespace.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// Command that runs a program in this namespace; the program and its arguments follow.
    pub fn prefix(&self) -> Vec<String> {
        let holder = self.holder.id().to_string();
        ["/usr/bin/nsenter", "--target", &holder, "--mount", "--root", "--"].map(str::to_owned).to_vec()
    }

    /// Copies a file of the host into it.
    pub fn copy(&self, file: &Path) -> Result<()> {
        let prefix = self.prefix();
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).args(["cp", "--sparse=always"]).arg(file).arg(self.path());
        let output = command.output().context("nsenter cannot be started")?;
        ensure!(output.status.success(), "cp fails: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

impl Drop for Filesystem {
    fn drop(&mut self) {
        // The process may have exited already, and a destructor cannot return an error.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

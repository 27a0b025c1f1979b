//! A filesystem in a file, mounted in a separate namespace that ends when its [`Filesystem`] is dropped.
//!
//! All other paths are those of the host. Limits: needs root, the kernel's driver and its `mkfs`.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use tempfile::TempDir;
use towline_lab::Namespace;

/// A mounted filesystem.
pub(crate) struct Filesystem {
    namespace: Namespace,
    directory: TempDir,
}

impl Filesystem {
    /// Creates a filesystem of this kind (`xfs`, `btrfs`, `ext4`, `tmpfs`) with this capacity.
    ///
    /// # Errors
    /// The filesystem cannot be made here: the reason for which a test is skipped.
    pub(crate) fn new(kind: &str, mib: u64) -> Result<Self> {
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
        let namespace = Namespace::new("--mount", &["--mount", "--root"], &script)?;
        Ok(Self { namespace, directory })
    }

    /// Path for programs inside the namespace.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// Command that runs a program in this namespace; the program and its arguments follow.
    pub(crate) fn prefix(&self) -> Vec<String> {
        self.namespace.prefix()
    }

    /// Bytes of the host's disk that its content takes, after a sync.
    pub(crate) fn allocated(&self) -> Result<u64> {
        self.namespace.run(&["sync", "--file-system", &self.path().display().to_string()])?;
        Ok(std::fs::metadata(self.directory.path().join("filesystem"))?.blocks() * 512)
    }

    /// Copies a file of the host into it.
    pub(crate) fn copy(&self, file: &Path) -> Result<()> {
        let [from, to] = [file, &self.path()].map(|path| path.display().to_string());
        self.namespace.run(&["cp", "--sparse=always", &from, &to])
    }
}

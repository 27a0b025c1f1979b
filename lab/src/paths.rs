//! Paths of the parts that the set-up installs for the lab.

use std::path::{Path, PathBuf};

/// The directory that `cargo xtask setup` fills: `target/lab` of the workspace, or `$TOWLINE_LAB`.
pub fn lab_directory() -> PathBuf {
    match std::env::var_os("TOWLINE_LAB") {
        Some(directory) => directory.into(),
        None => workspace().join("target/lab"),
    }
}

/// Root of the workspace in which the lab was built.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("lab lies one level below the root")
}

/// A kernel for Linux guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Debian 12's own, 6.1.
    Debian12,
    /// The kernel of Debian 13's backports, 7.x; not on every machine, see
    /// [`require_kernel`](crate::require_kernel).
    Newest,
}

impl Kernel {
    /// End of the names of its parts in the lab.
    fn suffix(self) -> &'static str {
        match self {
            Self::Debian12 => "",
            Self::Newest => "-newest",
        }
    }
}

/// Returns the kernel image, unpacked where the set-up could, if the set-up has installed it.
pub fn kernel(lab: &Path, kernel: Kernel) -> Option<PathBuf> {
    let tree = lab.join(format!("kernel{}", kernel.suffix()));
    let unpacked = tree.join("vmlinux");
    if unpacked.is_file() {
        return Some(unpacked);
    }
    let is_kernel =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"));
    std::fs::read_dir(tree.join("boot")).ok()?.flatten().map(|entry| entry.path()).find(is_kernel)
}

/// Initramfs of Linux guests with the modules of that kernel.
pub fn initramfs(lab: &Path, kernel: Kernel) -> PathBuf {
    lab.join(format!("initramfs{}", kernel.suffix()))
}

/// The installed emulator from the backports.
pub const QEMU_10_0: &str = "/usr/bin/qemu-system-x86_64";

/// Returns the first part of the lab that is missing.
pub(crate) fn missing() -> Option<PathBuf> {
    let lab = lab_directory();
    let qemu_7_2 = lab.join("qemu-7.2/usr/bin/qemu-system-x86_64");
    let files = [PathBuf::from(QEMU_10_0), qemu_7_2, initramfs(&lab, Kernel::Debian12)];
    let missing = files.into_iter().find(|file| !file.is_file());
    let kernel = kernel(&lab, Kernel::Debian12);
    missing.or_else(|| kernel.is_none().then(|| lab.join("kernel/boot/vmlinuz-*")))
}

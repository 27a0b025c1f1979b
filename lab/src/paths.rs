//! Where the set-up puts what the lab uses.

use std::path::{Path, PathBuf};

/// The directory that `cargo xtask setup` fills: `target/lab` of the workspace, or `$TOWLINE_LAB`.
pub fn lab_directory() -> PathBuf {
    match std::env::var_os("TOWLINE_LAB") {
        Some(directory) => directory.into(),
        None => workspace().join("target/lab"),
    }
}

/// The workspace's root, as it was when the lab was built.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("lab lies one level below the root")
}

/// `LD_LIBRARY_PATH` for a program of an unpacked tree of Debian packages.
pub fn library_path(tree: &Path) -> String {
    let directories = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    directories.map(|directory| tree.join(directory).display().to_string()).join(":")
}

/// The kernel that Linux guests boot, if the set-up has run.
pub fn kernel(lab: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(lab.join("kernel/boot")).ok()?;
    let is_kernel =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"));
    entries.flatten().map(|entry| entry.path()).find(is_kernel)
}

/// The archive that Linux guests boot with.
pub fn initramfs(lab: &Path) -> PathBuf {
    lab.join("initramfs")
}

/// The Python that has `websockets`.
pub fn python(lab: &Path) -> PathBuf {
    lab.join("python/bin/python")
}

/// The Python that has an S3 server.
pub fn s3_python(lab: &Path) -> PathBuf {
    lab.join("python-s3/bin/python")
}

/// The Python that has QEMU's own `qemu.qmp`.
pub fn qmp_python(lab: &Path) -> PathBuf {
    lab.join("python-qmp/bin/python")
}

/// The kernel's own tests of vsock, if their soak has brought them.
pub fn vsock_tests(lab: &Path) -> PathBuf {
    lab.join("vsock-tests")
}

/// The emulator from the backports, installed.
pub const QEMU_10_0: &str = "/usr/bin/qemu-system-x86_64";

/// The first part of the lab that is not there.
pub fn missing() -> Option<String> {
    let lab = lab_directory();
    let qemu_7_2 = lab.join("qemu-7.2/usr/bin/qemu-system-x86_64");
    let files = [PathBuf::from(QEMU_10_0), qemu_7_2, initramfs(&lab)];
    let missing = files.into_iter().find(|file| !file.is_file()).map(|file| file.display().to_string());
    missing
        .or_else(|| kernel(&lab).is_none().then(|| lab.join("kernel/boot/vmlinuz-*").display().to_string()))
}

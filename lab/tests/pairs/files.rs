//! Disks of the pairs, gone with the test.

use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;

use tempfile::TempDir;

/// Bytes of each.
const DISK_BYTES: u64 = 1 << 20;

/// An empty disk of this name, the same each time.
pub(crate) fn disk(name: &str) -> PathBuf {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    let directory =
        DIRECTORY.get_or_init(|| tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap());
    let path = directory.path().join(name);
    if !path.exists() {
        File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
    }
    path
}

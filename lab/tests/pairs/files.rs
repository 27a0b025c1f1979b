//! Disks of the pairs, removed with the test.

use std::path::PathBuf;

use tempfile::TempDir;

/// Size of each, as its guest sees it.
const DISK_BYTES: u64 = 1 << 20;
/// Size of a qcow2 cluster, and its logarithm.
const CLUSTER: u64 = 1 << CLUSTER_BITS;
const CLUSTER_BITS: u32 = 16;

/// Directory of the disks, removed on drop.
pub(crate) struct Disks(TempDir);

impl Disks {
    pub(crate) fn new() -> Self {
        Self(TempDir::with_prefix("towline-lab-").unwrap())
    }

    /// Creates an empty raw disk.
    pub(crate) fn raw(&self, name: &str) -> PathBuf {
        self.disk(name, &[], DISK_BYTES)
    }

    /// Creates an empty qcow2 disk.
    pub(crate) fn qcow2(&self, name: &str) -> PathBuf {
        self.disk(name, &empty_qcow2(), 4 * CLUSTER)
    }

    fn disk(&self, name: &str, content: &[u8], bytes: u64) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

/// Four clusters of version 2 (QEMU's `docs/interop/qcow2.txt`): the header, the refcount table, its one
/// block, and an empty L1 table.
fn empty_qcow2() -> Vec<u8> {
    let [table, block, map] = [1, 2, 3].map(|cluster| cluster * CLUSTER);
    let header = [
        &b"QFI\xfb"[..],
        &2u32.to_be_bytes(),
        // No backing file: offset and length are zero.
        &[0; 8],
        &[0; 4],
        &CLUSTER_BITS.to_be_bytes(),
        &DISK_BYTES.to_be_bytes(),
        // Not encrypted.
        &[0; 4],
        // One entry covers 512 MiB.
        &1u32.to_be_bytes(),
        &map.to_be_bytes(),
        &table.to_be_bytes(),
        &1u32.to_be_bytes(),
        // No snapshots: count and offset are zero.
        &[0; 4],
        &[0; 8],
    ]
    .concat();
    let used = 1u16.to_be_bytes().repeat(4);
    let mut file = Vec::new();
    for (at, part) in [(0, header.as_slice()), (table, &block.to_be_bytes()), (block, &used)] {
        file.resize(usize::try_from(at).unwrap(), 0);
        file.extend_from_slice(part);
    }
    file
}

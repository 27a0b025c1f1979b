//! Drives of a running guest: their files now, and snapshots of all of them at one instant.

use std::fs;
use std::path::PathBuf;

use serde_json::{Map, Value};
use towline_launch::DriveFiles;
use towline_qmp::commands::{BlockDevice, BlockImage, QueryBlock, Transaction, TransactionAction};

use super::{Error, Qemu};
use crate::journal::now_ms;

/// A program in place of one that does not exist any more.
const DEFAULT_PROGRAM: &str = "qemu-system-x86_64";
/// Backing files of a drive that are looked at.
const CHAIN_MAX: usize = 256;

/// A drive with a medium.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Drive {
    /// Its name for people.
    pub(crate) name: String,
    /// The node that its device uses.
    pub(crate) node: String,
    /// True if the guest may write to it.
    pub(crate) is_written: bool,
    /// Size that the guest sees.
    pub(crate) bytes: u64,
    /// Properties that a copy of its content would lose.
    pub(crate) extras: Option<&'static str>,
    pub(crate) files: DriveFiles,
}

impl Drive {
    fn of(device: BlockDevice) -> Option<Self> {
        let BlockDevice { device, qdev, inserted, .. } = device;
        let medium = inserted?;
        let node = medium.node_name.unwrap_or_default();
        let name =
            [Some(device), qdev, Some(node.clone())].into_iter().flatten().find(|name| !name.is_empty());
        let image: &BlockImage = &medium.image;
        let backing =
            std::iter::successors(image.backing_image.as_deref(), |image| image.backing_image.as_deref());
        let chain = backing.map(|image| plain_name(&image.filename)).take(CHAIN_MAX);
        let chain = std::iter::once(plain_name(&medium.file)).chain(chain).collect();
        let files = DriveFiles { format: medium.drv, chain };
        let (bytes, is_written, extras) = (image.virtual_size, !medium.ro, extras(&medium.other, image));
        Some(Self { name: name.unwrap_or_default(), node, is_written, bytes, extras, files })
    }
}

/// Properties of a medium beside its content.
fn extras(medium: &Map<String, Value>, image: &BlockImage) -> Option<&'static str> {
    let has = |list: Option<&Value>, is_kept: fn(&Value) -> bool| {
        list.and_then(Value::as_array).is_some_and(|list| list.iter().any(is_kept))
    };
    let is_encrypted = image.other.get("encrypted") == Some(&Value::Bool(true));
    if is_encrypted || image.format == "luks" {
        Some("encryption")
    } else if has(image.other.get("snapshots"), |_| true) {
        Some("internal snapshots")
    } else {
        has(medium.get("dirty-bitmaps"), |bitmap| bitmap["persistent"] == true)
            .then_some("persistent bitmaps")
    }
}

/// The name of a file alone, where QEMU describes it with its backing file, since that was opened by another name (a relative one).
fn plain_name(name: &str) -> String {
    let described = name.strip_prefix("json:").and_then(|json| serde_json::from_str::<Value>(json).ok());
    let file = described.as_ref().and_then(|json| json["file"]["filename"].as_str());
    file.unwrap_or(name).to_owned()
}

impl Qemu {
    /// The drives with a medium.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn drives(&mut self) -> Result<Vec<Drive>, Error> {
        let drives = self.client().execute(&QueryBlock)?;
        Ok(drives.into_iter().filter_map(Drive::of).collect())
    }

    /// The drives that the guest may write to.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn written_drives(&mut self) -> Result<Vec<Drive>, Error> {
        Ok(self.drives()?.into_iter().filter(|drive| drive.is_written).collect())
    }

    /// The directory to which its files are relative; `None` if it cannot be read.
    pub(crate) fn working_directory(&self) -> Option<PathBuf> {
        fs::read_link(format!("/proc/{}/cwd", self.process().pid()?)).ok()
    }

    /// The program that it executes, or the name of any QEMU if that was replaced.
    pub(crate) fn program(&self) -> PathBuf {
        let path = self.process().pid().and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
        path.filter(|path| path.is_file()).unwrap_or_else(|| DEFAULT_PROGRAM.into())
    }

    /// Has each drive of these nodes go on in the overlay of the same index, a qcow2 file with the drive's file as its backing file, from one
    /// instant on, or none.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn take_snapshots<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a str>,
        overlays: &[PathBuf],
    ) -> Result<(), Error> {
        let now = now_ms();
        let action =
            |(n, (node, overlay)): (usize, (&str, &PathBuf))| TransactionAction::BlockdevSnapshotSync {
                node_name: node.to_owned(),
                // At most 31 characters; a name that is taken is refused.
                snapshot_node_name: format!("towline-{now:x}-{n}"),
                snapshot_file: overlay.to_string_lossy().into_owned(),
                format: "qcow2".into(),
                mode: "existing".into(),
            };
        let actions = nodes.zip(overlays).enumerate().map(action).collect();
        self.client().execute(&Transaction { actions })?;
        Ok(())
    }
}

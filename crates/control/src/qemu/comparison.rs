//! A QEMU's disks for a comparison with their copies: exports that are read, and bitmaps of what the guest writes.

use std::path::Path;

use towline_qmp::commands::{
    ExportNode, NbdListenAddress, QueryNodes, RemoveBitmap, StartNbdServer, Transaction, TransactionAction,
};

use super::mirror::{NAME, unless_refused};
use super::{Drive, Error, Qemu};

/// A drive by its number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComparedDrive(pub(crate) usize);

impl ComparedDrive {
    /// Name of the export with its content.
    pub(crate) fn export(self) -> String {
        format!("{NAME}{}", self.0)
    }

    /// Name of a bitmap, and of the export that has it.
    pub(crate) fn bitmap(self, number: usize) -> String {
        format!("{NAME}{}-{number}", self.0)
    }
}

impl Qemu {
    /// Has QEMU's NBD server offer these drives, to be read, on a socket, and begins the first bitmap of each.
    ///
    /// # Errors
    /// [`Error::Qmp`]: also if another user has started the server.
    pub(crate) fn begin_comparison(&mut self, drives: &[Drive], socket: &Path) -> Result<(), Error> {
        let addr = NbdListenAddress::Unix { path: socket.to_owned() };
        self.client().execute(&StartNbdServer { addr })?;
        for (number, drive) in drives.iter().enumerate() {
            let compared = ComparedDrive(number);
            self.export_to_compare(compared.export(), drive, Vec::new())?;
            let (node, name) = (drive.node.clone(), compared.bitmap(0));
            let actions = vec![TransactionAction::BlockDirtyBitmapAdd { node, name }];
            self.client().execute(&Transaction { actions })?;
        }
        Ok(())
    }

    /// Ends the bitmap of this number, offers it to be read, and begins the next at the same instant.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn turn_bitmap(
        &mut self,
        compared: ComparedDrive,
        drive: &Drive,
        number: usize,
    ) -> Result<(), Error> {
        let (node, name) = (&drive.node, compared.bitmap(number));
        let actions = vec![
            TransactionAction::BlockDirtyBitmapDisable { node: node.clone(), name: name.clone() },
            TransactionAction::BlockDirtyBitmapAdd { node: node.clone(), name: compared.bitmap(number + 1) },
        ];
        self.client().execute(&Transaction { actions })?;
        self.export_to_compare(name.clone(), drive, vec![name])
    }

    fn export_to_compare(&mut self, name: String, drive: &Drive, bitmaps: Vec<String>) -> Result<(), Error> {
        let (id, node_name) = (name.clone(), drive.node.clone());
        self.client().execute(&ExportNode { id, node_name, name, writable: false, bitmaps })?;
        Ok(())
    }

    /// Bytes that these bitmaps have.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn written_bytes(&mut self, bitmaps: &[String]) -> Result<u64, Error> {
        let nodes = self.client().execute(&QueryNodes { flat: true })?;
        let found = nodes.iter().flat_map(|node| &node.dirty_bitmaps);
        Ok(found.filter(|bitmap| bitmaps.contains(&bitmap.name)).map(|bitmap| bitmap.count).sum())
    }

    /// Ends the exports and bitmaps of a comparison, if there are any.
    ///
    /// # Errors
    /// [`Error::Qmp`].
    pub(crate) fn end_comparison(&mut self) -> Result<(), Error> {
        self.end_exports()?;
        for node in self.client().execute(&QueryNodes { flat: true })? {
            for bitmap in node.dirty_bitmaps.into_iter().filter(|bitmap| bitmap.name.starts_with(NAME)) {
                let node = node.node_name.clone();
                unless_refused(self.client().execute(&RemoveBitmap { node, name: bitmap.name }))?;
            }
        }
        Ok(())
    }
}

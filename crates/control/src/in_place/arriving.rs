//! A guest that arrives in a QEMU that maps an image: it is that image, but for the pages that it has written since.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use towline_image::Image;
use towline_migration::{Base, BasePresence};
use towline_protocol::BlockIndex;
use towline_qmp as qmp;

use super::image_file::Unchanged;
use super::running::mapped_image;
use super::stored::of_image;
use super::{Error, Presence, TransferReason, TransferredBlock};
use crate::qemu::Qemu;

/// As `mapped_image`, of the QEMU at a monitor; `None` where it cannot be examined, which a copy reports. `interrupt` ends
/// the wait for it.
pub fn image_of(socket: &Path, interrupt: &Arc<OwnedFd>) -> Option<PathBuf> {
    let options = qmp::Options { interrupt: Some(Arc::clone(interrupt)), ..qmp::Options::default() };
    mapped_image(&mut Qemu::inspect(socket, &options).ok()?).ok()?
}

/// Proves which blocks a waiting QEMU maps from an image, for a guest that arrives: only pages that differ from the image are sent. Empty
/// if it maps none. `notice` receives sentences for the user.
///
/// # Errors
/// As [`of_image`].
pub fn of_arriving(qemu: &mut Qemu, notice: &dyn Fn(&str)) -> Result<Presence, Error> {
    let mut presence = Presence::default();
    // Its own exit may discard its memory, which no other QEMU has.
    let path = mapped_image(qemu).ok().flatten();
    if let Some(image) = path.and_then(|path| Image::open(&path).ok()) {
        let image = Arc::new(image);
        presence.add_base(&image, qemu)?;
        presence.notice_sent(notice);
        if !presence.is_empty() {
            let path = image.path().display();
            notice(&format!("memory is mapped from {path}: only pages that differ are sent"));
        }
    }
    Ok(presence)
}

/// All blocks of an image, which is locked, as what a destination's memory is or may be.
///
/// # Errors
/// The image is being replaced, or cannot be looked at.
pub(crate) fn as_base(image: &Arc<Image>, presence: BasePresence) -> Result<Base, TransferReason> {
    let id = |block| image.manifest().map(|manifest| manifest.block_memory(block).0);
    let blocks = (0..).map(BlockIndex).zip(image.ram_blocks());
    let blocks: BTreeMap<_, _> = blocks.map(|(index, block)| (block.name.clone(), id(index))).collect();
    let unchanged = Unchanged::of(image)?.locked()?;
    let check = move || unchanged.check().map_err(towline_migration::Error::guest);
    Ok(Base { guest: Arc::<Image>::clone(image), blocks, presence, check: Arc::new(check) })
}

impl Presence {
    /// Adds the blocks of `image` that a waiting QEMU maps copy-on-write, for a guest that has changed some of its pages.
    ///
    /// # Errors
    /// As [`of_image`].
    pub(crate) fn add_base(&mut self, image: &Arc<Image>, qemu: &mut Qemu) -> Result<(), Error> {
        let found = of_image(qemu, image)?;
        let is_mapped = |name: &String| found.mapped.iter().any(|mapped| mapped.block == *name);
        let Ok(mut base) = as_base(image, BasePresence::Proven) else { return Ok(()) };
        base.blocks.retain(|name, _| is_mapped(name));
        self.sent.retain(|sent| !is_mapped(&sent.block));
        let is_unexpected = |sent: &TransferredBlock| {
            sent.is_unexpected && !self.mapped.iter().any(|mapped| mapped.block == sent.block)
        };
        self.sent.extend(found.sent.into_iter().filter(is_unexpected));
        self.mapped.extend(found.mapped);
        self.unchanged = found.unchanged;
        self.base = Some(base).filter(|base| !base.blocks.is_empty());
        Ok(())
    }
}

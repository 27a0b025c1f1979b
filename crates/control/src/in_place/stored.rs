//! Memory of a stored guest: an image, or a reflink of one.

use std::fs::{File, Metadata};
use std::path::Path;

use towline_channel::Cancel;
use towline_image::Image;
use towline_migration::Guest as _;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::{BlockIndex, PageRef, RamBlock};
use towline_qmp::{self as qmp, Client};

use super::file_id::FileId;
use super::fresh::may_be_new_file;
use super::image_file::{Unchanged, stale_page, verify_block};
use super::maps::{Detail, FilePart, FileRange, range_at};
use super::process::{Mappings, OpenMode};
use super::proof::{BackendObject, Backends, address_in, check_backend, may_change_file, prove};
use super::{Error, Mapped, MappingKind, Presence, Reflink, TransferReason, TransferredBlock};
use crate::qemu::Qemu;

/// `f_type` of overlayfs.
const OVERLAYFS: u64 = 0x794c_7630;

/// Comparison of an image with its manifest before a guest runs from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// All of it is read and compared.
    All,
    /// None.
    Nothing,
}

/// Treatment of an image of which a QEMU maps nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfUnmapped {
    /// The memory is sent.
    Send,
    /// The QEMU is refused.
    Refuse,
}

/// Proves which blocks of `image` a waiting QEMU maps copy-on-write.
///
/// # Errors
/// [`Error::ImageWritable`]; [`Error::UndecidedFile`]; [`Error::Qemu`].
pub fn of_image(qemu: &mut Qemu, image: &Image) -> Result<Presence, Error> {
    if let Some(presence) = of_kernel(qemu, image) {
        return Ok(presence);
    }
    let backends = Backends::of(qemu.client())?;
    check_unchanging(qemu, &backends, image)?;
    of_stored(qemu, &backends, image, MappingKind::CopyOnWrite)
}

/// Proves which blocks of a reflink a waiting QEMU maps shared. The reflink is consumed: once a guest has it,
/// it is not an image any longer.
///
/// # Errors
/// [`Error::Qemu`].
pub fn of_reflink(qemu: &mut Qemu, reflink: Reflink) -> Result<Presence, Error> {
    let backends = Backends::of(qemu.client())?;
    let presence = of_stored(qemu, &backends, reflink.image(), MappingKind::Reflink)?;
    Ok(Presence { _reflink: Some(reflink), ..presence })
}

/// Returns true if a QEMU that waits at this monitor reports that it maps this image, a file that seems to be
/// new, or one that it shares, so [`of_image`] or [`old_memory`](super::old_memory) must inspect its process.
/// False where one of them cannot be examined; the copy reports that.
pub fn may_map(socket: &Path, image: &Path) -> bool {
    let Ok(image) = image.metadata() else { return false };
    let backends =
        Client::connect(socket, &qmp::Options::default()).and_then(|mut client| Backends::of(&mut client));
    backends.is_ok_and(|backends| {
        backends
            .iter()
            .any(|backend| is_same(backend, &image) || may_be_new_file(backend) || may_share_file(backend))
    })
}

/// An image that a waiting QEMU may map.
#[derive(Debug)]
pub struct MappedImage<'a> {
    /// The image, opened by [`Image::verify_on_read`] for [`Verify::All`].
    pub image: &'a Image,
    /// The reflink that QEMU was given; `None`: the image itself, copy-on-write.
    pub reflink: Option<Reflink>,
    /// Comparison of mapped memory before its guest runs.
    pub verify: Verify,
    /// Treatment if none of it is mapped.
    pub if_unmapped: IfUnmapped,
}

/// The memory of an image that a waiting QEMU maps; `None`: all of it must be sent. `notice` receives
/// sentences for the user. With [`Verify::All`] mapped memory is read and compared here, unless `cancel` is
/// raised.
///
/// # Errors
/// As [`of_image`]; [`Error::Damaged`]; with [`IfUnmapped::Refuse`] [`Error::NotMapped`].
pub fn find_mapped_memory(
    qemu: &mut Qemu,
    mapped: MappedImage<'_>,
    cancel: &Cancel,
    notice: &dyn Fn(&str),
) -> Result<Option<Presence>, Error> {
    let MappedImage { image, reflink, verify, if_unmapped } = mapped;
    let (presence, file) = match reflink {
        Some(reflink) => (of_reflink(qemu, reflink)?, "a reflink of "),
        None => (of_image(qemu, image)?, ""),
    };
    if presence.is_empty() && if_unmapped == IfUnmapped::Refuse {
        return Err(not_mapped(qemu, image, &presence));
    }
    presence.notice_sent(notice);
    if presence.is_empty() {
        return Ok(None);
    }
    if verify == Verify::All {
        presence.names().try_for_each(|name| verify_block(image, name, cancel))?;
    }
    notice(&format!("memory is mapped from {file}{}: its pages are not sent", image.path().display()));
    Ok(Some(presence))
}

fn not_mapped(qemu: &Qemu, image: &Image, presence: &Presence) -> Error {
    let (socket, path) = (qemu.socket().to_owned(), image.path().to_owned());
    // The backend that names the image has the most useful reason.
    let sent = presence.sent.iter().max_by_key(|sent| sent.is_unexpected);
    Error::NotMapped {
        socket,
        path,
        reason: sent.map_or(TransferReason::NoBackend, |sent| sent.reason.clone()),
    }
}

/// The proof by the kernel alone, without a query: the image is mapped, and all other blocks are anonymous
/// memory. `None` if that does not hold; QEMU's backends then give the reason.
fn of_kernel(qemu: &Qemu, image: &Image) -> Option<Presence> {
    let (process, own) = (Mappings::of(qemu, Detail::PrivateCopies), Mappings::own());
    // A block is mapped only from a file that is open, and the kernel counts private copies by a walk through
    // all page tables. Neither writes of a guest nor holes of its balloon reach a file that is open for
    // reading only.
    let mode = process.open_mode(&image.file().metadata().ok()?).ok()?;
    let unchanged = Unchanged::of(image).ok().filter(|_| mode == Some(OpenMode::ReadOnly))?;
    let mut presence = Presence::default();
    for (index, block) in (0..).map(BlockIndex).zip(image.ram_blocks()) {
        let kind = MappingKind::CopyOnWrite;
        let stored = ImageBlock { image, own: &own, index, block, kind };
        let address = qemu.facts().address_of(&block.name)?;
        presence.add(match range_at(process.get().ok()?, address, block.length) {
            Err(TransferReason::Anonymous) => {
                let (block, reason) = (block.name.clone(), TransferReason::NoBackend);
                Err(TransferredBlock { block, reason, is_unexpected: false })
            }
            found => Ok(stored.prove_range(found.ok()?, &stored.own_range().ok()?, &process).ok()?),
        });
    }
    if presence.is_empty() {
        return None;
    }
    presence.unchanged = Some(unchanged.locked().ok()?);
    Some(presence)
}

fn of_stored(qemu: &Qemu, backends: &Backends, image: &Image, kind: MappingKind) -> Result<Presence, Error> {
    let (process, own) = (Mappings::of(qemu, Detail::PrivateCopies), Mappings::own());
    let unchanged = Unchanged::of(image);
    let mut presence = Presence::default();
    for (index, block) in (0..).map(BlockIndex).zip(image.ram_blocks()) {
        let stored = ImageBlock { image, own: &own, index, block, kind };
        let backend = backends.of_block(&block.name);
        let proven = backend.ok_or(TransferReason::NoBackend);
        let proven = proven.and_then(|backend| stored.prove(qemu, backend, &process));
        if let (Err(TransferReason::WritableImage), Some(backend)) = (&proven, backend) {
            return Err(image_writable(qemu, &backend.id, image));
        }
        let is_unexpected = backend.is_some_and(|backend| is_file(backend, image));
        let sent = |reason| TransferredBlock { block: block.name.clone(), reason, is_unexpected };
        presence.add(proven.map_err(sent));
    }
    if presence.is_empty() {
        return Ok(presence);
    }
    match unchanged.and_then(Unchanged::locked) {
        // A reflink is the guest's to write.
        Ok(unchanged) => presence.unchanged = Some(unchanged).filter(|_| kind == MappingKind::CopyOnWrite),
        Err(reason) => {
            for Mapped { block, .. } in std::mem::take(&mut presence.mapped) {
                presence.add(Err(TransferredBlock { block, reason: reason.clone(), is_unexpected: true }));
            }
        }
    }
    Ok(presence)
}

/// A block of an image.
pub(super) struct ImageBlock<'a> {
    pub(super) image: &'a Image,
    /// The mappings of this process.
    pub(super) own: &'a Mappings,
    pub(super) index: BlockIndex,
    pub(super) block: &'a RamBlock,
    pub(super) kind: MappingKind,
}

impl ImageBlock<'_> {
    fn prove(
        &self,
        qemu: &Qemu,
        backend: &BackendObject,
        process: &Mappings,
    ) -> Result<Mapped, TransferReason> {
        let bytes = self.block.length;
        check_backend(backend, bytes, &qemu.facts().version)?;
        let address = address_in(qemu, &self.block.name)?;
        let own = self.own_range()?;
        let found = range_at(process.get()?, address, bytes)?;
        let is_image = found.file == own.file;
        if is_image && self.kind == MappingKind::CopyOnWrite && may_change_file(backend) {
            return Err(TransferReason::WritableImage);
        }
        self.prove_range(found, &own, process)
    }

    /// Compares the mapping of the block with the block in this process's mapping, and the file with the
    /// image.
    pub(super) fn prove_range(
        &self,
        found: FileRange,
        own: &FileRange,
        process: &Mappings,
    ) -> Result<Mapped, TransferReason> {
        let (kind, bytes) = (self.kind, self.block.length);
        prove(kind, FilePart { file: own.file, offset: own.offset, length: bytes }, found)?;
        self.check_open(process)?;
        self.check_content(own.offset)?;
        Ok(Mapped { block: self.block.name.clone(), bytes, kind })
    }

    /// The block in this process's own mapping of the image: the kernel names the file there as it does in
    /// QEMU.
    pub(super) fn own_range(&self) -> Result<FileRange, TransferReason> {
        let page = PageRef { block: self.index, offset: 0 };
        let bytes = self.image.immutable(page, PAGE_SIZE).ok_or(TransferReason::NotMapped)?;
        range_at(self.own.get()?, bytes.as_ptr().addr() as u64, PAGE_SIZE)
            .map_err(|_| TransferReason::NotMapped)
    }

    fn check_open(&self, process: &Mappings) -> Result<(), TransferReason> {
        let path = self.image.path();
        if is_overlay(self.image.file()) {
            return Err(TransferReason::Overlay { path: path.to_owned() });
        }
        let file = self.image.file().metadata().map_err(|error| TransferReason::file(path, error))?;
        process.check_open(path, &file)
    }

    fn check_content(&self, begin: u64) -> Result<(), TransferReason> {
        let path = self.image.path();
        let file = self.image.reopen().map_err(|error| TransferReason::file(path, error))?;
        let stale = stale_page(self.image, &file, self.index, begin);
        match stale.map_err(|error| TransferReason::file(path, error))? {
            None => Ok(()),
            Some(offset) => Err(TransferReason::StaleContent { path: path.to_owned(), offset }),
        }
    }
}

/// Returns true if two processes may have different files open by one path and number: the lower one, and its
/// copy.
fn is_overlay(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type as u64 == OVERLAYFS)
}

/// Returns true if the backend's path leads to the image now, or is the image's own, which may now lead to
/// another file.
fn is_file(backend: &BackendObject, image: &Image) -> bool {
    let resolved = |path: &Path| path.canonicalize().ok();
    let path = || resolved(backend.file()?);
    image.file().metadata().is_ok_and(|metadata| is_same(backend, &metadata))
        || path().is_some_and(|path| Some(path) == resolved(image.path()))
}

fn is_same(backend: &BackendObject, file: &Metadata) -> bool {
    let named = backend.file().map(std::fs::metadata);
    matches!(named, Some(Ok(named)) if FileId::of(&named) == FileId::of(file))
}

/// Refuses a QEMU that can change the image or one that it is based on by the backend of any block, or that
/// shares a file whose identity is unknown.
fn check_unchanging(qemu: &Qemu, backends: &Backends, image: &Image) -> Result<(), Error> {
    let writable: Vec<_> = backends.iter().filter(|backend| may_change_file(backend)).collect();
    if writable.is_empty() {
        return Ok(());
    }
    let bases = towline_image::base_paths(image.path());
    let files = bases.iter().map(std::fs::metadata).chain([image.file().metadata()]).flatten();
    let files: Vec<_> = files.collect();
    let is_named = |backend: &&&BackendObject| files.iter().any(|file| is_same(backend, file));
    if let Some(backend) = writable.iter().find(is_named) {
        return Err(image_writable(qemu, &backend.id, image));
    }
    // By another name of the file, which may no longer exist.
    let process = Mappings::of(qemu, Detail::PrivateCopies);
    let is_open = |file: &Metadata| process.open_mode(file).map(|mode| mode == Some(OpenMode::Writable));
    let found = files.iter().map(is_open).find(|open| !matches!(open, Ok(false)));
    match (found, writable.iter().find(|backend| may_share_file(backend))) {
        (Some(Ok(_)), _) => {
            let ids: Vec<_> = writable.iter().map(|backend| backend.id.as_str()).collect();
            Err(image_writable(qemu, &ids.join(" or "), image))
        }
        (Some(Err(reason)), Some(backend)) => Err(Error::UndecidedFile {
            socket: qemu.socket().to_owned(),
            backend: backend.id.clone(),
            reason,
        }),
        _ => Ok(()),
    }
}

/// Returns true if the guest would write into the file that the backend is given. In a directory QEMU creates
/// a new file.
fn may_share_file(backend: &BackendObject) -> bool {
    let is_directory = || {
        backend.path.as_ref().is_some_and(|path| std::fs::metadata(path).is_ok_and(|named| named.is_dir()))
    };
    may_change_file(backend) && backend.share && !is_directory()
}

fn image_writable(qemu: &Qemu, backend: &str, image: &Image) -> Error {
    let (socket, backend) = (qemu.socket().to_owned(), backend.to_owned());
    Error::ImageWritable { socket, backend, path: image.path().to_owned() }
}

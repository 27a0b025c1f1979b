//! A guest whose memory is already where it is needed: proven, not assumed.
//!
//! ```text
//!   QMP    query-memdev, qom-get, info ramblock ─► Backends: type, size, share, address of each block ─┐
//!   /proc  maps, smaps of QEMU ───────────────────► FileRange: device, inode, offset, private copies ──┼─► Presence ─► GuestWithPresentBlocks
//!   image  own mapping, page bitmaps, holes ──────► FilePart: the same of the block in the image ────────────────┘      └─► reasons
//! ```
//!
//! A block is [`Mapped`] if the kernel shows that QEMU's memory at the block's address is exactly that range
//! of exactly that file, without a private page in between. QEMU's command line alone proves nothing, since a
//! name may now be another file's. Otherwise its pages are sent, for a [`TransferReason`]. A setting that
//! would damage memory in use is an [`Error`].
//!
//! - [`of_image`]: QEMU maps an image copy-on-write; the guest's writes are its own.
//! - [`of_reflink`]: QEMU maps a file that shares the image's storage ([`Reflink`]), for devices that need
//!   shared memory.
//! - [`of_running`]: QEMU maps the memory of another QEMU, which has the guest until this one runs it.
//! - [`of_arriving`]: QEMU maps an image, and a guest arrives that has changed some of its pages.
//! - [`guest_backends`]: files of a running guest's memory, for a QEMU that will map it.
//! - [`old_memory`]: QEMU maps a file that may have content, which must not remain in an incoming guest.
//!
//! Out of scope: starting QEMU, and sending the rest (`plan`). Limits: Linux, a QEMU of this host whose
//! process is identified; QEMU 8.2 and later where memory is mapped, any version at the source. Nothing
//! protects the image from programs that do not know its lock (`flock`): it must not change while guests run
//! from it.

mod arriving;
mod based;
mod capture;
mod disks;
mod error;
mod file_id;
mod fresh;
mod image_file;
mod maps;
mod process;
mod proof;
mod running;
mod stored;
#[cfg(test)]
mod tests;
mod transfer_reason;

use std::io;
use std::ops::Deref;

use image_file::Unchanged;
use towline_migration::{Base, Guest, GuestWithPresentBlocks, ProcessMemory, Sink, SinkWithPresentBlocks};
use towline_protocol::{BlockIndex, RamBlock};

use crate::qemu::Qemu;

pub(crate) use arriving::as_base;
pub use arriving::{image_of, of_arriving};
pub(crate) use based::{BasedGuest, CapturedGuest};
pub(crate) use capture::PreparedCapture;
pub use disks::PreparedDisks;
pub(crate) use disks::{GuestDisks, continues_in};
pub use error::Error;
pub use file_id::FileId;
pub use fresh::{OldMemory, old_memory};
pub use image_file::Reflink;
pub(crate) use image_file::locked;
pub(crate) use running::mapped_image;
pub use running::{GuestBackends, PrivateBlock, guest_backends, of_running, shared_blocks};
pub use stored::{IfUnmapped, MappedImage, Verify, find_mapped_memory, may_map, of_image, of_reflink};
pub use transfer_reason::TransferReason;

/// Relation of a block's memory to the file that it is mapped from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingKind {
    /// Pages are those of an image until the guest writes them.
    CopyOnWrite,
    /// Pages are those of a reflink of an image, which is written.
    Reflink,
    /// Pages are those of an image, but for those that the running guest has written.
    Written,
    /// Pages are those of another QEMU.
    Running,
}

/// Proof that the memory of a block is at the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// Name of the block.
    pub block: String,
    /// Length of the block in bytes.
    pub bytes: u64,
    /// Kind of the mapping.
    pub kind: MappingKind,
}

/// A block whose pages must be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferredBlock {
    /// Name of the block.
    pub block: String,
    /// Reason for it.
    pub reason: TransferReason,
    /// The backend names the image, so the user expected it to be mapped: report why it is not.
    pub is_unexpected: bool,
}

/// The memory of a guest at a destination that waits for it. While it lives, no towline replaces the image.
#[derive(Debug, Default)]
#[must_use]
pub struct Presence {
    mapped: Vec<Mapped>,
    sent: Vec<TransferredBlock>,
    /// The image, if it must not be written.
    unchanged: Option<Unchanged>,
    /// The guest's own file, which no other guest gets.
    _reflink: Option<Reflink>,
    /// The image, if the guest is another one than the image's: its pages are compared.
    base: Option<Base>,
}

impl Presence {
    /// Blocks whose memory is present.
    pub fn mapped(&self) -> &[Mapped] {
        &self.mapped
    }

    /// Blocks whose pages are sent.
    pub fn sent(&self) -> &[TransferredBlock] {
        &self.sent
    }

    /// Tells the user why memory is sent that was expected to be mapped.
    fn notice_sent(&self, notice: &dyn Fn(&str)) {
        for TransferredBlock { block, reason, .. } in self.sent.iter().filter(|sent| sent.is_unexpected) {
            notice(&format!("memory of block {block:?} is sent, not mapped: {reason}"));
        }
    }

    /// Returns true if all pages must be sent.
    pub fn is_empty(&self) -> bool {
        self.mapped.is_empty()
    }

    /// The guest without the pages that need not be sent.
    ///
    /// # Errors
    /// The guest is not that of the proof.
    pub fn guest<P: Deref<Target: Guest>>(
        &self,
        guest: P,
    ) -> towline_migration::Result<GuestWithPresentBlocks<P>> {
        GuestWithPresentBlocks::new(guest, self.names())
    }

    /// Refuses an image that was written since the proof began, since the guest would have a mixture.
    ///
    /// # Errors
    /// [`Error::Changed`].
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.unchanged.as_ref().map_or(Ok(()), Unchanged::check)
    }

    /// A sink that drops those pages on arrival: all of memory that both ends map, and of an image what the guest has not changed.
    pub fn sink<P: Deref<Target: Sink>>(&self, sink: P) -> SinkWithPresentBlocks<P> {
        match &self.base {
            Some(base) => {
                let whole = self.names().filter(|name| !base.blocks.contains_key(*name));
                SinkWithPresentBlocks::new(sink, whole).based_on(base.clone())
            }
            None => SinkWithPresentBlocks::new(sink, self.names()),
        }
    }

    /// Writes what `guest` differs in from its image into the memory of a waiting QEMU that maps the image, which is faster than to send it. Returns true if QEMU has all of it now; otherwise it is to be
    /// sent, also where a part was written.
    pub(crate) fn write_difference(&self, qemu: &Qemu, guest: &dyn Guest) -> bool {
        let is_mapped = |name: &str| self.mapped.iter().any(|mapped| mapped.block == name);
        let blocks = (0..).map(BlockIndex).zip(guest.blocks());
        let mut differing =
            blocks.filter(|(index, block)| is_mapped(&block.name) && !guest.difference(*index).is_empty());
        let write = |(index, block): (BlockIndex, &RamBlock)| {
            let (pid, address) = (qemu.process().pid(), qemu.facts().address_of(&block.name));
            let (pid, address) = pid.zip(address).ok_or(io::ErrorKind::NotFound)?;
            ProcessMemory::open(pid)?.write(address, guest, index, guest.difference(index))
        };
        let written = differing.try_for_each(write);
        written.inspect_err(|error| tracing::debug!(%error, "the difference is sent")).is_ok()
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.mapped.iter().map(|mapped| mapped.block.as_str())
    }

    fn add(&mut self, outcome: Result<Mapped, TransferredBlock>) {
        match outcome {
            Ok(mapped) => self.mapped.push(mapped),
            Err(sent) => {
                tracing::debug!(block = sent.block, reason = %sent.reason, "pages are sent");
                self.sent.push(sent);
            }
        }
    }
}

//! Postcopy at a migration's destination: the guest runs before its memory has arrived.
//!
//! ```text
//!   ADVISE          sends the frontend a userfaultfd, from which it reads our page faults
//!   LISTEN          from now on memory is mapped, registered, and only then used:
//!     SET_MEM_TABLE, ADD_MEM_REG …  ──► mapped; the reply has the addresses
//!     their acknowledgement         ──► registered with the userfaultfd; the rings use it
//!   END             all memory has arrived; nothing is registered any more
//! ```
//! A thread that accesses a missing page waits in the kernel, even within a system call; other threads run
//! on.

use std::os::fd::OwnedFd;

use super::postcopy::PostcopyProgress;
use super::{Rings, Session, SessionError};
use crate::device::BackendError;
use crate::memory::GuestMemory;
use crate::message::{RegionInfo, Reply};
use crate::sys::Userfaultfd;

impl<R: Rings> Session<R> {
    pub(super) fn postcopy_advise(&mut self) -> Result<Reply, SessionError> {
        let failed = |error: std::io::Error| {
            let why = format!(
                "cannot create a userfaultfd: {error}; it requires CAP_SYS_PTRACE or /dev/userfaultfd"
            );
            SessionError::refused("POSTCOPY_ADVISE", BackendError::new(why))
        };
        let userfaultfd = Userfaultfd::new().map_err(failed)?;
        self.reply_fd = Some(userfaultfd.descriptor().map_err(failed)?);
        self.postcopy = Some(PostcopyProgress { userfaultfd, listening: false, unacknowledged: None });
        Ok(Reply::Empty)
    }

    pub(super) fn postcopy_listen(&mut self) -> Result<(), SessionError> {
        let refused = |why: &str| SessionError::refused("POSTCOPY_LISTEN", BackendError::new(why));
        if self.vrings.iter().any(|vring| vring.running) {
            return Err(refused("rings run already"));
        }
        self.postcopy.as_mut().ok_or_else(|| refused("POSTCOPY_ADVISE comes first"))?.listening = true;
        Ok(())
    }

    /// Returns true if the contents of new regions have not arrived yet.
    pub(super) fn is_postcopy_listening(&self) -> bool {
        self.postcopy.as_ref().is_some_and(|postcopy| postcopy.listening)
    }

    /// Returns true if the frontend has to acknowledge addresses of regions.
    pub(super) fn has_unacknowledged_regions(&self) -> bool {
        self.postcopy.as_ref().is_some_and(|postcopy| postcopy.unacknowledged.is_some())
    }

    pub(super) fn map_postcopy_table(
        &mut self,
        regions: Vec<(RegionInfo, OwnedFd)>,
    ) -> Result<Reply, SessionError> {
        let infos: Vec<RegionInfo> = regions.iter().map(|(info, _)| *info).collect();
        let memory = GuestMemory::map(regions)?;
        let mapped = infos.iter().map(|info| with_backend_address(&memory, info)).collect();
        self.set_unacknowledged(memory);
        Ok(Reply::Table(mapped))
    }

    pub(super) fn map_postcopy_region(
        &mut self,
        info: &RegionInfo,
        fd: OwnedFd,
    ) -> Result<Reply, SessionError> {
        let before = self.postcopy.as_ref().and_then(|postcopy| postcopy.unacknowledged.as_ref());
        let before = before.unwrap_or(&self.memory);
        if before.has(info) {
            return Ok(Reply::Region(with_backend_address(before, info)));
        }
        let memory = before.with_mapped(info, fd)?;
        let mapped = with_backend_address(&memory, info);
        self.set_unacknowledged(memory);
        Ok(Reply::Region(mapped))
    }

    fn set_unacknowledged(&mut self, memory: GuestMemory) {
        if let Some(postcopy) = &mut self.postcopy {
            postcopy.unacknowledged = Some(memory);
        }
    }

    /// Uses the mapped memory: the frontend knows its addresses and resolves faults in it.
    pub(super) fn acknowledge_postcopy_regions(&mut self) -> Result<(), SessionError> {
        let postcopy = self.postcopy.as_mut();
        let mapped =
            postcopy.and_then(|postcopy| Some((postcopy.unacknowledged.take()?, &postcopy.userfaultfd)));
        let Some((memory, userfaultfd)) = mapped else {
            let why = "no region was mapped that could be acknowledged";
            return Err(SessionError::refused("ADD_MEM_REG", BackendError::new(why)));
        };
        for mapping in memory.mappings() {
            userfaultfd.register(mapping).map_err(|error| {
                let why = format!("cannot register the guest's memory with userfaultfd: {error}");
                SessionError::refused("SET_MEM_TABLE", BackendError::new(why))
            })?;
        }
        self.set_memory(memory)
    }
}

/// The region with its address in this process.
fn with_backend_address(memory: &GuestMemory, info: &RegionInfo) -> RegionInfo {
    let address = memory.backend_address(info.guest_address).expect("a region of this memory");
    RegionInfo { user_address: address, ..*info }
}

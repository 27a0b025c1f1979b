//! Postcopy at a migration's destination: the guest runs while its memory is still on its way.
//!
//! ```text
//!   ADVISE          a userfaultfd goes to the frontend, which reads our faults from it and fetches the pages
//!   LISTEN          from now on memory is told, watched, and only then used:
//!     SET_MEM_TABLE, ADD_MEM_REG …  ──► mapped; the answer says where
//!     its acknowledgement           ──► watched; the rings have it
//!   END             everything is there; nothing is watched any more
//! ```
//! A thread that touches a page too early waits in the kernel, be it within a system call; others go on.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Rings, Session, SessionError};
use crate::device::Refusal;
use crate::memory::{Memory, Region};
use crate::message::{RegionInfo, Reply};
use crate::sys::Faults;

/// What is under way.
pub(super) struct Postcopy {
    faults: Faults,
    listening: bool,
    /// Mapped, and the frontend knows where; not watched yet.
    told: Option<Memory>,
}

impl<R: Rings> Session<R> {
    pub(super) fn postcopy_advise(&mut self) -> Result<Reply, SessionError> {
        let failed = |error: std::io::Error| {
            let why =
                format!("no userfaultfd can be had: {error}; it wants CAP_SYS_PTRACE or /dev/userfaultfd");
            SessionError::refused("POSTCOPY_ADVISE", Refusal::new(why))
        };
        let faults = Faults::new().map_err(failed)?;
        self.answer_fd = Some(faults.descriptor().map_err(failed)?);
        self.postcopy = Some(Postcopy { faults, listening: false, told: None });
        Ok(Reply::Empty)
    }

    pub(super) fn postcopy_listen(&mut self) -> Result<(), SessionError> {
        let refused = |why: &str| SessionError::refused("POSTCOPY_LISTEN", Refusal::new(why));
        if self.vrings.iter().any(|vring| vring.running) {
            return Err(refused("rings run already"));
        }
        self.postcopy.as_mut().ok_or_else(|| refused("POSTCOPY_ADVISE comes first"))?.listening = true;
        Ok(())
    }

    /// Whether memory that comes now is not there yet.
    pub(super) fn listens(&self) -> bool {
        self.postcopy.as_ref().is_some_and(|postcopy| postcopy.listening)
    }

    /// Whether the next acknowledgement is of memory.
    pub(super) fn has_told(&self) -> bool {
        self.postcopy.as_ref().is_some_and(|postcopy| postcopy.told.is_some())
    }

    pub(super) fn tell_table(&mut self, regions: Vec<(RegionInfo, OwnedFd)>) -> Result<Reply, SessionError> {
        let infos: Vec<RegionInfo> = regions.iter().map(|(info, _)| *info).collect();
        let mapped = regions.into_iter().map(|(info, fd)| Region::map(&info, fd));
        let memory = Memory::new(mapped.collect::<Result<_, _>>()?)?;
        let told = infos.iter().map(|info| own(&memory, info)).collect();
        self.tell(memory);
        Ok(Reply::Table(told))
    }

    pub(super) fn tell_region(&mut self, info: &RegionInfo, fd: OwnedFd) -> Result<Reply, SessionError> {
        let before = self.postcopy.as_ref().and_then(|postcopy| postcopy.told.as_ref());
        let before = before.unwrap_or(&self.memory);
        if before.has(info) {
            return Ok(Reply::Region(own(before, info)));
        }
        let memory = before.with(Region::map(info, fd)?)?;
        let told = own(&memory, info);
        self.tell(memory);
        Ok(Reply::Region(told))
    }

    fn tell(&mut self, memory: Memory) {
        if let Some(postcopy) = &mut self.postcopy {
            postcopy.told = Some(memory);
        }
    }

    /// The frontend is ready for faults in what it was told of.
    pub(super) fn watch(&mut self) -> Result<(), SessionError> {
        let postcopy = self.postcopy.as_mut();
        let told = postcopy.and_then(|postcopy| Some((postcopy.told.take()?, &postcopy.faults)));
        let Some((memory, faults)) = told else {
            let why = "nothing was told that could be acknowledged";
            return Err(SessionError::refused("ADD_MEM_REG", Refusal::new(why)));
        };
        for mapping in memory.mappings() {
            faults.watch(mapping).map_err(|error| {
                let why = format!("the guest's memory cannot be watched by userfaultfd: {error}");
                SessionError::refused("SET_MEM_TABLE", Refusal::new(why))
            })?;
        }
        self.memory = Arc::new(memory);
        self.rings.set_memory(&self.memory)
    }
}

fn own(memory: &Memory, info: &RegionInfo) -> RegionInfo {
    let address = memory.own_address(info.guest_address.get()).expect("it is of this memory");
    RegionInfo { user_address: address.into(), ..*info }
}

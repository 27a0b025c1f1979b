//! A session as the requests that led to it, for another process, or for this one when that does not want it.
//!
//! ```text
//!   Session ── pack: rings drained and stopped ──► features, memory, log, rings │ SET_VRING_KICK …
//!                                                  ── handle, each ──► a session whose rings run
//! ```

use std::os::fd::OwnedFd;

use zerocopy::IntoBytes as _;
use zerocopy::byteorder::little_endian::U64;

use super::{Rings, Session, SessionError};
use crate::features::ProtocolFeatures;
use crate::message::{Code, NO_FD, RawLog, RawTable, Request, TABLE_REGIONS_MAX, VringState};

/// A request, with its descriptors.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) code: Code,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// What was agreed upon; none of it makes a ring run.
    pub(crate) agreed: Vec<Message>,
    /// What makes those run that ran.
    pub(crate) starts: Vec<Message>,
}

impl Message {
    pub(crate) fn new(code: Code, payload: &[u8], fds: Vec<OwnedFd>) -> Self {
        Self { code, payload: payload.to_vec(), fds }
    }

    fn number(code: Code, number: u64) -> Self {
        Self::new(code, &number.to_le_bytes(), Vec::new())
    }

    fn state(code: Code, ring: usize, number: u32) -> Self {
        let state = VringState { index: index(ring).into(), number: number.into() };
        Self::new(code, state.as_bytes(), Vec::new())
    }

    fn ring_fd(code: Code, ring: usize, fd: Option<OwnedFd>) -> Self {
        let number = u64::from(index(ring)) | if fd.is_none() { NO_FD } else { 0 };
        Self::new(code, &number.to_le_bytes(), fd.into_iter().collect())
    }

    /// The request that it is.
    pub(crate) fn into_request(self) -> Result<Request, SessionError> {
        Ok(Request::decode(self.code, &self.payload, self.fds)?)
    }
}

fn index(ring: usize) -> u32 {
    u32::try_from(ring).expect("one byte names it")
}

impl<R: Rings> Session<R> {
    /// Why it cannot be packed at this moment, if it cannot.
    pub(crate) fn is_bound(&self) -> Option<&'static str> {
        match (&self.postcopy, &self.transfer) {
            (Some(_), _) => Some("the guest's memory is on its way (postcopy)"),
            (_, Some(_)) => Some("the device's state is being transferred"),
            (None, None) => None,
        }
    }

    /// Stops all rings in order, and takes down how to get here again.
    ///
    /// # Errors
    /// [`SessionError::Gone`] if a thread died; [`SessionError::Memory`] if no descriptor is left.
    pub(crate) fn pack(mut self) -> Result<Packed, SessionError> {
        let mut packed = Packed { agreed: self.negotiated()?, starts: Vec::new() };
        for ring in 0..self.vrings.len() {
            self.pack_ring(ring, &mut packed)?;
        }
        Ok(packed)
    }

    fn negotiated(&self) -> Result<Vec<Message>, SessionError> {
        let failed = |error| SessionError::from(crate::MemoryError::Map(error));
        let mut messages = vec![Message::number(Code::SET_PROTOCOL_FEATURES, self.agreed.protocol.bits())];
        if let Some(features) = self.agreed.features {
            messages.push(Message::number(Code::SET_FEATURES, features));
        }
        let regions = self.memory.shared().map_err(failed)?;
        if regions.len() > TABLE_REGIONS_MAX {
            messages.extend(regions.into_iter().map(|(info, fd)| {
                let payload = [U64::new(0).as_bytes(), info.as_bytes()].concat();
                Message::new(Code::ADD_MEM_REG, &payload, vec![fd])
            }));
        } else if !regions.is_empty() {
            let count = u32::try_from(regions.len()).expect("at most eight");
            let mut payload = RawTable { regions: count.into(), padding: 0.into() }.as_bytes().to_vec();
            regions.iter().for_each(|(info, _)| payload.extend_from_slice(info.as_bytes()));
            let fds = regions.into_iter().map(|(_, fd)| fd).collect();
            messages.push(Message::new(Code::SET_MEM_TABLE, &payload, fds));
        }
        if let Some(log) = &self.log {
            let log = log.shared().map_err(failed)?;
            let payload = RawLog { size: log.size.into(), offset: log.offset.into() };
            messages.push(Message::new(Code::SET_LOG_BASE, payload.as_bytes(), vec![log.fd]));
        }
        if self.agreed.protocol.contains(ProtocolFeatures::STATUS) {
            messages.push(Message::number(Code::SET_STATUS, self.status));
        }
        Ok(messages)
    }

    fn pack_ring(&mut self, ring: usize, packed: &mut Packed) -> Result<(), SessionError> {
        let stopped = self.rings.stop(ring)?;
        let vring = &mut self.vrings[ring];
        let ran = std::mem::take(&mut vring.running);
        let (mut call, mut err) = (vring.call.take(), vring.err.take());
        let mut kick = None;
        if let Some(stopped) = stopped {
            vring.base = stopped.base;
            (kick, call, err) = (stopped.kick, stopped.call, stopped.err);
        }
        let agreed = &mut packed.agreed;
        if vring.size != 0 {
            agreed.push(Message::state(Code::SET_VRING_NUM, ring, vring.size));
        }
        if let Some(address) = vring.address {
            agreed.push(Message::new(Code::SET_VRING_ADDR, address.as_bytes(), Vec::new()));
        }
        agreed.push(Message::state(Code::SET_VRING_BASE, ring, vring.base.into()));
        agreed.push(Message::ring_fd(Code::SET_VRING_CALL, ring, call));
        agreed.push(Message::ring_fd(Code::SET_VRING_ERR, ring, err));
        agreed.push(Message::state(Code::SET_VRING_ENABLE, ring, vring.enabled.into()));
        if ran && kick.is_some() {
            packed.starts.push(Message::ring_fd(Code::SET_VRING_KICK, ring, kick));
        }
        Ok(())
    }
}

//! A session as the requests that lead to it, for another process, or for this one if that refuses it.
//!
//! ```text
//!   Session ── save: rings drained and stopped ──► features, memory, log, rings │ SET_VRING_KICK …
//!                                                  ── handle each ──► a session whose rings run
//! ```

use std::os::fd::OwnedFd;

use zerocopy::IntoBytes as _;

use super::{Enablement, Rings, Session, SessionError};
use crate::features::ProtocolFeatures;
use crate::message::{NO_FD, RawLog, RawTable, Request, RequestCode, TABLE_REGIONS_MAX, VringState};

/// An encoded request with its descriptors.
#[derive(Debug)]
pub(crate) struct SavedRequest {
    pub(crate) code: RequestCode,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Requests that restore a session.
#[derive(Debug, Default)]
pub(crate) struct SavedSession {
    /// Everything that was negotiated and set; none of it starts a ring.
    pub(crate) negotiated: Vec<SavedRequest>,
    /// Starts of the rings that ran.
    pub(crate) starts: Vec<SavedRequest>,
}

impl SavedRequest {
    fn new(code: RequestCode, payload: &[u8], fds: Vec<OwnedFd>) -> Self {
        Self { code, payload: payload.to_vec(), fds }
    }

    fn number(code: RequestCode, number: u64) -> Self {
        Self::new(code, &number.to_le_bytes(), Vec::new())
    }

    fn vring_state(code: RequestCode, ring: usize, number: u32) -> Self {
        let state = VringState { index: wire_index(ring), number };
        Self::new(code, &state.to_bytes(), Vec::new())
    }

    fn vring_fd(code: RequestCode, ring: usize, fd: Option<OwnedFd>) -> Self {
        let number = u64::from(wire_index(ring)) | if fd.is_none() { NO_FD } else { 0 };
        Self::new(code, &number.to_le_bytes(), fd.into_iter().collect())
    }

    /// Decodes the request.
    pub(crate) fn decode(self) -> Result<Request, SessionError> {
        Ok(Request::decode(self.code, &self.payload, self.fds)?)
    }
}

fn wire_index(ring: usize) -> u32 {
    u32::try_from(ring).expect("a ring's number is one byte")
}

impl<R: Rings> Session<R> {
    /// Reason that prevents a live upgrade at this moment.
    pub(crate) fn upgrade_obstacle(&self) -> Option<&'static str> {
        match (&self.postcopy, &self.transfer) {
            (Some(_), _) => Some("the guest's memory is still arriving (postcopy)"),
            (_, Some(_)) => Some("the device's state is being transferred"),
            (None, None) => None,
        }
    }

    /// Drains and stops all rings, and saves the session.
    ///
    /// # Errors
    /// [`SessionError::WorkerPanicked`] if a thread died; [`SessionError::Memory`] if no descriptor is left.
    pub(crate) fn save(mut self) -> Result<SavedSession, SessionError> {
        let mut saved = SavedSession { negotiated: self.save_negotiated()?, starts: Vec::new() };
        for ring in 0..self.vrings.len() {
            self.save_ring(ring, &mut saved)?;
        }
        Ok(saved)
    }

    fn save_negotiated(&self) -> Result<Vec<SavedRequest>, SessionError> {
        let failed = |error| SessionError::from(crate::MemoryTableError::Map(error));
        let protocol = self.negotiated.protocol.bits();
        let mut requests = vec![SavedRequest::number(RequestCode::SET_PROTOCOL_FEATURES, protocol)];
        if let Some(features) = self.negotiated.features {
            requests.push(SavedRequest::number(RequestCode::SET_FEATURES, features));
        }
        let regions = self.memory.share().map_err(failed)?;
        if regions.len() > TABLE_REGIONS_MAX {
            requests.extend(regions.into_iter().map(|(info, fd)| {
                let payload = [&[0; 8], &info.to_bytes()[..]].concat();
                SavedRequest::new(RequestCode::ADD_MEM_REG, &payload, vec![fd])
            }));
        } else if !regions.is_empty() {
            let count = u32::try_from(regions.len()).expect("at most TABLE_REGIONS_MAX");
            let mut payload = RawTable { regions: count.into(), padding: 0.into() }.as_bytes().to_vec();
            regions.iter().for_each(|(info, _)| payload.extend_from_slice(&info.to_bytes()));
            let fds = regions.into_iter().map(|(_, fd)| fd).collect();
            requests.push(SavedRequest::new(RequestCode::SET_MEM_TABLE, &payload, fds));
        }
        if let Some(log) = &self.log {
            let log = log.share().map_err(failed)?;
            let payload = RawLog { size: log.size.into(), offset: log.offset.into() };
            requests.push(SavedRequest::new(RequestCode::SET_LOG_BASE, payload.as_bytes(), vec![log.fd]));
        }
        if self.negotiated.protocol.contains(ProtocolFeatures::STATUS) {
            requests.push(SavedRequest::number(RequestCode::SET_STATUS, self.status));
        }
        Ok(requests)
    }

    fn save_ring(&mut self, ring: usize, saved: &mut SavedSession) -> Result<(), SessionError> {
        let stopped = self.rings.stop(ring)?;
        let vring = &mut self.vrings[ring];
        let ran = std::mem::take(&mut vring.running);
        let (mut call, mut err) = (vring.call.take(), vring.err.take());
        let mut kick = None;
        if let Some(stopped) = stopped {
            vring.base = stopped.base;
            (kick, call, err) = (stopped.kick, stopped.call, stopped.err);
        }
        let negotiated = &mut saved.negotiated;
        if vring.size != 0 {
            negotiated.push(SavedRequest::vring_state(RequestCode::SET_VRING_NUM, ring, vring.size));
        }
        if let Some(address) = vring.address {
            negotiated.push(SavedRequest::new(RequestCode::SET_VRING_ADDR, &address.to_bytes(), Vec::new()));
        }
        negotiated.push(SavedRequest::vring_state(RequestCode::SET_VRING_BASE, ring, vring.base.into()));
        negotiated.push(SavedRequest::vring_fd(RequestCode::SET_VRING_CALL, ring, call));
        negotiated.push(SavedRequest::vring_fd(RequestCode::SET_VRING_ERR, ring, err));
        if vring.enablement != Enablement::Initial {
            let enabled = vring.enablement == Enablement::Enabled;
            negotiated.push(SavedRequest::vring_state(RequestCode::SET_VRING_ENABLE, ring, enabled.into()));
        }
        if ran && kick.is_some() {
            saved.starts.push(SavedRequest::vring_fd(RequestCode::SET_VRING_KICK, ring, kick));
        }
        Ok(())
    }
}

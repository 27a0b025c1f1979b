//! Requests about rings, stopped or running.

use std::os::fd::OwnedFd;

use super::vring::Vring;
use super::{Enablement, RingFds, Rings, Session, SessionError};
use crate::features;
use crate::memory::GuestMemory;
use crate::message::{Reply, VringAddress, VringFd, VringState};
use crate::ring::{RING_SIZE_MAX, RingExtent, RingSetup};

impl<R: Rings> Session<R> {
    /// Stops a ring and returns its available index.
    pub(super) fn get_base(&mut self, state: VringState) -> Result<Reply, SessionError> {
        let index = self.index("GET_VRING_BASE", state.index)?;
        Ok(Reply::VringBase(VringState { number: self.stop(index)?.into(), ..state }))
    }

    pub(super) fn set_call(&mut self, VringFd { index, fd }: VringFd) -> Result<(), SessionError> {
        let index = self.index("SET_VRING_CALL", index.into())?;
        let fd = non_blocking(fd);
        if self.vrings[index].running {
            return self.rings.set_call(index, fd);
        }
        self.vrings[index].call = fd;
        Ok(())
    }

    pub(super) fn set_err(&mut self, VringFd { index, fd }: VringFd) -> Result<(), SessionError> {
        let index = self.index("SET_VRING_ERR", index.into())?;
        let fd = non_blocking(fd);
        if self.vrings[index].running {
            return self.rings.set_err(index, fd);
        }
        self.vrings[index].err = fd;
        Ok(())
    }

    /// Checks the number of a ring.
    fn index(&self, request: &'static str, index: u32) -> Result<usize, SessionError> {
        let count = self.vrings.len();
        let known = usize::try_from(index).ok().filter(|index| *index < count);
        known.ok_or(SessionError::NoSuchRing { request, index: index.into(), count })
    }

    /// Checks the number of a ring that must be stopped.
    fn stopped_index(&self, request: &'static str, index: u32) -> Result<usize, SessionError> {
        let index = self.index(request, index)?;
        if self.vrings[index].running {
            let why = "it runs; stop it with GET_VRING_BASE first";
            return Err(SessionError::RingState { request, index, why });
        }
        Ok(index)
    }

    pub(super) fn set_size(&mut self, state: &VringState) -> Result<(), SessionError> {
        let index = self.stopped_index("SET_VRING_NUM", state.index)?;
        let found = state.number;
        if !found.is_power_of_two() || found > u32::from(RING_SIZE_MAX) {
            let expected = "a power of two up to 32768";
            return Err(SessionError::Value { request: "SET_VRING_NUM", index, found, expected });
        }
        self.vrings[index].size = found;
        Ok(())
    }

    pub(super) fn set_base(&mut self, state: &VringState) -> Result<(), SessionError> {
        let index = self.stopped_index("SET_VRING_BASE", state.index)?;
        let found = state.number;
        let base = u16::try_from(found).map_err(|_| SessionError::Value {
            request: "SET_VRING_BASE",
            index,
            found,
            expected: "at most 65535",
        })?;
        self.vrings[index].base = base;
        Ok(())
    }

    /// Sets the addresses of a ring. For a running ring, the flag for logging its used ring may change.
    pub(super) fn set_address(&mut self, address: VringAddress) -> Result<(), SessionError> {
        let index = self.index("SET_VRING_ADDR", address.index)?;
        let former = self.vrings[index].address.replace(address);
        if self.vrings[index].running {
            if let Err(error) = self.check_overlaps("SET_VRING_ADDR", &self.memory, Some(index)) {
                self.vrings[index].address = former;
                return Err(error);
            }
            self.rings.set_address(index, address)?;
        }
        Ok(())
    }

    pub(super) fn set_kick(&mut self, VringFd { index, fd }: VringFd) -> Result<(), SessionError> {
        let request = "SET_VRING_KICK";
        let index = self.index(request, index.into())?;
        let refused = |why| SessionError::RingState { request, index, why };
        let kick = non_blocking(fd).ok_or(refused("polled rings are not supported; send an eventfd"))?;
        if self.vrings[index].running {
            return self.rings.set_kick(index, kick);
        }
        let features = self.features.ok_or(refused("no features yet; SET_FEATURES comes first"))?;
        self.check_overlaps(request, &self.memory, Some(index))?;
        let vring = &mut self.vrings[index];
        let address = vring.address.ok_or(refused("it has no address yet; SET_VRING_ADDR comes first"))?;
        let setup = RingSetup {
            size: vring.size,
            address,
            base: vring.base,
            features,
            call: vring.call.take(),
            switch: self.switch.clone(),
            log: self.log.clone(),
        };
        let fds = RingFds { kick, err: vring.err.take() };
        let fault = self.rings.start(index, setup, &self.memory, fds)?;
        // The thread has reported the fault; the session and the other rings continue.
        vring.running = fault.is_none();
        let always = features & features::PROTOCOL_FEATURES == 0;
        self.rings.enable(index, if always { Enablement::Enabled } else { vring.enablement })
    }

    /// Refuses rings of which one's used ring overlaps another's available ring, at any address: the device's
    /// own completions would keep it busy. With `concerned`, only this ring is compared with the others. A
    /// ring that overlaps itself has a fault.
    pub(super) fn check_overlaps(
        &self,
        request: &'static str,
        memory: &GuestMemory,
        concerned: Option<usize>,
    ) -> Result<(), SessionError> {
        let Some(features) = self.features else { return Ok(()) };
        let is_known = |index, vring: &Vring| vring.running || concerned == Some(index);
        let known = self.vrings.iter().enumerate().filter(|(index, vring)| is_known(*index, vring));
        let extents: Vec<_> = known
            .filter_map(|(index, vring)| {
                Some((index, RingExtent::find(memory, &vring.address?, vring.size, features)?))
            })
            .collect();
        let compared = |ring, other| {
            ring != other && concerned.is_none_or(|concerned| concerned == ring || concerned == other)
        };
        for (ring, extent) in &extents {
            let fed = |(other, it): &&(usize, RingExtent)| compared(*ring, *other) && extent.feeds(it);
            if let Some((other, _)) = extents.iter().find(fed) {
                return Err(SessionError::RingOverlap { request, ring: *ring, other: *other });
            }
        }
        Ok(())
    }

    pub(super) fn set_enable(&mut self, state: &VringState) -> Result<(), SessionError> {
        let index = self.index("SET_VRING_ENABLE", state.index)?;
        let found = state.number;
        if found > 1 {
            let expected = "0 or 1";
            return Err(SessionError::Value { request: "SET_VRING_ENABLE", index, found, expected });
        }
        let enablement = if found == 1 { Enablement::Enabled } else { Enablement::Disabled };
        self.vrings[index].enablement = enablement;
        self.rings.enable(index, enablement)
    }

    pub(super) fn enable_all(&mut self, enablement: Enablement) -> Result<(), SessionError> {
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            vring.enablement = enablement;
            self.rings.enable(index, enablement)?;
        }
        Ok(())
    }

    /// Stops a ring if it runs. Returns its available index.
    pub(super) fn stop(&mut self, index: usize) -> Result<u16, SessionError> {
        let stopped = self.rings.stop(index)?;
        let vring = &mut self.vrings[index];
        let ran = std::mem::take(&mut vring.running);
        vring.call = None;
        vring.err = None;
        vring.base = stopped.unwrap_or(vring.base);
        let base = vring.base;
        if ran && !self.is_running() {
            self.log_is_current = false;
            self.set_log_mode();
        }
        Ok(base)
    }
}

/// Makes the frontend's descriptor non-blocking.
fn non_blocking(fd: Option<OwnedFd>) -> Option<OwnedFd> {
    if let Some(fd) = &fd
        && let Err(errno) = rustix::io::ioctl_fionbio(fd, true)
    {
        tracing::warn!(%errno, "cannot make an eventfd non-blocking");
    }
    fd
}

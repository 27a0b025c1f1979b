//! The backend's side of a conversation: what was agreed upon, and what each request does to memory, log and rings.
//!
//! ```text
//!   Offered ── SET_FEATURES ──► Agreed: rings may start                     a ring:
//!      protocol features are taken before or after                  Idle ── SET_VRING_KICK ──► Running
//!                                                                        ◄─ GET_VRING_BASE ──
//! ```
//! No I/O of its own: requests come decoded, answers go back as values, and [`Rings`] does what there is to do to rings
//! that run. A request that cannot be is refused by name. The frontend hears of it if it asked for an answer; if it did
//! not, it would go on believing, so the connection ends ([`Session::handle`]'s error).

mod error;
mod pack;
mod postcopy;
mod state_transfer;
mod vring;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use error::SessionError;
pub(crate) use pack::{Message, Packed};
use towline_channel::Cancel;

use crate::device::Device;
use crate::features::{self, ProtocolFeatures};
use crate::log::{DirtyLog, LogSwitch};
use crate::memory::{Memory, REGIONS_MAX, Region};
use crate::message::{Direction, LogMemory, Reply, Request, VringAddress};
use crate::ring::{RingFault, RingSetup};
use crate::sys::Faults;
use postcopy::Postcopy;
use state_transfer::StateTransfer;
use vring::Vring;

/// The most queues of a device: what one byte names on the wire.
pub const QUEUES_MAX: usize = 256;

/// What a session needs of those who run the rings. Each call has taken effect when it returns.
pub(crate) trait Rings {
    /// Calls that wait give up when this is cancelled.
    fn set_cancel(&mut self, cancel: &Cancel) {
        let _ = cancel;
    }
    /// Starts a ring; its fault, if it cannot be one, is no fault of the session.
    fn start(
        &mut self,
        ring: usize,
        setup: RingSetup,
        memory: &Arc<Memory>,
        fds: (OwnedFd, Option<OwnedFd>),
    ) -> Result<Option<RingFault>, SessionError>;
    /// Drains and stops it; where it stands, if it ran.
    fn stop(&mut self, ring: usize) -> Result<Option<Stopped>, SessionError>;
    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), SessionError>;
    fn set_kick(&mut self, ring: usize, fd: OwnedFd) -> Result<(), SessionError>;
    fn set_call(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError>;
    fn set_err(&mut self, ring: usize, fd: Option<OwnedFd>) -> Result<(), SessionError>;
    fn set_address(&mut self, ring: usize, address: VringAddress) -> Result<(), SessionError>;
    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), SessionError>;
    fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), SessionError>;
    /// Every batch that began before this is over.
    fn settle(&mut self) -> Result<(), SessionError>;
}

/// A ring that was stopped.
#[derive(Debug, Default)]
pub(crate) struct Stopped {
    /// Where it goes on.
    pub(crate) base: u16,
    /// What it was woken by, what it woke, and what its faults were told to.
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) err: Option<OwnedFd>,
}

/// What is agreed upon with one frontend.
pub(crate) struct Session<R> {
    device: Arc<dyn Device>,
    rings: R,
    vrings: Vec<Vring>,
    agreed: Agreed,
    memory: Arc<Memory>,
    switch: LogSwitch,
    log: Option<Arc<DirtyLog>>,
    status: u64,
    transfer: Option<StateTransfer>,
    postcopy: Option<Postcopy>,
    /// A frontend has said that the device is its own.
    owned: bool,
    /// Whatever waits gives up when this is cancelled.
    cancel: Option<Cancel>,
    /// Goes with the next answer.
    answer_fd: Option<OwnedFd>,
}

/// What was negotiated so far.
#[derive(Debug, Clone, Copy)]
struct Agreed {
    /// `None` until the frontend has taken some; no ring starts before.
    features: Option<u64>,
    protocol: ProtocolFeatures,
}

impl<R: Rings> Session<R> {
    /// A session before its first request.
    pub(crate) fn new(device: Arc<dyn Device>, rings: R) -> Self {
        let vrings = (0..device.queue_count()).map(|_| Vring::default()).collect();
        let agreed = Agreed { features: None, protocol: ProtocolFeatures::empty() };
        Self {
            device,
            rings,
            vrings,
            agreed,
            memory: Arc::default(),
            switch: LogSwitch::default(),
            log: None,
            status: 0,
            transfer: None,
            postcopy: None,
            owned: false,
            cancel: None,
            answer_fd: None,
        }
    }

    /// Requests that wait are given up when this is cancelled.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.rings.set_cancel(cancel);
        self.cancel = Some(cancel.clone());
    }

    /// Whether a frontend that asks for an answer gets one.
    pub(crate) fn acknowledges(&self) -> bool {
        self.agreed.protocol.contains(ProtocolFeatures::REPLY_ACK)
    }

    /// The descriptor that belongs to the answer just given, if one does.
    pub(crate) fn take_answer_fd(&mut self) -> Option<OwnedFd> {
        self.answer_fd.take()
    }

    /// Does what is asked. The answer, where the request has one of its own.
    pub(crate) fn handle(&mut self, request: Request) -> Result<Option<Reply>, SessionError> {
        self.check_agreed(&request)?;
        let number = |number| Ok(Some(Reply::Number(number)));
        let done = |()| None;
        match request {
            Request::GetFeatures => number(self.offered()),
            Request::SetFeatures(features) => self.set_features(features).map(done),
            Request::SetOwner => self.set_owner().map(done),
            Request::ResetOwner => self.enable_all(false).map(done),
            Request::GetProtocolFeatures => number(self.offered_protocol().bits()),
            Request::SetProtocolFeatures(bits) => self.set_protocol_features(bits).map(done),
            Request::GetQueueNum => number(self.device.queue_number() as u64),
            Request::GetMaxMemSlots => number(REGIONS_MAX as u64),
            Request::SetMemTable(regions) if regions.is_empty() && self.has_told() => self.watch().map(done),
            Request::SetMemTable(regions) if self.listens() => self.tell_table(regions).map(Some),
            Request::SetMemTable(regions) => {
                let regions = regions.into_iter().map(|(info, fd)| Region::map(&info, fd));
                let memory = Memory::new(regions.collect::<Result<_, _>>()?)?;
                self.set_memory(memory).map(done)
            }
            Request::MemRegionsWatched => self.watch().map(done),
            Request::AddMemReg(info, fd) if self.listens() => self.tell_region(&info, fd).map(Some),
            // QEMU before 8.1 says both once for each queue pair.
            Request::AddMemReg(info, _) if self.memory.has(&info) => Ok(None),
            Request::RemMemReg(info) if !self.memory.has(&info) => Ok(None),
            Request::AddMemReg(info, fd) => {
                let memory = self.memory.with(Region::map(&info, fd)?)?;
                self.set_memory(memory).map(done)
            }
            Request::RemMemReg(info) => {
                let memory = self.memory.without(&info)?;
                self.set_memory(memory).map(done)
            }
            Request::SetLogBase(log) => self.set_log(log).map(Some),
            // Nothing waits for it: who migrates looks at the log when it wants to.
            Request::SetLogFd(_) => Ok(None),
            Request::GetConfig { offset, size, flags } => Ok(Some(self.config(offset, size, flags))),
            Request::SetConfig { offset, flags, bytes } => {
                let written = self.device.write_config(offset as usize, &bytes, flags & 1 != 0);
                written.map(done).map_err(|reason| SessionError::refused("SET_CONFIG", reason))
            }
            Request::SendRarp(mac) => self
                .device
                .send_rarp(mac)
                .map(done)
                .map_err(|reason| SessionError::refused("SEND_RARP", reason)),
            Request::NetSetMtu(mtu) => self.set_mtu(mtu).map(done),
            Request::ResetDevice => self.reset().map(done),
            Request::SetStatus(status) => {
                self.status = status;
                Ok(None)
            }
            Request::GetStatus => number(self.status),
            Request::SetDeviceStateFd(direction, fd) => number(self.begin_transfer(direction, fd)),
            Request::CheckDeviceState => number(self.check_transfer()),
            Request::PostcopyAdvise => self.postcopy_advise().map(Some),
            Request::PostcopyListen => self.postcopy_listen().map(done),
            Request::PostcopyEnd => {
                self.postcopy = None;
                Ok(None)
            }
            vring => self.vring_request(vring),
        }
    }

    /// Refuses what belongs to a protocol feature that was not taken.
    fn check_agreed(&self, request: &Request) -> Result<(), SessionError> {
        use ProtocolFeatures as P;
        let (name, needed) = match request {
            Request::SetLogBase(_) => ("SET_LOG_BASE", P::LOG_SHMFD),
            Request::GetConfig { .. } => ("GET_CONFIG", P::CONFIG),
            Request::SetConfig { .. } => ("SET_CONFIG", P::CONFIG),
            Request::SendRarp(_) => ("SEND_RARP", P::RARP),
            Request::NetSetMtu(_) => ("NET_SET_MTU", P::NET_MTU),
            Request::ResetDevice => ("RESET_DEVICE", P::RESET_DEVICE),
            Request::GetMaxMemSlots => ("GET_MAX_MEM_SLOTS", P::CONFIGURE_MEM_SLOTS),
            Request::AddMemReg(..) => ("ADD_MEM_REG", P::CONFIGURE_MEM_SLOTS),
            Request::RemMemReg(_) => ("REM_MEM_REG", P::CONFIGURE_MEM_SLOTS),
            Request::SetStatus(_) => ("SET_STATUS", P::STATUS),
            Request::GetStatus => ("GET_STATUS", P::STATUS),
            Request::SetDeviceStateFd(..) => ("SET_DEVICE_STATE_FD", P::DEVICE_STATE),
            Request::CheckDeviceState => ("CHECK_DEVICE_STATE", P::DEVICE_STATE),
            Request::PostcopyAdvise => ("POSTCOPY_ADVISE", P::PAGEFAULT),
            Request::PostcopyListen => ("POSTCOPY_LISTEN", P::PAGEFAULT),
            Request::PostcopyEnd => ("POSTCOPY_END", P::PAGEFAULT),
            Request::MemRegionsWatched => ("ADD_MEM_REG", P::PAGEFAULT),
            _ => return Ok(()),
        };
        if self.agreed.protocol.contains(needed) {
            return Ok(());
        }
        Err(SessionError::NotAgreed { request: name, needed })
    }

    fn offered(&self) -> u64 {
        let unlogged = if self.device.is_migratable() { 0 } else { features::LOG_ALL };
        (self.device.features() | features::OURS) & !unlogged
    }

    fn offered_protocol(&self) -> ProtocolFeatures {
        let postcopy = match self.device.allows_postcopy() && Faults::new().is_ok() {
            true => ProtocolFeatures::PAGEFAULT,
            false => ProtocolFeatures::empty(),
        };
        ProtocolFeatures::ALWAYS | postcopy | (self.device.protocol_features() & ProtocolFeatures::BY_DEVICE)
    }

    /// Also what switches the log on and off, on rings that run.
    fn set_features(&mut self, taken: u64) -> Result<(), SessionError> {
        let offered = self.offered();
        if taken & !offered != 0 {
            return Err(SessionError::Features { unknown: taken & !offered, offered });
        }
        let guests = |features: u64| features & !features::NOT_THE_GUESTS;
        let known = self.agreed.features;
        if known.map(guests) != Some(guests(taken)) {
            if let Some(ring) = self.vrings.iter().position(|vring| vring.running) {
                return Err(SessionError::FeaturesWhileRunning { ring });
            }
            let taken = self.device.acknowledge(guests(taken));
            taken.map_err(|reason| SessionError::refused("SET_FEATURES", reason))?;
        }
        self.agreed.features = Some(taken);
        self.switch.set(taken & features::LOG_ALL != 0);
        if known.unwrap_or(0) & features::LOG_ALL != taken & features::LOG_ALL {
            self.rings.settle()?;
        }
        Ok(())
    }

    fn set_protocol_features(&mut self, bits: u64) -> Result<(), SessionError> {
        let offered = self.offered_protocol();
        match ProtocolFeatures::from_bits(bits).filter(|taken| offered.contains(*taken)) {
            Some(taken) => {
                self.agreed.protocol = taken;
                Ok(())
            }
            None => {
                let unknown = bits & !offered.bits();
                Err(SessionError::ProtocolFeatures { unknown, offered: offered.bits() })
            }
        }
    }

    fn set_memory(&mut self, memory: Memory) -> Result<(), SessionError> {
        self.memory = Arc::new(memory);
        self.rings.set_memory(&self.memory)
    }

    fn set_log(&mut self, LogMemory { size, offset, fd }: LogMemory) -> Result<Reply, SessionError> {
        let log = Arc::new(DirtyLog::map(fd, offset, size)?);
        self.rings.set_log(Some(&log))?;
        self.log = Some(log);
        Ok(Reply::Number(0))
    }

    /// A part that the device does not have reads as zeros, as with a device that knows fewer features.
    fn config(&self, offset: u32, size: u32, flags: u32) -> Reply {
        let mut bytes = self.device.config();
        let (start, end) = (offset as usize, (offset + size) as usize);
        bytes.resize(bytes.len().max(end), 0);
        Reply::Config { offset, flags, bytes: bytes[start..end].to_vec() }
    }

    fn set_mtu(&self, mtu: u64) -> Result<(), SessionError> {
        let mtu = u16::try_from(mtu).map_err(|_| SessionError::Mtu { found: mtu })?;
        self.device.set_mtu(mtu).map_err(|reason| SessionError::refused("NET_SET_MTU", reason))
    }

    /// The second one on a connection begins anew: QEMU's device was taken out of its guest and put in again, and the chardev stayed
    /// connected. What was set for the device before is gone; what the protocol can do was agreed upon just before.
    fn set_owner(&mut self) -> Result<(), SessionError> {
        if !std::mem::replace(&mut self.owned, true) {
            return Ok(());
        }
        self.reset()?;
        self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
        (self.agreed.features, self.transfer, self.postcopy, self.log) = (None, None, None, None);
        self.switch.set(false);
        self.rings.set_log(None)?;
        self.set_memory(Memory::default())
    }

    fn reset(&mut self) -> Result<(), SessionError> {
        for index in 0..self.vrings.len() {
            self.stop(index)?;
        }
        self.enable_all(false)?;
        self.status = 0;
        self.device.reset();
        Ok(())
    }

    /// Bits 0–7: 0 is well; bit 8: no descriptor comes back.
    fn begin_transfer(&mut self, direction: Direction, fd: OwnedFd) -> u64 {
        const NO_FD: u64 = 1 << 8;
        if let Some(ring) = self.vrings.iter().position(|vring| vring.running) {
            tracing::error!(ring, "SET_DEVICE_STATE_FD while this ring runs; stop it first");
            return NO_FD | 1;
        }
        if self.transfer.as_ref().is_some_and(StateTransfer::is_under_way) {
            tracing::error!(
                "SET_DEVICE_STATE_FD while a transfer is under way; close its descriptor and ask CHECK_DEVICE_STATE first"
            );
            return NO_FD | 1;
        }
        // One that is over and was not asked for is dropped.
        self.transfer = None;
        match StateTransfer::begin(Arc::clone(&self.device), direction, fd) {
            Ok(transfer) => {
                self.transfer = Some(transfer);
                NO_FD
            }
            Err(reason) => {
                tracing::error!(%reason, "the device's state cannot be transferred");
                NO_FD | 1
            }
        }
    }

    fn check_transfer(&mut self) -> u64 {
        let Some(transfer) = self.transfer.take() else {
            tracing::error!("CHECK_DEVICE_STATE without SET_DEVICE_STATE_FD");
            return 1;
        };
        match transfer.finish(self.cancel.as_ref()) {
            Ok(()) => 0,
            Err(reason) => {
                tracing::error!(%reason, "the device's state was not transferred");
                1
            }
        }
    }
}

#[cfg(test)]
mod tests;

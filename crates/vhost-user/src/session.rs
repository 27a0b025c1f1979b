//! The session with one frontend: negotiated state, and the effect of each request on memory, log and rings.
//!
//! ```text
//!   offered ── SET_FEATURES ──► negotiated: rings may start                a ring:
//!      protocol features are negotiated before or after            stopped ── SET_VRING_KICK ──► running
//!                                                                          ◄─ GET_VRING_BASE ──
//! ```
//! Without I/O: requests arrive decoded, replies leave as values, and [`Rings`] executes what concerns
//! running rings. The error of an invalid request names it. A frontend that requested an acknowledgement
//! receives the refusal; any other would assume success, so its connection ends.

mod descriptors;
mod error;
mod postcopy;
mod postcopy_requests;
mod ring_requests;
mod rings;
mod state_requests;
mod state_transfer;
mod vring;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use error::SessionError;
pub use rings::QUEUES_MAX;
pub(crate) use rings::{CANCELLED_WITHIN, Enablement, RingFds, Rings};
use towline_channel::Cancel;

use crate::device::{ConfigSource, Device};
use crate::features::{self, ProtocolFeatures};
use crate::log::{DirtyLog, LogMode, LogSwitch};
use crate::memory::{GuestMemory, REGIONS_MAX};
use crate::message::{LogMemory, RegionInfo, Reply, Request};
use crate::orphaned_threads::OrphanedThreads;
use crate::sys::Userfaultfd;
use postcopy::PostcopyProgress;
use state_transfer::StateTransfer;
use vring::Vring;

/// In `SET_CONFIG`: the configuration comes from a migration (`VHOST_SET_CONFIG_TYPE_MIGRATION`).
const CONFIG_OF_MIGRATION: u32 = 1;

/// State of the session with one frontend.
pub(crate) struct Session<R> {
    device: Arc<dyn Device>,
    orphans: Arc<OrphanedThreads>,
    /// Dropped before the rings, whose workers may wait for its pages.
    postcopy: Option<PostcopyProgress>,
    rings: R,
    vrings: Vec<Vring>,
    /// Negotiated features: `None` until `SET_FEATURES`; no ring starts before.
    features: Option<u64>,
    protocol_features: ProtocolFeatures,
    memory: Arc<GuestMemory>,
    switch: LogSwitch,
    log: Option<Arc<DirtyLog>>,
    /// The log arrived after the last of the former rings stopped, and after the log was last turned off.
    log_is_current: bool,
    status: u64,
    transfer: Option<StateTransfer>,
    /// `SET_OWNER` was received.
    owned: bool,
    /// Cancels waiting requests.
    cancel: Option<Cancel>,
    /// Descriptor for the next reply.
    reply_fd: Option<OwnedFd>,
}

/// Outcome of a request without a specific reply.
fn no_reply(outcome: Result<(), SessionError>) -> Result<Option<Reply>, SessionError> {
    outcome.map(|()| None)
}

/// Reply with a number.
fn number(number: u64) -> Result<Option<Reply>, SessionError> {
    Ok(Some(Reply::Number(number)))
}

impl<R: Rings> Session<R> {
    /// A session before its first request.
    pub(crate) fn new(device: Arc<dyn Device>, orphans: Arc<OrphanedThreads>, rings: R) -> Self {
        let vrings = (0..device.queue_count()).map(|_| Vring::default()).collect();
        Self {
            device,
            orphans,
            rings,
            vrings,
            features: None,
            protocol_features: ProtocolFeatures::empty(),
            memory: Arc::default(),
            switch: LogSwitch::default(),
            log: None,
            log_is_current: false,
            status: 0,
            transfer: None,
            postcopy: None,
            owned: false,
            cancel: None,
            reply_fd: None,
        }
    }

    /// Cancels waiting requests when `cancel` is cancelled.
    pub(crate) fn set_cancel(&mut self, cancel: &Cancel) {
        self.rings.set_cancel(cancel);
        self.cancel = Some(cancel.clone());
    }

    /// Returns true if acknowledgements are sent where the frontend requests them.
    pub(crate) fn has_reply_ack(&self) -> bool {
        self.protocol_features.contains(ProtocolFeatures::REPLY_ACK)
    }

    /// Takes the descriptor that belongs to the last reply.
    pub(crate) fn take_reply_fd(&mut self) -> Option<OwnedFd> {
        self.reply_fd.take()
    }

    /// Returns true if a ring runs.
    pub(crate) fn is_running(&self) -> bool {
        self.vrings.iter().any(|vring| vring.running)
    }

    /// Returns true if the request concerns the device and not only this session.
    pub(crate) fn concerns_device(&self, request: &Request) -> bool {
        match request {
            // The second one resets the device.
            Request::SetOwner => self.owned,
            // QEMU resets its machine when it starts: before the features this session has set nothing up
            // that a reset would undo.
            Request::ResetDevice => self.features.is_some(),
            Request::SetFeatures(_)
            | Request::SetConfig { .. }
            | Request::SendRarp(_)
            | Request::NetSetMtu(_)
            | Request::SetVringKick(_)
            | Request::SetDeviceStateFd(..) => true,
            _ => false,
        }
    }

    /// Sets the device up as negotiated here, because it was another session's.
    pub(crate) fn take_device(&mut self) -> Result<(), SessionError> {
        self.features.map_or(Ok(()), |accepted| self.acknowledge(accepted))
    }

    /// Passes the driver's part of these features to the device.
    fn acknowledge(&self, accepted: u64) -> Result<(), SessionError> {
        let acknowledged = self.device.acknowledge(accepted & !features::NOT_OF_THE_DRIVER);
        acknowledged.map_err(|reason| SessionError::refused("SET_FEATURES", reason))
    }

    /// Handles a request. Returns its reply if it has one besides an acknowledgement.
    pub(crate) fn handle(&mut self, request: Request) -> Result<Option<Reply>, SessionError> {
        self.check_negotiated(&request)?;
        let request = self.check_descriptors(request)?;
        match request {
            Request::GetFeatures => number(self.offered()),
            Request::SetFeatures(features) => no_reply(self.set_features(features)),
            Request::SetOwner => no_reply(self.set_owner()),
            Request::ResetOwner => no_reply(self.enable_all(Enablement::Disabled)),
            Request::GetProtocolFeatures => number(self.offered_protocol().bits()),
            Request::SetProtocolFeatures(bits) => no_reply(self.set_protocol_features(bits)),
            Request::GetQueueNum => number(self.device.reported_queue_num() as u64),
            Request::GetMaxMemSlots => number(REGIONS_MAX as u64),
            Request::SetMemTable(regions) => self.set_mem_table(regions),
            Request::PostcopyRegionsAck => no_reply(self.acknowledge_postcopy_regions()),
            Request::AddMemReg(info, fd) => self.add_region(&info, fd),
            Request::RemMemReg(info) => no_reply(self.remove_region(&info)),
            Request::SetLogBase(log) => self.set_log(log).map(Some),
            // Not signalled: a frontend that migrates reads the log when it needs it.
            Request::SetLogFd(_) => Ok(None),
            Request::GetConfig { offset, size, flags } => Ok(Some(self.config(offset, size, flags))),
            Request::SetConfig { offset, flags, bytes } => {
                no_reply(self.write_config(offset as usize, flags, &bytes))
            }
            Request::SendRarp(mac) => {
                let sent = self.device.send_rarp(mac);
                no_reply(sent.map_err(|reason| SessionError::refused("SEND_RARP", reason)))
            }
            Request::NetSetMtu(mtu) => no_reply(self.set_mtu(mtu)),
            Request::ResetDevice => no_reply(self.reset()),
            Request::SetStatus(status) => {
                self.status = status;
                Ok(None)
            }
            Request::GetStatus => number(self.status),
            Request::SetDeviceStateFd(direction, fd) => number(self.begin_transfer(direction, fd)),
            Request::CheckDeviceState => number(self.check_transfer()),
            Request::PostcopyAdvise => self.postcopy_advise().map(Some),
            Request::PostcopyListen => no_reply(self.postcopy_listen()),
            Request::PostcopyEnd => {
                self.postcopy = None;
                Ok(None)
            }
            Request::SetVringNum(state) => no_reply(self.set_size(&state)),
            Request::SetVringAddress(address) => no_reply(self.set_address(address)),
            Request::SetVringBase(state) => no_reply(self.set_base(&state)),
            Request::GetVringBase(state) => self.get_base(state).map(Some),
            Request::SetVringKick(kick) => no_reply(self.set_kick(kick)),
            Request::SetVringCall(call) => no_reply(self.set_call(call)),
            Request::SetVringErr(err) => no_reply(self.set_err(err)),
            Request::SetVringEnable(state) => no_reply(self.set_enable(&state)),
        }
    }

    /// Refuses requests of protocol features that were not negotiated.
    fn check_negotiated(&self, request: &Request) -> Result<(), SessionError> {
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
            Request::PostcopyRegionsAck => ("ADD_MEM_REG", P::PAGEFAULT),
            _ => return Ok(()),
        };
        if self.protocol_features.contains(needed) {
            return Ok(());
        }
        Err(SessionError::NotNegotiated { request: name, needed })
    }

    fn offered(&self) -> u64 {
        let unlogged = if self.device.is_migratable() { 0 } else { features::LOG_ALL };
        (self.device.features() | features::COMMON) & !unlogged
    }

    fn offered_protocol(&self) -> ProtocolFeatures {
        let mut offered =
            ProtocolFeatures::ALWAYS | (self.device.protocol_features() & ProtocolFeatures::BY_DEVICE);
        if self.device.allows_postcopy() && Userfaultfd::new().is_ok() {
            offered |= ProtocolFeatures::PAGEFAULT;
        }
        offered
    }

    /// Sets the accepted features. On running rings this also switches the dirty log.
    fn set_features(&mut self, accepted: u64) -> Result<(), SessionError> {
        let offered = self.offered();
        if accepted & !offered != 0 {
            return Err(SessionError::Features { unknown: accepted & !offered, offered });
        }
        let of_driver = |features: u64| features & !features::NOT_OF_THE_DRIVER;
        let before = self.features;
        if before.map(of_driver) != Some(of_driver(accepted)) {
            if let Some(ring) = self.vrings.iter().position(|vring| vring.running) {
                return Err(SessionError::FeaturesWhileRunning { ring });
            }
            self.acknowledge(accepted)?;
        }
        self.features = Some(accepted);
        let log_changes = before.unwrap_or(0) & features::LOG_ALL != accepted & features::LOG_ALL;
        if log_changes && accepted & features::LOG_ALL == 0 {
            self.log_is_current = false;
        }
        self.set_log_mode();
        if log_changes {
            self.rings.quiesce()?;
        }
        Ok(())
    }

    fn set_log_mode(&self) {
        let logs = self.features.is_some_and(|features| features & features::LOG_ALL != 0);
        self.switch.set(match (logs, self.log_is_current) {
            (false, _) => LogMode::Off,
            (true, true) => LogMode::On,
            (true, false) => LogMode::Awaited,
        });
    }

    fn set_protocol_features(&mut self, bits: u64) -> Result<(), SessionError> {
        let offered = self.offered_protocol().bits();
        if bits & !offered != 0 {
            return Err(SessionError::ProtocolFeatures { unknown: bits & !offered, offered });
        }
        self.protocol_features = ProtocolFeatures::from_bits_retain(bits);
        Ok(())
    }

    fn set_mem_table(&mut self, regions: Vec<(RegionInfo, OwnedFd)>) -> Result<Option<Reply>, SessionError> {
        // In postcopy an empty table acknowledges the one before.
        if regions.is_empty() && self.has_unacknowledged_regions() {
            return no_reply(self.acknowledge_postcopy_regions());
        }
        if self.is_postcopy_listening() {
            return self.map_postcopy_table(regions).map(Some);
        }
        no_reply(self.set_memory(GuestMemory::map(regions)?))
    }

    fn add_region(&mut self, info: &RegionInfo, fd: OwnedFd) -> Result<Option<Reply>, SessionError> {
        if self.is_postcopy_listening() {
            return self.map_postcopy_region(info, fd).map(Some);
        }
        // QEMU before 8.1 sends the request once for each queue pair.
        if self.memory.has(info) {
            return Ok(None);
        }
        let memory = self.memory.with_mapped(info, fd)?;
        no_reply(self.set_memory(memory))
    }

    fn remove_region(&mut self, info: &RegionInfo) -> Result<(), SessionError> {
        // As in `add_region`.
        if !self.memory.has(info) {
            return Ok(());
        }
        let memory = self.memory.without(info)?;
        self.set_memory(memory)
    }

    fn set_memory(&mut self, memory: GuestMemory) -> Result<(), SessionError> {
        self.check_overlaps("SET_MEM_TABLE", &memory, None)?;
        self.memory = Arc::new(memory);
        self.rings.set_memory(&self.memory)
    }

    fn set_log(&mut self, LogMemory { size, offset, fd }: LogMemory) -> Result<Reply, SessionError> {
        let log = Arc::new(DirtyLog::map(fd, offset, size)?);
        self.rings.set_log(Some(&log))?;
        self.log_is_current = true;
        self.set_log_mode();
        self.switch.write_kept(&log);
        self.log = Some(log);
        Ok(Reply::Number(0))
    }

    /// Reads the configuration space. Bytes past its end are zeros, as for a device with fewer features.
    fn config(&self, offset: u32, size: u32, flags: u32) -> Reply {
        let mut bytes = self.device.config();
        let (start, end) = (offset as usize, (offset + size) as usize);
        bytes.resize(bytes.len().max(end), 0);
        Reply::Config { offset, flags, bytes: bytes[start..end].to_vec() }
    }

    fn write_config(&self, offset: usize, flags: u32, bytes: &[u8]) -> Result<(), SessionError> {
        let migrated = flags & CONFIG_OF_MIGRATION != 0;
        let source = if migrated { ConfigSource::Migration } else { ConfigSource::Driver };
        let written = self.device.write_config(offset, bytes, source);
        written.map_err(|reason| SessionError::refused("SET_CONFIG", reason))
    }

    fn set_mtu(&self, mtu: u64) -> Result<(), SessionError> {
        let mtu = u16::try_from(mtu).map_err(|_| SessionError::Mtu { found: mtu })?;
        self.device.set_mtu(mtu).map_err(|reason| SessionError::refused("NET_SET_MTU", reason))
    }

    /// Handles `SET_OWNER`. The second one on a connection starts over: QEMU's device was unplugged from its
    /// guest and plugged in again while the chardev stayed connected. All settings of the former device are
    /// dropped, except for the protocol features, which were negotiated just before.
    fn set_owner(&mut self) -> Result<(), SessionError> {
        if !std::mem::replace(&mut self.owned, true) {
            return Ok(());
        }
        self.reset()?;
        self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
        self.features = None;
        self.transfer = None;
        self.postcopy = None;
        self.log = None;
        self.log_is_current = false;
        self.set_log_mode();
        self.rings.set_log(None)?;
        self.set_memory(GuestMemory::default())
    }

    fn reset(&mut self) -> Result<(), SessionError> {
        for index in 0..self.vrings.len() {
            self.stop(index)?;
        }
        self.enable_all(Enablement::Initial)?;
        self.status = 0;
        if self.features.is_some() {
            self.device.reset();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

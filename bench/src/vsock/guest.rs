//! The guest: a thread with a driver, which sleeps when idle.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use towline_frontend::vsock::{
    FEATURE_STREAM, LINUX_BUFFER_BYTES, Options, PAYLOAD_BYTES_MAX, PortPair, VsockEvent, VsockGuest,
};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena};

use crate::applications::Traffic;
use crate::vhost::Signals;

/// CID of the guest.
pub(super) const CID: u64 = 3;
/// Port of the listening application.
pub(super) const PORT: u32 = 1024;

/// Entries of each ring, as in QEMU.
const RING_SIZE: u16 = 128;
/// Packets per update of the transmit ring.
const BATCH: usize = 16;
/// Maximum sleep between checks for the end.
const SLEEP: Duration = Duration::from_millis(20);
/// Timeout of a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// A guest and its applications.
pub(super) struct Machine {
    // Disconnected when the guest is dropped.
    _frontend: Frontend,
    guest: VsockGuest,
    traffic: Traffic,
    /// Streams to the host, with the unsent rest of the current message.
    sending: HashMap<PortPair, usize>,
    /// Responses that wait for space in the ring.
    pending: Vec<(PortPair, u32)>,
}

impl Machine {
    /// Starts the guest on a backend.
    pub(super) fn start(mut frontend: Frontend, traffic: Traffic) -> Result<Self> {
        let wanted = feature::EVENT_IDX | feature::INDIRECT | FEATURE_STREAM;
        let negotiated = frontend.negotiate(0, wanted, 0)?;
        let receive_bytes = LINUX_BUFFER_BYTES;
        let features = negotiated.features;
        let options = Options { cid: CID, size: RING_SIZE, receive_bytes, features, takes_at_once: true };
        let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options))?);
        frontend.set_mem_table(Some(&memory))?;
        let guest = VsockGuest::start(&mut frontend, &memory, options)?;
        let (sending, pending) = (HashMap::new(), Vec::new());
        Ok(Self { _frontend: frontend, guest, traffic, sending, pending })
    }

    /// Opens the streams from the guest.
    pub(super) fn connect(&mut self, signals: &Signals) -> Result<()> {
        let sessions = self.traffic.sessions;
        let ports: Vec<PortPair> = (0..sessions).map(|index| (5000 + index as u32, PORT)).collect();
        ports.iter().for_each(|ports| self.guest.request(*ports));
        let until = Instant::now() + CONNECT_WITHIN;
        while self.sending.len() < sessions {
            ensure!(Instant::now() < until, "{} of {sessions} streams were accepted", self.sending.len());
            self.poll(signals)?;
            self.guest.wait(false, SLEEP)?;
        }
        Ok(())
    }

    /// Runs until the power is off.
    pub(super) fn run(mut self, signals: &Signals) -> Result<()> {
        while !signals.power_off.load(Ordering::Relaxed) {
            let received = self.poll(signals)?;
            let more = self.send()?;
            if !received && !more {
                let blocked = !self.sending.is_empty() || !self.pending.is_empty();
                self.guest.wait(blocked && !self.guest.can_send(), SLEEP)?;
            }
        }
        Ok(())
    }

    /// Processes received packets. Returns true if there were any.
    fn poll(&mut self, signals: &Signals) -> Result<bool> {
        let Self { guest, traffic, sending, pending, .. } = self;
        let received = guest.poll(|guest, event| match event {
            VsockEvent::Request(ports) => guest.accept(ports),
            VsockEvent::Connected(ports) => {
                sending.insert(ports, 0);
            }
            VsockEvent::Data { len, .. } if traffic.is_stream() => signals.add(len.into()),
            VsockEvent::Data { ports, len, .. } => {
                if !guest.send_any(ports, len) {
                    pending.push((ports, len));
                }
            }
            // As Linux: a reset for a peer that shuts both directions.
            VsockEvent::Shutdown(ports, _) => guest.reset(ports),
            VsockEvent::Reset(ports) => {
                sending.remove(&ports);
            }
            VsockEvent::Credit(_) => {}
        })?;
        pending.retain(|(ports, len)| !guest.send_any(*ports, *len));
        guest.tx().publish();
        Ok(received > 0)
    }

    /// Sends what credit and ring allow. Returns true if anything was sent.
    fn send(&mut self) -> Result<bool> {
        if self.sending.is_empty() {
            return Ok(false);
        }
        let mut sent = false;
        self.guest.reclaim()?;
        for (ports, left) in &mut self.sending {
            for _ in 0..BATCH {
                if *left == 0 {
                    *left = self.traffic.size;
                }
                let len = (*left).min(PAYLOAD_BYTES_MAX).min(self.guest.credit(*ports) as usize);
                if len == 0 || !self.guest.can_send() || !self.guest.send_any(*ports, u32::try_from(len)?) {
                    break;
                }
                *left -= len;
                sent = true;
            }
            self.guest.tx().publish();
        }
        Ok(sent)
    }
}

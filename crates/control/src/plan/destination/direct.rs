//! A waiting QEMU that receives a guest from the QEMU of another host directly.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_channel::Address;

use super::super::context::Context;
use super::super::error::Error;
use super::super::forward::at_port;
use super::super::request::Direct;
use super::QmpDestination;
use crate::qemu::Qemu;
use crate::switchover::DestinationStatus;

/// Time in which a QEMU whose towline was killed makes its connections.
const CONNECTING_TIME: Duration = Duration::from_secs(2);
const YANK_INTERVAL: Duration = Duration::from_millis(50);

impl QmpDestination {
    /// Configures QEMU, and has it listen on a socket of its directory, load the guest and stay paused. Returns the address.
    pub(in super::super) fn start_forwarded(
        &mut self,
        how: &Direct,
        context: &Context<'_>,
    ) -> Result<Address, Error> {
        self.apply_direct(how, context)?;
        self.listen(self.link.uri.clone())?;
        Ok(self.link.address.clone())
    }

    /// As [`Self::start_forwarded`], at this TCP address, on a free port, which is returned.
    pub(in super::super) fn start_direct(
        &mut self,
        at: &Address,
        how: &Direct,
        context: &Context<'_>,
    ) -> Result<u16, Error> {
        self.apply_direct(how, context)?;
        self.listen(at_port(at, 0).to_string())?;
        let migration = self.qemu.migration()?;
        let port = migration.socket_address.iter().find_map(port_of);
        port.ok_or_else(|| Error::NoPort { socket: self.qemu.socket().to_owned() })
    }

    fn apply_direct(&mut self, how: &Direct, context: &Context<'_>) -> Result<(), Error> {
        let capabilities = how.capabilities.iter().map(|name| (name.clone(), true));
        self.apply_settings(context.lanes(), context.options.compression, capabilities)
    }

    /// The reason for which QEMU could not load the guest, if it reports one.
    pub(in super::super) fn failed_to_load(&mut self) -> Option<Error> {
        let found = self.qemu.try_query(Qemu::migration_and_status).ok().flatten()?;
        self.see_loaded(found.0, found.1).err()
    }

    /// Closes QEMU's connections to the other QEMU, whose migration fails then; also those that it is about to make.
    pub(in super::super) fn break_connection(&mut self) {
        if !self.is_incoming_started {
            return;
        }
        let until = Instant::now() + CONNECTING_TIME;
        while matches!(self.query_status(), DestinationStatus::Loading | DestinationStatus::Unknown) {
            if let Err(error) = self.qemu.yank_migration() {
                tracing::debug!(%error, "the connections of the QEMUs stay");
            }
            if Instant::now() >= until {
                return;
            }
            thread::sleep(YANK_INTERVAL);
        }
    }
}

/// Port in a `SocketAddress`.
fn port_of(address: &Value) -> Option<u16> {
    address["port"].as_str()?.parse().ok()
}

//! A guest that is protected: the other host stands by for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_channel::{Address, Cancel, ListenOptions, Listener, OneTimeKey};
use towline_qmp::{Command, CommandError, Commands};

use super::frames::Card;
use super::waiting::{StartedForGuest, failed, free_port, with_peer};
use super::{Error, RemoteHost};
use crate::arbiter::Arbiter;
use crate::cards::HoldingCards;
use crate::hex::to_hex;
use crate::nbd::Export;
use crate::plan::Tls;
use crate::protect::{Standby, StandbyControl, StandbyEnd, StandbyError, StandbyMemory};

/// Has the agent stand by for the guest for which it has made a place.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct NewStandby {
    /// Certificate of the end that connects, in hexadecimal digits of DER.
    pub(crate) certificate: String,
    /// The guest's name, and its generation at its host.
    pub(crate) guest: String,
    pub(crate) generation: u64,
    pub(crate) arbiter: Arbiter,
    /// Silence after which the guest's host is lost.
    pub(crate) peer_timeout_ms: u64,
    pub(crate) checkpoint_bytes_max: usize,
    /// Disks of the guest, which it gets as well.
    pub(crate) disks: Vec<Export>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct StandsBy {
    certificate: String,
    /// All of its disks were made for this guest.
    disks_are_new: bool,
}

/// Has the agent give the guest up.
#[derive(Debug, Serialize, Deserialize)]
struct ReleaseStandby {}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Released {
    /// False: it may have the guest.
    is_released: bool,
}

impl Command for NewStandby {
    const NAME: &'static str = "stand-by";
    type Return = StandsBy;
}

impl Command for ReleaseStandby {
    const NAME: &'static str = "release-standby";
    type Return = Released;
}

/// Where another host stands by for a guest.
pub(crate) struct StandbyHost {
    pub(crate) address: Address,
    /// In hexadecimal digits of DER.
    pub(crate) certificate: String,
    /// The disks there are all zeros.
    pub(crate) disks_are_new: bool,
}

impl RemoteHost {
    /// Has the other host stand by for the guest for which it has made a place.
    pub(crate) fn stand_by(&mut self, standby: &NewStandby) -> Result<StandbyHost, Error> {
        let StandsBy { certificate, disks_are_new } = self.execute(standby)?;
        let address = self.await_listening()?;
        Ok(StandbyHost { address, certificate, disks_are_new })
    }

    /// Has the other host give the guest up, within this time. False: it may take the guest over, or has done so.
    pub(crate) fn release_standby(&mut self, within: Duration) -> bool {
        self.set_patience(within);
        self.execute(&ReleaseStandby {}).is_ok_and(|released| released.is_released)
    }
}

/// A guest for which this agent stands by.
#[derive(Debug)]
pub struct AgentStandby {
    standby: Standby,
    started: StartedForGuest,
}

/// Commands of the guest's host while an agent stands by.
#[derive(Debug)]
pub struct StandbyCommands(Arc<StandbyControl>);

impl AgentStandby {
    /// A standby in the QEMU with this monitor. Also returns the reply to the request.
    pub(super) fn new(
        request: &NewStandby,
        monitor: PathBuf,
        memory: StandbyMemory,
        cards: &[Card],
        started: StartedForGuest,
    ) -> Result<(Self, StandsBy), CommandError> {
        // Else both hosts would win.
        let (found, expected) = (request.arbiter.newest(&request.guest).map_err(failed)?, request.generation);
        if found != expected {
            return Err(CommandError::generic(format!(
                "the arbiter has generation {found} of guest {} here, and {expected} at the guest's host: it must be the same one on both (a \
                 directory that is not mounted is another one)",
                request.guest
            )));
        }
        let controls: Vec<_> = cards.iter().map(|card| card.control().to_owned()).collect();
        HoldingCards::hold(&controls, request.generation).map_err(failed)?;
        let key = OneTimeKey::generate().map_err(failed)?;
        let certificate = to_hex(key.certificate());
        let tls = Tls::OneTime(with_peer(key, &request.certificate)?).server().map_err(failed)?;
        let peer_timeout = Duration::from_millis(request.peer_timeout_ms);
        let options = ListenOptions { tls: Some(tls), ..ListenOptions::default() };
        let standby = Standby {
            memory,
            listener: Listener::bind_with(&free_port(), &options).map_err(failed)?,
            disks: request.disks.clone(),
            qemu: monitor,
            cards: controls,
            arbiter: request.arbiter.clone(),
            guest: request.guest.clone(),
            generation: request.generation,
            peer_timeout,
            checkpoint_bytes_max: request.checkpoint_bytes_max,
            control: Arc::new(StandbyControl::new().map_err(failed)?),
        };
        let disks_are_new = started.disks.len() == request.disks.len();
        Ok((Self { standby, started }, StandsBy { certificate, disks_are_new }))
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.standby.listener.local_address()
    }

    /// Commands that are executed meanwhile.
    pub fn commands(&self) -> StandbyCommands {
        StandbyCommands(Arc::clone(&self.standby.control))
    }

    /// Stands by for the guest. Its QEMU is ended unless it has the guest then.
    ///
    /// # Errors
    /// [`StandbyError`].
    pub fn run(mut self, notice: &dyn Fn(&str)) -> Result<StandbyEnd, StandbyError> {
        let takeover = self.standby.qemu.with_file_name("takeover.json");
        let (control, over) = (Arc::clone(&self.standby.control), Cancel::new()?);
        let (standby, qemu) = (self.standby, &self.started.qemu);
        let ended = thread::scope(|scope| {
            if let Some(qemu) = qemu {
                scope.spawn(|| control.watch(&qemu.pidfd(), &over));
            }
            let ended = standby.run(notice);
            over.cancel();
            ended
        });
        match &ended {
            Ok(StandbyEnd::TakenOver(times)) => {
                self.started.keep();
                let json = serde_json::to_vec(times).unwrap_or_default();
                if let Err(error) = std::fs::write(&takeover, json) {
                    tracing::warn!(path = %takeover.display(), %error, "the times of the takeover are not kept");
                }
            }
            Err(error) if error.has_guest() => self.started.keep(),
            _ => {}
        }
        ended
    }
}

impl StandbyCommands {
    /// Gives the guest up. False: it may be here.
    pub fn release(&self) -> bool {
        self.0.release()
    }
}

impl Commands for StandbyCommands {
    fn names(&self) -> &[&'static str] {
        &[ReleaseStandby::NAME]
    }

    fn execute(
        &self,
        name: &str,
        _arguments: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<serde_json::Value, CommandError> {
        if name != ReleaseStandby::NAME {
            return Err(CommandError::NotFound);
        }
        let released = Released { is_released: self.release() };
        serde_json::to_value(released).map_err(failed)
    }
}

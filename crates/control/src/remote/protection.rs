//! A guest that is protected: the other host stands by for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_channel::{Address, Cancel, ListenOptions, Listener};
use towline_qmp::{Command, CommandError, Commands};

use super::frames::Card;
use super::waiting::{StartedForGuest, failed, free_port, one_time_credentials, reply};
use super::{Error, RemoteHost};
use crate::cards::HoldingCards;
use crate::hex::to_hex;
use crate::plan::Tls;
use crate::protect::{Standby, StandbyControl, StandbyEnd, StandbyError, StandbyRequest};

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct StandsBy {
    /// In hexadecimal digits of DER.
    pub(crate) certificate: String,
    /// All of its disks were made for this guest: they are all zeros.
    pub(crate) disks_are_new: bool,
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

impl Command for StandbyRequest {
    const NAME: &'static str = "stand-by";
    type Return = StandsBy;
}

impl Command for ReleaseStandby {
    const NAME: &'static str = "release-standby";
    type Return = Released;
}

impl RemoteHost {
    /// Has the other host stand by for the guest for which it has made a place. Returns where it listens, too.
    pub(crate) fn stand_by(&mut self, request: &StandbyRequest) -> Result<(Address, StandsBy), Error> {
        let stands_by = self.execute(request)?;
        Ok((self.await_listening()?, stands_by))
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

impl AgentStandby {
    /// A standby in the QEMU with this monitor. Also returns the reply to the request.
    pub(super) fn new(
        request: StandbyRequest,
        monitor: PathBuf,
        cards: &[Card],
        mut started: StartedForGuest,
    ) -> Result<(Self, StandsBy), CommandError> {
        let memory = started.memory.take().ok_or_else(|| failed("no standby is prepared"))?;
        // Else both hosts would win.
        let (found, expected) = (request.arbiter.newest(&request.guest).map_err(failed)?, request.generation);
        if found != expected {
            return Err(CommandError::generic(format!(
                "the arbiter has generation {found} of guest {} here, and {expected} at the guest's host: it must be the same one on both (a \
                 directory that is not mounted is another one)",
                request.guest
            )));
        }
        let controls: Vec<_> = cards.iter().map(|card| card.control.clone()).collect();
        HoldingCards::hold(&controls, request.generation).map_err(failed)?;
        let credentials = one_time_credentials(&request.certificate)?;
        let certificate = to_hex(credentials.own().certificate());
        let disks_are_new = started.disks.len() == request.disks.len();
        let tls = Tls::OneTime(credentials).server().map_err(failed)?;
        let options = ListenOptions { tls: Some(tls), ..ListenOptions::default() };
        let standby = Standby {
            request,
            memory,
            listener: Listener::bind_with(&free_port(), &options).map_err(failed)?,
            qemu: monitor,
            cards: controls,
            control: Arc::new(StandbyControl::new().map_err(failed)?),
        };
        Ok((Self { standby, started }, StandsBy { certificate, disks_are_new }))
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.standby.listener.local_address()
    }

    /// The end of it, also by commands of the guest's host that are executed meanwhile.
    pub fn control(&self) -> Arc<StandbyControl> {
        Arc::clone(&self.standby.control)
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
                let watch = || control.watch(&qemu.pidfd(), &over);
                Builder::new().spawn_scoped(scope, watch).map_err(towline_channel::Error::NoThread)?;
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

impl Commands for StandbyControl {
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
        reply(&Released { is_released: self.release() })
    }
}

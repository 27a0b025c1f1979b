//! A QEMU that waits for its guest, and the connection by which that comes.

use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use towline_channel::{Address, OneTimeCredentials, OneTimeKey};
use towline_launch::{RunningGuest, RunningQemu};
use towline_qmp::CommandError;

use super::new_disks::NewDisks;
use crate::hex::from_hex;
use crate::protect::StandbyMemory;

/// Time in which a QEMU that is not needed ends; it is killed then.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU that waits for its guest, and ends with this value unless it is kept.
#[derive(Debug)]
pub(super) struct StartedForGuest {
    pub(super) qemu: Option<RunningQemu>,
    /// Disks that were made for it.
    pub(super) disks: NewDisks,
    /// Memory of a standby.
    pub(super) memory: Option<StandbyMemory>,
}

impl Drop for StartedForGuest {
    fn drop(&mut self) {
        if thread::panicking() {
            // Where the guest is is not known.
            return self.keep();
        }
        let Some(qemu) = self.qemu.take() else { return };
        qemu.quit();
        if qemu.wait(END_TIMEOUT).is_none() {
            qemu.kill();
            let _ = qemu.wait(END_TIMEOUT);
        }
        // While the guest's name is taken.
        drop(std::mem::take(&mut self.disks));
    }
}

impl StartedForGuest {
    /// Has them outlive this process.
    pub(super) fn keep(&mut self) {
        if let Some(qemu) = self.qemu.take() {
            let _ = std::fs::remove_file(RunningGuest::waiting_path(&qemu.qmp_path()));
        }
        self.disks.keep();
    }
}

/// Arguments of a command.
pub(super) fn parsed<T: DeserializeOwned>(arguments: &Map<String, Value>) -> Result<T, CommandError> {
    serde_json::from_value(arguments.clone().into()).map_err(failed)
}

/// Its reply.
pub(super) fn reply(value: &impl Serialize) -> Result<Value, CommandError> {
    serde_json::to_value(value).map_err(failed)
}

/// The error of a command.
pub(super) fn failed(error: impl std::fmt::Display) -> CommandError {
    CommandError::generic(error.to_string())
}

/// A key for one session with the other end, whose certificate is in hexadecimal digits.
pub(super) fn one_time_credentials(certificate: &str) -> Result<OneTimeCredentials, CommandError> {
    let peer = from_hex(certificate).ok_or_else(|| failed("the certificate is not one"))?;
    Ok(OneTimeKey::generate().map_err(failed)?.with_peer(peer))
}

/// Any port of the address by which ssh has reached this host.
pub(super) fn free_port() -> Address {
    Address::Tcp { host: own_address().map_or_else(String::new, |ip| ip.to_string()), port: 0 }
}

/// Address by which ssh has reached this host: `SSH_CONNECTION` is the client's address and port, and the server's.
pub(super) fn own_address() -> Option<IpAddr> {
    std::env::var("SSH_CONNECTION").ok()?.split(' ').nth(2)?.parse().ok()
}

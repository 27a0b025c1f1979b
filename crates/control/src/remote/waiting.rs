//! A QEMU that waits for its guest, and the connection by which that comes.

use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use towline_channel::{Address, OneTimeCredentials, OneTimeKey};
use towline_launch::{RunningGuest, RunningQemu};
use towline_qmp::CommandError;

use super::new_disks::NewDisks;
use crate::hex::from_hex;

/// Time in which a QEMU that is not needed ends; it is killed then.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU that waits for its guest, and ends with this value unless it is kept.
#[derive(Debug)]
pub(super) struct StartedForGuest {
    pub(super) qemu: Option<RunningQemu>,
    /// Disks that were made for it.
    pub(super) disks: NewDisks,
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

/// The error of a command.
pub(super) fn failed(error: impl std::fmt::Display) -> CommandError {
    CommandError::generic(error.to_string())
}

/// Keys of both ends, with the other's certificate in hexadecimal digits.
pub(super) fn with_peer(key: OneTimeKey, certificate: &str) -> Result<OneTimeCredentials, CommandError> {
    let peer = from_hex(certificate);
    Ok(key.with_peer(peer.ok_or_else(|| CommandError::generic("the certificate is not one"))?))
}

/// Any port of the address by which ssh has reached this host.
pub(super) fn free_port() -> Address {
    Address::Tcp { host: own_address().map_or_else(String::new, |ip| ip.to_string()), port: 0 }
}

/// Address by which ssh has reached this host: `SSH_CONNECTION` is the client's address and port, and the server's.
pub(super) fn own_address() -> Option<IpAddr> {
    std::env::var("SSH_CONNECTION").ok()?.split(' ').nth(2)?.parse().ok()
}

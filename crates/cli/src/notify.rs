//! Notification of a service manager by systemd's protocol (`sd_notify(3)`).
//!
//! The socket is connected at once, as a confined process cannot connect later, and notifications are queued,
//! as the thread that sends them must not wait for the manager: the crate `sd-notify` opens a socket for
//! each, and waits. Without `NOTIFY_SOCKET` nothing is sent; a manager that does not listen is ignored.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use towline_channel::Address;
use towline_control::plan::{CopyPhase, Observer};

use crate::console::{self, OverflowPolicy, QueueHandle};

/// Time limit of the last notification.
const STOPPING_TIMEOUT: Duration = Duration::from_secs(1);

/// The service manager, if there is one. Notifications are queued: a manager that does not read delays only
/// the end.
pub(crate) struct Notifier(Option<QueueHandle>);

impl Notifier {
    /// Of a command that notifies no one.
    pub(crate) const NONE: Self = Self(None);

    /// Connects to the manager that started this process.
    pub(crate) fn from_environment() -> Self {
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) else {
            return Self::NONE;
        };
        let socket = connected(&address);
        if let Err(error) = &socket {
            tracing::warn!(?address, %error, "cannot notify the service manager");
        }
        Self(socket.ok().map(console::datagrams))
    }

    /// Reports that the process is ready.
    pub(crate) fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}\n"));
    }

    /// Reports a status.
    pub(crate) fn status(&self, status: &str) {
        self.send(&format!("STATUS={status}\n"));
    }

    /// Reports the end of the process.
    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\n");
        if let Some(output) = &self.0
            && !output.wait_written(Instant::now() + STOPPING_TIMEOUT)
        {
            tracing::debug!("the service manager did not read the last notification");
        }
    }

    /// Queues a notification. A process sends few: one when it is ready, and one for each phase of a copy.
    fn send(&self, text: &str) {
        if let Some(output) = &self.0 {
            output.start();
            output.push(OverflowPolicy::Always, text.into());
        }
    }
}

/// A copy is ready when it listens for its source, or else when it is connected to both ends.
impl Observer for Notifier {
    fn phase(&self, phase: CopyPhase) {
        match phase {
            CopyPhase::Transfer => self.ready("copying a guest"),
            CopyPhase::Loaded => self.status("the guest is at its destination"),
            CopyPhase::Release => self.send("STOPPING=1\n"),
            _ => {}
        }
    }

    fn listening(&self, address: &Address) {
        self.ready(&format!("waiting for a guest at {address}"));
    }
}

/// Returns a socket connected to the manager at this address: a path, or `@` and an abstract name.
pub(crate) fn connected(address: &OsStr) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_reach_the_manager() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier(Some(console::datagrams(connected(path.as_os_str()).unwrap())));
        notifier.listening(&"tcp:127.0.0.1:4444".parse().unwrap());
        notifier.stopping();
        let receive = || {
            let mut bytes = [0; 200];
            let length = manager.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        assert_eq!(receive(), "READY=1\nSTATUS=waiting for a guest at tcp:127.0.0.1:4444\n");
        assert_eq!(receive(), "STOPPING=1\n");
    }

    #[test]
    fn without_a_manager_nothing_is_sent() {
        Notifier(None).ready("running");
        assert!(connected(OsStr::new("/nonexistent/notify")).is_err());
    }
}

//! Tells a service manager how it goes, by systemd's protocol (`sd_notify(3)`).
//!
//! Its socket is connected to at once, for a confined process may not later. Without `NOTIFY_SOCKET` nothing is told; a manager
//! that does not listen keeps nobody from working.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use towline_channel::Address;
use towline_control::plan::{Observer, Phase};

use crate::console::{self, Keep, Output};

/// How long the end of a process waits for a manager that does not read.
const STOPPED_WITHIN: Duration = Duration::from_secs(1);

/// A service manager, if there is one. What it is told is queued: one that does not read delays nothing but the end.
#[derive(Debug)]
pub(crate) struct Notifier(Option<Output>);

impl Notifier {
    /// The one that started this process.
    pub(crate) fn from_environment() -> Self {
        let Some(place) = std::env::var_os("NOTIFY_SOCKET").filter(|place| !place.is_empty()) else {
            return Self(None);
        };
        let socket = connected(&place);
        if let Err(error) = &socket {
            tracing::warn!(?place, %error, "the service manager cannot be told anything");
        }
        Self(socket.ok().map(console::datagrams))
    }

    /// What was asked for is there: it listens.
    pub(crate) fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={status}\n"));
    }

    /// How far it is.
    pub(crate) fn status(&self, status: &str) {
        self.tell(&format!("STATUS={status}\n"));
    }

    /// It ends.
    pub(crate) fn stopping(&self) {
        self.tell("STOPPING=1\n");
        if let Some(output) = &self.0
            && !output.wait_written(Instant::now() + STOPPED_WITHIN)
        {
            tracing::debug!("the service manager does not read");
        }
    }

    /// There are few: a command is ready once, and a copy has few phases.
    fn tell(&self, text: &str) {
        if let Some(output) = &self.0 {
            output.start();
            output.push(Keep::Always, text.into());
        }
    }
}

/// A copy is ready when it listens for its source, or else when it has reached both ends.
impl Observer for Notifier {
    fn phase(&self, phase: Phase) {
        match phase {
            Phase::Transfer => self.ready("a guest is being copied"),
            Phase::Loaded => self.status("the guest is at its destination"),
            Phase::Release => self.tell("STOPPING=1\n"),
            _ => {}
        }
    }

    fn listening(&self, address: &Address) {
        self.ready(&format!("waits for a guest at {address}"));
    }
}

/// A socket to the manager that listens there: a path, or `@` and an abstract name.
pub(crate) fn connected(place: &OsStr) -> io::Result<UnixDatagram> {
    let address = match place.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(place)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_hears_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier(Some(console::datagrams(connected(path.as_os_str()).unwrap())));
        notifier.listening(&"tcp:127.0.0.1:4444".parse().unwrap());
        notifier.stopping();
        let hear = || {
            let mut bytes = [0; 200];
            let length = manager.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        };
        assert_eq!(hear(), "READY=1\nSTATUS=waits for a guest at tcp:127.0.0.1:4444\n");
        assert_eq!(hear(), "STOPPING=1\n");
    }

    #[test]
    fn nobody_hears_without_one() {
        Notifier(None).ready("it runs");
        assert!(connected(OsStr::new("/nonexistent/notify")).is_err());
    }
}

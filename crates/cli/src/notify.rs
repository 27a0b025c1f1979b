//! Tells a service manager how it goes, by systemd's protocol (`sd_notify(3)`).
//!
//! Its socket is connected to at once, for a confined process may not later. Without `NOTIFY_SOCKET` nothing is told; a manager
//! that does not listen keeps nobody from working.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use towline_channel::Address;
use towline_control::plan::{Observer, Phase};

/// A service manager, if there is one.
#[derive(Debug)]
pub(crate) struct Notifier(Option<UnixDatagram>);

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
        Self(socket.ok())
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
    }

    fn tell(&self, text: &str) {
        if let Some(socket) = &self.0
            && let Err(error) = socket.send(text.as_bytes())
        {
            tracing::debug!(%error, "the service manager was not told");
        }
    }
}

/// A copy is ready when it listens for its source, or else when it has reached both ends.
impl Observer for Notifier {
    fn phase(&self, phase: Phase) {
        match phase {
            Phase::Transfer => self.ready("a guest is being copied"),
            Phase::Loaded => self.status("the guest is at its destination"),
            Phase::Release => self.stopping(),
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
        let notifier = Notifier(Some(connected(path.as_os_str()).unwrap()));
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

//! A card that is served on a thread of its network, for a driver in place of a guest.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use towline_frontend::Frontend;
use towline_lab::Network;
use towline_net::Net;
use towline_vhost_user::{Cancel, Device, ServeError};

/// Ends with its value; a thread that panicked fails the test.
pub(crate) struct Served {
    cancel: Cancel,
    thread: Option<JoinHandle<(Result<(), ServeError>, bool)>>,
}

impl Served {
    /// Serves it within this network; and who drives it.
    pub(crate) fn start(network: &Network, net: &Arc<Net>) -> (Self, Frontend) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let cancel = Cancel::new().unwrap();
        let (device, token): (Arc<dyn Device>, _) = (net.clone(), cancel.clone());
        let serve = move || {
            let channel = towline_channel::UnixChannel::new(theirs.into(), "the driver").unwrap();
            let outcome = towline_vhost_user::serve(&channel, &device, &token);
            (outcome, token.is_cancelled())
        };
        // A thread is of the network of its parent.
        let thread = Some(network.enter(|| std::thread::spawn(serve)).unwrap());
        (Self { cancel, thread }, Frontend::new(ours).unwrap())
    }
}

impl Served {
    /// The card ends the connection; why.
    pub(crate) fn failure(&mut self) -> ServeError {
        let thread = self.thread.take().expect("it fails once");
        thread.join().expect("the card's thread panicked").0.unwrap_err()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.cancel.cancel();
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join();
        if !std::thread::panicking() {
            let (outcome, cancelled) = ended.expect("the card's thread panicked");
            assert!(outcome.is_ok() || cancelled, "{outcome:?}");
        }
    }
}

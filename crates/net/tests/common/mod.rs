//! A card served on a thread of its network namespace, with a driver in place of a guest.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use towline_frontend::Frontend;
use towline_lab::Network;
use towline_net::Net;
use towline_vhost_user::{Cancel, Device, ServeError};

/// A served card, ended when this is dropped. The test fails if its thread panicked.
pub(crate) struct Served {
    cancel: Cancel,
    thread: Option<JoinHandle<(Result<(), ServeError>, bool)>>,
}

impl Served {
    /// Serves the card in this network. Returns its frontend too.
    pub(crate) fn start(network: &Network, net: &Arc<Net>) -> (Self, Frontend) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let cancel = Cancel::new().unwrap();
        let (device, token): (Arc<dyn Device>, _) = (net.clone(), cancel.clone());
        let serve = move || {
            let channel = towline_channel::UnixChannel::new(theirs.into(), "the driver").unwrap();
            let outcome = towline_vhost_user::serve(&channel, &device, &token);
            (outcome, token.is_cancelled())
        };
        // A thread inherits the network namespace of its parent.
        let thread = Some(network.enter(|| std::thread::spawn(serve)).unwrap());
        (Self { cancel, thread }, Frontend::new(ours).unwrap())
    }
}

impl Served {
    /// Waits until the card ends the connection. Returns its error.
    pub(crate) fn failure(&mut self) -> ServeError {
        let thread = self.thread.take().expect("`failure` is called once");
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

//! A card that is served on a thread of its network, for a driver in place of a guest.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use towline_frontend::Frontend;
use towline_lab::Network;
use towline_net::Net;
use towline_vhost_user::{Cancel, Device};

/// Ends with its value; a thread that panicked fails the test.
pub(crate) struct Served {
    cancel: Cancel,
    thread: Option<JoinHandle<()>>,
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
            assert!(outcome.is_ok() || token.is_cancelled(), "{outcome:?}");
        };
        // A thread is of the network of its parent.
        let thread = Some(network.enter(|| std::thread::spawn(serve)).unwrap());
        (Self { cancel, thread }, Frontend::new(ours).unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the card's thread panicked");
        }
    }
}

//! A card served on a thread of its network namespace, with a driver in place of a guest.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use towline_frontend::Frontend;
use towline_lab::Network;
use towline_net::Net;
use towline_vhost_user::{Cancel, Device, FrontendSource, InFlightRecord, ServeError, Service};

/// A served card, ended when this is dropped. The test fails if its thread panicked.
pub(crate) struct Served {
    cancel: Cancel,
    thread: Option<JoinHandle<(Result<(), ServeError>, bool)>>,
}

impl Served {
    /// Serves the card in this network. Returns its frontend too.
    pub(crate) fn start(network: &Network, net: &Arc<Net>) -> (Self, Frontend) {
        Self::start_with(network, net, |stream, device, cancel| {
            let channel = towline_channel::UnixChannel::new(stream.into(), "the driver").unwrap();
            towline_vhost_user::serve(&channel, device, cancel)
        })
    }

    /// As [`Served::start`], with a record of chains in flight.
    pub(crate) fn start_recorded(
        network: &Network,
        net: &Arc<Net>,
        record: InFlightRecord,
    ) -> (Self, Frontend) {
        Self::start_with(network, net, move |stream, device, cancel| {
            Service::new(FrontendSource::from_fd(stream.into()).unwrap()).serve(device, &record, cancel)
        })
    }

    fn start_with(
        network: &Network,
        net: &Arc<Net>,
        serve: impl FnOnce(UnixStream, &Arc<dyn Device>, &Cancel) -> Result<(), ServeError> + Send + 'static,
    ) -> (Self, Frontend) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let cancel = Cancel::new().unwrap();
        let (device, token): (Arc<dyn Device>, _) = (net.clone(), cancel.clone());
        let serve = move || {
            let outcome = serve(theirs, &device, &token);
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

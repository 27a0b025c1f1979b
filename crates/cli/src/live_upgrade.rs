//! Live upgrade (`--upgrade-socket SOCKET`): a device is served until a signal ends it or a new process takes it over.

use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use towline_channel::{Channel, connect};
use towline_vhost_user::{
    Address, Cancel, Device, InFlightRecord, Listener, ServeError, Service, UpgradeOffer, live_upgrade,
};

use crate::lock::lock;
use crate::sockets::{check_peer, private};

/// Timeout of the connection to the running process.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline of one `accept`, which is repeated.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(3600);

/// Requests the device from the process that listens at this path. `None`: there is none, as at a first start or after a crash.
pub(crate) fn request(path: &Path) -> Result<Option<UpgradeOffer>> {
    let never = Cancel::new()?;
    match connect(&Address::Unix(path.to_owned()), Instant::now() + CONNECT_TIMEOUT, &never) {
        Ok(channel) => {
            let offer = check_peer(channel.as_ref()).and_then(|()| Ok(UpgradeOffer::request(channel)?));
            offer.map(Some).with_context(|| format!("--upgrade-socket {}", path.display()))
        }
        Err(error) => {
            tracing::info!(%error, "no running process to upgrade");
            Ok(None)
        }
    }
}

/// Ends serving, from any thread.
#[derive(Clone)]
pub(crate) struct ShutdownSignal(Arc<Shared>);

struct Shared {
    cancel: Mutex<Cancel>,
    is_shutdown: AtomicBool,
    /// Connection of a process that requests the device.
    successor: Mutex<Option<Box<dyn Channel>>>,
}

impl ShutdownSignal {
    pub(crate) fn new() -> Result<Self> {
        let cancel = Mutex::new(Cancel::new().context("cancellation token")?);
        let (is_shutdown, successor) = (AtomicBool::new(false), Mutex::default());
        Ok(Self(Arc::new(Shared { cancel, is_shutdown, successor })))
    }

    /// Requests the end of the process.
    pub(crate) fn shut_down(&self) {
        self.0.is_shutdown.store(true, SeqCst);
        lock(&self.0.cancel).cancel();
    }

    fn is_shutdown(&self) -> bool {
        self.0.is_shutdown.load(SeqCst)
    }

    fn upgrade(&self, channel: Box<dyn Channel>) {
        *lock(&self.0.successor) = Some(channel);
        lock(&self.0.cancel).cancel();
    }

    /// Returns the cancellation token of the next call that serves.
    fn next_token(&self) -> Result<Cancel> {
        let mut cancel = lock(&self.0.cancel);
        *cancel = Cancel::new().context("cancellation token")?;
        if self.is_shutdown() || lock(&self.0.successor).is_some() {
            cancel.cancel();
        }
        Ok(cancel.clone())
    }
}

/// Listens for processes that request the device.
pub(crate) struct UpgradeListener {
    listener: Arc<Listener>,
    stop: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl UpgradeListener {
    /// Starts to listen, on the socket of the previous process if that was inherited.
    pub(crate) fn start(path: &Path, inherited: Option<OwnedFd>, shutdown: &ShutdownSignal) -> Result<Self> {
        let listener = match inherited {
            Some(fd) => Listener::adopt(fd, path),
            None => private(|| Ok(Listener::bind(&Address::Unix(path.to_owned()))?))?,
        };
        let (listener, stop) = (Arc::new(listener), Cancel::new()?);
        let accept = {
            let (listener, stop, shutdown) = (Arc::clone(&listener), stop.clone(), shutdown.clone());
            move || accept(&listener, &stop, &shutdown)
        };
        let thread = Some(thread::Builder::new().name("live-upgrade".into()).spawn(accept)?);
        Ok(Self { listener, stop, thread })
    }

    /// Returns the listening socket, which the successor receives before the device's descriptors.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_fd()
    }
}

impl Drop for UpgradeListener {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &Listener, stop: &Cancel, shutdown: &ShutdownSignal) {
    loop {
        match listener.accept(Instant::now() + ACCEPT_TIMEOUT, stop) {
            Ok(channel) => match check_peer(channel.as_ref()) {
                Ok(()) => shutdown.upgrade(channel),
                Err(error) => tracing::warn!("refused a live upgrade: {error:#}"),
            },
            Err(towline_channel::Error::Timeout { .. }) => {}
            Err(error) => {
                if !stop.is_cancelled() {
                    tracing::error!(%error, "upgrade listener failed");
                }
                return;
            }
        }
    }
}

/// End of serving.
pub(crate) enum ServeEnd {
    /// Shut down, or the only possible connection has ended.
    ToTheEnd,
    /// Another process serves the device now.
    Upgraded,
}

/// A device, and what it is served with.
pub(crate) struct DeviceServer<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    /// Descriptors of the device that a successor receives.
    pub(crate) descriptors: Vec<BorrowedFd<'a>>,
    pub(crate) record: &'a InFlightRecord,
    pub(crate) shutdown: &'a ShutdownSignal,
    pub(crate) listener: Option<UpgradeListener>,
    /// Called after a failed upgrade, before this process continues.
    pub(crate) on_failure: &'a dyn Fn(),
}

impl DeviceServer<'_> {
    /// Serves until shutdown or a live upgrade.
    pub(crate) fn serve(self, mut service: Service) -> Result<ServeEnd, ServeError> {
        let Self { device, record, shutdown, .. } = self;
        let own: Vec<_> =
            self.listener.iter().filter_map(UpgradeListener::fd).chain(self.descriptors).collect();
        loop {
            let Ok(cancel) = shutdown.next_token() else { return Ok(ServeEnd::ToTheEnd) };
            match service.serve(device, record, &cancel) {
                Err(ServeError::Channel(_)) if cancel.is_cancelled() => {}
                outcome => return outcome.map(|()| ServeEnd::ToTheEnd),
            }
            if shutdown.is_shutdown() {
                return Ok(ServeEnd::ToTheEnd);
            }
            let Some(channel) = lock(&shutdown.0.successor).take() else { continue };
            match live_upgrade(service, device, &own, record, channel.as_ref()) {
                Ok(()) => {
                    // The socket's file belongs to the successor now.
                    let _ = ManuallyDrop::new(self.listener);
                    return Ok(ServeEnd::Upgraded);
                }
                Err(left) => {
                    tracing::error!(error = %left.error, "live upgrade failed; continuing");
                    (self.on_failure)();
                    service = left.service;
                }
            }
        }
    }
}

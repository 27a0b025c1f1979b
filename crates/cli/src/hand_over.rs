//! Serving until a signal or a successor comes: `--hand-over SOCKET`, the live upgrade.

use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use towline_channel::{Channel, connect};
use towline_vhost_user::{
    Address, Cancel, Device, InFlightRecord, Listener, ServeError, Service, UpgradeOffer, live_upgrade,
};

use crate::sockets::{check_peer, private};

/// A connection over a Unix socket comes at once or never.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// A step of waiting for a successor; waiting goes on behind it.
const PATIENCE: Duration = Duration::from_secs(3600);

/// What a process that listens at this path offers; `None` if there is none, as at a first start or after a crash.
pub(crate) fn predecessor(path: &Path) -> Result<Option<UpgradeOffer>> {
    let never = Cancel::new()?;
    match connect(&Address::Unix(path.to_owned()), Instant::now() + CONNECT_WITHIN, &never) {
        Ok(channel) => {
            let offer = check_peer(channel.as_ref()).and_then(|()| Ok(UpgradeOffer::request(channel)?));
            offer.map(Some).with_context(|| format!("--hand-over {}", path.display()))
        }
        Err(error) => {
            tracing::info!(%error, "nobody hands over");
            Ok(None)
        }
    }
}

/// What ends serving, from whatever thread.
#[derive(Clone)]
pub(crate) struct Wishes(Arc<Shared>);

struct Shared {
    cancel: Mutex<Cancel>,
    quits: AtomicBool,
    successor: Mutex<Option<Box<dyn Channel>>>,
}

impl Wishes {
    pub(crate) fn new() -> Result<Self> {
        let cancel = Mutex::new(Cancel::new().context("no event descriptor can be had")?);
        Ok(Self(Arc::new(Shared { cancel, quits: AtomicBool::new(false), successor: Mutex::default() })))
    }

    /// It shall end.
    pub(crate) fn quit(&self) {
        self.0.quits.store(true, SeqCst);
        lock(&self.0.cancel).cancel();
    }

    pub(crate) fn quits(&self) -> bool {
        self.0.quits.load(SeqCst)
    }

    fn succeed(&self, channel: Box<dyn Channel>) {
        *lock(&self.0.successor) = Some(channel);
        lock(&self.0.cancel).cancel();
    }

    /// What the next round of serving watches.
    fn next(&self) -> Result<Cancel> {
        let mut cancel = lock(&self.0.cancel);
        *cancel = Cancel::new().context("no event descriptor can be had")?;
        if self.quits() || lock(&self.0.successor).is_some() {
            cancel.cancel();
        }
        Ok(cancel.clone())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The socket where successors ask.
pub(crate) struct Successors {
    listener: Arc<Listener>,
    stop: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl Successors {
    /// Listens, on the socket that the process before had, if there was one.
    pub(crate) fn listen(path: &Path, inherited: Option<OwnedFd>, wishes: &Wishes) -> Result<Self> {
        let listener = match inherited {
            Some(fd) => Listener::adopt(fd, path),
            None => private(|| Ok(Listener::bind(&Address::Unix(path.to_owned()))?))?,
        };
        let (listener, stop, wishes) = (Arc::new(listener), Cancel::new()?, wishes.clone());
        let (asked, stopped) = (Arc::clone(&listener), stop.clone());
        let accept = move || {
            loop {
                match asked.accept(Instant::now() + PATIENCE, &stopped) {
                    Ok(channel) => match check_peer(channel.as_ref()) {
                        Ok(()) => wishes.succeed(channel),
                        Err(error) => tracing::warn!("a successor is refused: {error:#}"),
                    },
                    Err(towline_channel::Error::Timeout { .. }) => {}
                    Err(error) => {
                        if !stopped.is_cancelled() {
                            tracing::error!(%error, "no successor is heard any more");
                        }
                        return;
                    }
                }
            }
        };
        let thread = Some(thread::Builder::new().name("successors".into()).spawn(accept)?);
        Ok(Self { listener, stop, thread })
    }

    /// For the successor, first of the device's descriptors.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_fd()
    }
}

impl Drop for Successors {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How serving ended.
pub(crate) enum Ended {
    /// As wished, or with the only connection that there could be.
    Done,
    /// Another process has the device now.
    HandedOver,
}

/// Serves until it is wished to quit, or a successor has the device with these descriptors of its own. `stays` is called when
/// a hand-over has come to nothing.
pub(crate) fn serve(
    mut service: Service,
    (device, own): (&Arc<dyn Device>, &[BorrowedFd<'_>]),
    record: &InFlightRecord,
    (wishes, successors): (&Wishes, Option<Successors>),
    stays: impl Fn(),
) -> Result<Ended, ServeError> {
    loop {
        let Ok(cancel) = wishes.next() else { return Ok(Ended::Done) };
        match service.serve(device, record, &cancel) {
            Err(ServeError::Channel(_)) if cancel.is_cancelled() => {}
            outcome => return outcome.map(|()| Ended::Done),
        }
        if wishes.quits() {
            return Ok(Ended::Done);
        }
        let Some(channel) = lock(&wishes.0.successor).take() else { continue };
        let listener = successors.as_ref().and_then(Successors::fd);
        let own: Vec<BorrowedFd<'_>> = listener.into_iter().chain(own.iter().copied()).collect();
        match live_upgrade(service, device, &own, record, channel.as_ref()) {
            Ok(()) => {
                // Its socket's file is the successor's.
                let _ = ManuallyDrop::new(successors);
                return Ok(Ended::HandedOver);
            }
            Err(left) => {
                tracing::error!(error = %left.error, "the hand-over came to nothing; this process goes on");
                stays();
                service = left.service;
            }
        }
    }
}

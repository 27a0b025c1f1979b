//! The process that takes checkpoints of a guest, and passes them on to its standby.
//!
//! ```text
//!   QEMU ── COLO ──► take ── whole checkpoints, in this process's memory ──► pass on ── TLS ──► standby
//!                     │ mark, while the guest is stopped                       │ release, once the standby has it
//!                     └──────────────────────► cards ◄─────────────────────────┘
//! ```
//! The guest is stopped while a checkpoint is received from its QEMU, and never for the network: where the standby is late, the next
//! checkpoint begins later.
//!
//! It holds no monitor, and may die at any moment: the keeper, another process, has the guest run on then. If the keeper dies, it goes on.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ConnectOptions, Error as ChannelError, FileOwner, Listener, OneTimeKey,
    TlsClient, connect_with, with_file_owner,
};
use towline_migration::Error;
use towline_migration::checkpoints::{self, CheckpointQueue, CheckpointSink, pass_on, pass_on_first_copy};
use towline_migration::incoming::gather;
use towline_protocol::colo::{Checkpoint, CheckpointBuffer, FirstCopy};

use super::disks::{self, DiskLog};
use super::messages::{FerryRequest, FromFerry, Link, Lost, Received, ToFerry};
use crate::cards::HoldingCards;
use crate::hex::{from_hex, to_hex};
use crate::lock::lock;

/// Checkpoints in memory: one is taken while the one before it is passed on.
const BUFFERS: usize = 2;
/// Shortest time from one checkpoint to the next.
const EPOCH_MIN: Duration = Duration::from_millis(5);
/// Longest wait for a card's answer about output.
const OUTPUT_WITHIN: Duration = Duration::from_millis(20);
/// Time for each step before the first checkpoint.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which the way to the standby stays open after the end, while the keeper decides what has ended.
const DECIDED_WITHIN: Duration = Duration::from_secs(10);
/// Interval of looks at a keeper that sends nothing.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The end of a ferry.
#[derive(Debug)]
struct Failure {
    lost: Lost,
    reason: String,
}

impl Failure {
    fn of<E: std::fmt::Display>(lost: Lost) -> impl FnOnce(E) -> Self {
        move |error| Self { lost, reason: error.to_string() }
    }
}

/// The way of checkpoints from the guest to its standby.
struct Way<'a> {
    link: &'a Link<ToFerry>,
    primary: Arc<dyn Channel>,
    standby: Arc<dyn Channel>,
    disks: Vec<Arc<DiskLog>>,
    queue: Arc<CheckpointQueue>,
}

/// Works on what the keeper at the other end of this socket sends, and returns when the protection has ended.
pub fn ferry(socket: OwnedFd) {
    let link = Link::new(socket);
    // Open until the keeper has decided.
    let mut standby = None;
    if let Err(Failure { lost, reason }) = carry(&link, &mut standby) {
        link.send(&FromFerry::Ended { lost, reason });
    }
    let deadline = Instant::now() + DECIDED_WITHIN;
    while link.receive(deadline.saturating_duration_since(Instant::now())) != Received::End
        && Instant::now() < deadline
    {}
}

fn carry(link: &Link<ToFerry>, open: &mut Option<Arc<dyn Channel>>) -> Result<(), Failure> {
    let key = OneTimeKey::generate().map_err(Failure::of(Lost::Standby))?;
    link.send(&FromFerry::Certificate(to_hex(key.certificate())));
    let Some(ToFerry::Begin(request)) = next(link) else { return Ok(()) };
    let connect = connector(&request, key)?;
    let disk = |_| {
        let channel = connect()?;
        // Else the standby may accept the next connection before this one.
        disks::await_done(&*channel).map_err(Failure::of(Lost::Standby))?;
        Ok(channel)
    };
    let buffer = || CheckpointBuffer::new(request.checkpoint_bytes_max);
    let queue = Arc::new(CheckpointQueue::new((0..BUFFERS).map(|_| buffer()).collect()));
    let disks = request.disks.iter().map(disk).collect::<Result<_, _>>()?;
    let disks = serve_disks(&request, disks, &queue)?;
    let standby = connect()?;
    *open = Some(Arc::clone(&standby));
    let address = Address::Unix(request.socket.clone());
    let listener =
        for_qemu(&request.socket, || Listener::bind(&address))?.map_err(Failure::of(Lost::Here))?;
    link.send(&FromFerry::Listening);
    let Some(ToFerry::Copy) = next(link) else { return Ok(()) };
    flush(&disks)?;
    let (primary, first) = first_copy(listener, &standby)?;
    link.send(&FromFerry::Copied);
    let Some(ToFerry::Go) = next(link) else { return Ok(()) };
    Way { link, primary, standby, disks, queue }.pass_checkpoints(&request, first)
}

/// The keeper's next message; `None`: it is gone.
fn next(link: &Link<ToFerry>) -> Option<ToFerry> {
    loop {
        match link.receive(LOOK_INTERVAL) {
            Received::Message(message) => return Some(message),
            Received::Nothing => {}
            Received::End => return None,
        }
    }
}

/// Connects to the standby, with each call once more.
fn connector(
    request: &FerryRequest,
    key: OneTimeKey,
) -> Result<impl Fn() -> Result<Arc<dyn Channel>, Failure> + use<>, Failure> {
    let certificate = from_hex(&request.certificate).ok_or("its certificate is not one");
    let certificate = certificate.map_err(Failure::of(Lost::Standby))?;
    let address: Address = request.standby.parse().map_err(Failure::of(Lost::Standby))?;
    let tls = TlsClient::one_time(&key.with_peer(certificate)).map_err(Failure::of(Lost::Standby))?;
    let options = ConnectOptions { tls: Some(tls), ..ConnectOptions::default() };
    let connect = move || -> towline_channel::Result<Arc<dyn Channel>> {
        let channel = connect_with(&address, Instant::now() + STEP_TIMEOUT, &Cancel::new()?, &options)?;
        channel.set_timeouts(Some(STEP_TIMEOUT), Some(STEP_TIMEOUT))?;
        Ok(channel.into())
    };
    Ok(move || connect().map_err(Failure::of(Lost::Standby)))
}

/// Has QEMU mirror the disks to this process, whose standby is connected by these channels.
fn serve_disks(
    request: &FerryRequest,
    channels: Vec<Arc<dyn Channel>>,
    queue: &Arc<CheckpointQueue>,
) -> Result<Vec<Arc<DiskLog>>, Failure> {
    let listener = for_qemu(&request.disk_socket, || UnixListener::bind(&request.disk_socket))?
        .map_err(Failure::of(Lost::Here))?;
    DiskLog::serve(&request.disks, channels, listener, queue, request.checkpoint_bytes_max)
        .map_err(Failure::of(Lost::Here))
}

/// Has the standby store what was written before the first checkpoint, which would wait for that.
fn flush(disks: &[Arc<DiskLog>]) -> Result<(), Failure> {
    disks.iter().try_for_each(|disk| disk.flush()).map_err(Failure::of(Lost::Standby))
}

/// Binds a socket to this path, for the user that its directory belongs to: that of QEMU.
fn for_qemu<T>(path: &Path, bind: impl FnOnce() -> T) -> Result<T, Failure> {
    let bind = || {
        let directory = std::fs::metadata(path.parent().unwrap_or(path))?;
        let owner = FileOwner { uid: directory.uid(), gid: directory.gid() };
        if owner.uid == rustix::process::getuid().as_raw() {
            Ok(bind())
        } else {
            with_file_owner(owner, bind)
        }
    };
    bind().map_err(Failure::of(Lost::Here))
}

/// Passes the first copy on.
fn first_copy(
    listener: Listener,
    standby: &Arc<dyn Channel>,
) -> Result<(Arc<dyn Channel>, FirstCopy), Failure> {
    let cancel = Cancel::new().map_err(Failure::of(Lost::Here))?;
    let gathered = gather(listener, 0, Instant::now() + STEP_TIMEOUT, STEP_TIMEOUT, &cancel);
    let primary = gathered.map_err(Failure::of(Lost::Here))?.main_channel();
    // Which end has failed is in the error, and makes no difference before the first checkpoint.
    let first = pass_on_first_copy(&primary, standby).map_err(Failure::of(Lost::Standby))?;
    Ok((primary, first))
}

impl Way<'_> {
    /// Takes checkpoints and passes them on, until an end is lost, which is reported.
    fn pass_checkpoints(&self, request: &FerryRequest, first: FirstCopy) -> Result<(), Failure> {
        let hold = || HoldingCards::hold(&request.cards, request.generation).map_err(Failure::of(Lost::Here));
        let (marks, releases) = (hold()?, hold()?);
        let watched = if request.ends_on_output && !request.cards.is_empty() { Some(hold()?) } else { None };
        let timeout = Duration::from_millis(request.peer_timeout_ms);
        // The guest stands; little was written since the last time.
        flush(&self.disks)?;
        let set = self.disks.iter().try_for_each(|disk| disk.set_timeout(timeout));
        let set = set.and_then(|()| self.standby.set_timeouts(Some(timeout), Some(timeout)));
        set.map_err(Failure::of(Lost::Standby))?;
        let mut taker = Taker {
            way: self,
            cards: marks,
            interval: Duration::from_millis(request.epoch_ms),
            begun: Instant::now(),
            number: 0,
        };
        let passing = Mutex::new(None);
        let pass = || {
            let failure = self.pass(releases);
            *lock(&passing) = failure;
            // QEMU may wait for a write before it requests the next checkpoint.
            self.close();
        };
        thread::scope(|scope| {
            let no_thread = |error| {
                self.close();
                Failure::of(Lost::Here)(ChannelError::NoThread(error))
            };
            Builder::new().spawn_scoped(scope, pass).map_err(no_thread)?;
            if let Some(mut watched) = watched {
                let watch = move || request_on_output(&mut watched, &self.queue);
                Builder::new().spawn_scoped(scope, watch).map_err(no_thread)?;
            }
            let Err(error) = checkpoints::take(self.primary.as_ref(), first, &mut taker);
            // Its writes do not wait for what comes next.
            self.close();
            let failure = lock(&passing).take();
            let Failure { lost, reason } = failure.unwrap_or_else(|| Failure::of(Lost::Here)(error));
            // Not after the other thread, which may wait for the standby.
            self.link.send(&FromFerry::Ended { lost, reason });
            Ok(())
        })
    }

    /// Passes checkpoints on until that fails; `None`: there are no more.
    fn pass(&self, mut cards: HoldingCards) -> Option<Failure> {
        while let Ok(checkpoint) = self.queue.next() {
            let (begun, epoch) = (Instant::now(), checkpoint.number());
            // The standby keeps the writes until it has the checkpoint.
            let passed = self.disks.iter().try_for_each(|disk| disk.pass_on(epoch)).map_err(Error::from);
            if let Err(error) = passed.and_then(|()| pass_on(self.standby.as_ref(), &checkpoint)) {
                return Some(Failure::of(Lost::Standby)(error));
            }
            if let Err(error) = cards.release(epoch) {
                return Some(Failure::of(Lost::Here)(error));
            }
            self.queue.release(checkpoint);
            self.link.send(&FromFerry::Acknowledged { epoch, latency_us: micros(begun) });
        }
        None
    }

    /// Ends all waits: there are no more checkpoints.
    fn close(&self) {
        self.queue.close();
        self.disks.iter().for_each(|disk| disk.close("there are no more checkpoints".into()));
    }
}

/// Requests a checkpoint whenever the guest has sent something. Another thread notices what fails here.
fn request_on_output(cards: &mut HoldingCards, queue: &CheckpointQueue) {
    loop {
        match cards.wait_for_output(OUTPUT_WITHIN) {
            Ok(true) if queue.request().is_ok() => {}
            Ok(false) if !queue.is_closed() => {}
            _ => return,
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Takes checkpoints at an interval.
struct Taker<'a> {
    way: &'a Way<'a>,
    cards: HoldingCards,
    interval: Duration,
    /// Time of the last reply, which stops the guest, and the checkpoint's number.
    begun: Instant,
    number: u64,
}

impl CheckpointSink for Taker<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        let buffer = self.way.queue.buffer()?;
        self.way.queue.wait_until_due(self.begun + EPOCH_MIN, self.begun + self.interval)?;
        self.number += 1;
        self.way.link.send(&FromFerry::Stopping { epoch: self.number });
        self.way.disks.iter().for_each(|disk| disk.stopping());
        self.begun = Instant::now();
        Ok(buffer)
    }

    fn mark(&mut self, number: u64) -> Result<(), Error> {
        self.cards.mark(number).map_err(|error| Error::Guest(Box::new(error)))?;
        let cut = self.way.disks.iter().try_for_each(|disk| disk.cut());
        cut.map_err(|error| Error::Guest(error.into()))?;
        self.way.queue.marked();
        Ok(())
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        let (epoch, bytes) = (checkpoint.number(), checkpoint.stream_bytes());
        let pages = checkpoint.pages().len() as u64;
        self.way.queue.put(checkpoint)?;
        self.way.link.send(&FromFerry::Runs { epoch, pause_us: micros(self.begun), bytes, pages });
        Ok(())
    }
}

//! Disks that move with their guest: its QEMU mirrors them to the NBD server of the destination's QEMU.
//!
//! ```text
//!   QEMU here ── unix ──► towline here ══ tcp, TLS by the keys of the move ══► towline there ── unix ──► QEMU there (NBD server)
//!   blockdev-mirror, write-blocking:
//!     copy ─► ready ─► [memory is transferred] ─► guest stopped (pre-switchover) ─► jobs ended, flushed ─► device state ─► …
//! ```
//! The guest's disk is at the source until the device state was sent, and a failure until then, of any part, leaves it there complete: a
//! mirror writes every block to the source's disk, too. Afterwards both disks are equal, and the stream's session decides who has the guest.
//! A failed move leaves a part of a disk at the destination, whose owner removes it.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ChannelExt as _, ConnectOptions, IoBuf, IoBufMut, Listener, RecvFlags,
    SendFlags, connect_with, is_out_of_resources,
};

use super::context::{Context, connect_options};
use super::error::Error;
use super::private_dir::PrivateDir;
use super::progress::{CopyPhase, DiskProgress, Progress};
use super::request::WritableDisks;
use crate::journal::{JournalEntry, UndoRecord};
use crate::lock::lock;
use crate::qemu::{Drive, Mirror, MirrorFailure, Qemu};

/// Socket of the source's QEMU, and of the destination's.
const MIRROR_SOCKET: &str = "mirror.sock";
const EXPORT_SOCKET: &str = "export.sock";
/// Interval of queries for the progress of the copy.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Connections at one time: one for each disk.
const CONNECTIONS_MAX: usize = 64;
/// Bytes that are forwarded at a time, of each direction.
const BUFFER_BYTES: usize = 256 << 10;
/// Timeout for the other end of a forwarded connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause if the kernel has no descriptor left for a connection.
const RESOURCES_PAUSE: Duration = Duration::from_millis(100);
/// No deadline: a listener waits until it is cancelled.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Forwards each connection of a listener to an address, until it is dropped.
#[derive(Debug)]
struct Forwarder {
    shared: Arc<Forwarding>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Forwarding {
    listener: Arc<Listener>,
    to: Address,
    options: ConnectOptions,
    cancel: Cancel,
    open: Mutex<Vec<Arc<dyn Channel>>>,
}

impl Forwarder {
    fn start(listener: Arc<Listener>, to: Address, options: ConnectOptions) -> Result<Self, Error> {
        let (cancel, open) = (Cancel::new()?, Mutex::default());
        let shared = Arc::new(Forwarding { listener, to, options, cancel, open });
        let thread = spawn("disks", {
            let shared = Arc::clone(&shared);
            move || shared.accept()
        });
        Ok(Self { shared, thread: Some(thread?) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.shared.cancel.cancel();
        lock(&self.shared.open).iter().for_each(end);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Forwarding {
    fn accept(self: Arc<Self>) {
        let mut connections: Vec<JoinHandle<()>> = Vec::new();
        while !self.cancel.is_cancelled() {
            match self.listener.accept(Instant::now() + FOREVER, &self.cancel) {
                Ok(near) => {
                    connections.retain(|connection| !connection.is_finished());
                    if connections.len() < CONNECTIONS_MAX {
                        let shared = Arc::clone(&self);
                        connections.extend(spawn("disk", move || shared.forward(&near.into())));
                    }
                }
                Err(error) if is_out_of_resources(&error) => thread::park_timeout(RESOURCES_PAUSE),
                Err(error) => tracing::debug!(%error, "no connection of a disk"),
            }
        }
        connections.into_iter().for_each(|connection| drop(connection.join()));
    }

    fn forward(&self, near: &Arc<dyn Channel>) {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let far: Arc<dyn Channel> = match connect_with(&self.to, deadline, &self.cancel, &self.options) {
            Ok(far) => far.into(),
            Err(error) => {
                tracing::info!(%error, "the connection of a disk");
                return end(near);
            }
        };
        lock(&self.open).extend([Arc::clone(near), Arc::clone(&far)]);
        // Else they are ended with the others.
        if !self.cancel.is_cancelled() {
            thread::scope(|scope| {
                scope.spawn(|| pass_on(near, &far));
                pass_on(&far, near);
            });
        }
        lock(&self.open).retain(|channel| !Arc::ptr_eq(channel, near) && !Arc::ptr_eq(channel, &far));
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let spawned = thread::Builder::new().name(name.into()).spawn(work);
    spawned.map_err(|source: io::Error| Error::DisksNotForwarded { source })
}

/// Passes bytes on until one end closes its part or fails, and ends both.
fn pass_on(from: &Arc<dyn Channel>, to: &Arc<dyn Channel>) {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut step = || {
        let count = from.recv(&mut [IoBufMut::from(&mut buffer[..])], RecvFlags::empty())?;
        to.send_all(&[IoBuf::from(&buffer[..count])], SendFlags::empty())?;
        Ok::<_, towline_channel::Error>(count)
    };
    loop {
        match step() {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "the connection of a disk");
                break;
            }
        }
    }
    [from, to].into_iter().for_each(end);
}

fn end(channel: &Arc<dyn Channel>) {
    if let Err(error) = channel.shutdown(std::net::Shutdown::Both) {
        tracing::trace!(%error, "closing");
    }
}

/// The drives that a guest may write to.
fn written_drives(qemu: &mut Qemu) -> Result<Vec<Drive>, Error> {
    Ok(qemu.drives()?.into_iter().filter(|drive| drive.is_written).collect())
}

/// Disks of a source that are copied.
#[derive(Debug)]
pub(super) struct DiskMirrors {
    mirrors: Vec<Mirror>,
    entry: Option<JournalEntry>,
    /// True once they have ended successfully.
    are_complete: bool,
    _forwarder: Forwarder,
}

impl DiskMirrors {
    /// Copies the disks, if the request has it so, and returns when the other QEMU has all of them and gets each further write.
    ///
    /// # Errors
    /// [`Error::DiskNotCopied`]; [`Error::Cancelled`]. The caller ends what was begun, by [`Self::end`].
    pub(super) fn start(
        qemu: &mut Qemu,
        dir: &PrivateDir,
        context: &Context<'_>,
        begun: &mut Option<Self>,
    ) -> Result<(), Error> {
        let WritableDisks::Mirrored { to } = &context.options.disks else { return Ok(()) };
        context.require_paths(qemu)?;
        context.observer.phase(CopyPhase::Disks);
        let forwarder = Forwarder::start(
            Arc::new(dir.listen(MIRROR_SOCKET)?),
            to.clone(),
            connect_options(context.options)?,
        )?;
        let drives = written_drives(qemu)?;
        let mirrors: Vec<_> =
            drives.iter().enumerate().map(|(number, drive)| Mirror::of(number, drive)).collect();
        let jobs: Vec<_> = mirrors.iter().map(|mirror| mirror.job.clone()).collect();
        qemu.wait_for_replies();
        // Of a towline that was killed.
        qemu.drop_mirrors(&jobs)?;
        let entry = qemu.record(&UndoRecord::Mirrors { jobs });
        let this = begun.insert(Self { mirrors, entry, are_complete: false, _forwarder: forwarder });
        let socket = dir.join(MIRROR_SOCKET);
        for (mirror, drive) in this.mirrors.iter().zip(&drives) {
            let started = qemu.start_mirror(mirror, drive, &socket, speed(context));
            started.map_err(|error| Error::DiskNotCopied {
                drive: drive.name.clone(),
                text: error.to_string(),
            })?;
        }
        this.await_ready(qemu, context)
    }

    fn await_ready(&self, qemu: &mut Qemu, context: &Context<'_>) -> Result<(), Error> {
        let mut applied = context.options.tuning.changes();
        loop {
            context.check_cancelled()?;
            let found = qemu.mirror_progress(&self.mirrors)?.map_err(Error::from)?;
            let disks = DiskProgress { copied: found.copied_bytes, total: found.total_bytes };
            context.observer.progress(&Progress { disks: Some(disks), ..Progress::default() });
            if found.is_ready {
                return Ok(());
            }
            let changes = context.options.tuning.changes();
            if std::mem::replace(&mut applied, changes) != changes {
                qemu.set_mirror_speed(&self.mirrors, speed(context))?;
            }
            let is_ready = |event: &towline_qmp::Event| event.name == "BLOCK_JOB_READY";
            // None, or a lost monitor, which the next query finds.
            let _ = qemu.client().wait_event(is_ready, PROGRESS_INTERVAL);
        }
    }

    /// Returns true if the source's migration has to wait for them.
    pub(super) fn are_active(&self) -> bool {
        !self.are_complete
    }

    /// Finds a disk that cannot be copied any more.
    pub(super) fn check(&self, qemu: &mut Qemu) -> Result<(), Error> {
        qemu.mirror_progress(&self.mirrors)?.map_err(Error::from).map(drop)
    }

    /// Ends them when the guest is stopped and its migration waits: both disks are equal then.
    pub(super) fn complete(&mut self, qemu: &mut Qemu) -> Result<(), Error> {
        qemu.complete_mirrors(&self.mirrors)?.map_err(Error::from)?;
        self.are_complete = true;
        Ok(())
    }

    /// Ends them in any state.
    pub(super) fn end(self, qemu: &mut Qemu) -> Result<(), Error> {
        if !self.are_complete {
            let jobs: Vec<_> = self.mirrors.iter().map(|mirror| mirror.job.clone()).collect();
            qemu.drop_mirrors(&jobs)?;
        }
        if let Some(entry) = self.entry {
            entry.done();
        }
        Ok(())
    }
}

/// Bytes per second at which the disks may be copied.
fn speed(context: &Context<'_>) -> Option<u64> {
    let changed = context.options.tuning.max_bandwidth();
    changed.unwrap_or(context.options.transfer_options().max_bandwidth)
}

impl From<MirrorFailure> for Error {
    fn from(failure: MirrorFailure) -> Self {
        Self::DiskNotCopied { drive: failure.drive, text: failure.text }
    }
}

/// Disks of a destination that its source writes.
#[derive(Debug)]
pub(super) struct DiskExports {
    entry: Option<JournalEntry>,
    _forwarder: Forwarder,
}

impl DiskExports {
    /// Offers the drives of this QEMU to those that connect to a listener; `None` if the request has none.
    pub(super) fn start(
        qemu: &mut Qemu,
        dir: &PrivateDir,
        context: &Context<'_>,
    ) -> Result<Option<Self>, Error> {
        let WritableDisks::Exported { listener } = &context.options.disks else { return Ok(None) };
        context.require_paths(qemu)?;
        let (drives, socket) = (written_drives(qemu)?, dir.join(EXPORT_SOCKET));
        qemu.wait_for_replies();
        let entry = qemu.record(&UndoRecord::Exports);
        let exported = qemu.export_drives(&drives, &socket);
        let forwarder = exported.map_err(Error::from).and_then(|()| {
            Forwarder::start(Arc::clone(listener), Address::Unix(socket), ConnectOptions::default())
        });
        match forwarder {
            Ok(forwarder) => Ok(Some(Self { entry, _forwarder: forwarder })),
            Err(error) => {
                qemu.end_exports()?;
                entry.iter().for_each(JournalEntry::done);
                Err(error)
            }
        }
    }

    /// Ends that.
    pub(super) fn end(self, qemu: &mut Qemu) -> Result<(), Error> {
        qemu.end_exports()?;
        self.entry.iter().for_each(JournalEntry::done);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_forwarder_passes_bytes_on_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let (path, far) = (directory.path().join("near.sock"), TcpListener::bind("127.0.0.1:0").unwrap());
        let listener = Arc::new(Listener::bind(&Address::Unix(path.clone())).unwrap());
        let to = Address::Tcp { host: "127.0.0.1".into(), port: far.local_addr().unwrap().port() };
        let forwarder = Forwarder::start(listener, to, ConnectOptions::default()).unwrap();
        let connect = || -> (UnixStream, TcpStream) {
            let near = UnixStream::connect(&path).unwrap();
            (near, far.accept().unwrap().0)
        };
        let (mut near, mut other) = connect();
        let sent: Vec<u8> = (0..3 * BUFFER_BYTES).map(|n| n as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| near.write_all(&sent).unwrap());
            let mut received = vec![0; sent.len()];
            other.read_exact(&mut received).unwrap();
            assert_eq!(received, sent);
        });
        other.write_all(b"back").unwrap();
        let mut back = [0; 4];
        near.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"back");
        // One end closes: so does the other.
        other.shutdown(Shutdown::Both).unwrap();
        assert_eq!(near.read(&mut back).unwrap(), 0);
        let (mut near, mut other) = connect();
        drop(forwarder);
        assert_eq!((near.read(&mut back).unwrap(), other.read(&mut back).unwrap()), (0, 0));
        assert!(UnixStream::connect(&path).is_err(), "nothing listens");
    }
}

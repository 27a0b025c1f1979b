//! Disks of a protected guest. QEMU mirrors them to its ferry, which passes the writes of each epoch on with its checkpoint; the standby has
//! the waiting QEMU do them once it has the whole checkpoint.
//!
//! ```text
//!   QEMU ── NBD, mirror ──► DiskLog ── writes of an epoch ── TLS ──► StandbyDisk ── NBD, then FLUSH ──► QEMU that waits
//!                             │ cut, while the guest is stopped            │ with the checkpoint's memory
//! ```
//! Before the first checkpoint each write is passed on by itself, and the guest waits for it, as for any mirror. From then on a write is done
//! once it is in the ferry's memory: what waits for the other host is the output that follows it.
//!
//! Between the hosts each disk has a connection, which the standby confirms by a byte. Then come the number of an epoch, the length of its
//! writes, and these as requests of NBD. Before the first checkpoint the number is 0, and a length of 0 has the standby flush, and confirm
//! that by a byte: all that was written until then is on its storage, and the first checkpoint does not wait for it.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use towline_channel::{Channel, ChannelExt as _, Error as ChannelError, IoBuf, IoBufMut, SendFlags};
use towline_migration::checkpoints::CheckpointQueue;

use crate::lock::lock;
use crate::nbd::{Change, Export, NbdClient, NbdServer};

/// Epoch of writes before the first checkpoint.
const BEFORE: u64 = 0;
/// Length of the writes of an epoch from which on the guest waits for the next one.
const OPEN_BYTES: usize = 16 << 20;
/// Byte of the standby for a disk that it has, and for a flush.
const DONE: u8 = 1;
/// Bytes of a disk that are changed before the first checkpoint without a flush, and in one epoch before the guest waits. Zeros may be written
/// as such.
const CHANGED_BYTES: u64 = 64 << 20;
/// Time for the other host to store what a guest without a checkpoint writes.
const STORED_WITHIN: Duration = Duration::from_secs(60);
/// Time for which a write waits for the next checkpoint at most.
const WRITE_WAITS: Duration = Duration::from_millis(500);
/// Maximum length of the writes of an epoch.
const LOG_BYTES_MAX: usize = 256 << 20;
/// Time for a write, and a flush, of the waiting QEMU.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes of a disk, by epochs.
#[derive(Debug)]
pub(super) struct DiskLog {
    disk: String,
    /// The standby.
    channel: Arc<dyn Channel>,
    /// Bytes that were changed since the last flush, before the first checkpoint.
    unflushed: Mutex<u64>,
    /// Checkpoints that are taken.
    queue: Arc<CheckpointQueue>,
    /// Maximum length of the writes of an epoch.
    limit: usize,
    state: Mutex<LogState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LogState {
    /// Writes are kept until they are passed on: the guest has, or had, a checkpoint.
    keeps: bool,
    /// The guest is being stopped, for which its writes must end.
    is_stopping: bool,
    /// Writes since the last checkpoint, and the bytes of the disk that they change.
    open: Vec<u8>,
    changed_bytes: u64,
    /// Writes of each checkpoint that was not passed on.
    cut: VecDeque<Vec<u8>>,
    /// Reason for which there are no more.
    ended: Option<String>,
}

/// Waits until the standby has the disk of this connection, or what was written to it on its storage.
pub(super) fn await_done(channel: &dyn Channel) -> towline_channel::Result<()> {
    channel.recv_exact(&mut [IoBufMut::from(&mut [0; 1][..])])
}

impl DiskLog {
    /// Logs of these disks, whose standby is connected by these channels. QEMU connects to the listener.
    pub(super) fn serve(
        disks: &[Export],
        channels: Vec<Arc<dyn Channel>>,
        listener: UnixListener,
        queue: &Arc<CheckpointQueue>,
        limit: usize,
    ) -> towline_channel::Result<Vec<Arc<Self>>> {
        let log = |(disk, channel): (&Export, Arc<dyn Channel>)| {
            channel.set_timeouts(Some(STORED_WITHIN), Some(STORED_WITHIN))?;
            Ok(Arc::new(Self {
                disk: disk.name.clone(),
                channel,
                unflushed: Mutex::default(),
                queue: Arc::clone(queue),
                limit: limit.min(LOG_BYTES_MAX),
                state: Mutex::default(),
                changed: Condvar::new(),
            }))
        };
        let logs: Vec<_> = disks.iter().zip(channels).map(log).collect::<towline_channel::Result<_>>()?;
        let (of_thread, exports) = (logs.clone(), disks.to_vec());
        let serve = move || {
            for stream in listener.incoming().take_while(Result::is_ok).flatten() {
                match NbdServer::negotiate(stream, &exports) {
                    Ok(Some((number, mut server))) => {
                        let log = Arc::clone(&of_thread[number]);
                        let serve = move || log.end(server.serve(&mut |change| log.change(change)));
                        if let Err(error) = Builder::new().spawn(serve) {
                            of_thread[number].end(Err(error));
                        }
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%error, "a connection for disks"),
                }
            }
        };
        Builder::new().spawn(serve).map_err(ChannelError::NoThread)?;
        Ok(logs)
    }

    /// Time for the standby to take writes from now on.
    pub(super) fn set_timeout(&self, timeout: Duration) -> towline_channel::Result<()> {
        self.channel.set_timeouts(Some(timeout), Some(timeout))
    }

    fn change(&self, change: Change<'_>) -> io::Result<()> {
        match change {
            Change::Write { request, bytes } => self.write(request, bytes.into()),
            // QEMU flushes in each stop, before the checkpoint with what it flushes.
            Change::Flush if lock(&self.state).keeps => Ok(()),
            Change::Flush => self.flush().map_err(io::Error::other),
        }
    }

    /// Has the standby store all writes before the first checkpoint.
    pub(super) fn flush(&self) -> towline_channel::Result<()> {
        let mut unflushed = lock(&self.unflushed);
        self.send(BEFORE, &[])?;
        await_done(&*self.channel)?;
        *unflushed = 0;
        Ok(())
    }

    /// A write before the first checkpoint.
    fn write_early(&self, request: &[u8], bytes: u64) -> towline_channel::Result<()> {
        let mut unflushed = lock(&self.unflushed);
        self.send(BEFORE, request)?;
        *unflushed += bytes;
        if *unflushed < CHANGED_BYTES {
            return Ok(());
        }
        drop(unflushed);
        self.flush()
    }

    /// A write of the guest is done once this returns.
    fn write(&self, request: &[u8], bytes: u64) -> io::Result<()> {
        let state = lock(&self.state);
        if !state.keeps {
            drop(state);
            return self.write_early(request, bytes).map_err(io::Error::other);
        }
        let is_full = |state: &LogState| {
            state.open.len() >= OPEN_BYTES.min(self.limit / 2) || state.changed_bytes >= CHANGED_BYTES
        };
        if is_full(&state) {
            self.queue.hasten();
        }
        // A standby that is late delays the guest's writes, and not its checkpoints; nor does a write that QEMU waits for delay QEMU for long.
        let waits = |state: &mut LogState| is_full(state) && !state.is_stopping && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(state, WRITE_WAITS, waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.ended.is_some() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if state.open.len() + request.len() > self.limit {
            return Err(io::Error::other(format!(
                "more than {} bytes were written in one epoch",
                self.limit
            )));
        }
        state.open.extend_from_slice(request);
        state.changed_bytes += bytes;
        Ok(())
    }

    /// The guest is about to be stopped: its writes end.
    pub(super) fn stopping(&self) {
        lock(&self.state).is_stopping = true;
        self.changed.notify_all();
    }

    /// Ends the epoch. The guest is stopped.
    pub(super) fn cut(&self) -> Result<(), String> {
        let mut state = lock(&self.state);
        if let Some(reason) = &state.ended {
            return Err(format!("disk {}: {reason}", self.disk));
        }
        (state.keeps, state.is_stopping, state.changed_bytes) = (true, false, 0);
        let open = mem::take(&mut state.open);
        state.cut.push_back(open);
        Ok(())
    }

    /// Passes the writes of the next epoch on, which has this number.
    pub(super) fn pass_on(&self, epoch: u64) -> towline_channel::Result<()> {
        let writes = lock(&self.state).cut.pop_front().unwrap_or_default();
        self.send(epoch, &writes)
    }

    fn send(&self, epoch: u64, writes: &[u8]) -> towline_channel::Result<()> {
        let head = [epoch.to_be_bytes(), (writes.len() as u64).to_be_bytes()].concat();
        self.channel.send_all(&[IoBuf::from(&head[..]), IoBuf::from(writes)], SendFlags::empty())
    }

    fn end(&self, ended: io::Result<()>) {
        let reason = ended.map_or_else(|error| error.to_string(), |()| "QEMU has ended its mirror".into());
        tracing::warn!(disk = self.disk, reason, "no more writes");
        self.close(reason);
    }

    /// Ends the guest's writes, now and later: its QEMU writes to its own disk alone.
    pub(super) fn close(&self, reason: String) {
        lock(&self.state).ended.get_or_insert(reason);
        self.changed.notify_all();
    }
}

/// Writes of an epoch, at the standby.
#[derive(Debug)]
struct Writes {
    epoch: u64,
    requests: Vec<u8>,
}

/// A disk of the QEMU that waits.
#[derive(Debug)]
pub(super) struct StandbyDisk {
    name: String,
    /// Writes, or the reason for which there are no more.
    received: Receiver<io::Result<Writes>>,
    client: Arc<Mutex<NbdClient>>,
}

impl StandbyDisk {
    /// The disk that this NBD server has, whose writes come by this channel.
    pub(super) fn new(
        disk: &Export,
        server: &Path,
        channel: Arc<dyn Channel>,
        limit: usize,
    ) -> io::Result<Self> {
        let client = NbdClient::connect(server, &disk.name, None, WRITE_TIMEOUT)?;
        if client.disk_bytes() != Some(disk.bytes) {
            let (found, expected) = (client.disk_bytes().unwrap_or_default(), disk.bytes);
            return Err(io::Error::other(format!("it has {found} bytes, expected {expected}")));
        }
        done(&*channel)?;
        let client = Arc::new(Mutex::new(client));
        let (sender, received) = mpsc::sync_channel(0);
        let (early, name) = (Arc::clone(&client), disk.name.clone());
        let receive_all = move || {
            loop {
                let writes = match receive(&*channel, limit) {
                    Ok(Writes { epoch: BEFORE, requests }) => match write_early(&early, &requests, &*channel)
                    {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    },
                    writes => writes,
                };
                let is_last = writes.is_err();
                if let Err(error) = &writes {
                    tracing::warn!(disk = name, %error, "no more writes");
                    // Its host sees it at the next write.
                    let _ = channel.shutdown(Shutdown::Both);
                }
                if sender.send(writes).is_err() || is_last {
                    return;
                }
            }
        };
        Builder::new().spawn(receive_all)?;
        Ok(Self { name: disk.name.clone(), received, client })
    }

    /// Waits for the writes of an epoch until a deadline.
    fn next(&self, epoch: u64, deadline: Instant) -> io::Result<Vec<u8>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let writes =
            self.received.recv_timeout(left).map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if writes.epoch != epoch {
            let text = format!("the writes of epoch {}, expected {epoch}", writes.epoch);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(writes.requests)
    }

    /// Writes them, and returns when they are on the storage.
    fn write(&self, requests: &[u8]) -> io::Result<()> {
        let mut client = lock(&self.client);
        client.replay(requests)?;
        client.flush()
    }
}

/// Writes of an epoch to all disks of a standby, which it has, and has not done.
#[derive(Debug)]
pub(super) struct EpochWrites<'a>(Vec<(&'a StandbyDisk, Vec<u8>)>);

impl<'a> EpochWrites<'a> {
    /// Waits for the writes of an epoch.
    pub(super) fn receive(disks: &'a [StandbyDisk], epoch: u64, within: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + within;
        let next = |disk: &'a StandbyDisk| {
            disk.next(epoch, deadline).map(|writes| (disk, writes)).map_err(|error| named(disk, &error))
        };
        disks.iter().map(next).collect::<io::Result<_>>().map(Self)
    }

    /// Does them, and returns when they are on the storage.
    pub(super) fn write(&self) -> io::Result<()> {
        self.0.iter().try_for_each(|(disk, writes)| disk.write(writes).map_err(|error| named(disk, &error)))
    }
}

fn named(disk: &StandbyDisk, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("disk {}: {error}", disk.name))
}

/// Confirms a disk, or a flush.
fn done(channel: &dyn Channel) -> io::Result<()> {
    channel.send_all(&[IoBuf::from(&[DONE][..])], SendFlags::empty()).map_err(io::Error::other)
}

/// Does what was written before the first checkpoint.
fn write_early(client: &Mutex<NbdClient>, requests: &[u8], channel: &dyn Channel) -> io::Result<()> {
    let mut client = lock(client);
    if !requests.is_empty() {
        return client.replay(requests);
    }
    client.flush()?;
    done(channel)
}

/// Receives the writes of an epoch.
fn receive(channel: &dyn Channel, limit: usize) -> io::Result<Writes> {
    let mut head = [[0; 8]; 2];
    let fill = |bytes: &mut [u8]| channel.recv_exact(&mut [IoBufMut::from(bytes)]).map_err(io::Error::other);
    fill(head.as_flattened_mut())?;
    let [epoch, length] = head.map(u64::from_be_bytes);
    let length = usize::try_from(length).ok().filter(|length| *length <= limit).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{length} bytes of writes in one epoch"))
    })?;
    let mut requests = vec![0; length];
    fill(&mut requests)?;
    Ok(Writes { epoch, requests })
}

#[cfg(test)]
mod tests;

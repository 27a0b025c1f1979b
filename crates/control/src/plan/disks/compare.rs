//! Disks are compared with their copies, by hashes that each end computes from what it has.
//!
//! ```text
//!   drive, bitmaps of what is written ── NBD ──► towline here ◄══ hashes ══ towline there ◄── NBD ── copy
//!   guest runs:    everything ─► written meanwhile ─► … (few rounds)
//!   guest stopped: written since ─► equal, or the guest stays here
//! ```
//! A part that was the same, and that the guest has not written since, is the same when it is stopped. While it runs, a difference proves
//! nothing: a write may have reached one disk only.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ChannelExt as _, IoBuf, IoBufMut, RecvFlags, SendFlags, connect,
};

use super::super::context::Context;
use super::super::error::{Error, check_cancelled};
use super::super::private_dir::PrivateDir;
use super::super::progress::{ComparedDisks, CopyPhase, DiskProgress, Progress};
use super::connection::{Purpose, connected};
use crate::nbd::NbdClient;
use crate::qemu::{ComparedDrive, Drive, Qemu};

/// Socket of the source's QEMU.
const SOCKET: &str = "compare.sock";
/// Bytes that are hashed at a time.
const PART_BYTES: u64 = 1 << 20;
/// Parts whose hashes are awaited from the other host.
const AWAITED_MAX: usize = 8;
/// Times that disks are compared while the guest runs, each time with what it has written meanwhile.
const ROUNDS_MAX: usize = 5;
const HASH_BYTES: usize = blake3::OUT_LEN;
/// Offset and length of a part.
const REQUEST_BYTES: usize = 12;
/// Interval of reports of the progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Longest name of a drive.
const NAME_BYTES_MAX: usize = 4096;
/// Timeout for the NBD server of this host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a part of a disk to be read.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Connects to the NBD server for the content of a disk; `None`: its hashes were requested, and sent.
pub(super) fn serve(
    near: &Arc<dyn Channel>,
    server: &Path,
    cancel: &Cancel,
) -> io::Result<Option<Arc<dyn Channel>>> {
    if Purpose::receive(&**near)? == Purpose::Hashes {
        return answer(&**near, server).map(|()| None);
    }
    let (address, deadline) = (Address::Unix(server.to_owned()), Instant::now() + CONNECT_TIMEOUT);
    let connected = connect(&address, deadline, cancel).map_err(io::Error::other)?;
    Ok(Some(connected.into()))
}

/// Disks of a guest that are compared with their copies.
#[derive(Debug)]
pub(super) struct Comparison {
    disks: Vec<ComparedDisk>,
    /// The source's NBD server.
    server: PathBuf,
    /// Number of bitmaps of each disk so far.
    bitmaps: usize,
    result: Arc<OnceLock<ComparedDisks>>,
}

#[derive(Debug)]
struct ComparedDisk {
    drive: Drive,
    here: NbdClient,
    there: Arc<dyn Channel>,
    content: Vec<u8>,
    /// Parts that were different, or may be.
    left: Vec<Range<u64>>,
}

impl Comparison {
    /// Compares these drives with their copies while the guest writes to both.
    pub(super) fn start(
        qemu: &mut Qemu,
        drives: &[Drive],
        dir: &PrivateDir,
        to: &Address,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        context.observer.phase(CopyPhase::CompareDisks);
        let server = dir.join(SOCKET);
        qemu.begin_comparison(drives, &server)?;
        let disk = |(number, drive): (usize, &Drive)| {
            let there = connected(drive, to, Purpose::Hashes, context)?;
            let here = NbdClient::connect(&server, &ComparedDrive(number).export(), None, READ_TIMEOUT);
            let left = std::iter::once(0..drive.bytes).collect();
            let disk = ComparedDisk {
                here: here.map_err(|error| not_compared(drive, error))?,
                drive: drive.clone(),
                there,
                content: Vec::new(),
                left,
            };
            disk.introduce(context.options.peer_timeout).map_err(|error| not_compared(drive, error))?;
            Ok(disk)
        };
        let disks = drives.iter().enumerate().map(disk).collect::<Result<_, Error>>()?;
        let mut this = Self { disks, server, bitmaps: 1, result: Arc::clone(&context.compared) };
        this.compare_running(qemu, context)?;
        Ok(this)
    }

    fn compare_running(&mut self, qemu: &mut Qemu, context: &Context<'_>) -> Result<(), Error> {
        let (begun, total) = (Instant::now(), self.bytes());
        let (mut copied, mut reported) = (0, Instant::now());
        let mut progress = |bytes| {
            copied += bytes;
            if reported.elapsed() >= PROGRESS_INTERVAL {
                reported = Instant::now();
                let disks = DiskProgress { copied, total: total.max(copied) };
                context.observer.progress(&Progress { disks: Some(disks), ..Progress::default() });
            }
        };
        for round in 1.. {
            let round_begun = Instant::now();
            let bytes = self.compare_left(context.cancel, &mut progress)?;
            let took = round_begun.elapsed();
            let written = qemu.written_bytes(&self.last_bitmaps())?;
            let pause = took.mul_f64(written as f64 / bytes.max(1) as f64);
            if round < ROUNDS_MAX && pause > context.options.downtime_limit / 10 {
                self.turn(qemu)?;
                continue;
            }
            context.observer.notice(&format!(
                "the disks were compared with their copies in {:.1} s; {:.1} MiB were written meanwhile, and are compared while the guest \
                 is stopped: about {} ms, and more by what it writes until then",
                begun.elapsed().as_secs_f64(),
                written as f64 / (1 << 20) as f64,
                pause.as_millis() + 1
            ));
            break;
        }
        Ok(())
    }

    /// Compares what was written since, when the guest is stopped, and ends the comparison.
    ///
    /// # Errors
    /// [`Error::DiskDiffers`].
    pub(super) fn finish(mut self, qemu: &mut Qemu, cancel: &Cancel) -> Result<(), Error> {
        let begun = Instant::now();
        self.turn(qemu)?;
        let again_bytes = self.compare_left(cancel, &mut |_| {})?;
        if let Some(disk) = self.disks.iter_mut().find(|disk| !disk.left.is_empty()) {
            return Err(disk.first_difference());
        }
        qemu.end_comparison()?;
        let (bytes, pause_ms) = (self.bytes(), begun.elapsed().as_millis() as u64);
        self.result.get_or_init(|| ComparedDisks { bytes, again_bytes, pause_ms });
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.drive.bytes).sum()
    }

    fn last_bitmaps(&self) -> Vec<String> {
        (0..self.disks.len()).map(|number| ComparedDrive(number).bitmap(self.bitmaps - 1)).collect()
    }

    /// Adds what was written to the parts that are left, and begins new bitmaps.
    fn turn(&mut self, qemu: &mut Qemu) -> Result<(), Error> {
        let ended = self.bitmaps - 1;
        for (number, disk) in self.disks.iter_mut().enumerate() {
            qemu.turn_bitmap(ComparedDrive(number), &disk.drive, ended)?;
            let name = ComparedDrive(number).bitmap(ended);
            let dirty = NbdClient::connect(&self.server, &name, Some(&name), READ_TIMEOUT)
                .and_then(|mut bitmap| bitmap.dirty(disk.drive.bytes));
            disk.left.extend(dirty.map_err(|error| not_compared(&disk.drive, error))?);
            disk.left = merged(std::mem::take(&mut disk.left));
        }
        self.bitmaps += 1;
        Ok(())
    }

    /// Compares the parts that are left, of which those stay that differ. Returns their bytes.
    fn compare_left(&mut self, cancel: &Cancel, progress: &mut dyn FnMut(u64)) -> Result<u64, Error> {
        let mut bytes = 0;
        for disk in &mut self.disks {
            let parts = std::mem::take(&mut disk.left);
            bytes += parts.iter().map(|part| part.end - part.start).sum::<u64>();
            disk.left = disk.differing(&parts, cancel, progress)?;
        }
        Ok(bytes)
    }
}

impl ComparedDisk {
    /// Names the drive to the other host.
    fn introduce(&self, timeout: Duration) -> towline_channel::Result<()> {
        self.there.set_timeouts(Some(timeout), Some(timeout))?;
        let name = self.drive.name.as_bytes();
        let length = (name.len() as u32).to_be_bytes();
        self.there.send_all(&[IoBuf::from(&length[..]), IoBuf::from(name)], SendFlags::empty())
    }

    /// Those of these parts that differ now.
    fn differing(
        &mut self,
        parts: &[Range<u64>],
        cancel: &Cancel,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<Range<u64>>, Error> {
        let mut parts = parts.iter().flat_map(split);
        let (mut awaited, mut differing) = (VecDeque::new(), Vec::new());
        loop {
            while awaited.len() < AWAITED_MAX
                && let Some(part) = parts.next()
            {
                self.request(&part).map_err(|error| not_compared(&self.drive, error))?;
                awaited.push_back(part);
            }
            let Some(part) = awaited.pop_front() else { return Ok(differing) };
            check_cancelled(cancel)?;
            progress(part.end - part.start);
            if self.differs(&part).map_err(|error| not_compared(&self.drive, error))? {
                differing.push(part);
            }
        }
    }

    fn request(&self, part: &Range<u64>) -> towline_channel::Result<()> {
        let (offset, bytes) = (part.start.to_be_bytes(), ((part.end - part.start) as u32).to_be_bytes());
        self.there.send_all(&[IoBuf::from(&offset[..]), IoBuf::from(&bytes[..])], SendFlags::empty())
    }

    /// Compares a part, whose hash was requested, with the other host's.
    fn differs(&mut self, part: &Range<u64>) -> io::Result<bool> {
        let here = hash(&mut self.here, part, &mut self.content)?;
        let mut there = [0; HASH_BYTES];
        self.there.recv_exact(&mut [IoBufMut::from(&mut there[..])]).map_err(io::Error::other)?;
        Ok(here != blake3::Hash::from(there))
    }

    /// The error of a disk that differs, with the place.
    fn first_difference(&mut self) -> Error {
        let Some(mut part) = self.left.first().cloned() else {
            return not_compared(&self.drive, "nothing differs");
        };
        while part.end - part.start > 1 {
            let half = part.start..part.start.midpoint(part.end);
            let found = self.request(&half).map_err(io::Error::other).and_then(|()| self.differs(&half));
            part = match found {
                Ok(true) => half,
                Ok(false) => half.end..part.end,
                Err(error) => return not_compared(&self.drive, error),
            };
        }
        Error::DiskDiffers { drive: self.drive.name.clone(), offset: part.start }
    }
}

/// Sends hashes of the disk of this NBD server that `to` names, until it has no further request.
pub(super) fn answer(to: &dyn Channel, server: &Path) -> io::Result<()> {
    let receive = |buffer: &mut [u8]| to.recv_exact(&mut [IoBufMut::from(buffer)]).map_err(io::Error::other);
    let mut length = [0; 4];
    receive(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > NAME_BYTES_MAX {
        return Err(too_long("a name", length, NAME_BYTES_MAX));
    }
    let mut name = vec![0; length];
    receive(&mut name)?;
    let mut disk = NbdClient::connect(server, &String::from_utf8_lossy(&name), None, READ_TIMEOUT)?;
    let (mut request, mut content) = ([0; REQUEST_BYTES], Vec::new());
    while to.recv(&mut [IoBufMut::from(&mut request[..1])], RecvFlags::empty()).map_err(io::Error::other)? > 0
    {
        receive(&mut request[1..])?;
        let (offset, bytes) = request.split_at(8);
        let offset = u64::from_be_bytes(offset.try_into().expect("split there"));
        let bytes = u32::from_be_bytes(bytes.try_into().expect("split there")) as usize;
        if bytes > PART_BYTES as usize {
            return Err(too_long("a part", bytes, PART_BYTES as usize));
        }
        let hash = hash(&mut disk, &(offset..offset.saturating_add(bytes as u64)), &mut content)?;
        to.send_all(&[IoBuf::from(&hash.as_bytes()[..])], SendFlags::empty()).map_err(io::Error::other)?;
    }
    Ok(())
}

/// A request of the other host that this version does not have: its disk would count as another one.
fn too_long(what: &str, found: usize, expected: usize) -> io::Error {
    io::Error::other(format!("{what} of a disk has {found} bytes, expected at most {expected}"))
}

/// The hash of a part of a disk, at most [`PART_BYTES`] long, which is read into `content`.
fn hash(disk: &mut NbdClient, part: &Range<u64>, content: &mut Vec<u8>) -> io::Result<blake3::Hash> {
    content.resize((part.end - part.start) as usize, 0);
    disk.read(part.start, content)?;
    Ok(blake3::hash(content))
}

fn not_compared(drive: &Drive, error: impl Display) -> Error {
    Error::DiskNotCompared { drive: drive.name.clone(), text: error.to_string() }
}

/// The parts of a range that are hashed at a time.
fn split(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    let begins = (range.start..end).step_by(PART_BYTES as usize);
    begins.map(move |begin| begin..(begin + PART_BYTES).min(end))
}

/// Ranges with the bytes of these, in order, each once.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_compared_once() {
        assert_eq!(merged(vec![6..9, 0..2, 2..4, 7..8, 12..13]), [0..4, 6..9, 12..13]);
        let parts: Vec<_> = split(&(PART_BYTES - 1..2 * PART_BYTES + 5)).collect();
        assert_eq!(parts, [PART_BYTES - 1..2 * PART_BYTES - 1, 2 * PART_BYTES - 1..2 * PART_BYTES + 5]);
        assert_eq!(merged(Vec::new()), []);
    }
}

//! The host's end: a tap or a macvtap, with a queue for each queue pair.
//!
//! ```text
//!   name ── exists? ── no ──► a tap is created, and deleted with its last queue           ┐
//!            └─ yes ─► a tap: /dev/net/tun   a macvtap: /dev/tapN                         ├─► N queues, virtio header
//!   descriptors that a manager opened ────────────────────────────────────────────────────┘
//! ```
//! The queue of a disabled pair is detached, so the kernel steers no flow to it. The first one stays
//! attached: a tap is configured through an attached queue, and a guest always has its first pair.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Cancel, IoBuf, IoBufMut, readv, writev};

use crate::PAIRS_MAX;
use crate::features::{self, Offloads};
use crate::lock::lock;
use crate::sys::tap_ring::TapRing;
use crate::sys::{interface, tap};

/// Maximum number of frames that are discarded when a tap is emptied: more than its queues hold.
const STALE_FRAMES_MAX: usize = 1 << 16;
/// Interval of the checks that the interface exists.
const GONE_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Reason why a tap cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// The number of queue pairs is out of range.
    #[error("{found} queue pairs; a vhost-user card has 1 to {PAIRS_MAX}")]
    QueueCount { found: usize },
    /// The device file cannot be opened.
    #[error("cannot open {path}: {source}; {remedy}")]
    Open {
        path: String,
        /// Error of `open`.
        source: io::Error,
        remedy: &'static str,
    },
    /// A queue cannot be attached to the interface.
    #[error("cannot attach queue {queue} of {queues} to interface {name}: {source}; {remedy}")]
    Attach {
        name: String,
        /// Index of the queue, from 0.
        queue: usize,
        queues: usize,
        /// Error of `TUNSETIFF`.
        source: io::Error,
        remedy: &'static str,
    },
    /// A descriptor is not a queue of a tap.
    #[error(
        "descriptor {number} is not a queue of a tap or macvtap ({source}); open one with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR, or give the tap's name"
    )]
    NotTap {
        number: RawFd,
        /// Error of `TUNGETIFF`.
        source: io::Error,
    },
    /// A descriptor of a tap was opened with other flags.
    #[error("descriptor {number} ({name}) was opened {found}; open it {expected}")]
    Flags { number: RawFd, name: String, found: &'static str, expected: &'static str },
    /// The descriptors are of different interfaces.
    #[error(
        "descriptor {first_number} belongs to interface {first} and descriptor {number} to {found}; all must belong to one"
    )]
    MixedInterfaces { first_number: RawFd, first: String, number: RawFd, found: String },
    /// A setting of the interface cannot be changed.
    #[error(
        "cannot set {what} of interface {name}: {source}; run with CAP_NET_ADMIN, or set it before the start (`ip link set {name} …`)"
    )]
    Set { what: &'static str, name: String, source: io::Error },
}

/// One queue of a tap.
#[derive(Debug)]
pub struct TapQueue {
    fd: OwnedFd,
    multi_queue: bool,
    attached: AtomicBool,
    /// Writes several frames in one call, if the kernel permits it.
    ring: Mutex<Option<TapRing>>,
}

/// All queues of one interface.
#[derive(Debug)]
pub struct Taps {
    name: String,
    created: bool,
    queues: Vec<TapQueue>,
    /// Offloads that this kernel's tap knows.
    pub(crate) offloads: Offloads,
}

/// Format of frames, which follows the negotiated features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameFormat {
    /// Length of the virtio header.
    pub(crate) header_bytes: usize,
    /// True if a frame may fill several chains (`VIRTIO_NET_F_MRG_RXBUF`).
    pub(crate) mergeable: bool,
}

impl FrameFormat {
    /// The format for a driver that negotiated these features.
    pub(crate) fn of(negotiated: u64) -> Self {
        let mergeable = negotiated & features::MRG_RXBUF != 0;
        Self { header_bytes: features::header_bytes(negotiated), mergeable }
    }
}

/// State of the card's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarrierState {
    Up,
    Down,
}

/// The queue of a pair for one run, with the format of its frames and the state of the link.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TapContext<'a> {
    pub(crate) queue: &'a TapQueue,
    pub(crate) format: FrameFormat,
    pub(crate) link: CarrierState,
}

impl Taps {
    /// Opens `queues` queues of the interface. An interface that does not exist is created and brought up; it
    /// is deleted with its last descriptor.
    ///
    /// # Errors
    /// [`TapError::QueueCount`], [`TapError::Open`], [`TapError::Attach`], [`TapError::Set`].
    pub fn open(name: &str, queues: usize) -> Result<Self, TapError> {
        check_count(queues)?;
        let set = |source| TapError::Set { what: "the name", name: name.to_owned(), source };
        let index = interface::index(name).map_err(set)?;
        let macvtap = index.map(|index| format!("/dev/tap{index}")).filter(|path| is_char_device(path));
        let path = macvtap.clone().unwrap_or_else(|| "/dev/net/tun".to_owned());
        let mut multi_queue = queues > 1;
        let mut opened = Vec::with_capacity(queues);
        for queue in 0..queues {
            let fd = open(&path)?;
            let flags = |multi: bool| tap::TAP | if multi { tap::MULTI_QUEUE } else { 0 };
            let mut attached = tap::attach(fd.as_fd(), name, flags(multi_queue));
            // A single queue of a multiqueue tap must be opened with IFF_MULTI_QUEUE too.
            if attached.is_err() && queues == 1 && index.is_some() {
                multi_queue = true;
                attached = tap::attach(fd.as_fd(), name, flags(true));
            }
            attached.map_err(|source| {
                let (name, remedy) = (name.to_owned(), attach_remedy(&source, queues));
                TapError::Attach { name, queue, queues, source, remedy }
            })?;
            opened.push(fd.into());
        }
        let taps = Self::new(name.to_owned(), index.is_none(), multi_queue, opened)?;
        if taps.created {
            interface::set_up(name).map_err(|source| taps.not_set("IFF_UP", source))?;
        }
        Ok(taps)
    }

    /// Adopts queues that another process opened, all of one interface, with the virtio header and without
    /// packet information. A missing IFF_NO_PI cannot be detected: the bit means IFF_NOFILTER in `TUNGETIFF`.
    ///
    /// # Errors
    /// [`TapError::QueueCount`], [`TapError::NotTap`], [`TapError::Flags`], [`TapError::MixedInterfaces`],
    /// [`TapError::Set`].
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        check_count(fds.len())?;
        let interface = |fd: &OwnedFd| {
            let number = fd.as_raw_fd();
            let (name, flags) =
                tap::interface(fd.as_fd()).map_err(|source| TapError::NotTap { number, source })?;
            check_flags(number, &name, flags, fds.len()).map(|()| (name, flags))
        };
        let (name, flags) = interface(&fds[0])?;
        for fd in &fds[1..] {
            let (found, _) = interface(fd)?;
            if found != name {
                let (first_number, number) = (fds[0].as_raw_fd(), fd.as_raw_fd());
                return Err(TapError::MixedInterfaces { first_number, first: name, number, found });
            }
        }
        // The previous process may have detached some. Attached queues return an error, which is ignored.
        for fd in &fds {
            let _ = tap::set_queue(fd.as_fd(), true);
        }
        Self::new(name, false, flags & tap::MULTI_QUEUE != 0, fds)
    }

    fn new(name: String, created: bool, multi_queue: bool, fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let queue = |fd: OwnedFd| {
            let ring = Mutex::new(ring_for(fd.as_fd()));
            TapQueue { fd, multi_queue, attached: AtomicBool::new(true), ring }
        };
        let queues: Vec<TapQueue> = fds.into_iter().map(queue).collect();
        let mut taps = Self { name, created, queues, offloads: Offloads::empty() };
        for queue in &taps.queues {
            rustix::io::ioctl_fionbio(&queue.fd, true)
                .map_err(|errno| taps.not_set("O_NONBLOCK", errno.into()))?;
        }
        taps.offloads = taps.probe_offloads();
        taps.set_header_bytes(12)?;
        // Pairs are disabled at first, and get no flows.
        taps.queues.iter().skip(1).for_each(|queue| queue.set_attached(false));
        Ok(taps)
    }

    /// Determines the offloads that this kernel's tap knows, and disables all of them.
    fn probe_offloads(&self) -> Offloads {
        let tries = [
            Offloads::all(),
            Offloads::all() - Offloads::USO,
            Offloads::all() - Offloads::USO - Offloads::UFO,
        ];
        let fd = self.control();
        let known = tries.into_iter().find(|offloads| tap::set_offloads(fd, offloads.bits()).is_ok());
        // Every kernel accepts an empty set.
        let _ = tap::set_offloads(fd, 0);
        known.unwrap_or_default()
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if frames are written by io_urings, which were created with the queues.
    pub fn uses_rings(&self) -> bool {
        self.queues.iter().any(|queue| lock(&queue.ring).is_some())
    }

    /// Returns true if this process created the interface.
    pub fn is_created(&self) -> bool {
        self.created
    }

    /// The queues, one for each pair.
    pub fn queues(&self) -> &[TapQueue] {
        &self.queues
    }

    /// Waits until the interface is deleted, or cancelled. Linux wakes waiters for an error of a queue only
    /// if they wait for frames too, so the interface is polled at intervals.
    pub fn wait_gone(&self, cancel: &Cancel) {
        while !(self.is_gone() || cancel.is_cancelled()) {
            if let Err(errno) = poll(&mut [PollFd::new(cancel, PollFlags::IN)], Some(&GONE_INTERVAL))
                && errno != Errno::INTR
            {
                tracing::warn!(%errno, "poll");
                return;
            }
        }
    }

    /// Returns true if the interface was deleted.
    pub fn is_gone(&self) -> bool {
        tap::interface(self.control()).is_err()
    }

    /// MTU of the interface; `None` if it is in another network namespace.
    pub fn mtu(&self) -> Option<u32> {
        interface::mtu(&self.name).ok()
    }

    /// Sets the MTU of the interface.
    ///
    /// # Errors
    /// [`TapError::Set`].
    pub fn set_mtu(&self, mtu: u16) -> Result<(), TapError> {
        interface::set_mtu(&self.name, mtu.into()).map_err(|source| self.not_set("the MTU", source))
    }

    pub(crate) fn set_offloads(&self, offloads: Offloads) -> Result<(), TapError> {
        tap::set_offloads(self.control(), (offloads & self.offloads).bits())
            .map_err(|source| self.not_set("the offloads", source))
    }

    /// Sets the length of the virtio header. A tap has one length; a macvtap has one for each queue.
    pub(crate) fn set_header_bytes(&self, bytes: usize) -> Result<(), TapError> {
        let bytes = i32::try_from(bytes).expect("a virtio header has 10 or 12 bytes");
        for queue in &self.queues {
            match tap::set_header_bytes(queue.fd.as_fd(), bytes) {
                // A detached queue of a tap. The length of the tap is set through the first queue, which
                // stays attached.
                Err(error) if !queue.is_attached() && error.raw_os_error() == Some(libc::EBADFD) => {}
                result => {
                    result.map_err(|source| self.not_set("the length of the virtio header", source))?;
                }
            }
        }
        Ok(())
    }

    /// Discards the frames that wait to be received. Returns their number.
    pub(crate) fn discard(&self) -> usize {
        let mut buffer = [0; 64];
        let mut discard_one =
            || self.queues.iter().any(|queue| queue.read(&mut [IoBufMut::from(&mut buffer)]).is_ok());
        (0..STALE_FRAMES_MAX).take_while(|_| discard_one()).count()
    }

    fn control(&self) -> BorrowedFd<'_> {
        self.queues[0].fd.as_fd()
    }

    fn not_set(&self, what: &'static str, source: io::Error) -> TapError {
        TapError::Set { what, name: self.name.clone(), source }
    }
}

impl TapQueue {
    /// Reads one frame, its virtio header first. Does not block.
    pub(crate) fn read(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<usize> {
        readv(self.fd.as_fd(), bufs)
    }

    /// Writes one frame, its virtio header first. Does not block.
    pub(crate) fn write(&self, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
        writev(self.fd.as_fd(), bufs)
    }

    /// Writes frames in their order, each of which consists of a range of `bufs`. Stores the length of each
    /// in `results`, or its error: `WouldBlock` for one that was not written.
    pub(crate) fn write_frames(&self, bufs: &[IoBuf<'_>], frames: &[Range<usize>], results: &mut Vec<i32>) {
        results.clear();
        results.resize(frames.len(), -libc::EAGAIN);
        let mut slot = lock(&self.ring);
        if frames.len() > 1
            && let Some(ring) = slot.take()
        {
            match ring.write(self.fd.as_fd(), bufs, frames, results) {
                // The order of frames is kept only by single calls if the tap has a limit.
                Ok(_) if results.contains(&-libc::EAGAIN) => {}
                Ok(ring) => *slot = Some(ring),
                Err(error) => tracing::warn!(%error, "io_uring_enter; frames are written one by one"),
            }
            return;
        }
        for (frame, result) in frames.iter().zip(results) {
            *result = match self.write(&bufs[frame.clone()]) {
                Ok(length) => i32::try_from(length).unwrap_or(i32::MAX),
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            };
            if *result == -libc::EAGAIN {
                break;
            }
        }
    }

    /// Sets whether the kernel steers flows to this queue.
    pub(crate) fn set_attached(&self, attached: bool) {
        if self.multi_queue && self.attached.swap(attached, Relaxed) != attached {
            // Not fatal: without it, some flows are steered to a queue that is not read.
            if let Err(error) = tap::set_queue(self.fd.as_fd(), attached) {
                tracing::warn!(%error, attached, "TUNSETQUEUE");
            }
        }
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
    }
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Creates a ring for a queue whose writes never wait for room: otherwise a batch might be written in part.
fn ring_for(tap: BorrowedFd<'_>) -> Option<TapRing> {
    if tap::send_buffer(tap).ok()? < i32::MAX {
        return None;
    }
    TapRing::new().inspect_err(|error| tracing::debug!(%error, "no io_uring")).ok()
}

fn check_count(queues: usize) -> Result<(), TapError> {
    if (1..=PAIRS_MAX).contains(&queues) { Ok(()) } else { Err(TapError::QueueCount { found: queues }) }
}

fn check_flags(number: RawFd, name: &str, flags: i32, count: usize) -> Result<(), TapError> {
    let fault = |found, expected| Err(TapError::Flags { number, name: name.to_owned(), found, expected });
    if flags & tap::IS_TAP == 0 {
        return fault("as a tun, without Ethernet headers", "with IFF_TAP");
    }
    if flags & tap::VNET_HDR == 0 {
        return fault("without the virtio header", "with IFF_VNET_HDR");
    }
    if count > 1 && flags & tap::MULTI_QUEUE == 0 {
        return fault("for one queue", "with IFF_MULTI_QUEUE, or give it alone");
    }
    Ok(())
}

fn is_char_device(path: &str) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}

fn open(path: &str) -> Result<File, TapError> {
    OpenOptions::new().read(true).write(true).open(path).map_err(|source| {
        let remedy = match source.kind() {
            io::ErrorKind::NotFound => "load the module `tun`, or give open descriptors with --tap-fds",
            _ => "run as root, or give open descriptors with --tap-fds",
        };
        TapError::Open { path: path.to_owned(), source, remedy }
    })
}

fn attach_remedy(error: &io::Error, queues: usize) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => {
            "another process has it open; end that process, or create the tap with `multi_queue`"
        }
        Some(libc::EPERM) => {
            "run with CAP_NET_ADMIN, as its owner (`ip tuntap add … user U`), or use --tap-fds"
        }
        Some(libc::EINVAL) if queues > 1 => {
            "it is not a tap, or has a single queue: create it with `ip tuntap add … mode tap multi_queue vnet_hdr`"
        }
        Some(libc::EINVAL) => {
            "it is not a tap, or in use; a macvtap needs its /dev/tapN (create it with mknod in a container)"
        }
        Some(libc::E2BIG) => "more queues than the interface was created with (macvtap: `numrxqueues`)",
        _ => "see `ip -d link show`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_that_is_no_tap_is_refused_by_its_number() {
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        let number = file.as_raw_fd();
        let error = Taps::from_fds(vec![file]).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("descriptor {number} is not a queue of a tap")),
            "{error}"
        );
    }
}

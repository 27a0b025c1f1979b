//! The host's end: a tap or a macvtap, with a queue for each pair.
//!
//! ```text
//!   name ── there? ── no ──► made, and gone with its last queue        ┐
//!            └─ yes ─► a tap: /dev/net/tun   a macvtap: /dev/tapN      ├─► N queues, each with the virtio header
//!   descriptors that a manager opened ─────────────────────────────────┘
//! ```
//! A queue whose pair is disabled is detached, so that the kernel steers no flow to it; the first one stays, because a
//! tap is told things through a queue that is attached, and because a guest always has its first pair.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use towline_channel::{IoBuf, IoBufMut, readv, writev};

use crate::PAIRS_MAX;
use crate::features::Offloads;
use crate::sys::{interface, tap};

/// Frames that are thrown away at most when a tap is emptied: more than any queue of it holds.
const STALE_FRAMES_MAX: usize = 1 << 16;

/// Why there is no tap to be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// A number of queues that there cannot be.
    #[error("{found} queue pairs; a vhost-user card has 1 to {PAIRS_MAX}")]
    Pairs {
        /// How many were asked for.
        found: usize,
    },
    /// The device file cannot be opened.
    #[error("{path} cannot be opened: {source}; {way_out}")]
    Open {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
        /// What to do.
        way_out: &'static str,
    },
    /// The interface does not take a queue.
    #[error("interface {name} takes no queue {queue} of {queues}: {source}; {way_out}")]
    Attach {
        /// The interface.
        name: String,
        /// Which queue, from 0.
        queue: usize,
        /// How many there are to be.
        queues: usize,
        /// Why.
        source: io::Error,
        /// What to do.
        way_out: &'static str,
    },
    /// A descriptor that is no tap.
    #[error(
        "descriptor {number} is no queue of a tap or macvtap ({source}); open one with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR, or give the tap's name"
    )]
    NoTap {
        /// Its place among those given, from 1.
        number: usize,
        /// Why.
        source: io::Error,
    },
    /// A descriptor of a tap that was opened differently.
    #[error("descriptor {number} ({name}) was opened {found}; open it {expected}")]
    Flags {
        /// Its place among those given, from 1.
        number: usize,
        /// Its interface.
        name: String,
        /// How it was opened.
        found: &'static str,
        /// How it should be.
        expected: &'static str,
    },
    /// Descriptors of different taps.
    #[error("descriptor 1 is of interface {first} and descriptor {number} of {found}; all must be of one")]
    Mixed {
        /// The first one's interface.
        first: String,
        /// Which is of another.
        number: usize,
        /// That other interface.
        found: String,
    },
    /// A setting that is not taken.
    #[error(
        "{what} of interface {name} cannot be set: {source}; run with CAP_NET_ADMIN, or set it beforehand (`ip link set {name} …`)"
    )]
    Set {
        /// The setting.
        what: &'static str,
        /// The interface.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// One queue.
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    multi_queue: bool,
    attached: AtomicBool,
}

/// All queues of one interface.
#[derive(Debug)]
pub struct Taps {
    name: String,
    made: bool,
    queues: Vec<Tap>,
    known: Offloads,
}

impl Taps {
    /// Opens so many queues of this interface. One that is not there is made and set up, and goes with this process.
    ///
    /// # Errors
    /// All but those of descriptors.
    pub fn open(name: &str, queues: usize) -> Result<Self, TapError> {
        check(queues)?;
        let set = |source| TapError::Set { what: "the name", name: name.to_owned(), source };
        let index = interface::index(name).map_err(set)?;
        let macvtap = index.map(|index| format!("/dev/tap{index}")).filter(|path| is_device(path));
        let path = macvtap.clone().unwrap_or_else(|| "/dev/net/tun".to_owned());
        let mut multi_queue = queues > 1;
        let mut opened = Vec::with_capacity(queues);
        for queue in 0..queues {
            let fd = open(&path)?;
            let flags = |multi: bool| tap::TAP | if multi { tap::MULTI_QUEUE } else { 0 };
            let mut attached = tap::attach(fd.as_fd(), name, flags(multi_queue));
            // One queue of a tap that has room for many has to say that it knows.
            if attached.is_err() && queues == 1 && index.is_some() {
                multi_queue = true;
                attached = tap::attach(fd.as_fd(), name, flags(true));
            }
            attached.map_err(|source| {
                let (name, way_out) = (name.to_owned(), way_out(&source, queues));
                TapError::Attach { name, queue, queues, source, way_out }
            })?;
            opened.push(fd.into());
        }
        let taps = Self::new(name.to_owned(), index.is_none(), multi_queue, opened)?;
        if taps.made {
            interface::set_up(name).map_err(|source| taps.not_set("the state up", source))?;
        }
        Ok(taps)
    }

    /// Queues that somebody else opened, all of one interface, with the virtio header and without packet information.
    ///
    /// # Errors
    /// [`TapError::Pairs`], [`TapError::NoTap`], [`TapError::Flags`], [`TapError::Mixed`], [`TapError::Set`].
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        check(fds.len())?;
        let mut first: Option<(String, i32)> = None;
        for (index, fd) in fds.iter().enumerate() {
            let number = index + 1;
            let (name, flags) =
                tap::interface(fd.as_fd()).map_err(|source| TapError::NoTap { number, source })?;
            check_flags(number, &name, flags, fds.len())?;
            match &first {
                Some((known, _)) if *known != name => {
                    return Err(TapError::Mixed { first: known.clone(), number, found: name });
                }
                Some(_) => {}
                None => first = Some((name, flags)),
            }
        }
        let (name, flags) = first.ok_or(TapError::Pairs { found: 0 })?;
        // Whoever had them before may have detached some; those that are attached refuse it.
        for fd in &fds {
            let _ = tap::set_queue(fd.as_fd(), true);
        }
        Self::new(name, false, flags & tap::MULTI_QUEUE != 0, fds)
    }

    fn new(name: String, made: bool, multi_queue: bool, fds: Vec<OwnedFd>) -> Result<Self, TapError> {
        let queue = |fd: OwnedFd| Tap { fd, multi_queue, attached: AtomicBool::new(true) };
        let queues: Vec<Tap> = fds.into_iter().map(queue).collect();
        let mut taps = Self { name, made, queues, known: Offloads::empty() };
        for queue in &taps.queues {
            rustix::io::ioctl_fionbio(&queue.fd, true)
                .map_err(|errno| taps.not_set("O_NONBLOCK", errno.into()))?;
        }
        taps.known = taps.probe();
        taps.set_header_bytes(12)?;
        // What is disabled from the start gets no flow.
        taps.queues.iter().skip(1).for_each(|queue| queue.attach(false));
        Ok(taps)
    }

    /// What this kernel's tap can hand over. Leaves it with none of it.
    fn probe(&self) -> Offloads {
        let tries = [
            Offloads::all(),
            Offloads::all() - Offloads::USO,
            Offloads::all() - Offloads::USO - Offloads::UFO,
        ];
        let fd = self.control();
        let known = tries.into_iter().find(|offloads| tap::set_offloads(fd, offloads.bits()).is_ok());
        // It knows none at worst, and none is taken by all.
        let _ = tap::set_offloads(fd, 0);
        known.unwrap_or_default()
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it was made here.
    pub fn is_made(&self) -> bool {
        self.made
    }

    /// Its queues.
    pub fn queues(&self) -> &[Tap] {
        &self.queues
    }

    /// After another process has had its descriptors: what is to be attached is, again.
    pub fn reattach(&self) {
        for queue in self.queues.iter().filter(|queue| queue.is_attached()) {
            // Those that are refuse it.
            let _ = tap::set_queue(queue.fd.as_fd(), true);
        }
    }

    /// Its MTU, if it is in this process's network.
    pub fn mtu(&self) -> Option<u32> {
        interface::mtu(&self.name).ok()
    }

    /// Sets its MTU.
    ///
    /// # Errors
    /// [`TapError::Set`].
    pub fn set_mtu(&self, mtu: u16) -> Result<(), TapError> {
        interface::set_mtu(&self.name, mtu.into()).map_err(|source| self.not_set("the MTU", source))
    }

    pub(crate) fn offloads(&self) -> Offloads {
        self.known
    }

    pub(crate) fn set_offloads(&self, offloads: Offloads) -> Result<(), TapError> {
        tap::set_offloads(self.control(), (offloads & self.known).bits())
            .map_err(|source| self.not_set("the offloads", source))
    }

    pub(crate) fn set_header_bytes(&self, bytes: usize) -> Result<(), TapError> {
        let bytes = i32::try_from(bytes).expect("it is 10 or 12");
        tap::set_header_bytes(self.control(), bytes)
            .map_err(|source| self.not_set("the length of the virtio header", source))
    }

    /// Throws away what waits to be received; how much that was.
    pub(crate) fn discard(&self) -> usize {
        let mut scrap = [0; 64];
        let mut frame =
            || self.queues.iter().any(|queue| queue.read(&mut [IoBufMut::from(&mut scrap)]).is_ok());
        (0..STALE_FRAMES_MAX).take_while(|_| frame()).count()
    }

    fn control(&self) -> BorrowedFd<'_> {
        self.queues[0].fd.as_fd()
    }

    fn not_set(&self, what: &'static str, source: io::Error) -> TapError {
        TapError::Set { what, name: self.name.clone(), source }
    }
}

impl Tap {
    /// One frame, its header first. Never waits.
    pub(crate) fn read(&self, bufs: &mut [IoBufMut<'_>]) -> io::Result<usize> {
        readv(self.fd.as_fd(), bufs)
    }

    /// One frame, its header first. Never waits.
    pub(crate) fn write(&self, bufs: &[IoBuf<'_>]) -> io::Result<usize> {
        writev(self.fd.as_fd(), bufs)
    }

    /// Whether flows may be steered to it.
    pub(crate) fn attach(&self, attached: bool) {
        if self.multi_queue && self.attached.swap(attached, Relaxed) != attached {
            // Where it cannot, flows go to a queue that nobody reads from; worth knowing, and no reason to end.
            if let Err(error) = tap::set_queue(self.fd.as_fd(), attached) {
                tracing::warn!(%error, attached, "TUNSETQUEUE");
            }
        }
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn check(queues: usize) -> Result<(), TapError> {
    if (1..=PAIRS_MAX).contains(&queues) { Ok(()) } else { Err(TapError::Pairs { found: queues }) }
}

fn check_flags(number: usize, name: &str, flags: i32, count: usize) -> Result<(), TapError> {
    let fault = |found, expected| Err(TapError::Flags { number, name: name.to_owned(), found, expected });
    if flags & tap::IS_TAP == 0 {
        return fault("as a tun, without Ethernet headers", "with IFF_TAP");
    }
    if flags & tap::VNET_HDR == 0 {
        return fault("without the virtio header", "with IFF_VNET_HDR");
    }
    if flags & tap::NO_PI == 0 {
        return fault("with packet information", "with IFF_NO_PI");
    }
    if count > 1 && flags & tap::MULTI_QUEUE == 0 {
        return fault("for one queue", "with IFF_MULTI_QUEUE, or give it alone");
    }
    Ok(())
}

fn is_device(path: &str) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}

fn open(path: &str) -> Result<File, TapError> {
    OpenOptions::new().read(true).write(true).open(path).map_err(|source| {
        let way_out = match source.kind() {
            io::ErrorKind::NotFound => "load the module `tun`, or give open descriptors with --tap-fds",
            _ => "run as root, or give open descriptors with --tap-fds",
        };
        TapError::Open { path: path.to_owned(), source, way_out }
    })
}

fn way_out(error: &io::Error, queues: usize) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => "another process has it; end that one, or make it with `multi_queue`",
        Some(libc::EPERM) => {
            "run with CAP_NET_ADMIN, as its owner (`ip tuntap add … user U`), or use --tap-fds"
        }
        Some(libc::EINVAL) if queues > 1 => {
            "it is no tap, or one for a single queue: make it with `ip tuntap add … mode tap multi_queue vnet_hdr`"
        }
        Some(libc::EINVAL) => {
            "it is no tap, or in use; for a macvtap its /dev/tapN must be there (mknod makes it in a container)"
        }
        Some(libc::E2BIG) => "more queues than the interface was made for (macvtap: `numrxqueues`)",
        _ => "see `ip -d link show`",
    }
}

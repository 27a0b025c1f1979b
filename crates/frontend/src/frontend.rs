//! A vhost-user connection to a backend: the requests that QEMU sends, in QEMU's order.

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::memory::MemoryArena;
use crate::queue::Queue;
use crate::wire::{self, HEADER_BYTES, RequestCode, encode_u32_pair, encode_u64s, feature, protocol};
use crate::{Error, Result, system};

/// The time that a backend may take for an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Descriptors that one message can carry.
const FDS_MAX: usize = 8;
/// The longest answer that is read.
const REPLY_BYTES_MAX: usize = 4096;
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// A frontend. Dropping it hangs up.
#[derive(Debug)]
pub struct Frontend {
    stream: UnixStream,
    negotiated: Negotiated,
}

/// Negotiated features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// Virtio features.
    pub features: u64,
    /// Protocol features.
    pub protocol: u64,
}

impl Frontend {
    /// Connects to a backend that listens, waiting for it to come up.
    ///
    /// # Errors
    /// No backend listens there within this time.
    pub fn connect(path: &Path, within: Duration) -> Result<Self> {
        let until = Instant::now() + within;
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => return Self::new(stream),
                Err(error) if Instant::now() > until => {
                    return Err(system("connecting to the backend")(error));
                }
                // The kernel has no event for a socket that starts to listen.
                Err(_) => std::thread::sleep(CONNECT_INTERVAL),
            }
        }
    }

    /// Waits for a backend that connects.
    ///
    /// # Errors
    /// The kernel's.
    pub fn accept(listener: &UnixListener) -> Result<Self> {
        let (stream, _) = listener.accept().map_err(system("accept"))?;
        Self::new(stream)
    }

    /// Uses an established connection.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(system("timeouts"))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT)).map_err(system("timeouts"))?;
        Ok(Self { stream, negotiated: Negotiated::default() })
    }

    /// The connection itself.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The negotiated features.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Accepts the offered features out of `wanted`, and all of `needed`; the same with protocol features, of
    /// which all known ones are wanted.
    ///
    /// # Errors
    /// [`Error::Features`], and those of [`Frontend::query`].
    pub fn negotiate(&mut self, needed: u64, wanted: u64, needed_protocol: u64) -> Result<Negotiated> {
        self.send_unacked(RequestCode::SET_OWNER, &[], &[])?;
        let offered = self.number(RequestCode::GET_FEATURES)?;
        let needed = needed | feature::VERSION_1;
        check_offered("features", needed, offered)?;
        if offered & feature::PROTOCOL_FEATURES != 0 {
            let offered = self.number(RequestCode::GET_PROTOCOL_FEATURES)?;
            check_offered("protocol features", needed_protocol, offered)?;
            let wanted = protocol::MQ | protocol::REPLY_ACK | protocol::MEM_SLOTS | protocol::CONFIG;
            let taken = offered & (needed_protocol | wanted | protocol::LOG_SHMFD);
            self.send_unacked(RequestCode::SET_PROTOCOL_FEATURES, &encode_u64s(&[taken]), &[])?;
            self.negotiated.protocol = taken;
        }
        let taken = offered & (needed | wanted | feature::PROTOCOL_FEATURES);
        self.set_features(taken)?;
        Ok(self.negotiated)
    }

    /// Takes these features, even if they were not offered.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn set_features(&mut self, taken: u64) -> Result<()> {
        self.request(RequestCode::SET_FEATURES, &encode_u64s(&[taken]), &[])?;
        self.negotiated.features = taken;
        Ok(())
    }

    /// Shares memory, all again; without any, takes it away.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn set_mem_table(&mut self, memory: Option<&MemoryArena>) -> Result<()> {
        let regions: Vec<_> = memory.iter().flat_map(|memory| memory.regions()).collect();
        let mut payload = encode_u32_pair(u32::try_from(regions.len()).expect("few regions"), 0);
        regions.iter().for_each(|region| payload.extend(region.encode()));
        let fds: Vec<_> = memory.iter().flat_map(|memory| regions.iter().map(|_| memory.fd())).collect();
        self.request(RequestCode::SET_MEM_TABLE, &payload, &fds)
    }

    /// Starts a ring at `base` and enables it.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn start(&mut self, queue: &Queue, base: u16) -> Result<()> {
        self.start_only(queue, base)?;
        self.enable(queue.index(), true)
    }

    /// Starts a ring at `base`, without enabling it.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn start_only(&mut self, queue: &Queue, base: u16) -> Result<()> {
        let index = queue.index();
        self.request(RequestCode::SET_VRING_NUM, &encode_u32_pair(index, queue.size().into()), &[])?;
        self.request(RequestCode::SET_VRING_BASE, &encode_u32_pair(index, base.into()), &[])?;
        self.set_vring_addr(queue, false)?;
        let ring = encode_u64s(&[index.into()]);
        self.request(RequestCode::SET_VRING_CALL, &ring, &[queue.call_fd()])?;
        self.request(RequestCode::SET_VRING_ERR, &ring, &[queue.err_fd()])?;
        self.request(RequestCode::SET_VRING_KICK, &ring, &[queue.kick_fd()])
    }

    /// Sets the addresses of a ring, and whether writes to its used part are logged.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn set_vring_addr(&mut self, queue: &Queue, logged: bool) -> Result<()> {
        let places = queue.addresses();
        let user = [places.table, places.used, places.available].map(|guest| queue.memory().user_addr(guest));
        let payload =
            [encode_u32_pair(queue.index(), logged.into()), encode_u64s(&user), encode_u64s(&[places.used])]
                .concat();
        self.request(RequestCode::SET_VRING_ADDR, &payload, &[])
    }

    /// Enables or disables a ring, if rings can be.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn enable(&mut self, index: u32, enabled: bool) -> Result<()> {
        if self.negotiated.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        self.request(RequestCode::SET_VRING_ENABLE, &encode_u32_pair(index, enabled.into()), &[])
    }

    /// Stops a ring; where it stands.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn stop(&mut self, index: u32) -> Result<u16> {
        let reply = self.query(RequestCode::GET_VRING_BASE, &encode_u32_pair(index, 0), &[])?;
        let base = reply.get(4..8).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        base.and_then(|base| u16::try_from(base).ok()).ok_or_else(|| {
            let expected = "a ring and a number of 16 bits";
            unexpected(RequestCode::GET_VRING_BASE, format!("{reply:?}"), expected)
        })
    }

    /// The device's own state, when no ring runs (DEVICE_STATE was negotiated).
    ///
    /// # Errors
    /// As [`Frontend::query`]; or the state cannot be saved.
    pub fn save(&mut self) -> Result<Vec<u8>> {
        let failed = system("a pipe for the state");
        let (mut reader, writer) = std::io::pipe().map_err(failed)?;
        let reply =
            self.query(RequestCode::SET_DEVICE_STATE_FD, &encode_u32_pair(0, 0), &[writer.as_fd()])?;
        // Otherwise it never ends.
        drop(writer);
        let mut state = Vec::new();
        reader.read_to_end(&mut state).map_err(failed)?;
        match (reply.first(), self.number(RequestCode::CHECK_DEVICE_STATE)?) {
            (Some(0), 0) => Ok(state),
            (_, found) => {
                let found = format!("{reply:?} and {found}");
                Err(unexpected(RequestCode::CHECK_DEVICE_STATE, found, "a state"))
            }
        }
    }

    /// Has the device take over a state. Whether it did.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn load(&mut self, state: &[u8]) -> Result<bool> {
        let failed = system("a pipe for the state");
        let (reader, mut writer) = std::io::pipe().map_err(failed)?;
        let reply =
            self.query(RequestCode::SET_DEVICE_STATE_FD, &encode_u32_pair(1, 0), &[reader.as_fd()])?;
        writer.write_all(state).map_err(failed)?;
        drop((writer, reader));
        Ok(reply.first() == Some(&0) && self.number(RequestCode::CHECK_DEVICE_STATE)? == 0)
    }

    /// Has writes logged here: a bit for each page from guest address 0 on.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn set_log(&mut self, log: &MemoryArena) -> Result<()> {
        let size = log.regions().map(|region| region.size).sum();
        self.query(RequestCode::SET_LOG_BASE, &encode_u64s(&[size, 0]), &[log.fd()]).map(drop)
    }

    /// A request that is answered with a number.
    ///
    /// # Errors
    /// As [`Frontend::query`].
    pub fn number(&mut self, code: RequestCode) -> Result<u64> {
        let reply = self.query(code, &[], &[])?;
        let number = <[u8; 8]>::try_from(&reply[..]).map(u64::from_le_bytes);
        number.map_err(|_| unexpected(code, format!("{} bytes", reply.len()), "8"))
    }

    /// A request without a specific reply. If REPLY_ACK was negotiated, it has taken effect when this
    /// returns.
    ///
    /// # Errors
    /// As [`Frontend::query`], and [`Error::Reply`] for a refusal.
    pub fn request(&mut self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if self.negotiated.protocol & protocol::REPLY_ACK == 0 {
            return self.send_unacked(code, payload, fds);
        }
        self.send(&wire::acknowledged_request(code, payload), code, fds)?;
        let reply = self.reply(code)?;
        if reply == [0; 8] { Ok(()) } else { Err(unexpected(code, format!("{reply:?}"), "0")) }
    }

    /// Sends a request without requesting a reply.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Disconnected`].
    pub fn send_unacked(&mut self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(&wire::request(code, payload), code, fds)
    }

    /// Sends a request that has a specific reply; returns the reply's payload.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Disconnected`], [`Error::Reply`].
    pub fn query(&mut self, code: RequestCode, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>> {
        self.send_unacked(code, payload, fds)?;
        self.reply(code)
    }

    /// Any bytes, with at most eight descriptors.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Disconnected`].
    pub fn send(&mut self, bytes: &[u8], code: RequestCode, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most {FDS_MAX} descriptors");
        }
        let sent = sendmsg(self.stream.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) | Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                Err(Error::Disconnected { request: code.0 })
            }
            Err(errno) => Err(system("sendmsg")(errno)),
        }
    }

    fn reply(&mut self, code: RequestCode) -> Result<Vec<u8>> {
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, code)?;
        let (found, is_reply, length) = wire::decode_reply_header(&header);
        if found != code.1 || !is_reply || length > REPLY_BYTES_MAX {
            let found = format!("request {found}, reply {is_reply}, {length} bytes");
            return Err(unexpected(code, found, &format!("a reply to {}", code.1)));
        }
        let mut payload = vec![0; length];
        self.fill(&mut payload, code)?;
        Ok(payload)
    }

    fn fill(&mut self, bytes: &mut [u8], code: RequestCode) -> Result<()> {
        use std::io::ErrorKind;
        self.stream.read_exact(bytes).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => Error::Disconnected { request: code.0 },
            ErrorKind::WouldBlock => {
                Error::Timeout { what: "an answer of the backend", seconds: REPLY_TIMEOUT.as_secs() }
            }
            _ => system("reading an answer")(source),
        })
    }
}

fn check_offered(what: &'static str, wanted: u64, offered: u64) -> Result<()> {
    match wanted & !offered {
        0 => Ok(()),
        missing => Err(Error::Features { what, wanted, missing, offered }),
    }
}

fn unexpected(code: RequestCode, found: String, expected: &str) -> Error {
    Error::Reply { request: code.0, found, expected: expected.into() }
}

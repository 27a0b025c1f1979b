//! Passing a protected guest on, byte for byte, to a secondary elsewhere.
//!
//! ```text
//!   QEMU ── first copy ──► run_first_copy ──┬─► (decoded, nothing is kept)
//!                                           └─► further secondary ──► its acknowledgement, READY
//!        ── checkpoints ─► take ─► queue ─► pass_on ──► further secondary ──► its acknowledgement
//! ```
//! Both ends decode the same bytes, so the further secondary is one like any other, and this end knows where a checkpoint ends.

use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use towline_channel::{
    Capabilities, Channel, ChannelExt, Flushed, IoBuf, IoBufMut, RecvFlags, Result as ChannelResult,
    SendFlags,
};
use towline_protocol::colo::{
    Checkpoint, FirstCopy, MESSAGE_BYTES, REPLIES_BYTES, check_ready, check_replies,
};
use towline_protocol::configuration::Configuration;
use towline_protocol::device_state::DeviceState;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::{BlockIndex, PageRef, PeerMisbehaved, RamBlock, Reader};

use crate::incoming::{Connections, Options};
use crate::{ChannelId, Error, Incoming, Pages, Result, Session, Sink, Statistics};

/// Bytes before the data of a message of the return path: its type, and the length of the data.
const MESSAGE_HEAD_BYTES: usize = 4;

/// Passes the first copy of the guest on `primary` on to a further secondary. The primary is acknowledged once that secondary has the copy and
/// awaits checkpoints.
///
/// # Errors
/// Either end fails; the primary keeps its guest.
pub fn pass_on_first_copy(primary: &Arc<dyn Channel>, secondary: &Arc<dyn Channel>) -> Result<FirstCopy> {
    let tee = Tee { from: Arc::clone(primary), to: Arc::clone(secondary) };
    let incoming =
        Incoming::new(Arc::new(Session::default()), Arc::new(Statistics::default()), Options::default());
    incoming.run_first_copy(&Connections::single(Arc::new(tee)), &Passed { secondary: secondary.as_ref() })
}

/// Passes a checkpoint on, and returns when the secondary has taken it.
///
/// # Errors
/// The connection fails, or its other end replies otherwise: what it has is not known.
pub fn pass_on(secondary: &dyn Channel, checkpoint: &Checkpoint) -> Result<()> {
    let head = Checkpoint::head();
    let bytes = [IoBuf::from(&head[..]), IoBuf::from(checkpoint.stream())];
    secondary.send_all(&bytes, SendFlags::empty())?;
    let mut replies = [0; REPLIES_BYTES];
    secondary.recv_exact(&mut [IoBufMut::from(&mut replies[..])])?;
    check_replies(&replies).map_err(Error::protocol(secondary.peer()))
}

/// A channel whose received bytes are sent to another one.
#[derive(Debug)]
struct Tee {
    from: Arc<dyn Channel>,
    to: Arc<dyn Channel>,
}

impl Channel for Tee {
    fn peer(&self) -> &str {
        self.from.peer()
    }

    /// Bytes that are looked at are not received yet, and those that another descriptor takes are not seen.
    fn capabilities(&self) -> Capabilities {
        self.from.capabilities() & Capabilities::SHUTDOWN
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> ChannelResult<usize> {
        self.from.send(bufs, flags)
    }

    fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> ChannelResult<usize> {
        let Some(first) = bufs.iter_mut().find(|buf| !buf.is_empty()) else { return Ok(0) };
        let received = self.from.recv(std::slice::from_mut(first), flags)?;
        self.to.send_all(&[first.as_io_buf().prefix(received)], SendFlags::empty())?;
        Ok(received)
    }

    fn flush(&self) -> ChannelResult<Flushed> {
        self.from.flush()
    }

    fn shutdown(&self, how: Shutdown) -> ChannelResult<()> {
        self.from.shutdown(how)
    }

    fn set_timeouts(&self, recv: Option<Duration>, send: Option<Duration>) -> ChannelResult<()> {
        self.from.set_timeouts(recv, send)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A guest that a further secondary keeps.
struct Passed<'a> {
    secondary: &'a dyn Channel,
}

impl Passed<'_> {
    fn receive<const N: usize>(&self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.secondary.recv_exact(&mut [IoBufMut::from(&mut bytes[..])])?;
        Ok(bytes)
    }

    /// The next message of its return path.
    fn message(&self) -> Result<ReturnPathMessage> {
        let mut bytes = self.receive::<MESSAGE_HEAD_BYTES>()?.to_vec();
        bytes.resize(MESSAGE_HEAD_BYTES + usize::from(u16::from_be_bytes([bytes[2], bytes[3]])), 0);
        self.secondary.recv_exact(&mut [IoBufMut::from(&mut bytes[MESSAGE_HEAD_BYTES..])])?;
        let message = ReturnPathMessage::decode(&mut Reader::new(&bytes));
        let message = message.map_err(Error::protocol(self.secondary.peer()))?;
        Ok(message.expect("all of it was received"))
    }
}

impl Sink for Passed<'_> {
    fn configuration(&self, _configuration: &Configuration) -> Result<()> {
        Ok(())
    }

    fn blocks(&self, _blocks: &[RamBlock]) -> Result<()> {
        Ok(())
    }

    fn pages(&self, _stream: ChannelId, _pages: &Pages<'_>) -> Result<()> {
        Ok(())
    }

    fn zero(&self, _stream: ChannelId, _block: BlockIndex, _offsets: &[u64]) -> Result<()> {
        Ok(())
    }

    fn current(&self, _page: PageRef, _content: &mut [u8]) -> Result<()> {
        let what = "a page as its changes in a guest that is passed on";
        let error = towline_protocol::PeerIncompatible::Feature { what, switch: "xbzrle" };
        Err(Error::protocol(self.secondary.peer())(error.into()))
    }

    fn device_state(&self, _state: DeviceState) -> Result<()> {
        Ok(())
    }

    /// Returns when the secondary has the copy, and awaits checkpoints.
    fn commit(&self) -> Result<()> {
        let failed = Error::protocol(self.secondary.peer());
        loop {
            match self.message()? {
                ReturnPathMessage::Shut(0) => break,
                ReturnPathMessage::Pong(_) => {}
                message => {
                    let (found, expected) = (format!("{message:?}"), "its acknowledgement of the first copy");
                    return Err(failed(PeerMisbehaved::Unexpected { found, expected }.into()));
                }
            }
        }
        check_ready(self.receive::<MESSAGE_BYTES>()?).map_err(failed)
    }
}

//! Faults injected into a real channel, to test the layers above it.
//!
//! | layer | effect on the wrapped channel |
//! |---|---|
//! | [`Cut`] | ends the connection exactly after byte N of one direction |
//! | [`Delay`] | lets each transfer wait a random time first |
//! | [`Throttle`] | limits each direction to a number of bytes per second |
//! | [`Capture`] | records what passes |
//! | [`FlipReceived`] | changes one byte |
//! | [`ShortIo`] | splits transfers at random places |
//!
//! Each wraps any `Box<dyn Channel>`, also another layer, and has the capabilities of the channel inside.
//!
//! All randomness comes from a `u64` seed, with one generator for each direction: the numbers of one
//! direction do not depend on another thread's use of the other. So the same seed and the same calls replay a
//! failure.
//!
//! Not a model of a network: bytes are neither lost nor reordered, as no stream does that.

mod capture;
mod cut;
mod delay;
mod flip;
mod pause;
mod short_io;
mod throttle;

pub use capture::{Capture, Recording};
pub use cut::Cut;
pub use delay::Delay;
pub use flip::FlipReceived;
pub use short_io::ShortIo;
pub use throttle::Throttle;

use crate::lock::lock;
use crate::sys::iobuf::{limit, limit_mut};
use fastrand::Rng;
use std::sync::Mutex;

/// Direction of a transfer, seen from the wrapped end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Sent bytes.
    Send,
    /// Received bytes.
    Recv,
}

/// A call that transfers bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfer {
    Send,
    Recv,
    /// Receives, and leaves the bytes to the next call.
    Peek,
}

impl Transfer {
    fn direction(self) -> Direction {
        match self {
            Self::Send => Direction::Send,
            Self::Recv | Self::Peek => Direction::Recv,
        }
    }
}

/// The transfers of a layer, whose method `pass` gets each with its length, makes it with that length or less, and
/// returns its result.
macro_rules! pass_transfers {
    () => {
        fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> Result<usize> {
            let send = |len| self.inner.send(&limit(bufs, len), flags);
            self.pass(Transfer::Send, total_len(bufs), send)
        }

        fn recv(&self, bufs: &mut [IoBufMut<'_>], flags: RecvFlags) -> Result<usize> {
            let peeks = flags.contains(RecvFlags::PEEK);
            let transfer = if peeks { Transfer::Peek } else { Transfer::Recv };
            let len = total_len_mut(bufs);
            self.pass(transfer, len, |len| self.inner.recv(&mut limit_mut(bufs, len), flags))
        }

        fn send_fds(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
            self.pass(Transfer::Send, bytes.len(), |len| self.inner.send_fds(&bytes[..len], fds))
        }

        fn recv_fds(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize> {
            self.pass(Transfer::Recv, bytes.len(), |len| self.inner.recv_fds(&mut bytes[..len], fds))
        }
    };
}
use pass_transfers;

/// A generator for each direction.
#[derive(Debug)]
struct FaultRng {
    send: Mutex<Rng>,
    recv: Mutex<Rng>,
}

impl FaultRng {
    fn new(seed: u64) -> Self {
        let mut root = Rng::with_seed(seed);
        Self { send: Mutex::new(root.fork()), recv: Mutex::new(root.fork()) }
    }

    fn draw<T>(&self, direction: Direction, draw: impl FnOnce(&mut Rng) -> T) -> T {
        let rng = match direction {
            Direction::Send => &self.send,
            Direction::Recv => &self.recv,
        };
        draw(&mut lock(rng))
    }
}

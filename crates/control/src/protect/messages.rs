//! Messages between the process that takes checkpoints (the ferry) and the one that keeps the guest's monitor (the keeper): JSON, one in each
//! packet of a socket pair.

use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::nbd::Export;

/// Longest message.
const BYTES_MAX: usize = 64 << 10;

/// From the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(super) enum ToFerry {
    /// Connects both ends.
    Begin(FerryRequest),
    /// QEMU is about to copy the guest; the disks are copied.
    Copy,
    /// QEMU awaits its secondary.
    Go,
}

/// Work of a ferry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct FerryRequest {
    /// Where the standby listens, and its certificate in hexadecimal digits of DER.
    pub(super) standby: String,
    pub(super) certificate: String,
    /// Socket that QEMU connects to.
    pub(super) socket: PathBuf,
    /// Disks that the guest writes, and the socket to which QEMU mirrors them.
    pub(super) disks: Vec<Export>,
    pub(super) disk_socket: PathBuf,
    /// Control sockets of the guest's cards.
    pub(super) cards: Vec<PathBuf>,
    pub(super) generation: u64,
    pub(super) epoch_ms: u64,
    /// An epoch ends earlier when the guest sends.
    pub(super) ends_on_output: bool,
    /// Silence after which the standby is lost.
    pub(super) peer_timeout_ms: u64,
    /// Maximum size of a checkpoint.
    pub(super) checkpoint_bytes_max: usize,
}

/// From the ferry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(super) enum FromFerry {
    /// Its certificate in hexadecimal digits of DER.
    Certificate(String),
    /// Both ends are connected, but for QEMU.
    Listening,
    /// The standby has the first copy.
    Copied,
    /// The guest is about to be stopped for a checkpoint.
    Stopping { epoch: u64 },
    /// It runs on.
    Runs { epoch: u64, pause_us: u64, bytes: u64, pages: u64 },
    /// The standby has the checkpoint, and the output before it was sent.
    Acknowledged { epoch: u64, latency_us: u64 },
    /// It takes no more checkpoints.
    Ended { lost: Lost, reason: String },
}

/// Part that a ferry has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Lost {
    /// The guest's QEMU, a card, the copy of a disk, or a checkpoint that cannot be used.
    Here,
    /// The other host, or the way to it.
    Standby,
}

/// One end of the socket pair, which receives messages of this kind.
#[derive(Debug)]
pub(super) struct Link<T> {
    fd: OwnedFd,
    received: PhantomData<T>,
}

/// Result of a wait for a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received<T> {
    Message(T),
    /// None has come in time.
    Nothing,
    /// The other end is gone.
    End,
}

impl<T: DeserializeOwned> Link<T> {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, received: PhantomData }
    }

    /// A pair of connected descriptors.
    pub(super) fn pair() -> io::Result<[OwnedFd; 2]> {
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok([one, other])
    }

    /// Sends a message without waiting: one for which there is no room is dropped. The other end is stopped then, and its queue has what it
    /// needs to know.
    pub(super) fn send(&self, message: &impl Serialize) {
        let bytes = serde_json::to_vec(message).expect("messages are JSON");
        if let Err(errno) = send(&self.fd, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            tracing::debug!(%errno, "a message is dropped");
        }
    }

    /// Waits for a message for this time.
    pub(super) fn receive(&self, within: Duration) -> Received<T> {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let timeout = Timespec::try_from(within).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => return Received::Nothing,
            Ok(_) => {}
            Err(_) => return Received::End,
        }
        let mut bytes = vec![0; BYTES_MAX];
        let count = match recv(&self.fd, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((count, _)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
            Err(_) => 0,
        };
        // One that cannot be read is of a process that is not ours.
        match serde_json::from_slice(&bytes[..count]) {
            Ok(message) => Received::Message(message),
            Err(_) => Received::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_and_the_end_is_seen() {
        let [one, other] = Link::<ToFerry>::pair().unwrap();
        let (keeper, ferry) = (Link::<FromFerry>::new(one), Link::<ToFerry>::new(other));
        assert_eq!(ferry.receive(Duration::ZERO), Received::Nothing);
        ferry.send(&FromFerry::Stopping { epoch: 1 });
        let ended = FromFerry::Ended { lost: Lost::Standby, reason: "gone".into() };
        ferry.send(&ended);
        keeper.send(&ToFerry::Go);
        assert_eq!(ferry.receive(Duration::ZERO), Received::Message(ToFerry::Go));
        assert_eq!(keeper.receive(Duration::ZERO), Received::Message(FromFerry::Stopping { epoch: 1 }));
        drop(ferry);
        assert_eq!(keeper.receive(Duration::ZERO), Received::Message(ended));
        // A process that another test is starting may have the other end.
        assert_eq!(keeper.receive(Duration::from_secs(60)), Received::End);
    }

    #[test]
    fn a_keeper_that_does_not_read_keeps_the_oldest_messages() {
        let [one, other] = Link::<ToFerry>::pair().unwrap();
        let (keeper, ferry) = (Link::<FromFerry>::new(one), Link::<ToFerry>::new(other));
        (1..100_000).for_each(|epoch| ferry.send(&FromFerry::Stopping { epoch }));
        assert_eq!(keeper.receive(Duration::ZERO), Received::Message(FromFerry::Stopping { epoch: 1 }));
    }
}

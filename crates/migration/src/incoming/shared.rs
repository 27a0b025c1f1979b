//! Options of an incoming migration, and the state that its threads share.

use std::sync::OnceLock;

use towline_channel::{Cancel, Channel};
use towline_protocol::RamBlock;
use towline_protocol::destination::SharedMemory;
use towline_protocol::session::ReceiverMode;

use crate::limiter::Limiter;
use crate::{Compression, Error, Result, Session, Sink, Statistics};

/// Options of an incoming migration.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Refuse a stream without a return path: its source would not learn of a failure here, and end its
    /// guest.
    pub require_return_path: bool,
    /// Compression of the lanes' pages; the level has no effect here.
    pub compression: Compression,
    /// The stream is that of QEMU's background-snapshot, whose memory has no END.
    pub is_snapshot: bool,
    /// Memory that the source leaves out because it is shared.
    pub shared_memory: SharedMemory,
    /// Total bytes per second that are received until the source has stopped its guest: its sockets slow the
    /// source down, and it measures that rate. `None`: unlimited.
    pub max_bandwidth: Option<u64>,
    /// Use of the guest here, as reported to a towline at the source.
    pub receiver: ReceiverMode,
    /// Moment of [`Sink::publish`].
    pub publication: Publication,
}

/// Moment at which a committed guest is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Publication {
    /// Before the source is acknowledged: it keeps its guest if that fails.
    #[default]
    BeforeAcknowledgement,
    /// The caller calls [`Sink::publish`] later, and gives a guest that it can resume back to the source if
    /// that fails. Until then the source need not wait, nor its guest be stopped.
    ByCaller,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            require_return_path: true,
            compression: Compression::None,
            is_snapshot: false,
            shared_memory: SharedMemory::Refused,
            max_bandwidth: None,
            receiver: ReceiverMode::RunsByItself,
            publication: Publication::BeforeAcknowledgement,
        }
    }
}

/// A stage of an incoming migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncomingStage {
    /// The memory's last section begins: the source has stopped its guest.
    Switchover,
    /// [`Sink::commit`] returned: the acknowledgement to the source follows.
    Committed,
}

/// State shared by the threads of one incoming migration.
pub(super) struct Shared<'a> {
    pub(super) session: &'a Session,
    pub(super) statistics: &'a Statistics,
    pub(super) sink: &'a dyn Sink,
    pub(super) lanes: usize,
    pub(super) options: Options,
    pub(super) watch: &'a (dyn Fn(IncomingStage) + Sync),
    pub(super) blocks: OnceLock<Vec<RamBlock>>,
    /// The block list of the guest, once the main channel has received it.
    pub(super) machine_type: OnceLock<String>,
    /// Raised when the main channel has received everything: no lane waits for more.
    pub(super) complete: Cancel,
    pub(super) limiter: Limiter,
}

impl Shared<'_> {
    /// Waits until the bandwidth limit permits receiving this number of bytes.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        self.limiter.reserve(bytes, self.session)
    }

    /// The block list; empty until the main channel has it.
    pub(super) fn blocks(&self) -> &[RamBlock] {
        self.blocks.get().map_or(&[], Vec::as_slice)
    }
}

/// The error of a stream that ends too early.
pub(super) fn ended(channel: &dyn Channel, awaiting: &'static str) -> Error {
    Error::Ended { peer: channel.peer().to_owned(), awaiting }
}

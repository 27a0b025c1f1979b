//! Requests that are not possible, as data: the command line has the words, and the names of its options.

use std::path::PathBuf;

use towline_channel::Address;
use towline_image::Location;

use super::request::RequestedPages;

/// Reason for which a request is refused before anything is touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invalid {
    /// An address of a single connection.
    LanesOver { lanes: usize, address: Address },
    /// More lanes than QEMU's parameter permits.
    TooManyLanes { lanes: usize, lanes_max: usize },
    /// Ends that do not fit the task, or each other.
    Ends(InvalidEnds),
    /// A postcopy that is not possible.
    Postcopy(InvalidPostcopy),
    /// TLS that would have no effect, or is missing.
    Tls(InvalidTls),
    /// Pages would be copied although that was excluded.
    ZeroCopy(CopiedPages),
    /// Neither end is a stream.
    CompressionBetweenImages { method: &'static str },
    /// Only lanes are compressed.
    CompressionWithoutLanes { method: &'static str },
    /// QEMU would end a running guest without an acknowledgement.
    RunningWithoutReturnPath,
    /// A stream without a return path is from or to an image.
    WithoutReturnPath,
    /// A stream in a file has no return path.
    FileTo { path: PathBuf, destination: String },
    /// Only an image can have several destinations.
    SeveralDestinations,
    /// More destinations than one command takes.
    TooManyDestinations { found: usize, expected: usize },
    /// A destination takes one guest.
    NamedTwice { destination: String },
    /// Only a stream can be inspected.
    InspectedWithoutStream,
    /// A guest goes directly between a QEMU here and one that a towline of another host drives.
    DirectEnds,
    /// A build without object stores.
    WithoutStores { location: Location },
}

/// Ends that do not fit the task, or each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidEnds {
    /// Both are the same QEMU.
    SameQemu { socket: PathBuf },
    /// A discarding destination takes a stream.
    ImageToNull,
    /// A destination that may run the guest by itself, which is resumed at its source.
    ResumedTo { address: Address },
    /// Only a driven QEMU can throttle its guest.
    ThrottledWithoutQemu,
    /// Only a QEMU can be ended.
    EndedWithoutQemu,
    /// The guest would be lost with its source.
    EndedToProcess { destination: String },
    /// The guest would be lost with its source.
    EndedToNull,
    /// A detached device could not be attached again.
    DetachedWithoutQemu,
    /// Only an image file has a base.
    BaseWithoutImage,
    /// A background snapshot goes from a QEMU to an image.
    Snapshot,
}

/// Reason for which a postcopy is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidPostcopy {
    /// Two QEMUs do it themselves.
    OfQemu,
    /// The sender of a stream decides.
    OfStream,
    /// The destination runs no guest.
    WithoutGuest,
    /// The destination runs no guest.
    To { destination: String },
    /// Two QEMUs that lost each other have commands for it.
    RecoveryOfQemu,
    /// An image's guest runs before its memory is sent, and no QEMU receives pages on lanes then.
    LanesOfImage,
    /// A QEMU that has no lanes in a migration that may become postcopy.
    LanesOfQemu { version: String, socket: String },
    /// Only lanes are compressed.
    Compressed,
    /// Only lanes have it.
    ZeroCopy,
    /// Pages are requested on the return path.
    WithoutReturnPath,
    /// The running guest requests its pages on another channel.
    OtherChannel { expected: RequestedPages },
}

/// Reason for which TLS is refused, or required.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidTls {
    /// A secure WebSocket without credentials.
    Missing { address: Address },
    /// Neither end is a stream.
    WithoutStream,
    /// An address without TLS.
    Over { address: Address },
    /// A host name, and no destination that is connected to.
    NameWithoutDestination,
    /// A destination whose address has no host name.
    NameMissing { address: Address },
}

/// Reason for which pages are copied while they are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopiedPages {
    /// The kernel supports it for TCP only.
    NotTcp { address: Address },
    /// Unix sockets copy.
    UnixSocket,
    /// Nothing is sent.
    NothingSent,
    /// Only lanes have it.
    WithoutLanes,
    /// Compression copies.
    Compressed { method: &'static str },
    /// TLS copies.
    Encrypted,
}

impl From<InvalidEnds> for Invalid {
    fn from(reason: InvalidEnds) -> Self {
        Self::Ends(reason)
    }
}

impl From<InvalidPostcopy> for Invalid {
    fn from(reason: InvalidPostcopy) -> Self {
        Self::Postcopy(reason)
    }
}

impl From<InvalidTls> for Invalid {
    fn from(reason: InvalidTls) -> Self {
        Self::Tls(reason)
    }
}

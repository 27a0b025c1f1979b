//! How a guest is copied.

use std::path::PathBuf;
use std::time::Duration;

use towline_migration::{Compression, Tuning, ZeroCopySend};

/// How to copy. See the command line for what each does.
#[derive(Debug, Clone)]
pub struct Options {
    /// Lanes at both ends; 0: none. `None`: 4 where QMP can set them, else none.
    pub multifd_channels: Option<usize>,
    /// How lanes are compressed; both ends alike. A relay decompresses and compresses again.
    pub compression: Compression,
    /// Whether the kernel reads the pages on lanes where they are, rather than copying them.
    pub zero_copy_send: ZeroCopySend,
    /// Streams are encrypted; `None`: they are not.
    pub tls: Option<Tls>,
    /// Bytes per second; `None`: as fast as it goes.
    pub max_bandwidth: Option<u64>,
    /// How long the guest may stand still.
    pub downtime_limit: Duration,
    /// Have a `qmp:` source slow its guest down if that writes too fast (QEMU's auto-converge).
    pub throttle: bool,
    /// Compare an image with its manifest while it is read.
    pub verify: bool,
    /// Let a `qmp:` source run on afterwards, and begin with `cont` if it was copied before.
    pub resume: bool,
    /// End a `qmp:` source once the guest is at its destination: a move.
    pub end_source: bool,
    /// Take a vhost-user-vsock out of the guest before it is moved, and put it in again at its `qmp:` destination.
    pub detach_vsock: bool,
    /// Devices of ours that serve the guest, by their control sockets: that at the source, and that at the destination. The copy
    /// is refused if one would not take the guest from the other.
    pub devices: Vec<(PathBuf, PathBuf)>,
    /// Whether a `qmp:` destination runs; `None`: as the guest did.
    pub run: Option<bool>,
    /// Whether streams have a return path. Without one nobody hears of a failure at the other end.
    pub return_path: bool,
    /// Stream an image even where QEMU could load the file itself.
    pub stream: bool,
    /// Replace an image of the same name.
    pub overwrite: bool,
    /// Store only what differs from this image.
    pub base: Option<PathBuf>,
    /// Have a `qmp:` source run on while an image of this instant is taken (QEMU's background-snapshot).
    pub live: bool,
    /// The destination runs the guest at once, and its memory follows; `None`: it runs when everything is there.
    pub postcopy: Option<PostcopyOptions>,
    /// How long the other end may take to connect or to be reached.
    pub connect_timeout: Duration,
    /// Changes rate and downtime while it goes on.
    pub tuning: Tuning,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            multifd_channels: None,
            compression: Compression::None,
            zero_copy_send: ZeroCopySend::Auto,
            tls: None,
            max_bandwidth: None,
            downtime_limit: Duration::from_millis(300),
            throttle: false,
            verify: false,
            resume: false,
            end_source: false,
            detach_vsock: false,
            devices: Vec::new(),
            run: None,
            return_path: true,
            stream: false,
            overwrite: false,
            base: None,
            live: false,
            postcopy: None,
            connect_timeout: Duration::from_secs(10),
            tuning: Tuning::default(),
        }
    }
}

/// How a copy by postcopy is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostcopyOptions {
    /// Pages that are waited for go on a channel of their own.
    pub preempt: bool,
    /// Goes on with a guest that runs at its destination, and whose memory stopped coming.
    pub recover: bool,
    /// Remembers beside the image what the guest needed at once, for the next time.
    pub record_working_set: bool,
}

/// How streams are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// A directory with the file names of QEMU's `tls-creds-x509`.
    pub credentials: PathBuf,
    /// What the certificate of a server must be for; `None`: the host of its address.
    pub hostname: Option<String>,
}

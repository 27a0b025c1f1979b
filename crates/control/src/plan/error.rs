//! Errors of a copy, and the state of the guest after them.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use towline_channel::Cancel;
use towline_qmp as qmp;
use towline_qmp::commands::RunState;

use super::invalid::{Invalid, InvalidPostcopy};
use super::outcomes::GuestAfterFailure;
use crate::qemu;

/// Fate of a guest that is resumed in the QEMU that has sent it.
pub(super) const ABORTS_ASLEEP: &str = "QEMU aborts when it resumes a guest that it has sent asleep";

/// Reason for the failure of a copy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    #[error("{0}")]
    Migration(#[from] towline_migration::Error),
    #[error("{0}")]
    Qemu(#[source] qemu::Error),
    #[error("{0}")]
    Settings(#[from] qemu::ApplyError),
    #[error("{0}")]
    Check(#[from] crate::check::Error),
    #[error("{0}")]
    Move(#[from] crate::moves::Error),
    #[error("{0}")]
    Generation(#[from] crate::generations::Error),
    #[error("{0}")]
    InPlace(#[from] crate::in_place::Error),
    #[error("{0}")]
    Remote(#[from] crate::remote::Error),
    #[error("{0}")]
    CommandLine(#[from] super::command_line::CommandLineRecordError),
    #[error("the directory of overlays: {0}")]
    Directory(std::io::Error),
    #[error(
        "disk {setting} ({file}) is not a regular file, beside which its overlay could be: name a directory of overlays"
    )]
    NoOverlayDirectory { setting: String, file: String },
    #[error(
        "the guest of QEMU on {socket} runs on, and writes to drive {drive} ({file}): its memory would be stored without the disk of the \
         same instant, and would destroy the file system on any other"
    )]
    WritesDisk { socket: String, drive: String, file: String },
    #[error(
        "the guest of QEMU on {socket} does not run on an image, as guests of `towline run` do, so its disks cannot be kept at its instant"
    )]
    DisksNotKept { socket: String },
    #[error("the request is not possible: {0:?}")]
    Invalid(Invalid),
    #[error("the guest on {socket} is in `postmigrate` after an earlier copy: run `cont`")]
    NeedsCont { socket: String },
    #[error("QEMU on {socket} has no guest to copy: its status is `{status}`; is this the destination?")]
    NoGuest { socket: String, status: String },
    #[error(
        "QEMU on {socket} is migrating already (status {status}): wait for it, or cancel it (`migrate_cancel`)"
    )]
    Migrating { socket: String, status: String },
    #[error(
        "QEMU on {socket} has not cleaned up its last migration within {} s, and accepts no other until it is restarted: some versions \
         (10.0) never do after connections that broke in their first moment; the guest is not affected",
        qemu::MIGRATION_CLEANUP_TIMEOUT.as_secs()
    )]
    NotCleanedUp { socket: String },
    #[error("QEMU on {socket} cannot send this guest: {}", joined(reasons))]
    Blocked { socket: String, reasons: Vec<BlockedBy> },
    #[error(
        "QEMU on {socket} does not wait for a guest (its status is `{status}`): start it with `-incoming defer`"
    )]
    NotWaiting { socket: String, status: String },
    #[error(
        "QEMU on {socket} already waits for a guest at the address on its command line: start it with `-incoming defer`, or copy to that address instead"
    )]
    WaitsElsewhere { socket: String },
    #[error("the guest does not fit {destination}: {}", reasons.join("; "))]
    DoesNotFit { destination: String, reasons: Vec<String> },
    #[error(
        "QEMU on {socket} got `migrate-incoming` before (migration status {status}), which it accepts once: end it and start it again with `-incoming defer`"
    )]
    UsedUp { socket: String, status: String },
    #[error(
        "{source}: the destination ended, its multifd-channels is not {lanes}, or its multifd-compression is not {compression} as here; its own log says which"
    )]
    LaneLost { lanes: usize, compression: &'static str, source: towline_migration::Error },
    #[error(
        "{peer} accepted fewer than {lanes} channels within {:.1} s; set multifd-channels to {lanes} there",
        waited.as_secs_f64()
    )]
    LanesNotTaken { peer: String, lanes: usize, waited: Duration },
    #[error(
        "QEMU on {socket} has no interrupted postcopy (its migration status is `{status}`, expected `postcopy-paused`)"
    )]
    NothingToRecover { socket: String, status: String },
    #[error(
        "{source}: QEMU's monitor on {socket} may be blocked on a missing page; if the towline that started the guest is gone, kill QEMU and restore the image again"
    )]
    BlockedMonitor { socket: String, source: Box<Error> },
    #[error(
        "the connection to the running guest was lost ({source}), and could not be restored within {:.1} s",
        waited.as_secs_f64()
    )]
    NotRecovered { source: towline_migration::Error, waited: Duration },
    #[error("the QEMUs lost their connection, which could not be restored within {:.1} s", waited.as_secs_f64())]
    NotConnectedAgain { waited: Duration },
    #[error("the QEMUs lost their connection")]
    ConnectionOfQemus,
    #[error("{device} cannot be detached from the guest of QEMU on {socket}: {text}")]
    NotDetached { socket: String, device: String, text: String },
    #[error("{device} is not attached to the guest of QEMU on {socket} again: {text}")]
    NotAttached { socket: String, device: String, text: String },
    #[error(
        "the guest of QEMU on {socket} fell asleep before it was stopped, and {}: restore it from what was stored, and end this QEMU",
        ABORTS_ASLEEP
    )]
    Asleep { socket: String },
    #[error("QEMU on {socket} ended while its guest was copied; its own log says why")]
    SourceEnded { socket: String },
    #[error("migration failed in QEMU on {socket}: {text}")]
    SourceFailed { socket: String, text: String },
    #[error("QEMU on {socket} could not load the guest: {text}")]
    DestinationFailed { socket: String, text: String },
    #[error("QEMU on {socket} did not complete within {:.1} s: its status is `{status}`", waited.as_secs_f64())]
    NotCompleted { socket: String, status: String, waited: Duration },
    #[error(
        "{peer} was acknowledged and did not close its connection within {:.1} s, so it is not known whether it is done with the guest",
        waited.as_secs_f64()
    )]
    SourceNotDone { peer: String, waited: Duration },
    #[error(
        "{peer} reset its connection after it was acknowledged: it is not known whether it had read that and is done with the guest"
    )]
    SourceReset { peer: String },
    #[error("the towline at the other end did not report within {:.1} s", waited.as_secs_f64())]
    PeerSilent { waited: Duration },
    #[error("the towline at the source has given up, and its own message says why")]
    PeerGaveUp,
    #[error("the towline at the destination could not run the guest: {reason}")]
    PeerDidNotRun { reason: String },
    #[error("QEMU on {socket} got `cont`, and its status is `{status}`; its own log says why")]
    NotRunning { socket: String, status: String },
    #[error(
        "QEMU on {socket} has the writable drive {drive:?} ({file}), and so has QEMU on {other}: two clones that write one disk destroy it; give each a copy of its own, as the disk was when the guest was stored (`qemu-img create -b` creates one that shares unwritten data)"
    )]
    SharedDrive { socket: String, drive: String, file: String, other: String },
    #[error("{why}{}", slowed(*throttle))]
    CannotConverge {
        #[source]
        why: towline_migration::convergence::CannotConverge,
        throttle: Option<u64>,
    },
    #[error("a directory for the stream's socket cannot be created in {}: {source}", path.display())]
    PrivateDir { path: PathBuf, source: std::io::Error },
    #[error(
        "memory of block {block:?} in the new QEMU on {socket} is not that of the old one: {reason}; the guest would be without it"
    )]
    NotInPlace { socket: String, block: String, reason: crate::in_place::TransferReason },
    #[error("the new QEMU on {socket} would not have what the old one has:\n  {}\nend what runs in the old QEMU (job-cancel, block-export-del), put back what was plugged, unplugged or replaced, or set it for the new one", differences.join("\n  "))]
    NotCarried { socket: String, differences: Vec<String> },
    #[error(
        "the guest's drives have changed while it was being moved (a snapshot, another medium); upgrade it again:\n  {}", differences.join("\n  ")
    )]
    DrivesChanged { differences: Vec<String> },
    #[error(
        "QEMU on {socket} is not connected to the process of a network card (chardev {chardev:?}), so that the guest would be without its link in the new QEMU; upgrade again when it is (`reconnect-ms=` has QEMU connect again)"
    )]
    CardDisconnected { socket: String, chardev: String },
    #[error("disk {drive} cannot be copied to the other host: {text}")]
    DiskNotCopied { drive: String, text: String },
    #[error("disk {drive} cannot be compared with its copy: {text}")]
    DiskNotCompared { drive: String, text: String },
    #[error(
        "disk {drive} differs from its copy at the other host, first at byte {offset}: check the storage there (another program that \
         writes it, a fault), and move again to a new file"
    )]
    DiskDiffers { drive: String, offset: u64 },
    #[error(
        "the QEMUs were not connected within {:.1} s: a firewall between the hosts has to let {address} through",
        waited.as_secs_f64()
    )]
    NotConnected { address: String, waited: Duration },
    #[error(
        "QEMU on {socket} has another root directory (chroot), and finds no socket of towline there: it can be copied and moved over one connection, without postcopy, disks, or a direct way to another host"
    )]
    OtherRoot { socket: String },
    #[error("QEMU on {socket} reports no TCP port that it listens on")]
    NoPort { socket: String },
    #[error("cancelled")]
    Cancelled,
}

/// Reason for which a QEMU cannot send its guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockedBy {
    /// A reason of QEMU, or a fault of QEMU.
    Qemu(String),
    /// A vsock, which can be detached, by QEMU's name of the device.
    Vsock(String),
    /// A background snapshot of a guest in this state.
    Snapshot { status: RunState, version: String },
    /// A postcopy of a guest in this state, which would arrive as `paused`.
    Postcopy { status: RunState },
    /// A postcopy of a running guest that this QEMU emulates.
    EmulatedPostcopy { version: String },
}

impl fmt::Display for BlockedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(reason) | Self::Vsock(reason) => f.write_str(reason),
            Self::Snapshot { status, version } => write!(
                f,
                "QEMU {version} aborts at a snapshot of a guest that is `{status}`, or runs the guest afterwards"
            ),
            Self::Postcopy { status } => {
                write!(f, "in a postcopy, a guest that is `{status}` arrives as `paused`")
            }
            Self::EmulatedPostcopy { version } => write!(
                f,
                "QEMU {version} loses track of what a guest that it emulates writes while a postcopy sends it"
            ),
        }
    }
}

fn joined(reasons: &[BlockedBy]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn slowed(throttle: Option<u64>) -> String {
    throttle.map(|percent| format!(" (it is throttled by {percent} % already)")).unwrap_or_default()
}

impl From<Invalid> for Error {
    fn from(reason: Invalid) -> Self {
        Self::Invalid(reason)
    }
}

impl From<InvalidPostcopy> for Error {
    fn from(reason: InvalidPostcopy) -> Self {
        Self::Invalid(reason.into())
    }
}

impl From<qemu::Error> for Error {
    fn from(error: qemu::Error) -> Self {
        match error {
            qemu::Error::Qmp(qmp::Error::Cancelled { .. }) => Self::Cancelled,
            error => Self::Qemu(error),
        }
    }
}

impl From<qmp::Error> for Error {
    fn from(error: qmp::Error) -> Self {
        qemu::Error::from(error).into()
    }
}

/// Returns an error if the command was cancelled.
pub(super) fn check_cancelled(cancel: &Cancel) -> Result<(), Error> {
    if cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
}

/// A copy that failed.
#[derive(Debug)]
pub struct Failure {
    /// The reason.
    pub error: Box<Error>,
    /// The state of the guest.
    pub guest: GuestAfterFailure,
    /// Changes that could not be undone, and other notices.
    pub notes: Vec<String>,
}

impl Failure {
    /// A failure before anything was touched.
    pub(crate) fn untouched(error: impl Into<Error>) -> Self {
        let error = error.into();
        let guest = match error {
            Error::NoGuest { .. } => GuestAfterFailure::NO_GUEST,
            _ => GuestAfterFailure::SAFE,
        };
        Self { error: Box::new(error), guest, notes: Vec::new() }
    }

    /// A failure before the QEMU or the image of the source was reached, or anything was touched.
    pub(super) fn not_reached(error: impl Into<Error>) -> Self {
        Self { guest: GuestAfterFailure::NOT_REACHED, ..Self::untouched(error) }
    }

    /// A failure to open the source's image.
    pub(super) fn unopened(error: impl Into<Error>) -> Self {
        let error = error.into();
        if has_no_image(&error) { Self::not_reached(error) } else { Self::untouched(error) }
    }
}

/// Returns true if there is no readable image, so that nothing is known of a guest in it.
fn has_no_image(error: &Error) -> bool {
    use towline_image::Error as Image;

    match error {
        Error::Image(
            Image::Read { .. } | Image::Socket { .. } | Image::NotAFile { .. } | Image::NotAnImage { .. },
        ) => true,
        #[cfg(feature = "store")]
        Error::Image(Image::Store(error)) => {
            use towline_image::store::Error as Store;

            matches!(error.downcast_ref(), Some(Store::NoImage { .. } | Store::Store { .. }))
        }
        _ => false,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(self.error.as_ref())
    }
}

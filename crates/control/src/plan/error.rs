//! Errors of a copy, and the state of the guest after them.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use towline_qmp as qmp;

use super::outcomes::GuestAfterFailure;
use crate::qemu;

/// Fate of a guest that is resumed in the QEMU that has sent it.
pub(super) const ABORTS_ASLEEP: &str = "QEMU aborts when it resumes a guest that it has sent asleep";

/// Reason for the failure of a copy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum Error {
    #[error(transparent)]
    Channel(#[from] towline_channel::Error),
    #[error(transparent)]
    Image(#[from] towline_image::Error),
    #[error(transparent)]
    Migration(#[from] towline_migration::Error),
    #[error(transparent)]
    Qemu(qemu::Error),
    #[error(transparent)]
    Settings(#[from] qemu::ApplyError),
    #[error(transparent)]
    Check(#[from] crate::check::Error),
    #[error(transparent)]
    Move(#[from] crate::moves::Error),
    #[error(transparent)]
    InPlace(#[from] crate::in_place::Error),
    #[error("{0}")]
    Usage(String),
    #[error("the guest on {socket} is in `postmigrate` after an earlier copy: run `cont`, or pass --resume")]
    NeedsCont { socket: String },
    #[error("QEMU on {socket} has no guest to copy: its status is `{status}`; is this the destination?")]
    NoGuest { socket: String, status: String },
    #[error(
        "QEMU on {socket} is migrating already (status {status}): wait for it, or cancel it (`migrate_cancel`)"
    )]
    Migrating { socket: String, status: String },
    #[error("QEMU on {socket} cannot send this guest: {}{}", reasons.join("; "), blocked_remedy(reasons))]
    Blocked { socket: String, reasons: Vec<String> },
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
        "{source}: the destination ended, its multifd-channels is not {lanes}, or its multifd-compression is not {compression} as here (--multifd-channels, --compression); its own log says which"
    )]
    LaneLost { lanes: usize, compression: &'static str, source: towline_migration::Error },
    #[error(
        "{peer} accepted fewer than {lanes} channels within {:.1} s; set multifd-channels to {lanes} there",
        waited.as_secs_f64()
    )]
    LanesNotTaken { peer: String, lanes: usize, waited: Duration },
    #[error(
        "QEMU on {socket} has no interrupted postcopy (its migration status is `{status}`, expected `postcopy-paused`): --recover needs one"
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
    #[error("the towline at the destination could not run the guest: {reason}")]
    PeerDidNotRun { reason: String },
    #[error("QEMU on {socket} got `cont`, and its status is `{status}`; its own log says why")]
    NotRunning { socket: String, status: String },
    #[error(
        "QEMU on {socket} has the writable drive {drive:?} ({file}), and so has QEMU on {other}: two clones that write one disk destroy it; give each a copy of its own, as the disk was when the guest was stored (`qemu-img create -b` creates one that shares unwritten data)"
    )]
    SharedDrive { socket: String, drive: String, file: String, other: String },
    #[error("{why}{}", slowed(*throttle))]
    CannotConverge { why: towline_migration::convergence::CannotConverge, throttle: Option<u64> },
    #[error("a directory for the stream's socket cannot be created in {}: {source}", path.display())]
    PrivateDir { path: PathBuf, source: std::io::Error },
    #[error(
        "memory of block {block:?} in the new QEMU on {socket} is not that of the old one: {reason}; the guest would be without it"
    )]
    NotInPlace { socket: String, block: String, reason: crate::in_place::TransferReason },
    #[error("the new QEMU on {socket} would not have what the old one has:\n  {}\nend what runs in the old QEMU (job-cancel, block-export-del), put back what was plugged, unplugged or replaced, or set it for the new one (--set drive.ID.file=, --set device.ID=, arguments after --)", differences.join("\n  "))]
    NotCarried { socket: String, differences: Vec<String> },
    #[error(
        "the guest's drives have changed while it was being moved (a snapshot, another medium); upgrade it again:\n  {}", differences.join("\n  ")
    )]
    DrivesChanged { differences: Vec<String> },
    #[error(
        "QEMU on {socket} is not connected to the process of a network card (chardev {chardev:?}), so that the guest would be without its link in the new QEMU; upgrade again when it is (`reconnect-ms=` has QEMU connect again)"
    )]
    CardDisconnected { socket: String, chardev: String },
    #[error("cancelled")]
    Cancelled,
}

/// Remedy for a guest that QEMU refuses to migrate, where there is one.
fn blocked_remedy(reasons: &[String]) -> &'static str {
    if reasons.iter().any(|reason| reason.contains("vhost-user-vsock")) {
        "; `towline move --detach-vsock` to a qmp: DEST unplugs the vsock, and plugs it in again there"
    } else {
        ""
    }
}

fn slowed(throttle: Option<u64>) -> String {
    throttle.map(|percent| format!(" (it is throttled by {percent} % already)")).unwrap_or_default()
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

    /// A failure to open the source's image.
    pub(super) fn unopened(error: impl Into<Error>) -> Self {
        let error = error.into();
        let guest =
            if has_no_image(&error) { GuestAfterFailure::NOT_REACHED } else { GuestAfterFailure::SAFE };
        Self { error: Box::new(error), guest, notes: Vec::new() }
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

impl std::error::Error for Failure {}

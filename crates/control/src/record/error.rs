//! Reasons for which a guest is not recorded.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_image::Location;
use towline_image::manifest::Timestamp;

use super::instants::RecordedInstant;
use crate::plan::{self, Failure};
use crate::qemu;

/// A host that takes over a guest, as a file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Holder {
    /// The file.
    #[serde(skip)]
    pub path: PathBuf,
    pub(super) version: u32,
    /// Name of the host.
    pub host: String,
    pub(super) pid: u32,
    /// The time, by the clock of that host.
    pub at: Timestamp,
    /// Random: of this takeover alone.
    pub(super) id: u64,
    /// False while the guest does not run there yet.
    pub runs: bool,
}

/// Error of a record.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Guest(Box<plan::Error>),
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    #[error("{0}")]
    Copy(#[source] Failure),
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    #[error("{0}")]
    Location(#[from] towline_image::LocationError),
    #[error("{}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "{host} has taken the guest over, at {at} ({}), and runs it. Stand by for that guest with --after, and an arbiter that speaks of {host}; \
         remove that file only if neither runs",
        .0.path.display(),
        host = .0.host,
        at = .0.at
    )]
    TakenOver(Holder),
    #[error(
        "{host} takes the guest over since {at} ({}); if that has ended and the guest does not run there, remove that file",
        .0.path.display(),
        host = .0.host,
        at = .0.at
    )]
    TakeoverBegun(Holder),
    #[error(
        "{host} has taken the guest over, at {at} ({}). If it runs there, the guest here is the older of two: end it, and find out why its host \
         was said to be off; if it does not run there, remove that file",
        .0.path.display(),
        host = .0.host,
        at = .0.at
    )]
    TakenFromHere(Holder),
    #[error(
        "{place} has no takeover {number}, which is to be followed: it has not happened, or --after is wrong"
    )]
    NoSuchTakeover { place: String, number: u64 },
    #[error("{place}: a guest is taken over from a record in a directory, on storage of both hosts")]
    NoTakeover { place: String },
    #[error("{}: {holder} records into it; use another directory", path.display())]
    PlaceInUse { path: PathBuf, holder: String },
    #[error("the guest of QEMU on {} is recorded already{}", socket.display(), pid.map(|pid| format!(", by process {pid}")).unwrap_or_default())]
    GuestInUse { socket: PathBuf, pid: Option<i32> },
    #[error("lock of the guest of QEMU on {}: {source}", socket.display())]
    Lock { socket: PathBuf, source: io::Error },
    #[error(
        "{place}: the guest writes to drive {drive}, whose disks of each instant a store does not have; record it to a directory"
    )]
    DisksInStore { place: Location, drive: String },
    #[error(
        "the guest of QEMU on {} writes to drive {drive} and does not run on an image, so its disks cannot be kept at each instant: save it, \
         and record the guest of `towline run IMAGE`",
        socket.display()
    )]
    DisksWithoutImage { socket: PathBuf, drive: String },
    #[error("{place}: this towline was built without object stores (feature `store`); use one that has them")]
    NoStores { place: Location },
    #[error(
        "{}: {free} MiB are free, and {needed} MiB are to be: what is about to be written, and a reserve for the guest's own writes; make \
         room, or record for a shorter time",
        path.display()
    )]
    NoRoom { path: PathBuf, free: u64, needed: u64 },
    #[error(
        "{place}: by the host's clock, its last image is of {at}, {} days ago, for which all images but the next would be removed; set the \
         clock if it is wrong, or keep images for longer, or use another directory",
        gap.as_secs() / 86_400
    )]
    Gap { place: String, at: Timestamp, gap: Duration },
    #[error("image {instant} has the last number or time that there is; move it out of the record")]
    LastInstant { instant: RecordedInstant },
    #[error("the disks of instants: {0}")]
    Disks(io::Error),
}

#[cfg(feature = "store")]
impl From<towline_image::store::Error> for Error {
    fn from(error: towline_image::store::Error) -> Self {
        Self::Image(towline_image::Error::Store(Box::new(error)))
    }
}

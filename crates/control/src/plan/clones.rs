//! One image, several destinations: clones of one guest.
//!
//! ```text
//!   check all ─► open the image once ─► compare the QEMUs ─► a copy for each, at the same time
//!                                         └─ those that share a disk are refused     each succeeds or fails by itself
//! ```
//!
//! Every copy is the one that [`copy`](super::copy) makes, from one mapping, so the page cache holds the
//! image once and a chunk is verified once. A failure at one destination does not affect the others.
//!
//! Out of scope: clones have no separate identity and wake up as the same guest; see `docs/clones.md`. Limit:
//! [`CLONES_AT_ONCE`]; further copies wait for a free slot.

mod conflicts;

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use towline_channel::Cancel;
use towline_image::{Image, StoredGuest};
use towline_migration::parallel;

use super::context::{Context, OwnQemu};
use super::copy::copy_stored;
use super::endpoint;
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::invalid::Invalid;
use super::progress::{CopyPhase, CopyReport, Observer};
use super::request::{AfterCopy, CopyRequest, Task, TransferOptions};
use super::validate::validate;
use crate::in_place::CapturedGuest;
use crate::lock::lock;
use conflicts::Conflicts;

/// Maximum number of copies in progress. Each has about ten threads and a descriptor for each lane.
pub const CLONES_AT_ONCE: usize = 32;
/// Maximum number of destinations of one call.
pub const CLONES_MAX: usize = 1024;

/// A destination, with the observer of the copy to it.
#[derive(Clone, Copy)]
pub struct CloneTarget<'a> {
    /// The destination.
    pub destination: &'a Destination,
    /// Observer of this copy.
    pub observer: &'a dyn Observer,
    /// The destination's QEMU, if this process has started it, so that it may write into its memory, and no sandbox forbids that.
    pub own: Option<OwnQemu<'a>>,
}

/// Copies of one image to several destinations.
#[derive(Clone, Copy)]
pub struct Clones<'a> {
    /// The destinations.
    pub targets: &'a [CloneTarget<'a>],
    /// Options of every copy.
    pub options: &'a CopyRequest,
    /// Cancels all of them.
    pub cancel: &'a Cancel,
    /// Receives notices that concern all of them.
    pub observer: &'a dyn Observer,
    /// Called for each copy as soon as it ends, from several threads.
    pub ended: &'a (dyn Fn(usize, &CopyResult) + Sync),
}

/// Result of one copy.
pub type CopyResult = Result<CopyReport, Failure>;

/// Copies one image to all targets at once. Returns the results in the order of the targets.
///
/// # Errors
/// Nothing was touched: the source is not an image or cannot be opened, or one of the copies is not possible.
pub fn copy_to_all(source: &Source, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
    if !source.is_image() {
        return Err(Failure::untouched(Invalid::SeveralDestinations));
    }
    let lanes = validate_all(source, clones).map_err(Failure::untouched)?;
    let image =
        endpoint::open(source, clones.options, clones.cancel, clones.observer).map_err(Failure::untouched)?;
    Ok(copy_as_planned(image.as_ref(), &lanes, clones))
}

/// As [`copy_to_all`], of an open image: the guests are those of this file, even if another file has its name
/// now.
///
/// # Errors
/// Nothing was touched: one of the copies is not possible.
pub fn copy_image_to_all(image: &Image, clones: &Clones<'_>) -> Result<Vec<CopyResult>, Failure> {
    let source = Source::Image(image.path().to_owned());
    let lanes = validate_all(&source, clones).map_err(Failure::untouched)?;
    endpoint::notice_missing_manifest(image, clones.observer);
    Ok(copy_as_planned(image, &lanes, clones))
}

/// As [`copy_to_all`], of a guest that was taken while it ran on an image.
///
/// # Errors
/// Nothing was touched: one of the copies is not possible.
pub(crate) fn copy_captured_to_all(
    guest: &CapturedGuest,
    clones: &Clones<'_>,
) -> Result<Vec<CopyResult>, Failure> {
    let source = Source::Image(guest.base().map_or_else(PathBuf::new, |image| image.path().to_owned()));
    let lanes = validate_all(&source, clones).map_err(Failure::untouched)?;
    Ok(copy_as_planned(guest, &lanes, clones))
}

/// Stores a guest that was taken while it ran on an image, as a whole image, which takes from that one what the guest has not written.
///
/// # Errors
/// Nothing is left of the new image.
pub(crate) fn store_captured(guest: &CapturedGuest, path: &Path, cancel: &Cancel) -> Result<(), Failure> {
    let base = guest.base().filter(|image| image.manifest().is_some()).map(|image| image.path().to_owned());
    let options = CopyRequest::new(Task::Copy {
        transfer: TransferOptions::default(),
        after: AfterCopy::default(),
        base,
    });
    let mut context = Context::new(&options, 0, cancel, &());
    context.takes_base = true;
    copy_stored(guest, &Destination::Image(path.to_owned()), &context).map(drop)
}

/// As [`copy_to_all`], of the image at `location`, which `open` returns: it was opened while the destinations
/// were started.
///
/// # Errors
/// Nothing was touched: one of the copies is not possible, or the image could not be opened.
#[cfg(feature = "store")]
pub fn copy_stored_image_to_all(
    location: &towline_image::Location,
    open: impl FnOnce() -> towline_image::store::Result<towline_image::store::StoredImage>,
    clones: &Clones<'_>,
) -> Result<Vec<CopyResult>, Failure> {
    let lanes = validate_all(&Source::Store(location.clone()), clones).map_err(Failure::untouched)?;
    let image = open().map_err(|error| Failure::untouched(endpoint::store_failed(error)))?;
    let image = endpoint::prepared(image, clones.options, clones.observer);
    Ok(copy_as_planned(&image, &lanes, clones))
}

/// Copies to all targets at once, over these numbers of lanes.
fn copy_as_planned(
    image: &(dyn StoredGuest + 'static),
    lanes: &[usize],
    clones: &Clones<'_>,
) -> Vec<CopyResult> {
    let found = conflicts(clones);
    found.notes.iter().for_each(|note| clones.observer.notice(note));
    let mut refused: BTreeMap<_, _> = found.refused.into_iter().collect();
    let jobs = (0..lanes.len()).map(|index| refused.remove(&index)).collect();
    at_once(jobs, |index, refused| {
        let target = &clones.targets[index];
        let mut context = Context::new(clones.options, lanes[index], clones.cancel, target.observer);
        context.own = target.own;
        // It may have waited for a free slot.
        let checked = refused.map_or_else(|| context.check_cancelled(), Err);
        let copied = checked.map_err(Failure::untouched).and_then(|()| {
            target.observer.phase(CopyPhase::Prepare);
            copy_stored(image, target.destination, &context)
        });
        (clones.ended)(index, &copied);
        copied
    })
}

/// Queries all QEMUs and compares them.
fn conflicts(clones: &Clones<'_>) -> Conflicts {
    // One alone is not delayed by the queries.
    if clones.targets.len() < 2 {
        return Conflicts::default();
    }
    let monitors = clones.targets.iter().map(|target| target.destination.monitor()).collect();
    conflicts::find(at_once(monitors, |_, monitor| Some(conflicts::query(monitor?, clones.cancel))))
}

/// Results of `work` with each of these jobs, in their order; at most [`CLONES_AT_ONCE`] are in progress.
fn at_once<J: Send, T: Send>(jobs: Vec<J>, work: impl Fn(usize, J) -> T + Sync) -> Vec<T> {
    let jobs: Vec<_> = jobs.into_iter().map(|job| Mutex::new(Some(job))).enumerate().collect();
    let one = |(index, job): &(usize, Mutex<Option<J>>)| {
        let job = lock(job).take().expect("each is done once");
        Ok::<T, Infallible>(work(*index, job))
    };
    let Ok(done) = parallel::for_each(&jobs, CLONES_AT_ONCE, || &one);
    done
}

/// Refuses impossible copies before anything is touched: all of them, since they are one command. Returns their numbers of lanes.
fn validate_all(source: &Source, clones: &Clones<'_>) -> Result<Vec<usize>, Error> {
    let Clones { targets, options, .. } = clones;
    if targets.len() > CLONES_MAX {
        let found = targets.len();
        return Err(Invalid::TooManyDestinations { found, expected: CLONES_MAX }.into());
    }
    let mut seen = HashSet::new();
    let again = targets.iter().find(|target| target.destination.key().is_some_and(|key| !seen.insert(key)));
    if let Some(CloneTarget { destination, .. }) = again {
        return Err(Invalid::NamedTwice { destination: destination.to_string() }.into());
    }
    targets.iter().map(|target| validate(source, target.destination, options)).collect()
}

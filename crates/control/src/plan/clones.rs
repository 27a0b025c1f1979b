//! One image, several destinations: clones of one guest.
//!
//! ```text
//!   check all ─► open the image once ─► look at the QEMUs beside each other ─► a copy for each, at the same time
//!                                            └─ those that share a disk are refused     each succeeds or fails by itself
//! ```
//!
//! Every copy is the one that [`copy`](super::copy) makes, out of one mapping, so the page cache holds the image once and a
//! chunk is verified once. What goes wrong at a destination is that destination's: the others do not hear of it.
//!
//! What it is not: it gives clones no identity of their own. They wake up as the same guest; `docs/clones.md` says what that
//! means. Limits: [`CLONES_AT_ONCE`]; the others wait for their turn.

mod neighbours;

use std::collections::HashSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use towline_channel::Cancel;
use towline_image::StoredGuest;

use super::context::Run;
use super::copy::stored;
use super::endpoint;
use super::ends::{Destination, Source};
use super::error::{Error, Failure};
use super::progress::{Observer, Phase};
use super::report::Report;
use super::request::Request;
use super::validate::checked;

/// Copies under way at the same time. Each has some ten threads and a descriptor for each lane.
pub const CLONES_AT_ONCE: usize = 32;
/// Destinations of one call.
pub const CLONES_MAX: usize = 1024;

/// One of several destinations, and who hears how the copy to it goes.
#[derive(Clone, Copy)]
pub struct Recipient<'a> {
    /// Where the guest goes.
    pub destination: &'a Destination,
    /// Hears of this copy alone.
    pub observer: &'a dyn Observer,
}

/// What came of one copy.
pub type Outcome = Result<Report, Failure>;

/// Copies one image to all `recipients` at once. `observer` hears what concerns all of them, `ended` of each copy as soon as it
/// ends (from several threads). Returns what came of each, in their order.
///
/// # Errors
/// Nothing was touched: the source is no image or cannot be opened, or one of the copies is no possible one.
pub fn copy_to_all(
    source: &Source,
    recipients: &[Recipient<'_>],
    options: &Request,
    cancel: &Cancel,
    observer: &dyn Observer,
    ended: &(dyn Fn(usize, &Outcome) + Sync),
) -> Result<Vec<Outcome>, Failure> {
    if !source.is_image() {
        return Err(Failure::untouched(Error::Usage(
            "several destinations, but only an image can be read several times: copy the guest to an image first, and the image to all of them"
                .into(),
        )));
    }
    let plans = plans(source, recipients, options).map_err(Failure::untouched)?;
    let image = endpoint::open(source, options, cancel, observer).map_err(Failure::untouched)?;
    let monitors: Vec<_> = recipients.iter().map(|recipient| recipient.destination.monitor()).collect();
    let found = neighbours::look(&monitors);
    found.notes.iter().for_each(|note| observer.notice(note));
    let outcomes: Vec<OnceLock<Outcome>> = recipients.iter().map(|_| OnceLock::new()).collect();
    let end = |index: usize, outcome: Outcome| {
        ended(index, &outcome);
        outcomes[index].get_or_init(|| outcome);
    };
    for (index, error) in found.refused {
        end(index, Err(Failure::untouched(error)));
    }
    let queue: Vec<_> = (0..recipients.len()).filter(|&index| outcomes[index].get().is_none()).collect();
    let next = AtomicUsize::new(0);
    let worker = || {
        while let Some(&index) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
            let ((options, lanes), recipient) = (&plans[index], &recipients[index]);
            let run = Run::new(options, *lanes, cancel, recipient.observer);
            end(index, one(image.as_ref(), recipient, &run));
        }
    };
    thread::scope(|scope| {
        for _ in 0..queue.len().min(CLONES_AT_ONCE) {
            scope.spawn(worker);
        }
    });
    Ok(outcomes
        .into_iter()
        .map(|outcome| outcome.into_inner().expect("each was refused or copied"))
        .collect())
}

fn one(image: &(dyn StoredGuest + 'static), recipient: &Recipient<'_>, run: &Run<'_>) -> Outcome {
    // One that had to wait for its turn.
    run.check_cancelled().map_err(Failure::untouched)?;
    recipient.observer.phase(Phase::Prepare);
    stored(image, recipient.destination, run)
}

/// Refuses what can be refused before anything is touched: all of it, as it is one command.
fn plans(
    source: &Source,
    recipients: &[Recipient<'_>],
    options: &Request,
) -> Result<Vec<(Request, usize)>, Error> {
    if recipients.len() > CLONES_MAX {
        let found = recipients.len();
        return Err(Error::Usage(format!("{found} destinations, at most {CLONES_MAX} at once")));
    }
    let mut seen = HashSet::new();
    let again = recipients.iter().find(|recipient| !seen.insert(recipient.destination.place()));
    if let Some(Recipient { destination, .. }) = again {
        return Err(Error::Usage(format!("{destination} is named twice, and takes one guest")));
    }
    recipients.iter().map(|recipient| checked(source, recipient.destination, options)).collect()
}

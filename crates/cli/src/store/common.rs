//! Types and output that the commands on directories and on stores share.

use crate::console;
use crate::events::{DiskSpace, FinalEvent, InterimEvent, Object};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::units::size;

/// Columns to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    List,
    Usage,
}

/// Action on garbage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    List,
    Remove,
}

/// Reports garbage, or its removal; `of`: what is known about it for people.
pub(crate) fn report_garbage(reporter: &Reporter, action: Action, garbage: Object<'_>, of: &str) {
    let line = format!("{} {:>11}{of}", garbage.object, size(garbage.bytes));
    match action {
        Action::List => {
            reporter.event(InterimEvent::Garbage(garbage));
            reporter.line(&format!("  garbage {line}"));
        }
        Action::Remove => {
            reporter.event(InterimEvent::Removed(garbage));
            reporter.line(&format!("  removed {line}"));
        }
    }
}

/// A removed image.
pub(super) struct Removed {
    /// Bytes of disk space; `None`: its chunks are left to garbage collection.
    pub(super) freed: Option<u64>,
    /// The same for people.
    pub(super) text: String,
}

/// Reports a verification that found no image.
pub(super) fn nothing_to_verify(reporter: &Reporter, place: &str) -> Exit {
    console::error(&format!("{place}: there is no image of this name or below it; correct the name"));
    let (place, space) = (place.to_owned(), DiskSpace::Unknown {});
    reporter.result(FinalEvent::Images { place, images: 0, unreadable: 0, space }, Exit::Failed)
}

/// Reports a compared image.
pub(super) fn report_verified(reporter: &Reporter, image: &str, error: Option<&str>) {
    reporter.event(InterimEvent::Verified { image, error });
    match error {
        None => reporter.line(&format!("{image}: every checksum matches")),
        Some(error) => console::error(error),
    }
}

/// Reports the end of a listing or a verification, with the exit status.
pub(super) fn end(reporter: &Reporter, place: String, images: usize, bad: usize, space: DiskSpace) -> Exit {
    let exit = if bad == 0 { Exit::Done } else { Exit::Failed };
    reporter.result(FinalEvent::Images { place, images, unreadable: bad, space }, exit)
}

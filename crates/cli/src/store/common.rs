//! Types and output that the commands on directories and on stores share.

use std::ffi::OsStr;

use anyhow::Result;

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

/// Compares images with their checksums by `compare`, which returns what is wrong with one.
pub(super) fn verify_each<T: AsRef<OsStr>>(
    reporter: &Reporter,
    place: String,
    images: &[T],
    compare: impl Fn(&T) -> Result<Option<String>>,
) -> Result<Exit> {
    if images.is_empty() {
        console::error(&format!("{place}: there is no image of this name or below it; correct the name"));
        let space = DiskSpace::Unknown {};
        let none = FinalEvent::Images { place, images: 0, unreadable: 0, space };
        return Ok(reporter.result(none, Exit::Failed));
    }
    let mut bad = 0;
    for image in images {
        let error = compare(image)?;
        let image = &*image.as_ref().to_string_lossy();
        reporter.event(InterimEvent::Verified { image, error: error.as_deref() });
        match &error {
            None => reporter.line(&format!("{image}: every checksum matches")),
            Some(error) => console::error(error),
        }
        bad += usize::from(error.is_some());
    }
    Ok(end(reporter, place, images.len(), bad, DiskSpace::Unknown {}))
}

/// Reports the end of a listing or a verification, with the exit status.
pub(super) fn end(reporter: &Reporter, place: String, images: usize, bad: usize, space: DiskSpace) -> Exit {
    let exit = if bad == 0 { Exit::Done } else { Exit::Failed };
    reporter.result(FinalEvent::Images { place, images, unreadable: bad, space }, exit)
}

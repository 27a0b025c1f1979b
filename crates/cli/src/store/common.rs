//! Types and output that the commands on directories and on stores share.

use serde_json::{Value, json};

use crate::exit::Exit;
use crate::progress::Reporter;
use crate::{console, events};

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
    end(reporter, totals(place, 0, 0), 1)
}

/// Reports a compared image.
pub(super) fn report_verified(reporter: &Reporter, image: &str, error: Option<&str>) {
    reporter.event("verified", json!({ "image": image, "error": error }));
    match error {
        None => reporter.line(&format!("{image}: every checksum matches")),
        Some(error) => console::error(error),
    }
}

/// Returns the fields of the last event of a listing.
pub(super) fn totals(place: &str, images: usize, unreadable: usize) -> Value {
    json!({ "place": place, "images": images, "unreadable": unreadable })
}

/// Reports the end of a listing or a verification, with the exit status.
pub(super) fn end(reporter: &Reporter, fields: Value, bad: usize) -> Exit {
    let exit = if bad == 0 { Exit::Done } else { Exit::Failed };
    reporter.event("images", events::with_exit(fields, exit));
    exit
}

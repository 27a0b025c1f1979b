//! Types and output that the commands on directories and on stores share.

use std::ffi::OsStr;

use anyhow::Result;

use crate::console;
use crate::events::{DiskSpace, FinalEvent, ImageContent, InterimEvent, ListedImage, Object};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::units::{self, size};

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

/// An image of a listing.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) content: Result<ImageContent, String>,
    /// Base images, the whole one last.
    pub(super) bases: Vec<String>,
    /// Processes that read the image.
    pub(super) readers: Vec<String>,
}

/// Reports a listing. Returns the number of images that cannot be read, according to it.
pub(super) fn report_rows(reporter: &Reporter, view: View, rows: &[Row]) -> usize {
    if !rows.is_empty() {
        reporter.line(&match view {
            View::List => format!("{:<28} {:>11} {:>8}  {}", "IMAGE", "MEMORY", "AGE", "SOURCE"),
            View::Usage => format!("{:<28} {:>11} {:>11} {:>11}", "IMAGE", "ALONE", "OWN", "SHARED"),
        });
    }
    rows.iter().for_each(|row| row.report(reporter, view));
    let is_whole = |row: &&Row| row.content.as_ref().is_ok_and(|content| content.missing == 0);
    rows.len() - rows.iter().filter(is_whole).count()
}

impl Row {
    fn report(&self, reporter: &Reporter, view: View) {
        let content = self.content.as_ref();
        reporter.event(InterimEvent::Image(ListedImage::new(
            &self.name,
            content,
            &self.bases,
            &self.readers,
        )));
        let name = &self.name;
        if view == View::List && reporter.output.quiet {
            return console::print_blocking(&console::printable(name));
        }
        let content = match content {
            Ok(content) => content,
            Err(error) => return reporter.line(&format!("{name:<28} cannot be read: {error}")),
        };
        reporter.line(&match view {
            View::List => {
                let qemu = content.qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default();
                let source = content.source.as_deref().unwrap_or("unknown");
                let (memory, age) = (size(content.memory), units::age(content.age()));
                format!("{name:<28} {memory:>11} {age:>8}  {source}{qemu}")
            }
            View::Usage => {
                let sizes = [content.alone, content.own, content.shared()].map(size);
                format!("{name:<28} {:>11} {:>11} {:>11}", sizes[0], sizes[1], sizes[2])
            }
        });
        if content.missing > 0 {
            reporter.line(&format!("  damaged: {} of its chunks are missing in the store", content.missing));
        }
        if !self.bases.is_empty() {
            reporter.line(&format!("  based on {}", self.bases.join(", on ")));
        }
        self.readers.iter().for_each(|reader| reporter.line(&format!("  read by {reader}")));
    }
}

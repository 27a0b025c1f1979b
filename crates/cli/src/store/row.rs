//! A line of `towline store ls` and `du`.

use super::common::View;
use crate::console;
use crate::events::{ImageContent, InterimEvent, ListedImage};
use crate::progress::Reporter;
use crate::units::{self, size};

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

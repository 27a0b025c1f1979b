//! A line of `towline store ls` and `du`.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use towline_image::manifest::Timestamp;

use super::common::View;
use crate::console;
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

/// Content of an image.
#[derive(Debug)]
pub(super) struct ImageContent {
    pub(super) created: Timestamp,
    pub(super) source: Option<String>,
    pub(super) qemu: Option<String>,
    /// Memory of the guest in bytes.
    pub(super) memory: u64,
    /// Disk space without the other images.
    pub(super) alone: u64,
    /// Disk space that its removal frees.
    pub(super) own: u64,
    /// Chunks that are missing in the store.
    pub(super) missing: u64,
}

/// Prints the heading of a listing.
pub(super) fn print_heading(reporter: &Reporter, view: View) {
    reporter.line(&match view {
        View::List => format!("{:<28} {:>11} {:>8}  {}", "IMAGE", "MEMORY", "AGE", "SOURCE"),
        View::Usage => format!("{:<28} {:>11} {:>11} {:>11}", "IMAGE", "ALONE", "OWN", "SHARED"),
    });
}

impl Row {
    /// Returns true if the image can be read, according to the listing.
    pub(super) fn is_whole(&self) -> bool {
        self.content.as_ref().is_ok_and(|content| content.missing == 0)
    }

    /// Reports the image.
    pub(super) fn report(&self, reporter: &Reporter, view: View) {
        reporter.event("image", self.fields());
        let name = &self.name;
        if view == View::List && reporter.is_quiet() {
            return console::print_blocking(&console::printable(name));
        }
        let content = match &self.content {
            Ok(content) => content,
            Err(error) => return reporter.line(&format!("{name:<28} cannot be read: {error}")),
        };
        reporter.line(&match view {
            View::List => {
                let qemu = content.qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default();
                let source = content.source.as_deref().unwrap_or("unknown");
                let (memory, age) = (size(content.memory), units::age(age(content.created)));
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

    fn fields(&self) -> Value {
        let content = self.content.as_ref().ok();
        json!({
            "name": self.name,
            "error": self.content.as_ref().err(),
            "created": content.map(|content| content.created.to_string()),
            "age": content.map(|content| age(content.created).as_secs()),
            "source": content.and_then(|content| content.source.clone()),
            "qemu": content.and_then(|content| content.qemu.clone()),
            "memory": content.map(|content| content.memory),
            "alone": content.map(|content| content.alone),
            "own": content.map(|content| content.own),
            "shared": content.map(ImageContent::shared),
            "missing-chunks": content.map(|content| content.missing),
            "bases": self.bases,
            "readers": self.readers,
        })
    }
}

impl ImageContent {
    fn shared(&self) -> u64 {
        self.alone.saturating_sub(self.own)
    }
}

fn age(created: Timestamp) -> Duration {
    SystemTime::now().duration_since(created.into()).unwrap_or_default()
}

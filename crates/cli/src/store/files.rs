//! Images in a directory.

use std::path::Path;

use anyhow::{Context as _, Result};
use towline_image::Image;
use towline_image::directory::{self, ImageEntry};
use towline_image::leftover::{self, Partial};

use super::common::{Action, Row, View, end, report_garbage, report_rows, verify_each};
use crate::events::{DiskSpace, ImageContent, Object};
use crate::exit::Exit;
use crate::inspect::VERIFY_THREADS;
use crate::progress::Reporter;
use crate::units::{counted, size};
use crate::{console, errors};

/// Lists the images.
pub(super) fn show(reporter: &Reporter, path: &Path, view: View) -> Result<Exit> {
    let entries = directory::list(path)?;
    let rows: Vec<Row> = entries.iter().map(row).collect();
    let bad = report_rows(reporter, view, &rows);
    let allocated: u64 = entries.iter().map(|entry| entry.allocated).sum();
    let images = counted(rows.len() as u64, "image");
    reporter.line(&format!("{}: {images} in {}", path.display(), size(allocated)));
    let space = DiskSpace::Directory { bytes: allocated };
    Ok(end(reporter, path.display().to_string(), rows.len(), bad, space))
}

fn row(entry: &ImageEntry) -> Row {
    let names = |paths: &[std::path::PathBuf]| paths.iter().map(|path| path.display().to_string()).collect();
    Row {
        name: entry.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bases: names(&entry.bases),
        readers: Vec::new(),
        content: entry.summary.clone().map(|summary| ImageContent {
            created: entry.modified,
            source: summary.source,
            qemu: summary.qemu,
            memory: summary.memory_bytes,
            // A whole image has no base; its file is what it occupies.
            alone: if entry.bases.is_empty() {
                entry.allocated
            } else {
                summary.content_bytes.max(entry.allocated)
            },
            own: entry.allocated,
            missing: 0,
        }),
    }
}

/// Compares one image, or all images of a directory, with their checksums.
pub(super) fn verify(reporter: &Reporter, path: &Path) -> Result<Exit> {
    let paths = if path.is_dir() {
        directory::list(path)?.into_iter().map(|entry| entry.path).collect()
    } else {
        vec![path.to_owned()]
    };
    verify_each(reporter, path.display().to_string(), &paths, |image| {
        let verified = Image::open(image).and_then(|image| image.verify(VERIFY_THREADS, &|_| {}));
        Ok(verified.err().map(|error| errors::text(&error.into())))
    })
}

/// Removes the partial files of writers that were killed.
pub(super) fn collect(reporter: &Reporter, path: &Path, action: Action) -> Result<Exit> {
    let partials = leftover::list(path)?;
    let (mut count, mut bytes, mut failed) = (0, 0, 0);
    for partial in &partials {
        let file = partial.path.display().to_string();
        let writer = match action {
            Action::Remove => remove_partial(partial),
            Action::List => Ok(partial.writer.clone()),
        };
        match writer {
            Ok(Some(writer)) => reporter.line(&format!("  kept {file}: {writer} writes it")),
            Ok(None) => {
                (count, bytes) = (count + 1, bytes + partial.allocated);
                report_garbage(reporter, action, Object::new(&file, partial.allocated, 0), "");
            }
            Err(error) => {
                failed += 1;
                console::error(&errors::text(&error));
            }
        }
    }
    let done = if action == Action::List { "not removed (--dry-run)" } else { "removed" };
    reporter.line(&format!("{}: {count} partial files in {}, {done}", path.display(), size(bytes)));
    Ok(end(reporter, path.display().to_string(), 0, failed, DiskSpace::Directory { bytes }))
}

/// Removes a partial file, unless a writer has it now; returns that one.
fn remove_partial(partial: &Partial) -> Result<Option<String>> {
    if partial.writer.is_some() {
        return Ok(partial.writer.clone());
    }
    let found = leftover::remove(&image_of(&partial.path)?)?;
    let now = found.into_iter().find(|found| found.path == partial.path);
    Ok(now.and_then(|found| found.writer))
}

/// Returns the path of the file that a partial file was to become.
fn image_of(partial: &Path) -> Result<std::path::PathBuf> {
    let name = partial.file_name().and_then(std::ffi::OsStr::to_str);
    let name = name.and_then(|name| name.strip_prefix('.')?.strip_suffix(".partial"));
    let name = name.with_context(|| format!("{}: not the name of a partial file", partial.display()))?;
    Ok(partial.with_file_name(name))
}

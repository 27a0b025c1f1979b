//! Images in an object store.

use anyhow::Result;
use towline_channel::Cancel;
use towline_control::plan::Observer as _;
use towline_image::store::{Catalog, CatalogEntry, Error, Location, StoredImage, VerifiedChunks, is_image};

use super::common::{Row, View, end, report_rows, verify_each};
use crate::errors;
use crate::events::{DiskSpace, ImageContent};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::{counted, size};

/// Lists the images of a prefix.
pub(super) fn show(reporter: &Reporter, prefix: &Location, view: View) -> Result<Exit> {
    let cancel = cancel_on_signals(SignalEffects::OF_READING)?;
    let catalog = Catalog::read(prefix, Some(cancel))?;
    let rows: Vec<Row> = catalog.images.iter().map(row).collect();
    let bad = report_rows(reporter, view, &rows);
    let Catalog { used, unreferenced, uploads, .. } = &catalog;
    reporter.line(&format!(
        "{prefix}: {}, {} in {}",
        counted(rows.len() as u64, "image"),
        counted(used.chunks, "chunk"),
        size(used.bytes)
    ));
    if unreferenced.chunks > 0 {
        reporter.line(&format!(
            "  unreferenced  {} in {} (`towline store gc` removes old ones); uploads in progress: {uploads}",
            counted(unreferenced.chunks, "chunk"),
            size(unreferenced.bytes)
        ));
    }

    let space = DiskSpace::Store { bytes: used.bytes, unreferenced: unreferenced.bytes, uploads: *uploads };
    Ok(end(reporter, prefix.to_string(), rows.len(), bad, space))
}

fn row(entry: &CatalogEntry) -> Row {
    Row {
        name: entry.name.clone(),
        bases: Vec::new(),
        readers: entry.readers.clone(),
        content: entry.summary.clone().map(|summary| ImageContent {
            created: summary.created,
            source: Some(summary.source),
            qemu: summary.qemu,
            memory: summary.memory_bytes,
            alone: summary.chunks.bytes + summary.index_bytes,
            own: summary.own.bytes + summary.index_bytes,
            missing: summary.missing,
        }),
    }
}

/// Compares an image, or all images of a prefix, with their checksums. A chunk that several images share is
/// read once.
pub(super) fn verify(reporter: &Reporter, place: &Location) -> Result<Exit> {
    let cancel = cancel_on_signals(SignalEffects::OF_READING)?;
    let names = names(reporter, place, &cancel)?;
    let known = VerifiedChunks::default();
    verify_each(reporter, place.to_string(), &names, |name| {
        cancel.check()?;
        match verify_image(name, place, &known, &cancel) {
            Err(error) if cancel.is_cancelled() => Err(error),
            verified => Ok(verified.err().map(|error| errors::text(&error))),
        }
    })
}

/// Names of the image at `place` and of those below it: an image may have the name of a prefix.
fn names(reporter: &Reporter, place: &Location, cancel: &Cancel) -> Result<Vec<String>> {
    let mut names = Vec::new();
    if is_image(place, Some(cancel.clone()))? {
        names.push(place.to_string());
    }
    match Catalog::read(place, Some(cancel.clone())) {
        Ok(catalog) => {
            let prefix = place.to_string();
            let prefix = prefix.trim_end_matches('/');
            names.extend(catalog.images.iter().map(|entry| format!("{prefix}/{}", entry.name)));
        }
        Err(error) if names.is_empty() => return Err(error.into()),
        // Nothing can be listed there: it is not a directory, it is on a web server, or this user may only
        // read objects.
        Err(error) => {
            cancel.check()?;
            if !matches!(error, Error::Location { .. }) {
                reporter.notice(&format!(
                    "images below {place}/ are not verified: {}",
                    errors::text(&error.into())
                ));
            }
        }
    }
    Ok(names)
}

/// Compares the image of this name, which is `place` itself or below it. An object of another program may
/// have a name that no image has.
fn verify_image(name: &str, place: &Location, known: &VerifiedChunks, cancel: &Cancel) -> Result<()> {
    let location = if name == place.to_string() {
        place.clone()
    } else {
        place.image(name.rsplit('/').next().unwrap_or(name))?
    };
    StoredImage::open(&location, Some(cancel.clone()))?.verify_unknown(known, &|_| {})?;
    Ok(())
}

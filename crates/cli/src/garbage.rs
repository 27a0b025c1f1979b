//! Garbage collection: `towline store gc`.

use std::time::Duration;

use anyhow::Result;
use towline_image::store::{ConditionalWrites, Garbage, Location};

use crate::events::{FinalEvent, Inspected, InspectedStore, Object};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::store::{Action, report_garbage};
use crate::units::{counted, size};

/// Lists or removes the garbage of a prefix.
pub(crate) fn collect(reporter: &Reporter, prefix: &Location, action: Action, age: Duration) -> Result<Exit> {
    let removes = action == Action::Remove;
    let cancel = Some(cancel_on_signals(SignalEffects {
        first: "cancelling; chunks that were removed stay removed",
        second: None,
    })?);
    let report = |object: &towline_image::store::Object| {
        let age = object.age.as_secs();
        let found = Object::new(&object.key, object.bytes, age);
        report_garbage(reporter, action, found, &format!(", {} h old", age / 3600));
    };
    let found = if removes {
        Garbage::remove(prefix, age, cancel, &mut |object| report(object))?
    } else {
        let found = Garbage::find(prefix, age, cancel)?;
        found.objects.iter().for_each(report);
        found
    };
    let store = Inspected::Store(InspectedStore::new(prefix, &found, bytes(&found), removes));
    let exit = reporter.result(FinalEvent::Inspected(store), Exit::Done);
    summarize(reporter, prefix, &found, action);
    Ok(exit)
}

/// Returns the size of the unreferenced objects.
fn bytes(found: &Garbage) -> u64 {
    found.objects.iter().map(|object| object.bytes).sum()
}

/// Prints the totals for people.
fn summarize(reporter: &Reporter, prefix: &Location, found: &Garbage, action: Action) {
    reporter.line(&format!(
        "{prefix}: {} in {} of {}",
        counted(found.used.chunks, "chunk"),
        size(found.used.bytes),
        counted(found.images as u64, "image")
    ));
    reporter.line(&format!(
        "  garbage       {} in {}, {}",
        counted(found.objects.len() as u64, "object"),
        size(bytes(found)),
        if action == Action::Remove { "removed" } else { "not removed" }
    ));
    reporter.line(&format!(
        "  too young     {} in {} (minimum age); uploads in progress: {}, readers: {}",
        counted(found.young.chunks, "chunk"),
        size(found.young.bytes),
        found.uploads,
        found.readers
    ));
    if found.kept.chunks > 0 {
        reporter.line(&format!(
            "  kept          {} in {}, of replaced or removed images that are still read by {}",
            counted(found.kept.chunks, "chunk"),
            size(found.kept.bytes),
            found.kept_for.join(", ")
        ));
    }
    if let Some(writes) = found.conditional_writes {
        reporter.line(&format!("  conditions    {}", conditions(writes)));
    }
}

/// Returns a sentence about the conditions that the store enforces.
fn conditions(writes: ConditionalWrites) -> &'static str {
    match writes {
        ConditionalWrites::All => {
            "the store enforces conditional puts: an expired lease cannot reappear, and a changed image is not replaced"
        }
        ConditionalWrites::Create => {
            "the store enforces conditional creation only: of two concurrent --overwrite of an image the last one wins"
        }
        ConditionalWrites::None => {
            "the store does not enforce conditional puts: of two concurrent images of one name the last one wins"
        }
    }
}

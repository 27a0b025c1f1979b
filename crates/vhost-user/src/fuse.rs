//! Ends a test's process, so to speak, before a store of its choice: what has been stored until then is what the next one
//! finds.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local!(static LEFT: Cell<Option<u64>> = const { Cell::new(None) });

struct Burnt;

/// Comes before each store that a record has to be right at.
pub(crate) fn burn() {
    match LEFT.get() {
        Some(0) => {
            LEFT.set(None);
            resume_unwind(Box::new(Burnt));
        }
        Some(left) => LEFT.set(Some(left - 1)),
        None => {}
    }
}

/// Does something, and dies in it before the store with this number, counted from 0. `None` if it died.
pub(crate) fn with<T>(stores: u64, act: impl FnOnce() -> T) -> Option<T> {
    LEFT.set(Some(stores));
    let outcome = catch_unwind(AssertUnwindSafe(act));
    LEFT.set(None);
    match outcome {
        Ok(value) => Some(value),
        Err(cause) if cause.is::<Burnt>() => None,
        Err(cause) => resume_unwind(cause),
    }
}

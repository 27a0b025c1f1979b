//! Simulates the death of a test's process before a chosen store: the next process finds the stores before
//! it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local!(static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) });

struct SimulatedCrash;

/// Called before each store that the in-flight record depends on.
pub(crate) fn reach() {
    match STORES_LEFT.get() {
        Some(0) => {
            STORES_LEFT.set(None);
            resume_unwind(Box::new(SimulatedCrash));
        }
        Some(left) => STORES_LEFT.set(Some(left - 1)),
        None => {}
    }
}

/// Runs `act`, which crashes before its store number `stores`, counted from 0. Returns `None` if it crashed.
pub(crate) fn run_until<T>(stores: u64, act: impl FnOnce() -> T) -> Option<T> {
    STORES_LEFT.set(Some(stores));
    let outcome = catch_unwind(AssertUnwindSafe(act));
    STORES_LEFT.set(None);
    match outcome {
        Ok(value) => Some(value),
        Err(cause) if cause.is::<SimulatedCrash>() => None,
        Err(cause) => resume_unwind(cause),
    }
}

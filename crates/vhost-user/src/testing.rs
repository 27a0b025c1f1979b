//! Hooks for tests of other crates; not part of the interface, and in no build that does not ask for the feature `testing`.

use std::sync::{Mutex, PoisonError};

type Hook = Box<dyn FnMut() + Send>;

static LOG_FLUSHED: Mutex<Option<Hook>> = Mutex::new(None);

/// Has this called whenever bits were written into a dirty log, by the thread that wrote them: what a frontend sees that reads and
/// clears the log at that very moment.
pub fn on_log_flush(hook: impl FnMut() + Send + 'static) {
    *LOG_FLUSHED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
}

pub(crate) fn log_flushed() {
    if let Some(hook) = &mut *LOG_FLUSHED.lock().unwrap_or_else(PoisonError::into_inner) {
        hook();
    }
}

//! Hooks for tests of other crates, with the feature `testing` only. Not part of the interface.

use std::sync::Mutex;

use towline_channel::lock::lock;

type Hook = Box<dyn FnMut() + Send>;

static LOG_FLUSHED: Mutex<Option<Hook>> = Mutex::new(None);

/// Sets a hook that is called after each write to a dirty log, by the writing thread. It simulates a frontend
/// that reads and clears the log at that moment.
pub fn on_log_flush(hook: impl FnMut() + Send + 'static) {
    *lock(&LOG_FLUSHED) = Some(Box::new(hook));
}

pub(crate) fn log_flushed() {
    if let Some(hook) = &mut *lock(&LOG_FLUSHED) {
        hook();
    }
}

//! A store that cannot be read for a time, while a guest waits for its pages.
//!
//! The guest is blocked wherever it needs a page, and perhaps its QEMU's main loop with it, which then
//! accepts no new connection to its monitor: only this process, whose connection takes commands out of band,
//! can continue. So it tries again for as long as there is hope, instead of leaving that to another one.

use std::time::{Duration, Instant};

use super::super::context::Context;
use super::super::error_origin;
use crate::waits::{Woken, wait};

/// Time for which reads are tried again, after the store's own retries.
const TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Time between attempts: the first, doubled each time up to the last.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Attempts to read on, since the last page that was sent.
#[derive(Debug)]
pub(super) struct Attempts {
    since: Option<Instant>,
    pause: Duration,
}

impl Attempts {
    pub(super) fn new() -> Self {
        Self { since: None, pause: PAUSE_MIN }
    }

    /// Waits before the next attempt. Returns false if there is none: the error is permanent, it lasts too
    /// long, or the user has cancelled.
    pub(super) fn wait(
        &mut self,
        error: &towline_migration::Error,
        has_progressed: bool,
        context: &Context<'_>,
    ) -> bool {
        if !error_origin::may_pass(error) {
            return false;
        }
        if has_progressed {
            *self = Self::new();
        }
        let since = *self.since.get_or_insert_with(|| {
            context.observer.notice(&format!(
                "{error}; the guest waits wherever it needs a page that is missing, and reading is tried again for {} minutes; \
                 Ctrl-C gives up",
                TIMEOUT.as_secs() / 60
            ));
            Instant::now()
        });
        if since.elapsed() >= TIMEOUT || wait(context.cancel, None, self.pause) == Woken::Cancelled {
            return false;
        }
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        true
    }
}

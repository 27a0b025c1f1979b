//! Budget of log lines. Guests, frontends and clients of a device can cause warnings without end, which would
//! fill the host's disk and hide the lines of others.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;

use crate::lock::lock;

/// Maximum number of lines of one kind in an interval.
const LINES_MAX: u64 = 50;
const INTERVAL: Duration = Duration::from_secs(10);

/// Lines of each kind, which is the place in the code that writes them.
#[derive(Debug, Default)]
pub(super) struct LineBudget(Mutex<HashMap<Identifier, LogWindow>>);

/// Lines of one kind in the present interval.
#[derive(Debug)]
struct LogWindow {
    since: Instant,
    lines: u64,
}

impl LineBudget {
    /// Counts a line. Returns the number of lines of its kind that were suppressed before it; `None` if it is suppressed too.
    pub(super) fn admit(&self, kind: Identifier, now: Instant) -> Option<u64> {
        let mut windows = lock(&self.0);
        let window = windows.entry(kind).or_insert(LogWindow { since: now, lines: 0 });
        let mut suppressed = 0;
        if now.saturating_duration_since(window.since) >= INTERVAL {
            suppressed = window.lines.saturating_sub(LINES_MAX);
            *window = LogWindow { since: now, lines: 0 };
        }
        window.lines += 1;
        (window.lines <= LINES_MAX).then_some(suppressed)
    }
}

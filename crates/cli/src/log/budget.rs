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

/// Decision about a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Write it. This number of lines of its kind was suppressed before.
    Written {
        suppressed: u64,
    },
    Suppressed,
}

impl LineBudget {
    /// Counts a line and decides whether it is written.
    pub(super) fn admit(&self, kind: Identifier, now: Instant) -> Admission {
        let mut windows = lock(&self.0);
        let window = windows.entry(kind).or_insert(LogWindow { since: now, lines: 0 });
        let mut suppressed = 0;
        if now.saturating_duration_since(window.since) >= INTERVAL {
            suppressed = window.lines.saturating_sub(LINES_MAX);
            *window = LogWindow { since: now, lines: 0 };
        }
        window.lines += 1;
        if window.lines <= LINES_MAX { Admission::Written { suppressed } } else { Admission::Suppressed }
    }
}

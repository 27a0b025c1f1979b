//! Instants of a record: the names of their images, and the choice of one.
//!
//! ```text
//!   00000042-000001893250-20261126T140305Z
//!   sequence   │            time of the host's clock
//!              milliseconds since the record's first instant, by a clock that no one steps
//! ```

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use towline_image::manifest::Timestamp;

/// An instant of a record, as the name of its image has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedInstant {
    /// Its number. A later instant has a higher one, whatever the clock shows.
    pub sequence: u64,
    /// Time since the record's first instant.
    pub elapsed: Duration,
    /// Time of the host's clock.
    pub at: Timestamp,
}

/// A choice among the instants of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstantChoice {
    /// The last one.
    Newest,
    /// The one with this number.
    Sequence(u64),
    /// The last one that is older than the newest by this time at least.
    Before(Duration),
    /// The last one for which the host's clock did not show a later time.
    At(Timestamp),
}

impl InstantChoice {
    /// The instant that is meant, of those of a record in their order.
    pub fn of(self, instants: &[RecordedInstant]) -> Option<RecordedInstant> {
        let newest = instants.last()?;
        let is_meant = |instant: &&RecordedInstant| match self {
            Self::Newest => true,
            Self::Sequence(sequence) => instant.sequence == sequence,
            Self::Before(age) => instant.elapsed + age <= newest.elapsed,
            Self::At(time) => instant.at <= time,
        };
        instants.iter().rev().find(is_meant).copied()
    }
}

impl RecordedInstant {
    /// Time since then by the host's clock.
    pub(super) fn gap(&self) -> Duration {
        SystemTime::now().duration_since(self.at.into()).unwrap_or_default()
    }
}

impl fmt::Display for RecordedInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Characters that the names of every store can have.
        let at = self.at.to_string().replace(['-', ':'], "");
        write!(f, "{:08}-{:012}-{at}", self.sequence, self.elapsed.as_millis())
    }
}

impl FromStr for RecordedInstant {
    type Err = ();

    /// Parses a name. Another one than [`fmt::Display`] writes is not an instant's.
    fn from_str(name: &str) -> Result<Self, ()> {
        let mut parts = name.splitn(3, '-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (sequence, elapsed) = (number().ok_or(())?, number().ok_or(())?);
        let at = parts.next().filter(|at| at.len() == "20261126T140305Z".len() && at.is_ascii()).ok_or(())?;
        let [year, month, day_and_hour, minute, rest] =
            [&at[..4], &at[4..6], &at[6..11], &at[11..13], &at[13..]];
        let at = format!("{year}-{month}-{day_and_hour}:{minute}:{rest}");
        let at = Timestamp::try_from(at).map_err(drop)?;
        let instant = Self { sequence, elapsed: Duration::from_millis(elapsed), at };
        if instant.to_string() == name { Ok(instant) } else { Err(()) }
    }
}

/// The clock of a record, which no one steps.
#[derive(Debug)]
pub(super) struct RecordClock {
    /// Time of the record when this process began.
    base: Duration,
    began: Duration,
}

impl RecordClock {
    /// Continues after the last instant. The time in which nothing was recorded is known by the host's clock only; it is not negative.
    pub(super) fn after(last: Option<&RecordedInstant>) -> Self {
        let since = last.map(|last| last.elapsed.saturating_add(last.gap()));
        Self { base: since.unwrap_or_default(), began: since_boot() }
    }

    /// The instant that follows `last`; `None` after the last one that a name can have.
    pub(super) fn next(&self, last: Option<&RecordedInstant>) -> Option<RecordedInstant> {
        let elapsed = self.base.saturating_add(since_boot().saturating_sub(self.began));
        let (sequence, elapsed) = match last {
            None => (1, elapsed),
            Some(last) => {
                (last.sequence.checked_add(1)?, elapsed.max(last.elapsed + Duration::from_millis(1)))
            }
        };
        let elapsed = Duration::from_millis(elapsed.as_millis().try_into().ok()?);
        Some(RecordedInstant { sequence, elapsed, at: Timestamp::now() })
    }
}

/// Time since the host was started, also while it was suspended.
fn since_boot() -> Duration {
    clock_gettime(ClockId::Boottime).try_into().unwrap_or_default()
}

//! What the parts of a run take: seconds, and seconds of processors.

use std::fmt;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Ticks per second in `/proc`.
const TICKS: u64 = 100;
/// Parts of a step that take less are not in the table.
const WORTH_A_LINE: Duration = Duration::from_secs(10);

/// Time that something took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) elapsed: Duration,
    /// Processor time of it and of all that it waited for.
    pub(crate) processor: Duration,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (elapsed, processor) = (self.elapsed.as_secs_f64(), self.processor.as_secs_f64());
        write!(f, "{elapsed:7.1} s, {processor:7.1} s of processors")
    }
}

/// Waits until `child`, started at `started`, has exited; its status is still to be taken.
pub(crate) fn exited(child: &Child, started: Instant) -> Result<Usage> {
    let pid = Pid::from_child(child);
    // The dead process's times are in /proc until it is reaped.
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
    let processor = processor(&stat).context("/proc/PID/stat")?;
    Ok(Usage { elapsed: started.elapsed(), processor })
}

/// Processor time of all processes that this one has waited for.
pub(crate) fn children() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    processor(&stat).unwrap_or_default()
}

/// `utime`, `stime`, `cutime` and `cstime` of proc(5).
fn processor(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let times = fields.split(' ').skip(11).take(4).map(|ticks| ticks.parse::<u64>().ok());
    let ticks: u64 = times.sum::<Option<u64>>()?;
    Some(Duration::from_millis(ticks * (1000 / TICKS)))
}

/// The table at the end of a run: its steps, and below each its longest parts.
#[derive(Debug, Default)]
pub(crate) struct Times {
    lines: Vec<String>,
    parts: Vec<(String, Usage)>,
}

impl Times {
    /// Adds a part of the step that is under way.
    pub(crate) fn part(&mut self, name: &str, usage: Usage) {
        self.parts.push((name.to_owned(), usage));
    }

    /// Adds a step, with its parts so far.
    pub(crate) fn step(&mut self, name: &str, usage: Usage) {
        self.lines.push(format!("{name:<28} {usage}"));
        let mut parts = std::mem::take(&mut self.parts);
        parts.sort_by_key(|(_, usage)| std::cmp::Reverse(usage.elapsed));
        let long = parts.iter().filter(|(_, usage)| usage.elapsed >= WORTH_A_LINE);
        self.lines.extend(long.map(|(name, usage)| format!("  {name:<26} {usage}")));
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_includes_that_of_children() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1 0";
        assert_eq!(processor(stat), Some(Duration::from_millis(1270)));
        assert_eq!(processor("7 (a"), None);
    }

    #[test]
    fn the_longest_part_of_a_step_comes_first_and_short_ones_are_left_out() {
        let usage = |seconds| Usage { elapsed: Duration::from_secs(seconds), ..Usage::default() };
        let mut times = Times::default();
        times.part("quick", usage(1));
        times.part("long", usage(20));
        times.part("longest", usage(30));
        times.step("tests", usage(51));
        times.step("fuzz", usage(5));
        let names: Vec<_> = times.lines.iter().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names, ["tests", "longest", "long", "fuzz"]);
    }
}

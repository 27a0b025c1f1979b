//! `cargo xtask bench sandbox`: cost of a filter for the system calls that move data.
//!
//! ```text
//!   one process ─┬─ an unconfined thread               turns of milliseconds: A B C, C B A, …
//!                └─ a thread for each filter           each turn the same calls, on one processor
//! ```
//! A filter may apply to a single thread. So threads of one process, with and without filters, make the same calls in turns of
//! milliseconds. The cost of a call is the thread's processor time (and instructions, where the machine counts them), which other
//! programs hardly influence. A ratio is taken turn by turn; the confidence interval of its median shows if one percent can be
//! distinguished from zero.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use perf_event::events::Hardware;
use perf_event::{Builder, Counter};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
    recvmsg, sendmsg, socketpair,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use serde_json::json;
use towline_channel::Cancel;
use towline_sandbox::Policy;

use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Approximate length of a turn.
const TURN: Duration = Duration::from_millis(2);
/// Number of turns for each run.
const TURNS_PER_RUN: usize = 200;
/// Number of calls that calibrate the length of a turn.
const PROBE_CALLS: u32 = 200;
/// Number of turns before the measured ones.
const WARM_UP_TURNS: usize = 20;
/// Name of the absent filter.
const NOTHING: &str = "nothing";
/// Name of the filter that permits every call.
const EVERYTHING: &str = "everything";
/// Goal of the ratio.
const RATIO_MAX: f64 = 1.01;

/// A command's filter.
#[derive(Debug, Clone, Copy)]
struct Filter {
    /// The command.
    name: &'static str,
    /// Applies it to the calling thread.
    confine: fn() -> Result<(), String>,
}

/// The filters that are compared with no filter. The first one filters nothing, in a thread of its own: its ratio is the method's
/// own error, as each thread has its buffers elsewhere. The second one is what any filter costs.
const FILTERS: [Filter; 4] = [
    Filter { name: NOTHING, confine: || Ok(()) },
    Filter { name: EVERYTHING, confine: || permit_everything().map_err(|error| error.to_string()) },
    Filter { name: "a device", confine: || Policy::default().filter_calls_of_thread() },
    Filter {
        name: "a copy",
        confine: || Policy { connects_unix: true, opens: true, ..Policy::default() }.filter_calls_of_thread(),
    },
];

/// Applies a filter whose verdict the kernel knows without running it.
fn permit_everything() -> Result<()> {
    let (permitted, refused) = (SeccompAction::Allow, SeccompAction::KillProcess);
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(BTreeMap::new(), permitted, refused, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(apply_filter(&program)?)
}

/// Parameters of the measurement.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Number of runs, of several turns each.
    pub runs: usize,
    /// Cancels the measurement.
    pub cancel: Cancel,
}

/// The measured operation: one or two calls.
type Work = Box<dyn FnMut() -> rustix::io::Result<()>>;

/// Creates one, in the thread that measures it.
type Make = fn() -> Result<Work>;

const WORKS: [(&str, Make); 4] = [
    ("sendmsg and recvmsg of 64 KiB, a Unix stream", || messages(64 << 10)),
    ("sendmsg and recvmsg of 64 B, a Unix stream", || messages(64)),
    ("writev and readv of 1514 B, packets", packets),
    ("write and read of an eventfd", notifications),
];

/// Cost of one call.
#[derive(Debug, Clone, Copy)]
struct Sample {
    nanoseconds: f64,
    instructions: Option<f64>,
}

/// A measuring thread.
struct Contender {
    turns: Sender<u32>,
    samples: Receiver<Result<Sample>>,
}

/// Measures the table.
///
/// # Errors
/// The run was cancelled, or the machine does not support a call.
pub fn measure(parameters: &Parameters) -> Result<Table> {
    let mut rows = Vec::new();
    for (name, work) in WORKS {
        rows.extend(compare(parameters, name, work)?);
    }
    Ok(Table {
        name: "sandbox",
        title: format!(
            "Cost of a filter for system calls, {} turns, median",
            parameters.runs * TURNS_PER_RUN
        ),
        columns: vec!["what", "processor time", "× none", "95 % of it", "instructions, × none", "goal"],
        rows,
        notes: vec!["processor time of the threads; the interval is that of the median".into()],
    })
}

fn compare(parameters: &Parameters, name: &str, work: Make) -> Result<Vec<Row>> {
    let settings: Vec<Option<Filter>> = std::iter::once(None).chain(FILTERS.map(Some)).collect();
    let contenders: Vec<Contender> =
        settings.iter().map(|setting| Contender::start(work, *setting)).collect::<Result<_>>()?;
    let probe = contenders[0].turn(PROBE_CALLS)?;
    let calls = (TURN.as_nanos() as f64 / probe.nanoseconds).clamp(1.0, 1e6) as u32;
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); settings.len()];
    for turn in 0..WARM_UP_TURNS + parameters.runs * TURNS_PER_RUN {
        parameters.cancel.check()?;
        let mut order: Vec<usize> = (0..settings.len()).collect();
        order.rotate_left(turn / 2 % settings.len());
        if turn % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let sample = contenders[index].turn(calls)?;
            if turn >= WARM_UP_TURNS {
                samples[index].push(sample);
            }
        }
    }
    let rows = settings.iter().zip(&samples).map(|(setting, of)| row(name, *setting, &samples[0], of));
    Ok(rows.collect())
}

fn row(name: &str, setting: Option<Filter>, base: &[Sample], of: &[Sample]) -> Row {
    let label = match setting {
        None => "no filter".to_owned(),
        Some(Filter { name: NOTHING, .. }) => "no filter, another thread".to_owned(),
        Some(Filter { name: EVERYTHING, .. }) => "a filter that permits every call".to_owned(),
        Some(filter) => format!("the filter of {}", filter.name),
    };
    let times = |samples: &[Sample]| samples.iter().map(|sample| sample.nanoseconds).collect::<Vec<_>>();
    let counts =
        |samples: &[Sample]| samples.iter().map(|sample| sample.instructions).collect::<Option<Vec<_>>>();
    let (Some(time), Some(ratio)) = (Summary::of(times(of)), Median::of_ratios(&times(of), &times(base)))
    else {
        return Row { group: name.into(), label, content: Content::Missing("no turn".into()) };
    };
    let instructions = counts(of).zip(counts(base)).and_then(|(of, base)| Median::of_ratios(&of, &base));
    let goal = match ratio {
        _ if setting.is_none_or(|filter| filter.name == NOTHING) => "–".into(),
        Median { low, high, .. } if low <= RATIO_MAX && high > RATIO_MAX => {
            format!("≤ {RATIO_MAX}: undecided")
        }
        Median { high, .. } => format!("≤ {RATIO_MAX}: {}", if high <= RATIO_MAX { "yes" } else { "no" }),
    };
    let cells = vec![
        format!("{:.0} ns", time.median),
        format!("{:.4}", ratio.median),
        format!("{:.4}–{:.4}", ratio.low, ratio.high),
        instructions.map_or("not counted".into(), |found| format!("{:.4}", found.median)),
        goal,
    ];
    let data = json!({
        "nanoseconds": time.median,
        "ratio": ratio.median,
        "ratio-low": ratio.low,
        "ratio-high": ratio.high,
        "instructions-ratio": instructions.map(|found| found.median),
        "turns": of.len(),
    });
    Row { group: name.into(), label, content: Content::Measured { cells, data } }
}

/// A median, with the bounds of its confidence interval of 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Median {
    median: f64,
    low: f64,
    high: f64,
}

impl Median {
    fn of_ratios(values: &[f64], base: &[f64]) -> Option<Self> {
        let mut ratios: Vec<f64> = values.iter().zip(base).map(|(value, base)| value / base).collect();
        ratios.sort_by(f64::total_cmp);
        let median = Summary::of(ratios.iter().copied())?.median;
        // By ranks (the binomial distribution, approximated by a normal one), whatever the distribution of turns.
        let (middle, reach) = (ratios.len() as f64 / 2.0, 0.98 * (ratios.len() as f64).sqrt());
        let rank = |rank: f64| ratios[(rank.max(0.0) as usize).min(ratios.len() - 1)];
        Some(Self { median, low: rank((middle - reach).floor()), high: rank((middle + reach).ceil()) })
    }
}

impl Contender {
    fn start(work: Make, filter: Option<Filter>) -> Result<Self> {
        let (turns, requests) = channel::<u32>();
        let (results, samples) = channel();
        let run = move || {
            let (mut work, mut counter) = match prepare(work, filter) {
                Ok(prepared) => prepared,
                Err(error) => return drop(results.send(Err(error))),
            };
            for calls in requests {
                if results.send(turn(&mut work, counter.as_mut(), calls)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("turns".into()).spawn(run)?;
        Ok(Self { turns, samples })
    }

    /// Measures one turn of this number of calls.
    fn turn(&self, calls: u32) -> Result<Sample> {
        // A thread that has ended has sent its error.
        let _ = self.turns.send(calls);
        self.samples.recv().map_err(|_| anyhow!("a measuring thread has ended"))?
    }
}

fn prepare(work: Make, filter: Option<Filter>) -> Result<(Work, Option<Counter>)> {
    // All on the last processor: the first one handles more interrupts.
    let mut cpus = CpuSet::new();
    cpus.set(thread::available_parallelism()?.get() - 1);
    sched_setaffinity(None, &cpus).context("binding a thread to a processor")?;
    let work = work()?;
    let counter = Builder::new(Hardware::INSTRUCTIONS).include_kernel().build();
    let counter = counter.and_then(|mut counter| counter.enable().map(|()| counter)).ok();
    if let Some(filter) = filter {
        (filter.confine)().map_err(|error| anyhow!("{}: {error}", filter.name))?;
    }
    Ok((work, counter))
}

fn turn(work: &mut Work, mut counter: Option<&mut Counter>, calls: u32) -> Result<Sample> {
    let read = |counter: &mut Option<&mut Counter>| -> Result<Option<u64>> {
        Ok(counter.as_mut().map(|counter| counter.read()).transpose()?)
    };
    let time =
        || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).context("negative processor time");
    let (count, begun) = (read(&mut counter)?, time()?);
    for _ in 0..calls {
        work()?;
    }
    let (took, now) = (time()? - begun, read(&mut counter)?);
    ensure!(!took.is_zero(), "{calls} calls used no processor time");
    let each = |total: f64| total / f64::from(calls);
    let instructions = now.zip(count).map(|(now, count)| each((now - count) as f64));
    Ok(Sample { nanoseconds: each(took.as_nanos() as f64), instructions })
}

fn pair(kind: SocketType) -> Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).context("socketpair")
}

fn messages(bytes: usize) -> Result<Work> {
    let (one, other) = pair(SocketType::STREAM)?;
    let (sent, mut received) = (vec![1; bytes], vec![0; bytes]);
    Ok(Box::new(move || {
        let mut left =
            sendmsg(&one, &[IoSlice::new(&sent)], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?;
        while left > 0 {
            let mut into = [IoSliceMut::new(&mut received)];
            left -=
                recvmsg(&other, &mut into, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())?.bytes;
        }
        Ok(())
    }))
}

fn packets() -> Result<Work> {
    let (one, other) = pair(SocketType::SEQPACKET)?;
    let (sent, mut received) = (vec![1; 1514], vec![0; 2048]);
    Ok(Box::new(move || {
        rustix::io::writev(&one, &[IoSlice::new(&sent[..12]), IoSlice::new(&sent[12..])])?;
        rustix::io::readv(&other, &mut [IoSliceMut::new(&mut received)]).map(drop)
    }))
}

fn notifications() -> Result<Work> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).context("eventfd")?;
    let mut count = [0; 8];
    Ok(Box::new(move || {
        rustix::io::write(&fd, &1u64.to_ne_bytes())?;
        rustix::io::read(&fd, &mut count).map(drop)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_has_an_interval() {
        let base = vec![1.0; 100];
        let values: Vec<f64> = (0..100).map(|index| 1.0 + f64::from(index) / 1000.0).collect();
        let found = Median::of_ratios(&values, &base).unwrap();
        assert!((found.median - 1.0495).abs() < 1e-9, "{found:?}");
        // Ranks 40 and 60.
        assert!((found.low - 1.040).abs() < 1e-9 && (found.high - 1.060).abs() < 1e-9, "{found:?}");
        assert_eq!(Median::of_ratios(&[], &[]), None);
    }

    #[test]
    fn confined_threads_are_measured_and_errors_returned() {
        let filter = FILTERS[0];
        for (name, work) in WORKS {
            let contender = Contender::start(work, Some(filter)).unwrap();
            let sample = contender.turn(10).unwrap();
            assert!(sample.nanoseconds > 0.0, "{name}: {sample:?}");
        }
        let refuses = Filter { name: "a test", confine: || Err("no".into()) };
        let error = Contender::start(WORKS[0].1, Some(refuses)).unwrap().turn(1).unwrap_err();
        assert_eq!(error.to_string(), "a test: no");
    }
}

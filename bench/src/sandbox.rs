//! `cargo xtask bench sandbox`: cost of the sandbox's filters for the system calls that move data.
//!
//! A filter may apply to a single thread. So each figure is of a new thread of this process, with or without a filter, that makes the
//! same calls on the same processor as the others, in turns. The cost of a call is the thread's processor time, which other programs
//! hardly influence. Many short turns (`--runs 200`) distinguish one percent.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
    recvmsg, sendmsg, socketpair,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use towline_sandbox::Policy;

use crate::machine::own_thread_seconds;
use crate::options::Bench;
use crate::table::{self, Bound, Column, Contender, Entry, Figures, Row, Table};

/// Processor time of a turn.
const WINDOW: Duration = Duration::from_millis(20);
/// Number of calls between two looks at the clock.
const BATCH: u32 = 100;

/// Confines the calling thread.
type Filter = fn() -> Result<()>;

/// Bytes that one call sends and another one receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bytes(usize);

type Turn = Entry<Bytes, Filter>;

impl Row for Bytes {
    fn name(&self) -> String {
        format!("sendmsg and recvmsg of {} B, a Unix stream", self.0)
    }
}

const NO_FILTER: Contender<Filter> = Contender::new("no filter", || Ok(()));
const FILTERS: [Contender<Filter>; 4] = [
    NO_FILTER,
    Contender::new("a filter that permits every call", permit_every_call),
    Contender::new("the filter of a device", || confine(&Policy::default())),
    Contender::new("the filter of a copy", || {
        confine(&Policy { connects_unix: true, opens: true, ..Policy::default() })
    }),
];
const COLUMNS: [Column<Bytes, Filter>; 2] = [
    Column::spread("ns", 0),
    Column::ratio("× no filter", "ns", |turn| turn.with(NO_FILTER))
        .with_goal(|turn| (turn.contender != NO_FILTER).then_some(Bound::Most(1.01))),
];

/// Measures the table.
///
/// # Errors
/// The run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let all = Entry::all([64 << 10, 64].map(Bytes), &FILTERS);
    let window = bench.window(WINDOW);
    let results = table::measure(bench, bench.chosen(all)?, |turn| {
        let nanoseconds = std::thread::spawn(move || turn.measure(window));
        Ok(Figures::from([("ns", nanoseconds.join().expect("the thread does not panic")?)]))
    })?;
    let title = "Cost of a filter for system calls: processor time of the thread";
    Ok(vec![results.table("sandbox", title, &COLUMNS, |_| true)])
}

impl Turn {
    /// Returns the nanoseconds of an operation, in this thread.
    fn measure(self, window: Duration) -> Result<f64> {
        // All on the last processor: the first one handles more interrupts.
        let mut cpus = CpuSet::new();
        cpus.set(std::thread::available_parallelism()?.get() - 1);
        sched_setaffinity(None, &cpus).context("binding a thread to a processor")?;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .context("socketpair")?;
        let (sent, mut received) = (vec![1; self.row.0], vec![0; self.row.0]);
        let mut exchange = || -> Result<()> {
            let buffers = [IoSlice::new(&sent)];
            let mut left = sendmsg(&one, &buffers, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?;
            while left > 0 {
                let mut buffers = [IoSliceMut::new(&mut received)];
                let mut ancillary = RecvAncillaryBuffer::default();
                left -= recvmsg(&other, &mut buffers, &mut ancillary, RecvFlags::empty())?.bytes;
            }
            Ok(())
        };
        (self.contender.kind)()?;
        let mut repeat = |seconds: f64| -> Result<f64> {
            let (begun, mut count) = (own_thread_seconds(), 0);
            loop {
                for _ in 0..BATCH {
                    exchange()?;
                }
                count += BATCH;
                let took = own_thread_seconds() - begun;
                if took >= seconds {
                    return Ok(took / f64::from(count));
                }
            }
        };
        // First for a tenth, in which memory is touched.
        repeat(window.as_secs_f64() / 10.0)?;
        Ok(repeat(window.as_secs_f64())? * 1e9)
    }
}

/// Cost of any filter: its verdict is known to the kernel without running it.
fn permit_every_call() -> Result<()> {
    let (permitted, refused) = (SeccompAction::Allow, SeccompAction::KillProcess);
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(BTreeMap::new(), permitted, refused, architecture)?;
    Ok(apply_filter(&BpfProgram::try_from(filter)?)?)
}

fn confine(policy: &Policy) -> Result<()> {
    policy.filter_calls_of_thread().map_err(|error| anyhow!(error))
}

//! Start of the QEMUs of one command: as many at once as the host has processors, since nearly all of it is QEMU's own work.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Context as _, Result};
use towline_channel::Cancel;
use towline_control::qemu::StartedQemu;
use towline_launch::{GuestDirectory, IncomingOption, Launcher, Lifetime, RuntimeRoot};

use super::image::RunImage;
use super::report::{RunReport, StartedGuest};
use super::request::GuestStart;
use super::supervise::Guests;
use crate::args::RunArgs;
use crate::lock::lock;

/// Guests that are about to start, and their names. Names that are not used are free again when this is dropped.
pub(crate) struct Claimed<'a> {
    starts: &'a [GuestStart],
    names: VecDeque<GuestDirectory>,
}

impl<'a> Claimed<'a> {
    /// Takes the names of these guests.
    pub(crate) fn of(starts: &'a [GuestStart]) -> Result<Self> {
        let root = RuntimeRoot::of_user();
        let mut claimed = Self { starts, names: VecDeque::new() };
        for start in starts {
            claimed.names.push_back(root.claim(&start.name)?);
        }
        Ok(claimed)
    }

    fn next(&mut self) -> Option<(usize, &'a GuestStart, GuestDirectory)> {
        let index = self.starts.len() - self.names.len();
        Some((index, self.starts.get(index)?, self.names.pop_front()?))
    }

    fn release(&mut self) {
        self.names.clear();
    }
}

/// Use of the connections by which monitors have answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Monitors {
    /// The copy continues with it.
    Kept,
    /// Closed: the QEMUs are compared with each other first, or need another kind of connection.
    Free,
}

/// The QEMUs that are started, by several threads.
struct Starts<'a> {
    monitors: Monitors,
    args: &'a RunArgs,
    image: &'a RunImage,
    report: &'a RunReport<'a>,
    claimed: Mutex<Claimed<'a>>,
    started: Mutex<Vec<(usize, Result<StartedGuest>)>>,
}

/// Starts the QEMUs. If one does not start, the others are ended.
pub(crate) fn start(
    args: &RunArgs,
    image: &RunImage,
    claimed: Claimed<'_>,
    cancel: &Cancel,
    report: &RunReport<'_>,
) -> Result<Guests> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(claimed.starts.len());
    let monitors = if claimed.starts.len() == 1 && !args.postcopy { Monitors::Kept } else { Monitors::Free };
    let starts =
        Starts { monitors, args, image, report, claimed: Mutex::new(claimed), started: Mutex::default() };
    thread::scope(|scope| {
        // This thread is one of them.
        for _ in 1..threads {
            scope.spawn(|| starts.work(cancel));
        }
        starts.work(cancel);
    });
    let mut started = std::mem::take(&mut *lock(&starts.started));
    started.sort_by_key(|(index, _)| *index);
    let mut guests = Guests::default();
    let mut failed = Ok(());
    for (_, guest) in started {
        match guest {
            Ok(guest) => guests.push(guest),
            Err(error) => failed = failed.and(Err(error)),
        }
    }
    failed?;
    cancel.check()?;
    Ok(guests)
}

impl Starts<'_> {
    /// Starts one after the other until none is left.
    fn work(&self, cancel: &Cancel) {
        while !cancel.is_cancelled() {
            let next = {
                let mut claimed = lock(&self.claimed);
                let next = claimed.next();
                // In their order.
                next.iter().for_each(|(_, start, _)| self.report.starting(start));
                next
            };
            let Some((index, start, directory)) = next else { return };
            let started = self.start(start, directory);
            if started.is_err() {
                lock(&self.claimed).release();
            }
            lock(&self.started).push((index, started));
        }
    }

    fn start(&self, start: &GuestStart, directory: GuestDirectory) -> Result<StartedGuest> {
        let mut launcher = Launcher::new(directory);
        launcher.incoming = IncomingOption::Defer;
        launcher.image = Some(self.report.image.to_owned());
        launcher.lifetime = if self.args.detach { Lifetime::Detached } else { Lifetime::WithOwner };
        // A guest that outlives this process keeps the lock.
        launcher.descriptors.extend(self.image.lock().context("lock of the image")?.map(Into::into));
        let (line, host) = (&start.command_line, &start.host);
        let started = match self.monitors {
            Monitors::Kept => launcher
                .start_with(line, host, |qemu, options| {
                    StartedQemu::connect(&qemu.qmp_path(), qemu.pid(), options)
                })
                .map(|(qemu, monitor)| (qemu, Some(monitor))),
            Monitors::Free => launcher.start(line, host).map(|qemu| (qemu, None)),
        };
        let (qemu, monitor) = started.with_context(|| format!("guest {}", start.name))?;
        let answered = self.report.begun.elapsed();
        Ok(StartedGuest { qemu, monitor, answered, has_run: AtomicBool::new(false) })
    }
}

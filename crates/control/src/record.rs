//! Records a running guest: an image of it at each interval, as long as it runs.
//!
//! ```text
//!   interval ─► state of the guest ─► image ─► retention ─► disks joined ─► next interval
//!                  │ waits, or failed          │ one merge at a time, beside all this
//!                  └► counted, said once       └► images that no one needs are removed
//! ```
//! A guest that runs on an image is stored by what it has written, with its disks of the same instant; any other one by QEMU's background
//! snapshot. In a directory, the `n`th image since the guest was found is based on the one whose number is `n` without its last bit that is
//! set, so a chain has as many images as `n` has such bits: some are stored with little more than what was written in an interval, and
//! every 256th is based on the guest's image alone.
//!
//! An image is there if a file has its name: there is no index to get out of step with the files. Retention uses the names.
//!
//! Out of scope: the command line and output. Limits: a monitor that another client holds skips an interval.

mod disks;
mod error;
mod guest;
mod instants;
mod place;
mod retention;
mod takeover;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use towline_channel::Cancel;

use crate::plan::{
    self, AfterCopy, CopyReport, CopyRequest, Observer, Source, Task, TransferOptions, WritableDisks,
};
use crate::qemu::Drive;
use crate::waits::{Woken, wait};
use disks::DiskFiles;
pub use error::{Error, Holder};
use guest::{GuestState, RecordedGuest, inspect};
use instants::RecordClock;
pub use instants::{InstantChoice, RecordedInstant};
pub use place::Place;
use place::{Record, merge};
pub use retention::Keep;
use retention::{mergeable, removable};
pub use takeover::{Begun, Takeover, newest_takeover};
use takeover::{Takeovers, overlay_directories};

/// Images after which one is based on the guest's image alone. A chain has eight more at most.
const SERIES: u64 = 256;

/// Time without images that is never a reason to refuse a record.
const GAP_MIN: Duration = Duration::from_secs(30 * 24 * 3600);

/// Request to record a guest.
#[derive(Debug, Clone)]
pub struct RecordRequest {
    /// The monitor of its QEMU.
    pub socket: PathBuf,
    /// Place of the images.
    pub place: Place,
    /// Time from one image to the next.
    pub interval: Duration,
    /// The images that stay.
    pub keep: Keep,
}

/// An image that was stored.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Its instant.
    pub instant: RecordedInstant,
    /// Time for which the guest was stopped, in milliseconds, if QEMU reports it.
    pub pause_ms: Option<u64>,
    /// Bytes that it takes on the disk, or that were sent to the store.
    pub bytes: u64,
    /// Time that it took.
    pub took: Duration,
    /// Images of the record.
    pub images: usize,
}

/// Receives what becomes of a record.
pub trait RecordObserver: Sync {
    /// An image was stored.
    fn recorded(&self, recorded: &Recorded);

    /// A notice for the user.
    fn notice(&self, text: &str);

    /// Formats the failure of an image.
    fn failure(&self, error: &Error) -> String;
}

/// Reason for which a record has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecordEnd {
    /// On request.
    #[default]
    Cancelled,
    /// The guest's QEMU has ended.
    GuestEnded,
}

/// A record that has ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct RecordSummary {
    /// Images that were stored.
    pub recorded: u64,
    /// Intervals without one, since the one before took longer.
    pub late: u64,
    /// Intervals without one, since the guest did not run.
    pub idle: u64,
    /// Images that could not be stored.
    pub failed: u64,
    /// Images that retention has removed.
    pub removed: u64,
    /// Images of the record.
    pub images: usize,
    /// The reason.
    pub end: RecordEnd,
}

/// Records a guest until it ends, or until `cancel`, which lets the image under way be completed.
///
/// # Errors
/// The place or the guest cannot be used, or the first image could not be stored. Later failures are reported, and the next interval tries
/// again.
pub fn record(
    request: &RecordRequest,
    cancel: &Cancel,
    observer: &dyn RecordObserver,
) -> Result<RecordSummary, Error> {
    let guest = RecordedGuest::connect(&request.socket, cancel)?;
    let takeovers = Takeovers::of(request.place.directory())?;
    let record = Record::open(&request.place, cancel)?;
    check_gap(&record, &request.keep)?;
    let recorder = Recorder {
        clock: RecordClock::after(record.newest()),
        disks: disk_files(&record)?,
        takeovers,
        series: Series::default(),
        never: Cancel::new().map_err(plan::Error::from).map_err(|error| Error::Guest(Box::new(error)))?,
        merging: None,
        said: None,
        summary: RecordSummary::default(),
        request,
        cancel,
        observer,
        guest,
        record,
    };
    recorder.run()
}

/// Images since the guest was found, by their numbers among these.
#[derive(Debug, Default)]
struct Series {
    next: u64,
    /// Those on which the next ones are based, the newest last.
    bases: Vec<(u64, PathBuf)>,
}

impl Series {
    /// The base of the next image.
    fn base(&mut self) -> Option<PathBuf> {
        let number = self.next % SERIES;
        let base = number & number.wrapping_sub(1);
        self.bases.retain(|(of, path)| number > 0 && *of <= base && path.exists());
        self.bases.last().filter(|(of, _)| *of == base).map(|(_, path)| path.clone())
    }

    /// Counts an image that was stored, in this file or in a store.
    fn stored(&mut self, path: Option<PathBuf>) {
        self.bases.extend(path.map(|path| (self.next % SERIES, path)));
        self.next += 1;
    }
}

struct Recorder<'a> {
    request: &'a RecordRequest,
    cancel: &'a Cancel,
    observer: &'a dyn RecordObserver,
    guest: RecordedGuest,
    record: Record,
    disks: Option<DiskFiles>,
    takeovers: Takeovers,
    clock: RecordClock,
    series: Series,
    /// Cancels nothing: an image that is begun is completed.
    never: Cancel,
    merging: Option<Merge>,
    /// The last notice, which is not repeated.
    said: Option<String>,
    summary: RecordSummary,
}

/// A merge under way.
struct Merge {
    sequence: u64,
    thread: JoinHandle<Result<(), Error>>,
}

/// Notices of single copies are for the log.
struct Logged;

impl Observer for Logged {
    fn notice(&self, text: &str) {
        tracing::info!(text, "notice of an image");
    }
}

impl Recorder<'_> {
    fn run(mut self) -> Result<RecordSummary, Error> {
        let interval = self.request.interval;
        let (mut due, mut has_exited) = (Instant::now(), false);
        self.summary.end = loop {
            let left = due.saturating_duration_since(Instant::now());
            let woken = wait(self.cancel, (!has_exited).then_some(&self.guest.process), left);
            match woken {
                Woken::Cancelled => break RecordEnd::Cancelled,
                Woken::InTime if due > Instant::now() => continue,
                Woken::InTime | Woken::Exited => {}
            }
            if let Some(end) = self.interval()? {
                break end;
            }
            // It is asked once more at the end of the interval.
            has_exited = woken == Woken::Exited;
            if has_exited {
                continue;
            }
            let late = Instant::now().saturating_duration_since(due).as_nanos() / interval.as_nanos();
            let late = u32::try_from(late).unwrap_or(u32::MAX);
            self.summary.late += u64::from(late);
            due += interval.saturating_mul(late.saturating_add(1));
        };
        if let Some(Merge { thread, .. }) = self.merging {
            // Cancelled by the same token, unless the guest has ended.
            let _ = thread.join();
        }
        self.summary.images = self.record.entries.len();
        Ok(self.summary)
    }

    /// Stores the guest if it runs; returns the reason for which the record ends.
    fn interval(&mut self) -> Result<Option<RecordEnd>, Error> {
        match self.takeovers.check() {
            Ok(()) => {}
            Err(error @ Error::TakenFromHere { .. }) => return Err(error),
            Err(error) => {
                // Nothing else is done with a guest that the other host may have.
                let reason = self.observer.failure(&error);
                self.idle(&reason);
                let has_ended = self.guest.has_ended(&self.request.socket, self.cancel);
                return Ok(has_ended.then_some(RecordEnd::GuestEnded));
            }
        }
        match self.guest.state(&self.request.socket, self.cancel) {
            Ok(GuestState::Ended) => return Ok(Some(RecordEnd::GuestEnded)),
            Ok(GuestState::Replaced) => self.find_again()?,
            Ok(GuestState::Waits(reason)) => {
                self.idle(&reason);
                self.clean(None);
            }
            Ok(GuestState::Runs(drives)) => {
                let taken = self.take(&drives);
                self.clean(Some(&drives));
                taken?;
            }
            Err(_) if self.cancel.is_cancelled() => return Ok(Some(RecordEnd::Cancelled)),
            Err(error) => self.fail(error.into())?,
        }
        self.merge();
        Ok(None)
    }

    /// Stores the guest as it is now.
    fn take(&mut self, drives: &[Drive]) -> Result<(), Error> {
        let begun = Instant::now();
        let last = self.record.newest();
        let Some(instant) = self.clock.next(last) else {
            return last.copied().map_or(Ok(()), |instant| Err(Error::LastInstant { instant }));
        };
        let stored = self.record.check_room().and_then(|()| self.store(&instant, drives));
        let report = match stored.and_then(|report| self.record.add(instant).map(|()| report)) {
            Ok(report) => report,
            Err(_) if self.cancel.is_cancelled() => return Ok(()),
            Err(error) => return self.fail(error),
        };
        self.series.stored(self.record.file(instant.sequence));
        self.said = None;
        self.summary.recorded += 1;
        let sent = report.uploaded.map_or(0, |uploaded| uploaded.sent_bytes);
        self.observer.recorded(&Recorded {
            instant,
            pause_ms: report.downtime_ms,
            bytes: self.record.allocated(instant.sequence).unwrap_or(sent),
            took: begun.elapsed(),
            images: self.record.entries.len(),
        });
        Ok(())
    }

    fn store(&mut self, instant: &RecordedInstant, drives: &[Drive]) -> Result<CopyReport, Error> {
        let socket = &self.request.socket;
        let base = match self.record.place.directory() {
            Some(_) => self.series.base().or_else(|| self.guest.image.clone()),
            None => None,
        };
        let (has_image, transfer) = (self.guest.image.is_some(), TransferOptions::default());
        let task = match has_image {
            true => Task::Copy { transfer, after: AfterCopy::SourceResumed, base },
            false => Task::Snapshot { base },
        };
        let disks = match (drives, &self.record.place) {
            ([], _) => WritableDisks::Refused,
            ([drive, ..], _) if !has_image => {
                return Err(Error::DisksWithoutImage { socket: socket.clone(), drive: drive.name.clone() });
            }
            ([drive, ..], Place::Prefix(place)) => {
                return Err(Error::DisksInStore { place: place.clone(), drive: drive.name.clone() });
            }
            _ => {
                let directory = self.record.disks();
                let prepared =
                    plan::prepare_disks(socket, directory.as_deref(), &self.cancel.descriptor(), &Logged);
                WritableDisks::Kept(prepared.map_err(Error::Copy)?)
            }
        };
        let request = CopyRequest { requires_mapped_memory: has_image, disks, ..CopyRequest::new(task) };
        let destination = self.record.place.destination(instant)?;
        plan::copy(&Source::Qmp(socket.clone()), &destination, &request, &self.never, &Logged)
            .map_err(Error::Copy)
    }

    /// Another QEMU has the guest: it was upgraded, or started again.
    fn find_again(&mut self) -> Result<(), Error> {
        match RecordedGuest::connect(&self.request.socket, self.cancel) {
            Ok(guest) => {
                (self.guest, self.series) = (guest, Series::default());
                // The last disk of the guest before stays.
                self.disks = disk_files(&self.record)?;
                self.say(
                    "another QEMU has the guest's monitor, and its guest is recorded from now on".into(),
                );
                Ok(())
            }
            Err(error @ Error::GuestInUse { .. }) => Err(error),
            Err(error) => self.fail(error),
        }
    }

    fn idle(&mut self, reason: &str) {
        self.summary.idle += 1;
        self.say(format!("the guest is not recorded: {reason}; it is again as soon as it runs"));
    }

    /// Counts and reports a failure; the first image's ends the record.
    fn fail(&mut self, error: Error) -> Result<(), Error> {
        if self.summary.recorded == 0 {
            return Err(error);
        }
        self.summary.failed += 1;
        // Another host may record into it.
        if self.takeovers.check().is_ok()
            && let Err(error) = self.record.remove_partial_files()
        {
            tracing::info!(%error, "what is left of an image stays");
        }
        self.say(format!("not recorded: {}; the next interval tries again", self.observer.failure(&error)));
        Ok(())
    }

    fn say(&mut self, text: String) {
        if self.said.as_ref() != Some(&text) {
            self.observer.notice(&text);
            self.said = Some(text);
        }
    }

    /// Removes what nothing needs, and joins disks. What fails is tried again later.
    fn clean(&mut self, drives: Option<&[Drive]>) {
        // The guest of another host may need what this record does not know.
        if self.takeovers.check().is_err() {
            return;
        }
        let mut needed = self.request.keep.kept(&self.record.entries);
        needed.extend(self.merging.as_ref().map(|merge| merge.sequence));
        let removed = self.record.remove(&removable(&self.record.entries, needed));
        self.summary.removed += removed as u64;
        let age_min = self.request.keep.all_within();
        let cleaned =
            self.record.collect(age_min, self.cancel).and_then(|()| self.clean_disks(drives, removed));
        if let Err(error) = cleaned {
            tracing::warn!(%error, "what was removed is not cleaned up");
        }
    }

    /// `drives`: those of a guest that runs, which may be joined.
    fn clean_disks(&self, drives: Option<&[Drive]>, removed: usize) -> Result<(), Error> {
        let (Some(disks), Some(directory)) = (&self.disks, self.record.place.directory()) else {
            return Ok(());
        };
        let is_long = drives.into_iter().flatten().any(disks::is_long);
        if drives.is_some_and(<[Drive]>::is_empty) || removed == 0 && !is_long {
            return Ok(());
        }
        let mut qemu = inspect(&self.request.socket, self.cancel)?;
        if !self.guest.is_in(&qemu) {
            return Ok(());
        }
        let joined = if is_long { disks::join(&mut qemu, directory, self.cancel) } else { Ok(()) };
        let Some(oldest) = self.record.entries.values().next() else { return joined };
        let mut needed = needed_disks(&self.record).map_err(Error::Disks)?;
        needed.extend(qemu.drives()?.into_iter().flat_map(|drive| drive.files.chain).map(PathBuf::from));
        disks.remove_unneeded(needed, oldest.instant.at.into()).map_err(Error::Disks).and(joined)
    }

    /// Ends a merge that is done, or starts one.
    fn merge(&mut self) {
        match self.merging.take_if(|merge| merge.thread.is_finished()) {
            Some(Merge { sequence, thread }) => {
                let merged = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                let instant = self.record.entries.get(&sequence).map(|entry| entry.instant);
                // What it needs now is read from it.
                let read = merged.and_then(|()| instant.map_or(Ok(()), |instant| self.record.add(instant)));
                if let Err(error) = read {
                    tracing::info!(%error, sequence, "an image is not merged");
                }
            }
            None if self.merging.is_none() => self.merging = self.start_merge(),
            None => {}
        }
    }

    fn start_merge(&self) -> Option<Merge> {
        let keep = &self.request.keep;
        let sequence = mergeable(&self.record.entries, &keep.kept(&self.record.entries), keep)?;
        let (path, bytes) = (self.record.file(sequence)?, self.record.allocated_with_bases(sequence));
        let cancel = self.cancel.clone();
        let merge = move || merge(&path, bytes, &cancel, &Logged);
        // Without a thread it is begun after the next image.
        let started = Builder::new().spawn(merge).inspect_err(|error| tracing::warn!(%error, "no merge"));
        Some(Merge { sequence, thread: started.ok()? })
    }
}

/// Refuses a record that would be removed for a clock that was set forward, or since it was not written for so long.
fn check_gap(record: &Record, keep: &Keep) -> Result<(), Error> {
    match record.newest() {
        Some(last) if record.entries.len() > 1 && last.gap() > keep.longest().max(GAP_MIN) => {
            Err(Error::Gap { place: record.place.to_string(), at: last.at, gap: last.gap() })
        }
        _ => Ok(()),
    }
}

fn disk_files(record: &Record) -> Result<Option<DiskFiles>, Error> {
    let Some(directory) = record.disks() else { return Ok(None) };
    let needed = needed_disks(record).and_then(|needed| DiskFiles::of(directory, &needed));
    needed.map(Some).map_err(Error::Disks)
}

/// Disks that instants need, and overlays in the directory of the record of guests that run from one.
///
/// # Errors
/// A directory cannot be read, so it is not known what is needed.
fn needed_disks(record: &Record) -> io::Result<Vec<PathBuf>> {
    let mut needed: BTreeSet<_> =
        record.entries.values().flat_map(|entry| entry.disks.iter().cloned()).collect();
    if let Some(directory) = record.place.directory() {
        for directory in [vec![directory.to_owned()], overlay_directories(directory)?].concat() {
            for entry in std::fs::read_dir(directory)? {
                let path = entry?.path();
                if path.extension().is_some_and(|end| end == "qcow2") {
                    // One that is being made has none.
                    needed.extend(disks::backing_file(&path).ok().flatten());
                }
            }
        }
    }
    Ok(needed.into_iter().collect())
}

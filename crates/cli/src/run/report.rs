//! Reports of guests that run and end: lines for people, events, and the page of `--report`.

use std::time::Instant;

use anyhow::Result;
use towline_channel::Cancel;
use towline_control::plan::{CopyResult, Failure, Observer};
use towline_control::run::{GuestEnd, ImageChange, RestoreObserver, Running, StartedGuest};

use crate::args::StartArgs;
use crate::console;
use crate::endpoint::Endpoint;
use crate::events::{GuestRuns, InterimEvent};
use crate::exit::Exit;
use crate::outcome::{Destinations, Results};
use crate::progress::Reporter;
use crate::report::{GuestReport, ReportRecorder, html_of_several};

/// Reports of one command.
pub(super) struct RunReport<'a> {
    /// Source of the guests.
    pub(super) source: &'a Endpoint,
    pub(super) args: &'a StartArgs,
    pub(super) reporter: &'a Reporter,
    /// Begin of the command.
    pub(super) begun: Instant,
}

impl RunReport<'_> {
    /// Restores the image into all QEMUs, runs the guests, and writes the page of `--report`.
    pub(super) fn restore(&self, running: &Running, cancel: &Cancel) -> Result<Vec<CopyResult>, Failure> {
        let names: Vec<_> = running.guests().iter().map(|guest| &guest.start.name).collect();
        let reporters = Reporter::several(&self.args.output, &names);
        let recorders: Vec<_> = names.iter().map(|_| ReportRecorder::of_started(self.begun)).collect();
        let both: Vec<_> = reporters.iter().zip(&recorders).collect();
        let observer = RestoreObserver {
            guests: &both.iter().map(|both| both as &dyn Observer).collect::<Vec<_>>(),
            all: self.reporter,
            running: &|guest| self.running(running, guest),
            ended: &|index, _| reporters[index].finish(),
        };
        let copied = running.restore(observer, cancel)?;
        self.write_page(running, &recorders, &copied);
        Ok(copied)
    }

    /// Writes the page of `--report`.
    fn write_page(&self, running: &Running, recorders: &[ReportRecorder], copied: &[CopyResult]) {
        let page = &self.args.report;
        if let ([guest], [recorder], [copied]) = (running.guests(), recorders, copied) {
            let to = Endpoint::Qmp(guest.qemu.qmp_path());
            return recorder.write(page, [self.source, &to], copied.as_ref());
        }
        let guests = running.guests().iter().zip(recorders).zip(copied);
        let guests = guests.map(|((guest, recorder), copied)| GuestReport {
            name: guest.start.name.as_str(),
            recorder,
            copied: copied.as_ref(),
        });
        page.write(|| html_of_several(self.source, self.begun.elapsed(), &guests.collect::<Vec<_>>()));
    }

    /// Reports the results of the restores. Returns the worst.
    pub(super) fn restored(&self, running: &Running, copied: &Result<Vec<CopyResult>, Failure>) -> Exit {
        let results = Results::of("copied", self.reporter, self.source);
        let results = Results { destinations: Destinations::Several, ..results };
        let copied = match copied {
            Ok(copied) => copied,
            Err(failure) => return results.refused(failure),
        };
        let mut exit = Exit::Done;
        for (copied, guest) in copied.iter().zip(running.guests()) {
            let to = Endpoint::Qmp(guest.qemu.qmp_path());
            match copied {
                Ok(report) if self.args.output.json => results.done(&to, report),
                Ok(_) => {}
                Err(failure) => exit = exit.max(results.failed(&to, failure)),
            }
        }
        exit
    }

    fn running(&self, running: &Running, guest: &StartedGuest) {
        self.reporter.event(InterimEvent::Running(GuestRuns::new(guest, running, self.begun)));
        let (name, qmp) = (&guest.start.name, guest.qemu.qmp_path());
        self.reporter.line(&format!("{name} runs, qmp:{}", qmp.display()));
    }
}

/// Reports guests that end, until the last one has ended or the command is cancelled, when the others are
/// ended.
pub(super) fn supervise(mut running: Running, cancel: &Cancel, reporter: &Reporter) -> Result<Exit> {
    let mut exit = Exit::Done;
    let supervised = running.supervise(cancel, &mut |end| exit = exit.max(ended(reporter, end)));
    if let Some(change) = running.image_change() {
        reporter.notice(&change_text(&change));
    }
    supervised?;
    Ok(exit)
}

fn ended(reporter: &Reporter, end: &GuestEnd<'_>) -> Exit {
    let name = end.guest.start.name.as_str();
    let is_success = end.status.is_some_and(|status| status.success());
    let status = end.status.map_or_else(|| "unknown exit status".into(), |status| status.to_string());
    reporter.event(InterimEvent::Ended { name, success: is_success, text: status.clone() });
    if is_success {
        reporter.line(&format!("{name} has ended"));
        return Exit::Done;
    }
    let reason = end.change.as_ref().map_or_else(|| end.guest.qemu.log_tail(), change_text);
    console::error(&format!("QEMU of {name} ended ({status}): {reason}"));
    Exit::Failed
}

fn change_text(change: &ImageChange) -> String {
    let ImageChange { path, difference, .. } = change;
    let path = path.display();
    format!(
        "image {path} was changed while its memory was in use: {difference}; `towline inspect --verify {path}` names what differs"
    )
}

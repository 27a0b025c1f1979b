//! `towline repair`: undoes the changes of a killed towline in a QEMU, and removes the partial files of an image.

use std::path::Path;

use towline_control::moves;
use towline_control::plan::Source;
use towline_control::qemu::{Qemu, RepairReport};
use towline_image::leftover::{self, Partial};
use towline_qmp::Options;

use crate::args::RepairArgs;
use crate::console;
use crate::events::{FailedPart, FinalEvent, PartialFile, Reason, Repaired};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::units::size;

/// Runs `repair`.
pub(crate) fn run(args: &RepairArgs) -> Exit {
    let reporter = Reporter::new(&args.output);
    let path = match args.target.source() {
        Ok(Source::Qmp(path)) => path,
        Ok(Source::Image(path)) => return partials(&reporter, &path),
        Ok(_) => {
            let text =
                format!("{}: expected a QEMU (qmp:PATH), an image or a directory of images", args.target);
            return reporter.failed(&text, Reason::Usage, Exit::Usage);
        }
        Err(text) => return reporter.failed(&text, Reason::Usage, Exit::Usage),
    };
    let socket = path.display().to_string();
    note_undecided_moves(&path);
    match Qemu::repair(&path, &Options::default()) {
        Ok(None) => {
            reporter.line(&format!("QEMU on {socket}: nothing to repair"));
            let clean =
                Repaired::Qemu { socket: &socket, state: "clean", owner_pid: None, done: &[], left: &[] };
            reporter.result(FinalEvent::Repaired(clean), Exit::Done)
        }
        Ok(Some(repaired)) => report(&reporter, &repaired),
        Err(error) => {
            let about = FailedPart::Monitor { socket: &socket };
            reporter.failed_with(about, &error.to_string(), Reason::Qemu, Exit::Failed)
        }
    }
}

/// Names the undecided moves of a QEMU, which `resume` finishes.
fn note_undecided_moves(path: &Path) {
    let Ok(qemu) = Qemu::inspect(path, &Options::default()) else { return };
    for id in moves::undecided_of(&qemu) {
        console::error(&format!(
            "note: move {id} of the guest of this QEMU is undecided: towline resume {id}"
        ));
    }
}

fn report(reporter: &Reporter, repaired: &RepairReport) -> Exit {
    let RepairReport { socket, owner, done, left, .. } = repaired;
    let (exit, state) = if left.is_empty() { (Exit::Done, "repaired") } else { (Exit::Failed, "incomplete") };
    let repaired = Repaired::Qemu { socket, state, owner_pid: Some(*owner), done, left };
    reporter.result(FinalEvent::Repaired(repaired), exit);
    reporter.line(&format!(
        "QEMU on {socket} was left changed by a towline process that has exited (pid {owner})"
    ));
    for text in done {
        reporter.line(&format!("  repaired      {text}"));
    }
    for text in left {
        reporter.line(&format!("  not repaired  {text}"));
    }
    exit
}

/// Removes the partial files of an image, or lists those of a directory.
fn partials(reporter: &Reporter, path: &Path) -> Exit {
    let is_directory = path.is_dir();
    let found = if is_directory { leftover::list(path) } else { leftover::remove(path) };
    let shown = path.display().to_string();
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let about = FailedPart::File { path: shown };
            return reporter.failed_with(about, &error.to_string(), Reason::Image, Exit::Failed);
        }
    };
    let state = |partial: &Partial| match partial.writer {
        Some(_) => "in-use",
        None if is_directory => "leftover",
        None => "removed",
    };
    let files = found.iter().map(|partial| PartialFile::new(partial, state(partial))).collect();
    let files = Repaired::Files { path: &shown, partials: files };
    let exit = reporter.result(FinalEvent::Repaired(files), Exit::Done);
    if found.is_empty() {
        reporter.line(&format!("{shown}: no partial files"));
    }
    for Partial { path, allocated, writer } in &found {
        let what = match writer {
            Some(writer) => format!("in use by {writer}"),
            None if is_directory => "left by a killed writer; `towline repair IMAGE` removes it".into(),
            None => "removed".into(),
        };
        reporter.line(&format!("{}  {} allocated  {what}", path.display(), size(*allocated)));
    }
    exit
}

//! Comparison of the guest's fate with towline's report of it.

use std::os::unix::process::ExitStatusExt;

use towline_lab::Finished;

use crate::case::{Case, Fault, Kind, Victim};
use crate::guests::Held;

/// State at the end of a run.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Exit of each towline; with two, the destination's is the first.
    pub(crate) ends: Vec<Finished>,
    pub(crate) source: Option<Held>,
    pub(crate) destinations: Vec<Held>,
    /// Files of the working directory.
    pub(crate) work: Vec<String>,
    /// Files in the directory for temporary files.
    pub(crate) tmp: Vec<String>,
    /// Result of verifying the image, if there is one under its final name.
    pub(crate) image_is_right: Option<bool>,
}

/// A condition on the state at the end.
type IsSo = fn(&Seen) -> bool;

/// Texts of reports with exit status 3, and the condition that makes each of them true.
const PLACES: &[(&str, IsSo)] = &[
    ("paused at its source", |seen| seen.source == Some(Held::Whole)),
    ("its source still holds it", |seen| seen.source == Some(Held::Whole)),
    ("stored; at its source it is still paused", |seen| seen.source == Some(Held::Whole)),
    ("running at its source", |seen| seen.source == Some(Held::Live)),
    ("whole at its destination, paused", |seen| seen.destinations.contains(&Held::Whole)),
    ("paused at the destination", |seen| seen.destinations.contains(&Held::Whole)),
    ("paused at both ends", |seen| {
        seen.source == Some(Held::Whole) && seen.destinations.contains(&Held::Whole)
    }),
    ("which was sent everything and may run it", |seen| seen.source != Some(Held::Live)),
    ("has ended, and the guest with it", |seen| seen.source == Some(Held::Gone)),
    ("both QEMUs have ended", |seen| {
        seen.source == Some(Held::Gone) && seen.destinations.iter().all(|held| *held == Held::Gone)
    }),
    ("stored, and nowhere else", |seen| seen.source == Some(Held::Gone) && seen.image_is_right == Some(true)),
    ("its source has ended", |seen| seen.source == Some(Held::Gone)),
    ("at its source, if that still lives", |seen| seen.source != Some(Held::Part)),
    ("at its destination; its source could not be ended", |seen| seen.source != Some(Held::Live)),
    ("in its image;", |seen| !seen.destinations.contains(&Held::Busy)),
    ("the image is as it was", |seen| !seen.destinations.contains(&Held::Busy)),
];

/// Compares the two; returns a summary in one line.
pub(crate) fn judge(case: &Case, seen: &Seen, operator_ran: bool) -> Result<String, String> {
    let checks = [
        runs_twice(case, seen, operator_ran),
        is_lost(case, seen),
        is_untrue(case, seen),
        leaves_files(case, seen),
    ];
    let found = format!("source {:?}, destinations {:?}, {}", seen.source, seen.destinations, said(seen));
    match checks.into_iter().flatten().next() {
        Some(fault) => Err(format!("{fault}: {found}, work {:?}, tmp {:?}", seen.work, seen.tmp)),
        None => Ok(found),
    }
}

fn said(seen: &Seen) -> String {
    let texts: Vec<_> =
        seen.ends.iter().map(|end| format!("{}: {:?}", end.status, end.stderr.trim())).collect();
    texts.join("; ")
}

fn runs_twice(case: &Case, seen: &Seen, operator_ran: bool) -> Option<String> {
    let live = seen.destinations.iter().chain(&seen.source).filter(|held| **held == Held::Live).count();
    let is_allowed = operator_ran || case.kind == Kind::Clones || is_in_the_window(case, seen);
    (live > 1 && !is_allowed).then(|| "two guests run".into())
}

/// True in the cases that docs/move.md excludes from its guarantee if the destination runs the guest by itself,
/// between the last byte and the acknowledgement: towline is killed, or the migration is cancelled at the source's
/// own monitor, which exits with 3 and is named.
pub(crate) fn is_in_the_window(case: &Case, seen: &Seen) -> bool {
    let is_named = |end: &Finished| {
        end.status.code() == Some(3)
            && end.stderr.contains("whose migration was cancelled there when the destination had everything")
    };
    let is_cancelled = case.fault == Fault::Operator("migrate_cancel") && seen.ends.iter().any(is_named);
    case.kind == Kind::ToStock && (is_cancelled || case.kills(Victim::Towline(0)))
}

/// A guest may be lost with a QEMU that was killed, unless another QEMU has all of it.
fn is_lost(case: &Case, seen: &Seen) -> Option<String> {
    let held = |held: &Held| matches!(held, Held::Live | Held::Whole);
    let is_stored = !case.kind.has_source() || seen.image_is_right == Some(true);
    let is_killed = case.kills(Victim::Source)
        || (0..seen.destinations.len()).any(|at| case.kills(Victim::Destination(at)));
    let is_somewhere = seen.destinations.iter().chain(&seen.source).any(held);
    (!is_somewhere && !is_stored && !is_killed).then(|| "the guest is lost".into())
}

fn is_untrue(case: &Case, seen: &Seen) -> Option<String> {
    if seen.image_is_right == Some(false) {
        return Some("an image has its name and does not verify".into());
    }
    seen.ends.iter().enumerate().find_map(|(index, end)| {
        let has_source = case.kind != Kind::FromStock && index + 1 == seen.ends.len();
        let fault = match end.status.code() {
            None => return end_by_signal(case, index, end),
            Some(0) => done(case, seen, has_source),
            Some(1) => safe(case, seen, has_source, &end.stderr),
            Some(3) => look(case, seen, &end.stderr),
            Some(_) => Some("an exit code that no fault explains"),
        };
        fault.map(|fault| format!("towline {index}: {fault}"))
    })
}

/// A killed towline was sent SIGKILL by this test; one that was ended by another signal got it twice, or before it
/// had installed its handlers.
fn end_by_signal(case: &Case, index: usize, end: &Finished) -> Option<String> {
    let may = match case.fault {
        Fault::Kill(victim) => victim == Victim::Towline(index),
        Fault::Signal(towline, ..) => towline == index,
        _ => false,
    };
    (!may).then(|| format!("towline {index} ended by signal {:?}", end.status.signal()))
}

fn done(case: &Case, seen: &Seen, has_source: bool) -> Option<&'static str> {
    if case.kind == Kind::Save {
        let kept = case.may_be_paused() || case.kills(Victim::Source) || seen.source == Some(Held::Live);
        return match seen.image_is_right {
            Some(true) if kept => None,
            Some(true) => Some("exit 0 with --resume, and the source does not run"),
            _ => Some("exit 0, and there is no image"),
        };
    }
    for (index, held) in seen.destinations.iter().enumerate() {
        match held {
            Held::Live => {}
            Held::Whole if case.may_be_paused() => {}
            Held::Gone if case.kills(Victim::Destination(index)) => {}
            _ => return Some("exit 0, and the guest does not run at its destination"),
        }
    }
    let ends_source = matches!(case.kind, Kind::Move | Kind::Towlines | Kind::ToStock);
    match seen.source {
        Some(Held::Gone) | None => None,
        Some(_) if ends_source && has_source => Some("exit 0 of a move, and its source lives"),
        _ => None,
    }
}

fn safe(case: &Case, seen: &Seen, has_source: bool, stderr: &str) -> Option<&'static str> {
    if case.kind != Kind::Clones && seen.destinations.contains(&Held::Live) {
        return Some("exit 1, and the guest runs at its destination");
    }
    match seen.source {
        None | Some(Held::Live) => None,
        Some(Held::Whole) if case.may_be_paused() => None,
        Some(Held::Gone) if case.kills(Victim::Source) && !has_source => None,
        Some(Held::Gone) if case.kills(Victim::Source) && stderr.contains("could not be reached") => None,
        // The source's own towline was killed before it could resume the guest.
        Some(Held::Whole) if !has_source && seen.ends.len() > 1 => None,
        _ => Some("exit 1, and the guest does not run at its source"),
    }
}

fn look(case: &Case, seen: &Seen, stderr: &str) -> Option<&'static str> {
    if case.hides_output() {
        return None;
    }
    let Some((_, guest)) = stderr.split_once("the guest: ") else {
        return Some("exit 3, and no word of the guest");
    };
    let mut places = PLACES.iter().filter(|(text, _)| guest.contains(text)).peekable();
    if places.peek().is_none() {
        return Some("exit 3, with a place that this test does not know");
    }
    // A QEMU that was killed later may no longer have it.
    let is_killed = matches!(case.fault, Fault::Kill(Victim::Source | Victim::Destination(_)));
    let wrong = places.any(|(_, is_so)| !is_so(seen));
    (wrong && !is_killed).then_some("exit 3, and the guest is not where it says")
}

fn leaves_files(case: &Case, seen: &Seen) -> Option<String> {
    // A killed towline could not remove its files.
    if seen.ends.iter().any(|end| end.status.code().is_none()) {
        return None;
    }
    let wanted: &[&str] = &["guest.img", "guest.img.manifest.json"];
    let unknown = seen.work.iter().find(|name| !wanted.contains(&name.as_str()));
    let unwanted =
        seen.work.iter().find(|_| case.kind == Kind::Save && seen.ends[0].status.code() == Some(1));
    let left = unknown.or(unwanted).or(seen.tmp.first());
    left.map(|name| format!("{name} is left"))
}

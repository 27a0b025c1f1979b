//! Comparison of the guest's fate with towline's report of it.

use std::os::unix::process::ExitStatusExt;

use towline_lab::Finished;

use crate::case::{Case, Fault, Kind, Victim};
use crate::guests::GuestState;

/// State at the end of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Exit of each towline; with two, the destination's is the first.
    pub(crate) ends: Vec<Finished>,
    pub(crate) source: Option<GuestState>,
    pub(crate) destinations: Vec<GuestState>,
    /// Files of the working directory.
    pub(crate) work: Vec<String>,
    /// Files in the directory for temporary files.
    pub(crate) tmp: Vec<String>,
    /// Result of verifying the image, if there is one under its final name.
    pub(crate) image_is_right: Option<bool>,
}

/// A condition on the state at the end.
type Condition = fn(&Outcome) -> bool;

/// Texts of reports with exit status 3, and the condition that makes each of them true.
const REPORTS: &[(&str, Condition)] = &[
    ("paused at its source", |outcome| outcome.source == Some(GuestState::Whole)),
    ("running at its source", |outcome| outcome.source == Some(GuestState::Live)),
    ("it is not known whether its source still has it", |outcome| outcome.source != Some(GuestState::Part)),
    ("whole at its destination", |outcome| {
        outcome.destinations.contains(&GuestState::Whole) || outcome.image_is_right == Some(true)
    }),
    ("do not resume", |outcome| outcome.source != Some(GuestState::Live)),
    ("has ended, and the guest with it", |outcome| outcome.source == Some(GuestState::Gone)),
    ("has ended, and the guest with it; its destination has ended", |outcome| {
        outcome.destinations.iter().all(|guest_state| *guest_state == GuestState::Gone)
    }),
    ("stored, and nowhere else", |outcome| {
        outcome.source == Some(GuestState::Gone) && outcome.image_is_right == Some(true)
    }),
    ("has ended; ", |outcome| outcome.source == Some(GuestState::Gone)),
    ("in its image, which is as it was", |outcome| !outcome.destinations.contains(&GuestState::Busy)),
];

/// Compares the two; returns a summary in one line.
pub(crate) fn judge(case: &Case, outcome: &Outcome, operator_ran: bool) -> Result<String, String> {
    let checks = [
        runs_twice(case, outcome, operator_ran),
        is_lost(case, outcome),
        is_misreported(case, outcome),
        leaves_files(case, outcome),
    ];
    let found =
        format!("source {:?}, destinations {:?}, {}", outcome.source, outcome.destinations, reports(outcome));
    match checks.into_iter().flatten().next() {
        Some(fault) => Err(format!("{fault}: {found}, work {:?}, tmp {:?}", outcome.work, outcome.tmp)),
        None => Ok(found),
    }
}

fn reports(outcome: &Outcome) -> String {
    let texts: Vec<_> =
        outcome.ends.iter().map(|end| format!("{}: {:?}", end.status, end.stderr.trim())).collect();
    texts.join("; ")
}

/// Fault of a case in which two guests run.
pub(crate) const TWO_GUESTS: &str = "two guests run";

fn runs_twice(case: &Case, outcome: &Outcome, operator_ran: bool) -> Option<String> {
    let live = outcome
        .destinations
        .iter()
        .chain(&outcome.source)
        .filter(|guest_state| **guest_state == GuestState::Live)
        .count();
    let is_allowed = operator_ran || case.kind == Kind::Clones || is_outside_guarantee(case, outcome);
    (live > 1 && !is_allowed).then(|| TWO_GUESTS.into())
}

/// True in the cases that docs/move.md excludes from its guarantee if the destination runs the guest on its
/// own, between the last byte and the acknowledgement: towline is killed, or the migration is cancelled at
/// the source's own monitor, which exits with 3 and is named.
pub(crate) fn is_outside_guarantee(case: &Case, outcome: &Outcome) -> bool {
    let is_named = |end: &Finished| {
        end.status.code() == Some(3)
            && end.stderr.contains("whose migration was cancelled there when the destination had everything")
    };
    let is_cancelled = case.fault == Fault::Operator("migrate_cancel") && outcome.ends.iter().any(is_named);
    case.kind == Kind::ToStock && (is_cancelled || case.kills(Victim::Towline(0)))
}

/// True if two guests may run by the moment that docs/move.md excludes with a stock source: its migration is
/// cancelled while it reads the acknowledgement. Nothing on the connection shows that to the destination.
pub(crate) fn may_hit_excluded_moment(case: &Case) -> bool {
    case.kind == Kind::FromStock && case.fault == Fault::Operator("migrate_cancel")
}

/// A guest may be lost with a QEMU that was killed, unless another QEMU has all of it.
fn is_lost(case: &Case, outcome: &Outcome) -> Option<String> {
    let guest_state = |guest_state: &GuestState| matches!(guest_state, GuestState::Live | GuestState::Whole);
    let is_stored = !case.kind.has_source() || outcome.image_is_right == Some(true);
    let is_killed = case.kills(Victim::Source)
        || (0..outcome.destinations.len()).any(|at| case.kills(Victim::Destination(at)));
    let is_somewhere = outcome.destinations.iter().chain(&outcome.source).any(guest_state);
    (!is_somewhere && !is_stored && !is_killed).then(|| "the guest is lost".into())
}

fn is_misreported(case: &Case, outcome: &Outcome) -> Option<String> {
    if outcome.image_is_right == Some(false) {
        return Some("an image has its name and does not verify".into());
    }
    outcome.ends.iter().enumerate().find_map(|(index, end)| {
        let has_source = case.kind != Kind::FromStock && index + 1 == outcome.ends.len();
        let fault = match end.status.code() {
            None => return end_by_signal(case, index, end),
            Some(0) => done(case, outcome, has_source),
            Some(1) => safe(case, outcome, has_source, &end.stderr),
            Some(3) => look(case, outcome, &end.stderr),
            Some(_) => Some("an exit status that no fault explains"),
        };
        fault.map(|fault| format!("towline {index}: {fault}"))
    })
}

/// A killed towline was sent SIGKILL by this test; one that was ended by another signal got it twice, or
/// before it had installed its handlers.
fn end_by_signal(case: &Case, index: usize, end: &Finished) -> Option<String> {
    let may = match case.fault {
        Fault::Kill(victim) => victim == Victim::Towline(index),
        Fault::Signal(towline, ..) => towline == index,
        _ => false,
    };
    (!may).then(|| format!("towline {index} ended by signal {:?}", end.status.signal()))
}

fn done(case: &Case, outcome: &Outcome, has_source: bool) -> Option<&'static str> {
    if case.kind == Kind::Save {
        let kept =
            case.may_be_paused() || case.kills(Victim::Source) || outcome.source == Some(GuestState::Live);
        return match outcome.image_is_right {
            Some(true) if kept => None,
            Some(true) => Some("exit 0 with --resume, and the source does not run"),
            _ => Some("exit 0, and there is no image"),
        };
    }
    for (index, guest_state) in outcome.destinations.iter().enumerate() {
        match guest_state {
            GuestState::Live => {}
            GuestState::Whole if case.may_be_paused() => {}
            GuestState::Gone if case.kills(Victim::Destination(index)) => {}
            _ => return Some("exit 0, and the guest does not run at its destination"),
        }
    }
    let ends_source = matches!(case.kind, Kind::Move | Kind::Towlines | Kind::ToStock);
    match outcome.source {
        Some(GuestState::Gone) | None => None,
        Some(_) if ends_source && has_source => Some("exit 0 of a move, and its source lives"),
        _ => None,
    }
}

fn safe(case: &Case, outcome: &Outcome, has_source: bool, stderr: &str) -> Option<&'static str> {
    if case.kind != Kind::Clones && outcome.destinations.contains(&GuestState::Live) {
        return Some("exit 1, and the guest runs at its destination");
    }
    match outcome.source {
        None | Some(GuestState::Live) => None,
        Some(GuestState::Whole) if case.may_be_paused() => None,
        Some(GuestState::Gone) if case.kills(Victim::Source) && !has_source => None,
        Some(GuestState::Gone) if case.kills(Victim::Source) && stderr.contains("was not reached") => None,
        // The source's own towline was killed before it could resume the guest.
        Some(GuestState::Whole) if !has_source && outcome.ends.len() > 1 => None,
        _ => Some("exit 1, and the guest does not run at its source"),
    }
}

fn look(case: &Case, outcome: &Outcome, stderr: &str) -> Option<&'static str> {
    if case.hides_output() {
        return None;
    }
    let Some((_, guest)) = stderr.split_once("the guest: ") else {
        return Some("exit 3, and no word of the guest");
    };
    let mut places = REPORTS.iter().filter(|(text, _)| guest.contains(text)).peekable();
    if places.peek().is_none() {
        return Some("exit 3, with a place that this test does not know");
    }
    // A QEMU that was killed later may no longer have it.
    let is_killed = matches!(case.fault, Fault::Kill(Victim::Source | Victim::Destination(_)));
    let wrong = places.any(|(_, is_so)| !is_so(outcome));
    (wrong && !is_killed).then_some("exit 3, and the guest is not where it says")
}

fn leaves_files(case: &Case, outcome: &Outcome) -> Option<String> {
    // A killed towline could not remove its files.
    if outcome.ends.iter().any(|end| end.status.code().is_none()) {
        return None;
    }
    let wanted: &[&str] = &["guest.img", "guest.img.manifest.json"];
    let unknown = outcome.work.iter().find(|name| !wanted.contains(&name.as_str()));
    // An image that was published before the failure is kept, and named.
    let end = &outcome.ends[0];
    let is_kept = end.stderr.contains("guest.img was complete before that, and is kept");
    let failed = case.kind == Kind::Save && end.status.code() == Some(1) && !is_kept;
    let unwanted = outcome.work.iter().find(|_| failed);
    let left = unknown.or(unwanted).or(outcome.tmp.first());
    left.map(|name| format!("{name} is left"))
}

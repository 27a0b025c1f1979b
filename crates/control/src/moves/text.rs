//! Texts about records: the open decision, and the remedy.

use super::{ListedMove, MoveEnd, MoveRecord, Role, Stage};
use crate::switchover::{Choice, ResumeBlocker, Side, Unresolved};

/// Describes what is undecided of a move, by its record.
pub(super) fn undecided(record: &MoveRecord) -> String {
    let (source, destination) = (&record.source, &record.destination);
    match (record.stage, record.role) {
        (Stage::Commit, _) => format!(
            "{destination} was sent everything, and may run the guest; {source} is stopped, or has it back if its migration failed"
        ),
        (Stage::Acknowledge, Role::Destination) => format!(
            "{destination} holds the guest, paused; it is not known whether its source, reached by {source}, is done with it"
        ),
        (Stage::Acknowledge, Role::Source) => format!(
            "{destination} holds the guest, paused, and did not get the outcome; {source} is done with it, or has it back if its migration failed"
        ),
        (Stage::Acknowledge, Role::Both) => {
            format!(
                "{destination} holds the guest, paused; it is not known yet whether {source} is done with it"
            )
        }
        (Stage::Complete, _) => format!(
            "{source} is done with the guest, and the towline at {destination} is sent that: it is not known whether it runs there"
        ),
        (Stage::Run, _) => {
            format!(
                "{source} is done with the guest, and {destination} is being started: it is not known whether it runs"
            )
        }
        (Stage::Left, _) => left(record),
    }
}

/// Notice of a command that leaves a move undecided: the commands that finish it.
pub(crate) fn notice(record: &MoveRecord, unresolved: Unresolved) -> String {
    let id = &record.id;
    let resume = format!("`towline resume {id}");
    let finish = match (unresolved, record.role) {
        (Unresolved::BothPaused, Role::Both) => {
            format!("{resume}` runs the guest at its destination, {resume} --run-here=source` at its source")
        }
        (Unresolved::UpgradeNotUndone, _) => {
            format!("{resume} --run-here=source` runs the guest in the old QEMU")
        }
        (Unresolved::UpgradedLost, _) => format!("{resume} --discard=source` ends the old QEMU"),
        _ => format!("{resume}` finishes it"),
    };
    format!("move {id} is undecided: `towline moves` shows it, {finish}")
}

/// Reason for which the guest of a copied source must not be resumed.
pub(super) fn left(record: &MoveRecord) -> String {
    let MoveRecord { id, source, destination, .. } = record;
    match record.stage {
        Stage::Left if record.guest_plan.run => format!(
            "the guest of {source} was copied to {destination} and made to run there (move {id}): to run it here too would run it twice; end \
             this QEMU, or, if it does not run there, `towline resume {id} --run-here=source`"
        ),
        Stage::Left => format!(
            "the guest of {source} was paused when it was copied to {destination} (move {id}), and QEMU sends it again only after it was resumed: \
             resume it first (`cont`), if it may run"
        ),
        _ => format!(
            "the guest of {source} is part of a move to {destination} that is undecided: `towline resume {id}` first"
        ),
    }
}

/// Commands to run, and other advice.
pub(super) fn advice(listed: &ListedMove) -> Vec<String> {
    let id = &listed.record.id;
    let mut advice = Vec::new();
    match (listed.owner, listed.record.stage) {
        (Some(pid), _) => advice.push(format!("wait: towline (process {pid}) works on it")),
        (None, Stage::Left) => {
            advice.push(format!(
                "nothing: the record keeps a later copy from running {}, and goes with that QEMU",
                listed.record.source
            ));
        }
        (None, _) => advice.push(format!("towline resume {id}")),
    }
    let changed = |end: &String| {
        format!("towline repair {end}   (its settings are left changed; `resume` does this too)")
    };
    if listed.owner.is_none() {
        advice.extend(listed.changed.iter().map(changed));
    }
    advice
}

/// Reason for which a move is not finished automatically, and what to look at.
pub(super) fn explain(blocker: ResumeBlocker, record: &MoveRecord) -> String {
    let MoveRecord { id, source, destination, .. } = record;
    let since = record.started_at();
    match blocker {
        ResumeBlocker::DestinationWaits => format!(
            "{source} is done with the guest (postmigrate), and the towline at {destination} did not get the outcome. On that host, run it: \
             `towline resume {id} --run-here`; then end this source: `towline resume {id} --discard`. Or take the guest back: on that host \
             `towline resume {id} --discard`, and only then here `towline resume {id} --run-here`"
        ),
        ResumeBlocker::DestinationMayRun => format!(
            "{source} is done with the guest (postmigrate), and {destination} MAY RUN IT. Look there (`query-status`; `towline moves`). If it runs \
             there, end this source: `towline resume {id} --discard`. Only if it does not, and will not: end that QEMU, and then run the guest \
             here: `towline resume {id} --run-here`. TWO GUESTS ON ONE DISK DESTROY IT"
        ),
        ResumeBlocker::SourceElsewhere => format!(
            "{destination} holds the whole guest, paused. Look at its source, which sent it from {source} (`query-status`; `towline resume {id}` if \
             a towline is there). If its status is `postmigrate`, or that QEMU has exited, and it neither ran on nor was sent elsewhere after {since}: \
             `towline resume {id} --run-here`. If it runs or is paused there, or did since: `towline resume {id} --discard`. TWO GUESTS ON ONE DISK \
             DESTROY IT"
        ),
        ResumeBlocker::SourceLost => format!(
            "{destination} holds the whole guest as it was at {since}, paused; {source} has exited, and it is not known whether it was done with the \
             guest before. If it ran on there after that time, or was sent elsewhere, its disks are newer than its memory at {destination}: \
             end that (`towline resume {id} --forget`, then `quit`). If it did not: `towline resume {id} --run-here=destination`"
        ),
        ResumeBlocker::DestinationStopped => format!(
            "{destination} holds the guest, which stopped there by itself or is being sent on (`query-status` shows why): it is not run or ended from here. \
             Act by its monitor, end the source if it is left, and then `towline resume {id} --forget`"
        ),
        ResumeBlocker::BothMayRun => format!(
            "{source} HAS THE GUEST, and {destination}, which was given everything, MAY RUN IT TOO. Look there now (`query-status`): if it runs there, \
             end one of the two; if not, end that QEMU. Then `towline resume {id} --forget`. TWO GUESTS ON ONE DISK DESTROY IT"
        ),
        ResumeBlocker::SourceRanOn => format!(
            "{source} is postmigrate, but not provably by this move: its guest may have run there after {since} and have been sent elsewhere, and would \
             then be newer than what {destination} holds. Look where it went. If it was: `towline resume {id} --discard{at}`. Only if it neither ran on \
             nor was sent elsewhere: `towline resume {id} --run-here{at}`. TWO GUESTS ON ONE DISK DESTROY IT",
            at = at_destination(record)
        ),
        ResumeBlocker::SourceUnknown => format!(
            "{source} does not reply, or is still migrating: its state is not known. Try again when it replies, or when it has exited"
        ),
        ResumeBlocker::DestinationUnknown => format!(
            "{destination} does not reply, or is still loading: it is not known whether it runs the guest. Try again when it replies, or when it has exited"
        ),
        ResumeBlocker::DestinationLost => format!(
            "{source} holds the guest as it was when it was sent (postmigrate); {destination} has exited or failed, and MAY HAVE RUN IT before. If it \
             did, its disks are newer than its memory here: end it (`quit`) and start the guest again. Only if it never ran there: \
             `towline resume {id} --run-here=source`"
        ),
        ResumeBlocker::MemoryChanged => format!(
            "{destination} has exited, and may have run the guest in the memory that {source} maps too: the device state there may not fit that \
             memory any more, and must not run. End it: `towline resume {id} --discard=source`, and start the guest again"
        ),
        ResumeBlocker::RunsTwice => {
            format!(
                "the guest RUNS AT BOTH ENDS, {source} and {destination}: stop one of them at once (`stop`), and end it"
            )
        }
        ResumeBlocker::SourceHasGuest => format!("{source} has the guest"),
        ResumeBlocker::DestinationHasGuest => {
            format!("the guest runs at {destination}, or may have run there since it was to")
        }
        ResumeBlocker::NotOnThisHost => "that end is on another host, or its QEMU has exited".into(),
        ResumeBlocker::OnlyCopy => "no other QEMU is known to hold the guest".into(),
    }
}

/// Name of the destination in a choice: on its host, or by its end.
fn at_destination(record: &MoveRecord) -> &'static str {
    match record.role {
        Role::Both => "=destination",
        Role::Source => " on its host",
        Role::Destination => "",
    }
}

/// Reason for which a choice is refused.
pub(super) fn refusal(choice: Choice, reason: ResumeBlocker, record: &MoveRecord) -> String {
    let end = |side: Side| match side {
        Side::Source => &record.source,
        Side::Destination => &record.destination,
    };
    let text = explain(reason, record);
    match choice {
        Choice::Run(side) => format!("the guest is not run at {}: {text}", end(side)),
        Choice::Discard(side) => format!("{} is not ended: {text}", end(side)),
    }
}

/// The end that is on this host; `None` if both are.
pub(super) fn only_side(record: &MoveRecord) -> Option<Side> {
    match (&record.source, &record.destination) {
        (MoveEnd::Qemu { .. }, MoveEnd::Qemu { .. }) => None,
        (MoveEnd::Qemu { .. }, _) => Some(Side::Source),
        _ => Some(Side::Destination),
    }
}

impl ListedMove {
    /// A sentence that describes what is undecided.
    #[must_use]
    pub fn undecided(&self) -> String {
        undecided(&self.record)
    }

    /// Commands to run, and other advice.
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        advice(self)
    }
}

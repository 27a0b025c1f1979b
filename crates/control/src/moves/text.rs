//! Texts about records: the open decision, and the remedy.

use super::{Decision, ListedMove, MoveEnd, MoveRecord, Role};
use crate::switchover::{AtDestination, AtSource, Choice, GuestState, Refusal, Side, ToDo};

/// Notice of a command that leaves a move undecided: the commands that finish it.
pub(crate) fn notice(record: &MoveRecord, guest: GuestState) -> String {
    let id = &record.id;
    let resume = format!("`towline resume {id}");
    let finish = match (guest.source, guest.to_do) {
        (AtSource::Paused, ToDo::RunOne) if record.role == Role::Both => {
            format!("{resume}` runs the guest at its destination, {resume} --run-here=source` at its source")
        }
        (AtSource::Paused, ToDo::RunSource) => {
            format!("{resume} --run-here=source` runs the guest in the old QEMU")
        }
        (AtSource::Paused, ToDo::StartAgain) => format!("{resume} --discard=source` ends the old QEMU"),
        _ => format!("{resume}` finishes it"),
    };
    format!("move {id} is undecided: `towline moves` shows it, {finish}")
}

/// Reason for which the guest of a copied source must not be resumed.
pub(super) fn left(record: &MoveRecord) -> String {
    let MoveRecord { id, source, destination, .. } = record;
    match record.stage {
        Decision::Left if record.guest_plan.run => format!(
            "the guest of {source} was copied to {destination} and made to run there (move {id}): to run it here too would run it twice; end \
             this QEMU, or, if it does not run there, `towline resume {id} --run-here=source`"
        ),
        Decision::Left => format!(
            "the guest of {source} was paused when it was copied to {destination} (move {id}), and QEMU sends it again only after it was resumed: \
             resume it first (`cont`), if it may run"
        ),
        _ => format!(
            "the guest of {source} is part of a move to {destination} that is undecided: `towline resume {id}` first"
        ),
    }
}

const WARNING: &str = ". TWO GUESTS ON ONE DISK DESTROY IT";

/// Reason for which a move is not finished automatically, and what to look at.
pub(super) fn explain(state: GuestState, record: &MoveRecord) -> String {
    let source = state.at_source(&record.source.to_string());
    let destination = state.at_destination(&record.destination.to_string());
    let warning = match state.to_do {
        ToDo::LookAtDestination | ToDo::LookAtSource | ToDo::EndOne => WARNING,
        ToDo::RunDestinationUnlessItRanOn if state.source != AtSource::Ended => WARNING,
        _ => "",
    };
    let to_do = to_do(state, record);
    format!("the guest: {source}; {destination}{}{to_do}{warning}", if to_do.is_empty() { "" } else { ". " })
}

/// Commands for the next step of an operator.
fn to_do(state: GuestState, record: &MoveRecord) -> String {
    let MoveRecord { id, source, destination, .. } = record;
    let (resume, at, since) = (format!("`towline resume {id}"), at_destination(record), record.started_at());
    match state.to_do {
        ToDo::Wait => "Try again when both reply, or have exited".into(),
        ToDo::RunOne => format!(
            "The towline at {destination} did not get the outcome. On that host, run it: {resume} --run-here`; then end this source: \
             {resume} --discard`. Or take the guest back: on that host {resume} --discard`, and only then here {resume} --run-here`"
        ),
        ToDo::LookAtDestination => format!(
            "Look there (`query-status`; `towline moves`). If it runs there, end this source: {resume} --discard`. Only if it does not, \
             and will not: end that QEMU, and then run the guest here: {resume} --run-here`"
        ),
        ToDo::LookAtSource => format!(
            "Look at its source (`query-status`; {resume}` if a towline is there). If its status is `postmigrate`, or that QEMU has \
             exited, and it neither ran on nor was sent elsewhere after {since}: {resume} --run-here`. If it runs or is paused there, \
             or did since: {resume} --discard`"
        ),
        ToDo::RunDestinationUnlessItRanOn if state.source == AtSource::Ended => format!(
            "It is not known whether the source was done with it before. If it ran on there after {since}, or was sent elsewhere, its \
             disks are newer than its memory at {destination}: end that ({resume} --forget`, then `quit`). If it did not: \
             {resume} --run-here=destination`"
        ),
        ToDo::RunDestinationUnlessItRanOn => format!(
            "The source is postmigrate, but not provably by this move: its guest may have run there after {since} and have been sent \
             elsewhere, and would then be newer than what {destination} holds. Look where it went. If it was: {resume} --discard{at}`. \
             Only if it neither ran on nor was sent elsewhere: {resume} --run-here{at}`"
        ),
        ToDo::ActAtDestination => format!(
            "It stopped there by itself or is being sent on (`query-status` shows why): it is not run or ended from here. Act by its \
             monitor, end the source if it is left, and then {resume} --forget`"
        ),
        ToDo::EndOne if state.destination == AtDestination::Runs => {
            "It RUNS AT BOTH ENDS: stop one of them at once (`stop`), and end it".into()
        }
        ToDo::EndOne => format!(
            "Look there now (`query-status`): if it runs there, end one of the two; if not, end that QEMU. Then {resume} --forget`"
        ),
        ToDo::KeepDestination => "It may have run there, because it was to run at its destination".into(),
        ToDo::RunSourceUnlessItRan => format!(
            "It may have run there before. If it did, its disks are newer than its memory here: end it (`quit`) and start the guest \
             again. Only if it never ran there: {resume} --run-here=source`"
        ),
        ToDo::StartAgain => format!(
            "It may have run there in the memory that {source} maps too, which the device state of that may not fit any more: it must \
             not run. End it: {resume} --discard=source`, and start the guest again"
        ),
        _ => String::new(),
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
pub(super) fn refusal(choice: Choice, refusal: Refusal, record: &MoveRecord) -> String {
    let end = |side: Side| match side {
        Side::Source => &record.source,
        Side::Destination => &record.destination,
    };
    let text = match refusal {
        Refusal::Evidence(state) => explain(state, record),
        Refusal::NotOnThisHost => "that end is on another host, or its QEMU has exited".into(),
        Refusal::OnlyCopy => "no other QEMU is known to hold the guest".into(),
    };
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
    pub fn undecided(&self) -> String {
        let record = &self.record;
        let (source, destination) = (&record.source, &record.destination);
        match (record.stage, record.role) {
            (Decision::Commit, _) => format!(
                "{destination} was sent everything, and may run the guest; {source} is stopped, or has it back if its migration failed"
            ),
            (Decision::Acknowledge, Role::Destination) => format!(
                "{destination} holds the guest, paused; it is not known whether its source, reached by {source}, is done with it"
            ),
            (Decision::Acknowledge, Role::Source) => format!(
                "{destination} holds the guest, paused, and did not get the outcome; {source} is done with it, or has it back if its migration failed"
            ),
            (Decision::Acknowledge, Role::Both) => {
                format!(
                    "{destination} holds the guest, paused; it is not known yet whether {source} is done with it"
                )
            }
            (Decision::Complete, _) => format!(
                "{source} is done with the guest, and the towline at {destination} is sent that: it is not known whether it runs there"
            ),
            (Decision::Run, _) => {
                format!(
                    "{source} is done with the guest, and {destination} is being started: it is not known whether it runs"
                )
            }
            (Decision::Left, _) => left(record),
        }
    }

    /// Commands to run, and other advice.
    pub fn advice(&self) -> Vec<String> {
        let Self { record, owner, changed, .. } = self;
        if let Some(pid) = owner {
            return vec![format!("wait: towline (process {pid}) works on it")];
        }
        let finish = match record.stage {
            Decision::Left => format!(
                "nothing: the record keeps a later copy from running {}, and goes with that QEMU",
                record.source
            ),
            _ => format!("towline resume {}", record.id),
        };
        let repair = |end: &String| {
            format!("towline repair {end}   (its settings are left changed; `resume` does this too)")
        };
        std::iter::once(finish).chain(changed.iter().map(repair)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{peer, record, running};
    use super::*;

    #[test]
    fn description_of_an_undecided_move_names_both_ends_and_the_remedy() {
        for stage in
            [Decision::Commit, Decision::Acknowledge, Decision::Complete, Decision::Run, Decision::Left]
        {
            let record = record(running(), peer()).at_stage(stage);
            let listed = ListedMove { record, owner: None, exited: Vec::new(), changed: Vec::new() };
            let text = listed.undecided();
            assert!(text.contains("qmp:/run/vm/b.qmp") && text.contains("tcp:10.0.0.1:4444"), "{text}");
            let expected = match stage {
                Decision::Left => {
                    "nothing: the record keeps a later copy from running qmp:/run/vm/b.qmp, and goes with that QEMU".into()
                }
                _ => format!("towline resume {}", "ab".repeat(16)),
            };
            assert_eq!(listed.advice(), [expected]);
        }
    }

    #[test]
    fn a_notice_names_the_command_that_finishes_the_move() {
        let notice = |record: &MoveRecord, destination, to_do| {
            let text = super::notice(record, GuestState::new(AtSource::Paused, destination, to_do));
            let id = "ab".repeat(16);
            let expected = format!("move {id} is undecided: `towline moves` shows it, ");
            text.strip_prefix(&expected).unwrap_or_else(|| panic!("{text}")).replace(&id, "ID")
        };
        let local = record(running(), running());
        assert_eq!(
            notice(&local, AtDestination::None, ToDo::RunSource),
            "`towline resume ID --run-here=source` runs the guest in the old QEMU"
        );
        assert_eq!(
            notice(&local, AtDestination::Holds, ToDo::RunOne),
            "`towline resume ID` runs the guest at its destination, `towline resume ID --run-here=source` at its source"
        );
        assert_eq!(
            notice(&local, AtDestination::Ended, ToDo::StartAgain),
            "`towline resume ID --discard=source` ends the old QEMU"
        );
        let remote = record(peer(), running());
        assert_eq!(notice(&remote, AtDestination::Holds, ToDo::RunOne), "`towline resume ID` finishes it");
    }
}

//! Every situation after a failure, by the identifier that it had before: where the guest is, what to do, and
//! the words that an operator needs.

use super::{GuestAfterFailure, GuestState, SourceCategory};
use crate::plan::progress::{DestinationState, SourceState};
use crate::switchover::{AtDestination, AtSource, ToDo};
use AtDestination::{Holds, MayRun, Runs};
use AtSource::{HasIt, Paused};
use SourceCategory::{Command, Image, Process, Qemu};

const NOWHERE: AtDestination = AtDestination::None;
const LOST: AtDestination = AtDestination::Ended;
const AT_UNKNOWN: AtDestination = AtDestination::Unknown;
const GONE: AtSource = AtSource::Ended;
const NOT_KNOWN: AtSource = AtSource::Unknown;
const THERE: ToDo = ToDo::LookAtDestination;
const SOURCE: ToDo = ToDo::LookAtSource;

const ONE: &str = "run it at one of them only (`cont`)";
const OLDER: &str = "do not resume the source, whose state is older: end it (`quit`)";
const LOOK: &str = "look there, and run it at the source (`cont`) only if it does not run there";
const LOOK_AT_SOURCE: &str =
    "look at the source, and run it at the destination (`cont`) only if it does not run";
const ONLY_THERE: &str = "run it there (`cont`), or end it";

struct Situation(&'static str, SourceCategory, GuestState, &'static str);

const fn at(source: AtSource, destination: AtDestination, to_do: ToDo) -> GuestState {
    GuestState::new(source, destination, to_do)
}

/// The guest is where it was: exit status 1.
fn untouched() -> Vec<Situation> {
    let at = |source| at(source, NOWHERE, ToDo::Nothing);
    vec![
        Situation("at-source", Qemu, at(HasIt), "safe at its source"),
        Situation("in-image", Image, at(HasIt), "in its image, which is as it was"),
        Situation("ended-with-process", Process("it has ended"), at(HasIt), "it has ended"),
        Situation(
            "with-command",
            Command,
            at(HasIt),
            "where the command of its stream reads it; this copy has not changed it",
        ),
        Situation("unreached", Qemu, at(NOT_KNOWN), "not touched; its QEMU was not reached"),
        Situation("unopened", Image, at(NOT_KNOWN), "not touched; its image could not be opened"),
        Situation("no-guest", Qemu, at(GONE), "none at this source; nothing was changed"),
    ]
}

/// An operator must look at it: exit status 3.
fn unresolved() -> Vec<Situation> {
    [after_postcopy(), of_images(), at_both_ends(), at_one_end()].into_iter().flatten().collect()
}

/// It ran at its destination before all of it was there, or is there without a device.
fn after_postcopy() -> Vec<Situation> {
    vec![
        Situation("without-vsock", Qemu, at(Paused, Runs, ToDo::AttachVsock), "(`device_add`)"),
        Situation("image-cut-short", Image, GuestState::TRUNCATED, "restore another copy of the image"),
        Situation("postcopy-paused", Image, GuestState::LACKS_MEMORY, "`towline copy --postcopy --recover`"),
        Situation(
            "postcopy-unreadable",
            Image,
            GuestState::UNREADABLE,
            "if the image can be made whole again",
        ),
        Situation("postcopy-blocked", Image, GuestState::BLOCKED, "kill that QEMU, and restore the image"),
        Situation("postcopy-ended", Image, GuestState::RAN_AND_ENDED, "it may have run there"),
        Situation("postcopy-arrived", Image, GuestState::ARRIVED, "may run it: look there"),
        Situation("postcopy-arrived, live", Qemu, at(Paused, MayRun, ToDo::KeepDestination), OLDER),
        Situation("postcopy-refused", Qemu, at(Paused, AT_UNKNOWN, THERE), LOOK),
        Situation(
            "postcopy-split",
            Qemu,
            at(Paused, Runs, ToDo::Reconnect),
            "`migrate` with resume at the source",
        ),
    ]
}

/// Its source is an image.
fn of_images() -> Vec<Situation> {
    vec![
        Situation("destination-may-run, of an image", Image, at(HasIt, MayRun, THERE), "run it: look there"),
        Situation("both-paused, of an image", Image, at(HasIt, Holds, ToDo::RunDestination), ONLY_THERE),
        Situation("stopped-again, of an image", Image, at(HasIt, Holds, THERE), "does not run: look there"),
        Situation(
            "destination-lost, of an image",
            Image,
            at(HasIt, LOST, ToDo::RunSourceUnlessItRan),
            "in its image, which is as it was; its destination has ended: it may have run there",
        ),
        Situation(
            "destination-AT_UNKNOWN, of an image",
            Image,
            at(HasIt, AT_UNKNOWN, THERE),
            "destination: look there",
        ),
    ]
}

/// Both ends are left.
fn at_both_ends() -> Vec<Situation> {
    vec![
        Situation("destination-holds", Qemu, at(NOT_KNOWN, Holds, SOURCE), LOOK_AT_SOURCE),
        Situation("undecided", Qemu, at(NOT_KNOWN, Holds, SOURCE), LOOK_AT_SOURCE),
        Situation("destination-may-run", Qemu, at(Paused, MayRun, THERE), LOOK),
        Situation("destination-may-run, source exited", Qemu, at(GONE, MayRun, THERE), "run it: look there"),
        Situation("both-may-run", Qemu, at(HasIt, MayRun, ToDo::EndOne), "look at both, and end one of them"),
        Situation("both-paused", Qemu, at(Paused, Holds, ToDo::RunOne), ONE),
        Situation(
            "not-retracted",
            Qemu,
            at(Paused, Holds, ToDo::ForgetRecord),
            "`towline resume ID --forget`",
        ),
        Situation("stopped-again", Qemu, at(Paused, Holds, ToDo::KeepDestination), OLDER),
        Situation(
            "destination-lost",
            Qemu,
            at(Paused, LOST, ToDo::RunSourceUnlessItRan),
            "only if it did not",
        ),
        Situation("destination-unknown", Qemu, at(Paused, AT_UNKNOWN, THERE), LOOK),
        Situation("peer-waits", Qemu, at(Paused, Holds, THERE), LOOK),
        Situation("peer-waits, source not known", Qemu, at(NOT_KNOWN, Holds, SOURCE), LOOK_AT_SOURCE),
        Situation("peer-unknown", Qemu, at(Paused, AT_UNKNOWN, THERE), LOOK),
        Situation("peer-did-not-run", Qemu, at(Paused, Holds, ToDo::RunOne), ONE),
    ]
}

/// One end is left, or is not to be used.
fn at_one_end() -> Vec<Situation> {
    vec![
        Situation("source-run-by-others", Qemu, at(HasIt, Holds, ToDo::RunOne), ONE),
        Situation(
            "upgraded-lost",
            Qemu,
            at(Paused, LOST, ToDo::StartAgain),
            "do not resume the source, end it (`quit`)",
        ),
        Situation("upgraded-stopped", Qemu, at(Paused, Holds, ToDo::KeepDestination), OLDER),
        Situation("upgraded-unknown", Qemu, at(Paused, AT_UNKNOWN, ToDo::KeepDestination), OLDER),
        Situation(
            "upgrade-not-undone",
            Qemu,
            at(Paused, NOWHERE, ToDo::RunSource),
            "resume it at its source (`cont`)",
        ),
        Situation("destination-only", Qemu, at(GONE, Holds, ToDo::RunDestination), ONLY_THERE),
        Situation("destination-alone", Qemu, at(GONE, MayRun, THERE), "run it: look there"),
        Situation("both-exited", Qemu, at(GONE, LOST, ToDo::StartAgain), "it is lost: start it again"),
        Situation(
            "source-exited",
            Qemu,
            at(GONE, NOWHERE, ToDo::StartAgain),
            "has ended, and the guest with it",
        ),
        Situation(
            "source-exited-since",
            Qemu,
            at(GONE, AT_UNKNOWN, ToDo::StartAgain),
            "it ran on at its source, so a state there is older",
        ),
        Situation(
            "source-unknown",
            Qemu,
            at(NOT_KNOWN, NOWHERE, ToDo::RunSource),
            "unless QEMU does that by itself",
        ),
        Situation("source-not-ended", Qemu, at(Paused, Runs, ToDo::EndSource), "end the source (`quit`)"),
        Situation(
            "source-not-resumed",
            Qemu,
            at(Paused, Holds, ToDo::RunSource),
            "resume it at its source (`cont`)",
        ),
        Situation(
            "stored-only",
            Qemu,
            at(GONE, Holds, ToDo::Restore),
            "stored, and nowhere else: restore it from there",
        ),
        Situation(
            "unpublished",
            Qemu,
            at(GONE, AT_UNKNOWN, ToDo::Restore),
            "the file that a notice names may hold it",
        ),
    ]
}

#[test]
fn an_untouched_guest_is_only_located() {
    for Situation(name, keeper, state, sentence) in untouched() {
        let guest = GuestAfterFailure::unresolved(state);
        assert_eq!(guest.sentence(keeper), sentence, "{name}");
        assert!(!guest.needs_attention() && !guest.may_be_at_destination(), "{name}");
    }
}

#[test]
fn an_unresolved_guest_is_located_at_both_ends_with_what_to_do() {
    for Situation(name, keeper, state, words) in unresolved() {
        let guest = GuestAfterFailure::unresolved(state);
        let sentence = guest.sentence(keeper);
        assert!(sentence.contains(words), "{name}: {sentence}");
        assert!(sentence.contains("; ") && sentence.contains(": "), "{name}: {sentence}");
        assert!(guest.needs_attention(), "{name}");
    }
}

/// Equal pairs with different steps, and equal sentences, would hide a distinction.
#[test]
fn a_sentence_stands_for_one_state() {
    let mut sentences = std::collections::HashMap::new();
    for Situation(name, keeper, state, _) in unresolved() {
        let sentence = GuestAfterFailure::unresolved(state).sentence(keeper);
        let other = *sentences.entry(sentence).or_insert(state);
        assert_eq!(other, state, "{name}");
    }
}

#[test]
fn a_destination_is_left_alone_if_it_may_have_the_guest() {
    let left = |name: &str| {
        let found = unresolved().into_iter().find(|Situation(of, ..)| *of == name).unwrap();
        GuestAfterFailure::unresolved(found.2).may_be_at_destination()
    };
    for name in [
        "source-run-by-others",
        "source-exited",
        "source-exited-since",
        "both-exited",
        "upgraded-lost",
        "upgrade-not-undone",
    ] {
        assert!(!left(name), "{name}");
    }
    for name in ["both-paused", "not-retracted", "upgraded-stopped", "upgraded-unknown", "source-unknown"] {
        assert!(left(name), "{name}");
    }
}

#[test]
fn driven_source_is_named() {
    let lost = at(AtSource::Ended, AtDestination::None, ToDo::StartAgain);
    let named = GuestAfterFailure::unresolved_at(lost, "/run/a.qmp").sentence(Qemu);
    let rest = "has ended, and the guest with it; its destination has nothing that can run: it is lost: start it again";
    assert_eq!(named, format!("its source, QEMU on /run/a.qmp, {rest}"));
    assert_eq!(GuestAfterFailure::unresolved(lost).sentence(Qemu), format!("its source's QEMU {rest}"));
}

/// A guest of this process is gone, and nothing is known of one whose stream a command reads.
#[test]
fn the_category_of_the_source_is_part_of_the_state() {
    let states = [Qemu, Image, Process("it has ended"), Command]
        .map(|keeper| GuestAfterFailure::SAFE.state(keeper).source);
    assert_eq!(states, [AtSource::HasIt, AtSource::HasIt, AtSource::Ended, AtSource::Unknown]);
}

#[test]
fn success_texts_describe_both_ends() {
    use DestinationState as D;
    use SourceState as S;
    assert_eq!(
        [S::Running, S::Paused, S::Ended, S::Unchanged, S::UpToSender].map(S::text),
        [
            "runs on",
            "paused (postmigrate); `cont` resumes it",
            "ended",
            "as it was",
            "not known: it has sent its guest; look there whether it still has one"
        ]
    );
    assert_eq!(
        [D::Running, D::Paused, D::Stored, D::Loaded, D::Sent, D::Received, D::Dropped].map(D::text),
        [
            "runs",
            "loaded, paused",
            "stored, synced",
            "loaded; the receiver decides whether it runs",
            "not known: everything was sent, and without a return path nothing acknowledges it",
            "received into memory, which ends with this process",
            "counted and dropped"
        ]
    );
}

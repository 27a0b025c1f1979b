//! One test for each row: sentence, exit status and identifier.

use super::{GuestAfterFailure, GuestLocation, OutcomeRow, SourceCategory};
use crate::plan::report::{DestinationState, SourceState};
use crate::switchover::Unresolved;

macro_rules! rows {
    ($($name:ident: $place:expr => $id:literal, $exit_code:literal, $text:literal;)*) => {
        $(#[test]
        fn $name() {
            assert_eq!($place.row(), OutcomeRow { id: $id, exit_code: $exit_code, text: $text });
        })*

        #[test]
        fn sentences_are_distinct() {
            let mut texts = vec![$($text),*];
            texts.sort_unstable();
            let count = texts.len();
            texts.dedup();
            assert_eq!(texts.len(), count);
        }
    };
}

rows! {
    at_source: GuestLocation::AtSource => "at-source", 1, "safe at its source";
    in_image: GuestLocation::InImage => "in-image", 1, "in its image, which is as it was";
    with_process: GuestLocation::WithProcess => "ended-with-process", 1, "gone: a synthetic guest ends with its process";
    with_command: GuestLocation::WithCommand => "with-command", 1, "where the command of its stream reads it; this copy has not changed it";
    unreached: GuestLocation::QemuNotReached => "unreached", 1, "not touched; its QEMU was not reached";
    unopened: GuestLocation::ImageNotReadable => "unopened", 1, "not touched; its image could not be opened";
    no_guest: GuestLocation::NoGuest => "no-guest", 1, "none at this source; nothing was changed";
    without_vsock: GuestLocation::WithoutVsock => "without-vsock", 3, "at its destination, whole, except for its vsock, which could not be attached there (`device_add`)";
    image_cut_short: GuestLocation::ImageCutShort => "image-cut-short", 3, "it has its memory at its destination, but pages that were sent after the image was cut short may be zeros there: end it, and restore another copy of the image";
    postcopy_paused: GuestLocation::PostcopyPaused => "postcopy-paused", 3, "at its destination without a part of its memory, and stops wherever it needs that (postcopy-paused); the image is complete and unchanged: run `towline copy --postcopy --recover` with the same image and destination, which sends the rest";
    postcopy_unreadable: GuestLocation::PostcopyUnreadable => "postcopy-unreadable", 3, "at its destination without a part of its memory, and stops wherever it needs that (postcopy-paused); the image cannot be read to its end: if it can be made whole again (a missing chunk or a file's content put back), run `towline copy --postcopy --recover` with it and the same destination, which sends the rest; else the guest cannot continue: end the destination, and restore another image of the guest";
    postcopy_blocked: GuestLocation::PostcopyBlocked => "postcopy-blocked", 3, "at its destination without a part of its memory, where it waits for a page that is missing, and with it the main loop of its QEMU, whose monitor does not reply: no other command can send the rest, so kill that QEMU; the image is as it was: restore it";
    postcopy_ended: GuestLocation::PostcopyEnded => "postcopy-ended", 3, "it ran at its destination, which has ended, and the guest with it; the image holds it as it was stored";
    postcopy_arrived: GuestLocation::PostcopyArrived => "postcopy-arrived", 3, "at its destination, with all of its memory: check its state there";
    postcopy_refused: GuestLocation::PostcopyRefused => "postcopy-refused", 3, "it was switched to its destination, which could not take it: look at both, and resume it at the source (`cont`) only if it does not run there";
    postcopy_split: GuestLocation::PostcopySplit => "postcopy-split", 3, "it runs at its destination with a part of its memory, and the source holds the rest: do not run it there; if both QEMUs still run, `migrate-recover` at the destination and `migrate` with resume at the source resume it";
    destination_holds: GuestLocation::Unresolved(Unresolved::DestinationHolds) => "destination-holds", 3, "whole at its destination, paused; its source did not report whether it is done: look at the source, and run the guest at one of them only (`cont`)";
    undecided: GuestLocation::Unresolved(Unresolved::Undecided) => "undecided", 3, "whole at its destination, paused; whether its source is done with it is not known: run it here (`cont`) only if it does not run there";
    destination_may_run: GuestLocation::Unresolved(Unresolved::DestinationMayRun) => "destination-may-run", 3, "at its destination, which was sent everything and may run it; its source, if it still has it, holds it paused (postmigrate): look at the destination, and resume it at the source (`cont`) only if it does not run there";
    both_may_run: GuestLocation::Unresolved(Unresolved::BothMayRun) => "both-may-run", 3, "running at its source, whose migration was cancelled there when the destination had everything: look at the destination, which may run it too, and end one of them";
    source_run_by_others: GuestLocation::Unresolved(Unresolved::SourceRunByOthers) => "source-run-by-others", 3, "running at its source, where another party resumed it after the copy was complete; the destination holds a copy of it, paused: run only one of them";
    both_paused: GuestLocation::Unresolved(Unresolved::BothPaused) => "both-paused", 3, "paused at both ends: resume it (`cont`) at one of them only";
    not_retracted: GuestLocation::Unresolved(Unresolved::NotRetracted) => "not-retracted", 3, "paused at both ends, and its record, which could not be changed, has it running at the destination: run it there (`towline resume`), or remove the record first (`towline resume ID --forget`) and resume it at one of them only (`cont`)";
    stopped_again: GuestLocation::Unresolved(Unresolved::StoppedAgain) => "stopped-again", 3, "at its destination, where it was run and stopped again; its source still holds it as it was before that, paused (postmigrate): run only one of them";
    destination_lost: GuestLocation::Unresolved(Unresolved::DestinationLost) => "destination-lost", 3, "paused at its source (postmigrate); the destination was lost when it was to run it, so it may have run there: if not, resume it at the source (`cont`)";
    destination_unknown: GuestLocation::Unresolved(Unresolved::DestinationUnknown) => "destination-unknown", 3, "paused at its source (postmigrate); whether it runs at the destination is not known: look there, and run only one of them (`cont`)";
    upgraded_lost: GuestLocation::Unresolved(Unresolved::UpgradedLost) => "upgraded-lost", 3, "lost: its new QEMU has ended and may have run it; the old one is left, paused (postmigrate), with a device state that may not fit the memory any more: end it (`quit`), do not resume it, and start the guest again";
    upgraded_stopped: GuestLocation::Unresolved(Unresolved::UpgradedStopped) => "upgraded-stopped", 3, "in its new QEMU, where it was run and stopped again: look there; the old one is left, paused (postmigrate), with a device state that does not fit the memory any more: end it (`quit`), and do not resume it";
    upgraded_unknown: GuestLocation::Unresolved(Unresolved::UpgradedUnknown) => "upgraded-unknown", 3, "in its new QEMU, which may run it: look there; the old one is left, paused (postmigrate), with a device state that may not fit the memory any more: do not resume it";
    upgrade_not_undone: GuestLocation::Unresolved(Unresolved::UpgradeNotUndone) => "upgrade-not-undone", 3, "in its old QEMU, paused (postmigrate), which could not be made to run it again; it has not run in the new one: remove the cause, and then resume it in the old one";
    destination_only: GuestLocation::Unresolved(Unresolved::DestinationOnly) => "destination-only", 3, "paused at the destination, whole (`cont` resumes it); its source has ended";
    destination_alone: GuestLocation::Unresolved(Unresolved::DestinationAlone) => "destination-alone", 3, "at its destination, which does not reply any more: check whether it runs there; its source has ended";
    both_exited: GuestLocation::Unresolved(Unresolved::BothExited) => "both-exited", 3, "lost: both QEMUs have ended";
    source_exited: GuestLocation::Unresolved(Unresolved::SourceExited) => "source-exited", 3, "lost: its source's QEMU has ended, and the guest with it; the destination has only a part of it, which does not run";
    source_exited_since: GuestLocation::Unresolved(Unresolved::SourceExitedSince) => "source-exited-since", 3, "lost: its source's QEMU has ended, and the guest with it, after it ran on there; the destination's state of it is older";
    source_unknown: GuestLocation::Unresolved(Unresolved::SourceUnknown) => "source-unknown", 3, "at its source, if that still runs: the guest is resumed there as soon as QEMU sees that the copy failed (if not: `cont`)";
    source_not_ended: GuestLocation::Unresolved(Unresolved::SourceNotEnded) => "source-not-ended", 3, "at its destination; its source could not be ended and holds it paused (postmigrate): end it (`quit`), and do not resume it there";
    source_not_resumed: GuestLocation::Unresolved(Unresolved::SourceNotResumed) => "source-not-resumed", 3, "stored; paused at its source: see above, else resume it (`cont`)";
    stored_only: GuestLocation::Unresolved(Unresolved::StoredOnly) => "stored-only", 3, "stored, and nowhere else: its source's QEMU has ended";
    unpublished: GuestLocation::Unresolved(Unresolved::Unpublished) => "unpublished", 3, "nowhere but in the file that a notice names, if there is one: its source's QEMU has ended, and the image could not be completed";
    peer_waits: GuestLocation::Unresolved(Unresolved::PeerWaits) => "peer-waits", 3, "paused at both ends: the outcome could not be sent to the destination's towline";
    peer_unknown: GuestLocation::Unresolved(Unresolved::PeerUnknown) => "peer-unknown", 3, "paused at its source (postmigrate); the destination's towline was to run it, and did not report that it did: look there, and run only one of them";
    peer_did_not_run: GuestLocation::Unresolved(Unresolved::PeerDidNotRun) => "peer-did-not-run", 3, "paused at both ends: the destination's towline could not run it; resume it (`cont`) at one of them only";
    destination_may_run_of_an_image: GuestLocation::UnresolvedOfImage(Unresolved::DestinationMayRun) => "destination-may-run", 3, "at its destination, which was sent everything and may run it: look there; the image is as it was";
    both_paused_of_an_image: GuestLocation::UnresolvedOfImage(Unresolved::BothPaused) => "both-paused", 3, "paused at the destination, which has loaded it: run it there (`cont`), or end it; the image is as it was";
    stopped_again_of_an_image: GuestLocation::UnresolvedOfImage(Unresolved::StoppedAgain) => "stopped-again", 3, "at its destination, where it was run and stopped again: look there; the image is as it was";
    destination_lost_of_an_image: GuestLocation::UnresolvedOfImage(Unresolved::DestinationLost) => "destination-lost", 3, "in its image; its destination was lost when it was to run it, so it may have run there; the image is as it was";
    destination_unknown_of_an_image: GuestLocation::UnresolvedOfImage(Unresolved::DestinationUnknown) => "destination-unknown", 3, "in its image; whether it runs at its destination is not known: look there";
}

#[test]
fn other_rows_of_an_image_are_those_of_a_qemu() {
    assert_eq!(
        GuestLocation::UnresolvedOfImage(Unresolved::PeerUnknown).row(),
        GuestLocation::Unresolved(Unresolved::PeerUnknown).row()
    );
}

#[test]
fn safe_guest_is_at_its_source() {
    let ids = [SourceCategory::Qemu, SourceCategory::Image, SourceCategory::Process, SourceCategory::Command]
        .map(|keeper| GuestAfterFailure::Safe.row(keeper).id);
    assert_eq!(ids, ["at-source", "in-image", "ended-with-process", "with-command"]);
    for keeper in [SourceCategory::Qemu, SourceCategory::Image] {
        let ids = [
            GuestAfterFailure::QemuNotReached,
            GuestAfterFailure::ImageNotReadable,
            GuestAfterFailure::NoGuest,
        ]
        .map(|state| state.row(keeper).id);
        assert_eq!(ids, ["unreached", "unopened", "no-guest"]);
    }
}

#[test]
fn driven_source_is_named() {
    let state = GuestAfterFailure::unresolved_at(Unresolved::SourceExited, "/run/a.qmp");
    assert_eq!(
        state.sentence(SourceCategory::Qemu),
        "lost: its source, QEMU on /run/a.qmp, has ended, and the guest with it; the destination has only a part of it, which does not run"
    );
    let unnamed = GuestAfterFailure::needs_attention(GuestLocation::Unresolved(Unresolved::SourceExited));
    assert_eq!(
        unnamed.sentence(SourceCategory::Qemu),
        GuestLocation::Unresolved(Unresolved::SourceExited).row().text
    );
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

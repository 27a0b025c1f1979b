//! Outcomes of failed copies and moves in one table: sentence, identifier for `--json`, exit status.
//!
//! The sentence of an [`OutcomeRow`] follows "the guest: ". Exit status 1: the guest is where it was. Exit status
//! 3: an operator must look at it.

use std::borrow::Cow;

use super::report::{DestinationState, SourceState};
use crate::switchover::Unresolved;

/// Outcome of a failed copy or move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutcomeRow {
    /// Identifier in `--json` (`guest-state`). It stays the same if the sentence is reworded.
    pub id: &'static str,
    /// Exit status.
    pub exit_code: u8,
    /// Location of the guest, and what to do.
    pub text: &'static str,
}

/// Location of a guest after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GuestLocation {
    /// At its source, as it was.
    AtSource,
    /// In its image.
    InImage,
    /// It was a synthetic guest.
    WithProcess,
    /// Wherever the command of its stream reads it.
    WithCommand,
    /// Unchanged by this copy; its QEMU was not reached.
    QemuNotReached,
    /// Unchanged by this copy; its image could not be opened.
    ImageNotReadable,
    /// The source has none.
    NoGuest,
    /// At its destination, but its vsock could not be attached there.
    WithoutVsock,
    /// It runs, and a truncated image may have given it zeros.
    ImageCutShort,
    /// It runs without the rest of its memory, and no more is sent.
    PostcopyPaused,
    /// As `PostcopyPaused`, and its image cannot be read to its end.
    PostcopyUnreadable,
    /// As `PostcopyPaused`, and its QEMU's main loop waits too, so that no other process can send the rest.
    PostcopyBlocked,
    /// It ran at its destination, whose QEMU has exited.
    PostcopyEnded,
    /// It has all of its memory; its run state is not known.
    PostcopyArrived,
    /// Its source's QEMU failed after the switch to postcopy.
    PostcopyRefused,
    /// Each of two QEMUs holds a part of it, and their connection is lost.
    PostcopySplit,
    /// As the switchover reports.
    Unresolved(Unresolved),
    /// As the switchover reports, of a guest whose source is an image, which stays as it was.
    UnresolvedOfImage(Unresolved),
}

impl GuestLocation {
    /// The row of the table.
    pub(crate) fn row(self) -> OutcomeRow {
        let (id, exit_code, text) = match self {
            Self::AtSource => ("at-source", 1, "safe at its source"),
            Self::InImage => ("in-image", 1, "in its image, which is as it was"),
            Self::WithProcess => ("ended-with-process", 1, "gone: a synthetic guest ends with its process"),
            Self::WithCommand => {
                ("with-command", 1, "where the command of its stream reads it; this copy has not changed it")
            }
            Self::QemuNotReached => ("unreached", 1, "not touched; its QEMU was not reached"),
            Self::ImageNotReadable => ("unopened", 1, "not touched; its image could not be opened"),
            Self::NoGuest => ("no-guest", 1, "none at this source; nothing was changed"),
            Self::WithoutVsock => (
                "without-vsock",
                3,
                "at its destination, whole, except for its vsock, which could not be attached there (`device_add`)",
            ),
            Self::ImageCutShort => (
                "image-cut-short",
                3,
                "it has its memory at its destination, but pages that were sent after the image was cut short may be zeros there: end it, and restore another copy of the image",
            ),
            Self::PostcopyPaused => (
                "postcopy-paused",
                3,
                "at its destination without a part of its memory, and stops wherever it needs that (postcopy-paused); the image is complete and unchanged: run `towline copy --postcopy --recover` with the same image and destination, which sends the rest",
            ),
            Self::PostcopyUnreadable => (
                "postcopy-unreadable",
                3,
                "at its destination without a part of its memory, and stops wherever it needs that (postcopy-paused); the image cannot be read to its end: if it can be made whole again (a missing chunk or a file's content put back), run `towline copy --postcopy --recover` with it and the same destination, which sends the rest; else the guest cannot continue: end the destination, and restore another image of the guest",
            ),
            Self::PostcopyBlocked => (
                "postcopy-blocked",
                3,
                "at its destination without a part of its memory, where it waits for a page that is missing, and with it the main loop of its QEMU, whose monitor does not reply: no other command can send the rest, so kill that QEMU; the image is as it was: restore it",
            ),
            Self::PostcopyEnded => (
                "postcopy-ended",
                3,
                "it ran at its destination, which has ended, and the guest with it; the image holds it as it was stored",
            ),
            Self::PostcopyArrived => {
                ("postcopy-arrived", 3, "at its destination, with all of its memory: check its state there")
            }
            Self::PostcopyRefused => (
                "postcopy-refused",
                3,
                "it was switched to its destination, which could not take it: look at both, and resume it at the source (`cont`) only if it does not run there",
            ),
            Self::PostcopySplit => (
                "postcopy-split",
                3,
                "it runs at its destination with a part of its memory, and the source holds the rest: do not run it there; if both QEMUs still run, `migrate-recover` at the destination and `migrate` with resume at the source resume it",
            ),
            Self::Unresolved(unresolved) => return unresolved_row(unresolved),
            Self::UnresolvedOfImage(unresolved) => return image_row(unresolved),
        };
        OutcomeRow { id, exit_code, text }
    }
}

/// Row of a guest that was stopped at its source.
fn unresolved_row(unresolved: Unresolved) -> OutcomeRow {
    let text = match unresolved {
        Unresolved::DestinationHolds => {
            "whole at its destination, paused; its source did not report whether it is done: look at the source, and run the guest at one of them only (`cont`)"
        }
        Unresolved::Undecided => {
            "whole at its destination, paused; whether its source is done with it is not known: run it here (`cont`) only if it does not run there"
        }
        Unresolved::DestinationMayRun => {
            "at its destination, which was sent everything and may run it; its source, if it still has it, holds it paused (postmigrate): look at the destination, and resume it at the source (`cont`) only if it does not run there"
        }
        Unresolved::BothMayRun => {
            "running at its source, whose migration was cancelled there when the destination had everything: look at the destination, which may run it too, and end one of them"
        }
        Unresolved::SourceRunByOthers => {
            "running at its source, where another party resumed it after the copy was complete; the destination holds a copy of it, paused: run only one of them"
        }
        Unresolved::BothPaused => "paused at both ends: resume it (`cont`) at one of them only",
        Unresolved::NotRetracted => {
            "paused at both ends, and its record, which could not be changed, has it running at the destination: run it there (`towline resume`), or remove the record first (`towline resume ID --forget`) and resume it at one of them only (`cont`)"
        }
        Unresolved::StoppedAgain => {
            "at its destination, where it was run and stopped again; its source still holds it as it was before that, paused (postmigrate): run only one of them"
        }
        Unresolved::DestinationLost => {
            "paused at its source (postmigrate); the destination was lost when it was to run it, so it may have run there: if not, resume it at the source (`cont`)"
        }
        Unresolved::DestinationUnknown => {
            "paused at its source (postmigrate); whether it runs at the destination is not known: look there, and run only one of them (`cont`)"
        }
        Unresolved::UpgradedLost
        | Unresolved::UpgradedStopped
        | Unresolved::UpgradedUnknown
        | Unresolved::UpgradeNotUndone => upgraded_text(unresolved),
        Unresolved::DestinationOnly => {
            "paused at the destination, whole (`cont` resumes it); its source has ended"
        }
        Unresolved::DestinationAlone => {
            "at its destination, which does not reply any more: check whether it runs there; its source has ended"
        }
        Unresolved::BothExited => "lost: both QEMUs have ended",
        Unresolved::SourceExited => {
            "lost: its source's QEMU has ended, and the guest with it; the destination has only a part of it, which does not run"
        }
        Unresolved::SourceExitedSince => {
            "lost: its source's QEMU has ended, and the guest with it, after it ran on there; the destination's state of it is older"
        }
        Unresolved::SourceUnknown => {
            "at its source, if that still runs: the guest is resumed there as soon as QEMU sees that the copy failed (if not: `cont`)"
        }
        Unresolved::SourceNotEnded => {
            "at its destination; its source could not be ended and holds it paused (postmigrate): end it (`quit`), and do not resume it there"
        }
        Unresolved::SourceNotResumed => "stored; paused at its source: see above, else resume it (`cont`)",
        Unresolved::StoredOnly => "stored, and nowhere else: its source's QEMU has ended",
        Unresolved::Unpublished => {
            "nowhere but in the file that a notice names, if there is one: its source's QEMU has ended, and the image could not be completed"
        }
        Unresolved::PeerWaits => {
            "paused at both ends: the outcome could not be sent to the destination's towline"
        }
        Unresolved::PeerUnknown => {
            "paused at its source (postmigrate); the destination's towline was to run it, and did not report that it did: look there, and run only one of them"
        }
        Unresolved::PeerDidNotRun => {
            "paused at both ends: the destination's towline could not run it; resume it (`cont`) at one of them only"
        }
    };
    OutcomeRow { id: id_of(unresolved), exit_code: 3, text }
}

/// Text of an upgrade, whose QEMUs have the same memory.
fn upgraded_text(unresolved: Unresolved) -> &'static str {
    match unresolved {
        Unresolved::UpgradedLost => {
            "lost: its new QEMU has ended and may have run it; the old one is left, paused (postmigrate), with a device state that may not fit the memory any more: end it (`quit`), do not resume it, and start the guest again"
        }
        Unresolved::UpgradedStopped => {
            "in its new QEMU, where it was run and stopped again: look there; the old one is left, paused (postmigrate), with a device state that does not fit the memory any more: end it (`quit`), and do not resume it"
        }
        Unresolved::UpgradedUnknown => {
            "in its new QEMU, which may run it: look there; the old one is left, paused (postmigrate), with a device state that may not fit the memory any more: do not resume it"
        }
        Unresolved::UpgradeNotUndone => {
            "in its old QEMU, paused (postmigrate), which could not be made to run it again; it has not run in the new one: remove the cause, and then resume it in the old one"
        }
        _ => unreachable!("{unresolved:?} is not of an upgrade"),
    }
}

fn id_of(unresolved: Unresolved) -> &'static str {
    match unresolved {
        Unresolved::DestinationHolds => "destination-holds",
        Unresolved::Undecided => "undecided",
        Unresolved::DestinationMayRun => "destination-may-run",
        Unresolved::BothMayRun => "both-may-run",
        Unresolved::SourceRunByOthers => "source-run-by-others",
        Unresolved::BothPaused => "both-paused",
        Unresolved::NotRetracted => "not-retracted",
        Unresolved::StoppedAgain => "stopped-again",
        Unresolved::DestinationLost => "destination-lost",
        Unresolved::DestinationUnknown => "destination-unknown",
        Unresolved::UpgradedLost => "upgraded-lost",
        Unresolved::UpgradedStopped => "upgraded-stopped",
        Unresolved::UpgradedUnknown => "upgraded-unknown",
        Unresolved::UpgradeNotUndone => "upgrade-not-undone",
        Unresolved::DestinationOnly => "destination-only",
        Unresolved::DestinationAlone => "destination-alone",
        Unresolved::BothExited => "both-exited",
        Unresolved::SourceExited => "source-exited",
        Unresolved::SourceExitedSince => "source-exited-since",
        Unresolved::SourceUnknown => "source-unknown",
        Unresolved::SourceNotEnded => "source-not-ended",
        Unresolved::SourceNotResumed => "source-not-resumed",
        Unresolved::StoredOnly => "stored-only",
        Unresolved::Unpublished => "unpublished",
        Unresolved::PeerWaits => "peer-waits",
        Unresolved::PeerUnknown => "peer-unknown",
        Unresolved::PeerDidNotRun => "peer-did-not-run",
    }
}

/// Row of a guest whose image stays as it was.
fn image_row(unresolved: Unresolved) -> OutcomeRow {
    let text = match unresolved {
        Unresolved::DestinationMayRun => {
            "at its destination, which was sent everything and may run it: look there; the image is as it was"
        }
        Unresolved::BothPaused => {
            "paused at the destination, which has loaded it: run it there (`cont`), or end it; the image is as it was"
        }
        Unresolved::StoppedAgain => {
            "at its destination, where it was run and stopped again: look there; the image is as it was"
        }
        Unresolved::DestinationLost => {
            "in its image; its destination was lost when it was to run it, so it may have run there; the image is as it was"
        }
        Unresolved::DestinationUnknown => {
            "in its image; whether it runs at its destination is not known: look there"
        }
        unresolved => return unresolved_row(unresolved),
    };
    OutcomeRow { text, ..unresolved_row(unresolved) }
}

/// State of a guest after a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestAfterFailure {
    /// At its source, as it was.
    Safe,
    /// Unchanged by this copy: its QEMU was not reached, so nothing is known of it.
    QemuNotReached,
    /// Unchanged by this copy: its image could not be opened.
    ImageNotReadable,
    /// The source has no guest.
    NoGuest,
    /// An operator must look at it.
    NeedsAttention(GuestNeedingAttention),
}

/// Location of a guest that an operator must look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNeedingAttention {
    location: GuestLocation,
    /// Monitor of its source, if that is driven.
    source: Option<String>,
}

/// Category of the source that holds a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceCategory {
    /// A QEMU.
    Qemu,
    /// An image.
    Image,
    /// This process.
    Process,
    /// A command whose output is its stream.
    Command,
}

impl GuestAfterFailure {
    /// An operator must look at it; its source is not driven, or not named.
    pub(crate) fn needs_attention(location: GuestLocation) -> Self {
        Self::NeedsAttention(GuestNeedingAttention { location, source: None })
    }

    /// An operator must look at it; the monitor of its source is `socket`.
    pub(crate) fn unresolved_at(unresolved: Unresolved, socket: &str) -> Self {
        Self::NeedsAttention(GuestNeedingAttention {
            location: GuestLocation::Unresolved(unresolved),
            source: Some(socket.to_owned()),
        })
    }

    /// Returns true if the guest is at its destination without a part of its memory, which a recovery can send.
    pub fn lacks_memory(&self) -> bool {
        let Self::NeedsAttention(GuestNeedingAttention { location, .. }) = self else { return false };
        matches!(location, GuestLocation::PostcopyPaused | GuestLocation::PostcopyUnreadable)
    }

    /// The row of the table, by the category of the source.
    pub fn row(&self, keeper: SourceCategory) -> OutcomeRow {
        let location = match (self, keeper) {
            (Self::Safe, SourceCategory::Qemu) => GuestLocation::AtSource,
            (Self::Safe, SourceCategory::Image) => GuestLocation::InImage,
            (Self::Safe, SourceCategory::Process) => GuestLocation::WithProcess,
            (Self::Safe, SourceCategory::Command) => GuestLocation::WithCommand,
            (Self::QemuNotReached, _) => GuestLocation::QemuNotReached,
            (Self::ImageNotReadable, _) => GuestLocation::ImageNotReadable,
            (Self::NoGuest, _) => GuestLocation::NoGuest,
            (Self::NeedsAttention(whereabouts), _) => whereabouts.location,
        };
        location.row()
    }

    /// Returns true if the destination may hold the guest, so that its QEMU must be left alone.
    pub(crate) fn may_be_at_destination(&self) -> bool {
        let Self::NeedsAttention(GuestNeedingAttention { location, .. }) = self else { return false };
        !matches!(
            location,
            GuestLocation::Unresolved(
                Unresolved::SourceRunByOthers
                    | Unresolved::SourceExited
                    | Unresolved::SourceExitedSince
                    | Unresolved::BothExited
                    | Unresolved::UpgradedLost
                    | Unresolved::UpgradeNotUndone
            )
        )
    }

    /// The row's sentence, which names the source's QEMU if that is known.
    pub fn sentence(&self, keeper: SourceCategory) -> Cow<'static, str> {
        let text = self.row(keeper).text;
        match self {
            Self::NeedsAttention(GuestNeedingAttention { source: Some(socket), .. }) => {
                text.replace("its source's QEMU", &format!("its source, QEMU on {socket},")).into()
            }
            _ => text.into(),
        }
    }
}

impl SourceState {
    /// State at the source after a copy or move that completed (exit status 0), for people and in `--json`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Running => "runs on",
            Self::Paused => "paused (postmigrate); `cont` resumes it",
            Self::Ended => "ended",
            Self::Unchanged => "as it was",
            Self::UpToSender => "not known: it has sent its guest; look there whether it still has one",
        }
    }
}

impl DestinationState {
    /// State at the destination after a copy or move that completed (exit status 0), for people and in `--json`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Running => "runs",
            Self::Paused => "loaded, paused",
            Self::Stored => "stored, synced",
            Self::Loaded => "loaded; the receiver decides whether it runs",
            Self::Sent => "not known: everything was sent, and without a return path nothing acknowledges it",
            Self::Received => "received into memory, which ends with this process",
            Self::Dropped => "counted and dropped",
        }
    }
}

#[cfg(test)]
mod tests;

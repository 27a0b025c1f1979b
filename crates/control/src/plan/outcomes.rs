//! Outcomes of failed copies and moves: sentences for people.
//!
//! A sentence follows "the guest: ". It is composed of the guest at its source, the guest at its destination,
//! and what to do.

use super::progress::{DestinationState, SourceState};
use crate::switchover::{AtDestination, AtSource, GuestState, ToDo};

/// State of a guest after a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestAfterFailure {
    state: GuestState,
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
    /// This process, with a sentence about a guest that has ended with it.
    Process(&'static str),
    /// A command whose output is its stream.
    Command,
}

impl GuestAfterFailure {
    /// A guest that is unchanged at its source.
    pub const SAFE: Self = Self::untouched(AtSource::HasIt);
    /// This copy has not changed it. Its QEMU was not reached, or its image could not be opened.
    pub const NOT_REACHED: Self = Self::untouched(AtSource::Unknown);
    /// The source has no guest.
    pub const NO_GUEST: Self = Self::untouched(AtSource::Ended);

    const fn untouched(source: AtSource) -> Self {
        Self { state: GuestState::new(source, AtDestination::None, ToDo::Nothing), source: None }
    }

    /// An operator must look at it; its source is not driven, or not named.
    pub(crate) fn unresolved(state: GuestState) -> Self {
        Self { state, source: None }
    }

    /// An operator must look at it; the monitor of its source is `socket`.
    pub(crate) fn unresolved_at(state: GuestState, socket: &str) -> Self {
        Self { state, source: Some(socket.to_owned()) }
    }

    /// Returns true if an operator must look at it: exit status 3. Without that it is where it was.
    pub fn needs_attention(&self) -> bool {
        self.state.to_do != ToDo::Nothing
    }

    /// Returns true if it is at its source, as it was.
    pub(crate) fn is_safe(&self) -> bool {
        *self == Self::SAFE
    }

    /// Returns true if the guest is at its destination without a part of its memory, which a recovery can send.
    pub fn lacks_memory(&self) -> bool {
        matches!(self.state.to_do, ToDo::Recover | ToDo::RecoverRepaired)
    }

    /// Returns true if the destination may hold the guest, so that its QEMU must be left alone.
    pub(crate) fn may_be_at_destination(&self) -> bool {
        let GuestState { source, destination, to_do } = self.state;
        let is_elsewhere = match destination {
            AtDestination::None | AtDestination::Ended => source == AtSource::Unknown,
            AtDestination::Holds => source != AtSource::HasIt,
            AtDestination::MayRun | AtDestination::Runs => true,
            AtDestination::Unknown => to_do != ToDo::StartAgain,
        };
        self.needs_attention() && is_elsewhere
    }

    /// Its state, by the category of the source.
    pub fn state(&self, keeper: SourceCategory) -> GuestState {
        let source = match (self.state.source, keeper) {
            (AtSource::HasIt, SourceCategory::Process(_)) => AtSource::Ended,
            (AtSource::HasIt, SourceCategory::Command) => AtSource::Unknown,
            (source, _) => source,
        };
        GuestState { source, ..self.state }
    }

    /// Where it is, and what to do; names the source's QEMU if that is known.
    pub fn sentence(&self, keeper: SourceCategory) -> String {
        let source = self
            .special_source(keeper)
            .map_or_else(|| self.state.at_source(&self.source_name()), str::to_owned);
        if !self.needs_attention() {
            return source;
        }
        format!("{source}; {}: {}", self.state.at_destination("its destination"), to_do(self.state))
    }

    /// The guest at a source that is not a QEMU, or of a guest that is where it was.
    fn special_source(&self, keeper: SourceCategory) -> Option<&'static str> {
        let is_untouched = !self.needs_attention();
        Some(match (self.state.source, keeper) {
            (AtSource::HasIt, SourceCategory::Qemu) if is_untouched => "safe at its source",
            (AtSource::HasIt, SourceCategory::Image) => "in its image, which is as it was",
            (AtSource::HasIt, SourceCategory::Process(ended)) => ended,
            (AtSource::HasIt, SourceCategory::Command) => {
                "where the command of its stream reads it; this copy has not changed it"
            }
            (AtSource::Ended, _) if is_untouched => "none at this source; nothing was changed",
            (AtSource::Unknown, SourceCategory::Image) if is_untouched => {
                "not touched; its image could not be opened"
            }
            (AtSource::Unknown, SourceCategory::Image) => "in its image, which cannot be read to its end",
            (AtSource::Unknown, _) if is_untouched => "not touched; its QEMU was not reached",
            _ => return None,
        })
    }

    fn source_name(&self) -> String {
        match (self.state.source, &self.source) {
            (AtSource::Ended, Some(socket)) => format!("its source, QEMU on {socket},"),
            (AtSource::Ended, None) => "its source's QEMU".into(),
            _ => "its source".into(),
        }
    }
}

/// Next step of an operator.
fn to_do(state: GuestState) -> &'static str {
    match (state.to_do, state.source) {
        (ToDo::Nothing, _) => "nothing",
        (ToDo::Wait, _) => "wait until both reply, or have ended",
        (ToDo::LookAtDestination, AtSource::Paused | AtSource::Unknown) => {
            "look there, and run it at the source (`cont`) only if it does not run there"
        }
        (ToDo::LookAtDestination, _) => "look there",
        (ToDo::LookAtSource, _) => {
            "look at the source, and run it at the destination (`cont`) only if it does not run there"
        }
        (ToDo::RunOne, _) => "run it at one of them only (`cont`)",
        (ToDo::RunDestination, _) => "run it there (`cont`), or end it",
        (ToDo::RunDestinationUnlessItRanOn, _) => {
            "run it there (`cont`) only if it has not run on at its source"
        }
        (ToDo::RunSource, _) => "resume it at its source (`cont`), unless QEMU does that by itself",
        (ToDo::RunSourceUnlessItRan, _) => {
            "it may have run there, so run it from its source only if it did not"
        }
        (ToDo::KeepDestination, _) => {
            "look there; do not resume the source, whose state is older: end it (`quit`)"
        }
        (ToDo::EndSource, _) => "end the source (`quit`), and do not resume it there",
        (ToDo::ActAtDestination, _) => "act by the monitor of its destination",
        (ToDo::EndOne, _) => "look at both, and end one of them",
        (ToDo::StartAgain, AtSource::Paused) => {
            "it may have run there, in the memory of both: do not resume the source, end it (`quit`), and start the guest again"
        }
        (ToDo::StartAgain, _) if state.destination == AtDestination::Unknown => {
            "it ran on at its source, so a state there is older: end that, and start the guest again"
        }
        (ToDo::StartAgain, _) => "it is lost: start it again",
        (ToDo::ForgetRecord, _) => {
            "its record, which could not be changed, has it running at its destination: run it there (`towline resume`), or remove the record first (`towline resume ID --forget`) and run it at one of them only (`cont`)"
        }
        (ToDo::Restore, _) if state.destination == AtDestination::Holds => "restore it from there",
        (ToDo::Restore, _) => "the file that a notice names may hold it",
        _ => to_do_by_postcopy(state.to_do),
    }
}

/// Next step for a guest that ran at its destination before all of it was there.
fn to_do_by_postcopy(to_do: ToDo) -> &'static str {
    match to_do {
        ToDo::RestoreAnother => {
            "pages that were sent after the image was truncated may be zeros there: end it, and restore another copy of the image"
        }
        ToDo::KillAndRestore => {
            "it waits for a missing page, and with it the main loop of its QEMU, whose monitor does not reply: no other command can send the rest, so kill that QEMU, and restore the image"
        }
        ToDo::Recover => {
            "it lacks a part of its memory, and stops where it needs that (postcopy-paused): run `towline copy --postcopy --recover` with the same image and destination, which sends the rest"
        }
        ToDo::RecoverRepaired => {
            "it lacks a part of its memory, and stops where it needs that (postcopy-paused): if the image can be made whole again (a missing chunk or a file's content put back), run `towline copy --postcopy --recover` with it and the same destination, which sends the rest; else end the destination, and restore another image of the guest"
        }
        ToDo::Reconnect => {
            "it lacks a part of its memory, which the source holds: do not run it there; if both QEMUs still run, they can be connected: of two hosts, by `towline resume` at the source while the other towline waits for that, else by `migrate-recover` at the destination and `migrate` with resume at the source"
        }
        _ => "its vsock could not be attached there: attach it (`device_add`)",
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

//! Request, inputs and directives of the switchover.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::outcome::{AtDestination, AtSource, GuestState, Placement, SwitchoverOutcome, ToDo};

pub(crate) use towline_migration::LinkState as SourceLink;
pub(crate) use towline_protocol::session::{GuestRunState, RunRequest};

/// Kind of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceKind {
    /// A QEMU whose monitor is connected.
    Qemu,
    /// A stream from a QEMU that another party drives: only its connection is visible.
    Stream,
    /// A stream from another towline, which reports the outcome.
    Towline,
    /// An image, or memory of this process: no guest runs there.
    Stored,
}

/// Kind of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationKind {
    /// A QEMU whose monitor is connected; it loads the guest and stays paused until `cont`.
    Qemu,
    /// A stream to a QEMU that runs the guest by itself as soon as it has the last byte.
    Stream,
    /// A stream to another towline, which relays it to a QEMU that runs the guest by itself.
    Relayed,
    /// A stream to another towline, which starts the guest when it has the outcome.
    Towline,
    /// An image, an object store, or memory: no guest runs there.
    Stored,
}

impl DestinationKind {
    /// Returns true if the guest may run there as soon as the last byte has arrived.
    pub(crate) fn runs_by_itself(self) -> bool {
        matches!(self, Self::Stream | Self::Relayed)
    }
}

/// Action at the source when its guest is at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceAction {
    /// Stays paused (`postmigrate`).
    KeepPaused,
    /// Is resumed; only if no guest runs at the destination.
    Resume,
    /// The QEMU is ended.
    Quit,
}

/// Memory of the guest at the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum MemorySharing {
    /// Each end has its own.
    Copied,
    /// Both QEMUs map the same memory: once the destination has run the guest, the source's device state is
    /// of another memory, and must never run.
    Shared,
    /// Each end has its own, and the QEMUs are connected to each other, driven by a towline each. The source, whose guest is stopped,
    /// completes by itself once it may; until then, and if that fails, it gets its guest back.
    Connected,
    /// As `Connected`, of a source that may be switched to postcopy. Once it has, it is not cancelled any more.
    ConnectedPostcopy,
    /// Each end has its own; the destination runs the guest before all of its own is there.
    Postcopy,
}

/// Request of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SwitchoverRequest {
    pub(crate) source: SourceKind,
    pub(crate) destination: DestinationKind,
    pub(crate) run: RunRequest,
    pub(crate) after: SourceAction,
    pub(crate) memory: MemorySharing,
}

/// Run state that a guest has at its destination in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FinalRunState {
    Running,
    Paused,
}

impl FinalRunState {
    /// `Running` if the condition is true.
    pub(crate) fn running_if(runs: bool) -> Self {
        if runs { Self::Running } else { Self::Paused }
    }

    /// State of a guest that was stopped in `guest`.
    pub(crate) fn requested(request: RunRequest, guest: GuestRunState) -> Self {
        Self::running_if(match request {
            RunRequest::AsItWas => guest.is_live(),
            RunRequest::Run => true,
            RunRequest::Pause => false,
        })
    }
}

/// State of the source's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceStatus {
    /// The migration is in progress.
    Migrating,
    /// It has stopped the guest for good, and sends the rest of its memory (`postcopy-active`).
    Following,
    /// The same, without a connection (`postcopy-paused`).
    FollowingPaused,
    /// The migration is complete and the guest is stopped (`postmigrate`).
    Completed,
    /// The migration was complete and the guest has since been resumed there.
    CompletedThenResumed,
    /// A migration is complete, perhaps a later one of another party: the guest may have run there since.
    /// Only a later towline finds this.
    CompletedByOthers,
    /// The migration failed, was cancelled or never started: the source has its guest in the former state.
    HasGuest,
    /// The process has exited and can never run the guest again.
    Exited,
    /// No reply, or the monitor is disconnected.
    Unknown,
}

/// State of the destination's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationStatus {
    /// Holds the guest, which has stopped: an error, a panic or a shutdown. Only a later query distinguishes
    /// this from `Loaded`.
    Stopped,
    /// Waits for the guest or loads it.
    Loading,
    /// Has the guest's devices, and not all of its memory; the guest is in this run state.
    LacksMemory(FinalRunState),
    /// Its main loop waits for a page of the guest.
    Blocked,
    /// Holds the whole guest, paused.
    Loaded,
    /// The guest runs, or is suspended and wakes up by itself.
    Running,
    /// Could not load the guest.
    Failed,
    /// The process has exited.
    Exited,
    /// No reply, or the monitor is disconnected.
    Unknown,
}

/// Result of `cont` at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StartResult {
    /// The guest is live.
    Live,
    /// Accepted, and the guest was stopped again.
    StoppedAgain,
    /// QEMU refused it.
    Refused,
    /// `cont` was not sent, because QEMU failed or did not reply before.
    NotSent,
    /// QEMU's process had exited before `cont` was sent.
    ExitedBefore,
    /// QEMU's process has exited.
    Exited,
    /// No reply within the deadline, or the monitor is disconnected.
    Unknown,
}

/// A stored guest's memory that is not sent over this connection any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MemoryLoss {
    pub(crate) cause: LossCause,
    /// The destination has reported that it has loaded the devices.
    pub(crate) has_loaded: bool,
}

/// Cause of a [`MemoryLoss`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LossCause {
    /// The connection was lost.
    Connection,
    /// The image cannot be read.
    Unreadable,
    /// The image was truncated: pages that were sent may be zeros.
    Truncated,
}

/// Message between two towlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PeerMessage {
    /// From the source's towline: the source is done with the guest, which is now the destination's.
    Completed(RunRequest),
    /// From the source's towline: the source has its guest back.
    Aborted,
    /// From the destination's towline: the guest is in its requested state.
    Placed(Placement),
    /// From the destination's towline: it holds the guest and could not start it.
    NotRun,
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// The destination has loaded everything but the last bytes, which are about to be sent. A destination
    /// that runs the guest by itself runs it then.
    CommitRequested(GuestRunState),
    /// The destination has acknowledged; now acknowledge the source.
    AcknowledgeRequested { guest: GuestRunState, source: SourceLink },
    /// The source has sent all memory once, of a guest in this run state: it can switch to postcopy.
    SwitchRequested(GuestRunState),
    /// The stream is complete, including the source's acknowledgement; all memory of a stored guest was sent.
    Delivered,
    /// The memory of a stored guest that may run is not sent any more.
    MemoryLost(MemoryLoss),
    /// The stream, or a concurrent action, failed.
    Failed,
    /// The destination reported that it could not load the guest, before or after the last bytes.
    DestinationRefused,
    /// The source was queried.
    Source(SourceStatus),
    /// The connection to a source that another party drives was probed.
    SourceLink(SourceLink),
    /// The destination was queried.
    Destination(DestinationStatus),
    /// Starting the guest at the destination had this result.
    Started(StartResult),
    /// The other towline sent a message.
    Peer(PeerMessage),
    /// The connection to the other towline is lost.
    PeerLost,
    /// A directive was carried out: the message is sent, the source is restored.
    Done,
    /// A directive could not be carried out.
    NotDone,
    /// A deadline has passed.
    TimedOut,
    /// The decision is durable.
    Recorded,
    /// The decision is not durable, or not known to be.
    NotRecorded,
    /// The user cancels the command.
    Cancel,
}

/// The next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Directive {
    /// Continue.
    Proceed,
    /// Do not send the bytes in question: the stream is to fail.
    Refuse,
    /// Fail the stream and close its connections.
    Abort,
    /// Make this decision durable and report that; do not act on it before.
    Record(Decision),
    /// Withdraw the decision to run the guest at its destination from the record, and report whether it is.
    Retract,
    /// Report that it is too late to cancel.
    TooLate,
    /// Acknowledge the source although its destination has not confirmed the guest, so the source stops for
    /// good.
    AcknowledgeUnconfirmed,
    /// Ask the source to switch to postcopy (`migrate-start-postcopy`). No reply is [`Input::TimedOut`].
    StartPostcopy,
    /// Query a source that was asked to switch. It connects again if its monitor is lost.
    FollowSource,
    /// Start the guest if the destination has its devices.
    RunEarly,
    /// Connect a destination that lacks memory again.
    Recover,
    /// Send the memory of a stored guest.
    ServeMemory,
    /// Query the source again.
    QuerySource,
    /// Cancel the source's migration, which this command started.
    CancelMigration,
    /// Probe the connection to the source again.
    ProbeSourceLink,
    /// Query the destination again.
    QueryDestination,
    /// Query the destination once, before the guest counts as its source's.
    LookAtDestination,
    /// Wait for a message of the other towline.
    AwaitPeer,
    /// Start the guest at the destination and check that it runs.
    RunDestination,
    /// Send this to the other towline.
    Send(PeerMessage),
    /// Restore the destination's settings: the guest is in its final state.
    FinalizeDestination,
    /// Restore the source's settings and leave its guest unchanged.
    RestoreSource,
    /// Restore the source's settings and resume its guest, which this migration stopped.
    ResumeSource,
    /// As `ResumeSource`, of a destination in the same memory that is not ended before: the record has it
    /// running the guest.
    ResumeSourceFirst,
    /// End the source's QEMU.
    QuitSource,
    /// End the command.
    End(SwitchoverOutcome),
}

impl Directive {
    /// The end of a guest that an operator must look at.
    pub(super) fn unresolved(source: AtSource, destination: AtDestination, to_do: ToDo) -> Self {
        Self::End(SwitchoverOutcome::Unresolved(GuestState::new(source, destination, to_do)))
    }

    /// The end if the source does not reply or could not be restored.
    pub(super) fn source_unknown(destination: AtDestination) -> Self {
        Self::End(SwitchoverOutcome::Unresolved(GuestState::source_unknown(destination)))
    }
}

/// A decision, in the order in which they are taken: the stage of a move in its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "Stage", description = "Last recorded stage of a move.")]
pub enum Decision {
    /// A destination that runs the guest by itself is sent the last bytes.
    Commit,
    /// The destination holds the guest; its source is acknowledged and may complete.
    Acknowledge,
    /// The source is done; the towline at the destination is sent the outcome.
    Complete,
    /// The source is done; the guest is started at its destination.
    Run,
    // Only a record has this one: nothing is decided.
    /// The move is over. The source keeps an older state of the guest, which a later copy must not resume.
    Left,
}

/// Progress of the switch to postcopy, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SwitchProgress {
    /// The source was not asked to switch.
    Unasked,
    /// It was asked, and its reply is lost.
    Unanswered,
    /// It will switch, or has; the devices of a stored guest were sent.
    Accepted,
    /// The source has stopped its guest for good; the destination has loaded the devices of a stored one.
    Switched,
    /// The destination got `cont`, and its reply is lost.
    MayRun,
    /// The guest was seen to run at its destination.
    Runs,
}

//! What the switchover is asked for, what it takes in, and what it directs.

use super::decision::Decision;
use super::outcome::{Outcome, Placement};

/// What holds the guest before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceKind {
    /// A QEMU whose monitor is at hand.
    Qemu,
    /// A stream of a QEMU that is driven by somebody else: its connection is all that is seen of it.
    Stream,
    /// A stream of another towline, which reports the outcome.
    Towline,
    /// An image, or memory of this process: no guest runs there.
    Stored,
}

/// What is to hold it afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationKind {
    /// A QEMU whose monitor is at hand; it loads and stays paused until `cont`.
    Qemu,
    /// A stream to a QEMU that runs the guest by itself as soon as it has the last byte.
    Stream,
    /// A stream to another towline, which passes it on to a QEMU that runs the guest by itself.
    Relayed,
    /// A stream to another towline, which runs the guest when it has the outcome.
    Towline,
    /// An image, an object store, or memory: no guest runs there.
    Stored,
}

impl DestinationKind {
    /// Whether the guest may run there as soon as the last byte is there.
    pub(crate) fn runs_by_itself(self) -> bool {
        matches!(self, Self::Stream | Self::Relayed)
    }
}

/// Whether the guest is to run at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RunRequest {
    /// As it did at its source when it was stopped for the switchover.
    AsItWas,
    /// In any case.
    Run,
    /// In no case.
    Pause,
}

/// What becomes of a source whose guest is at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceAction {
    /// It stays paused (`postmigrate`).
    KeepPaused,
    /// It runs on: only where no guest runs at the destination.
    Resume,
    /// It is ended.
    Quit,
}

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SwitchoverRequest {
    pub(crate) source: SourceKind,
    pub(crate) destination: DestinationKind,
    pub(crate) run: RunRequest,
    pub(crate) after: SourceAction,
}

/// What the guest did when it was stopped for the switchover, as QEMU's `globalstate` section has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GuestRunState {
    /// `running`, or nothing is said, which QEMU takes for the same.
    Running,
    /// `suspended`: it sleeps, and wakes up by itself or by an event. It is live.
    Suspended,
    /// Paused, shut down, panicked, stopped by an I/O error: `cont` is not for a migration to decide.
    Stopped,
}

impl GuestRunState {
    /// From the text of the `globalstate` section; `None` where a stream has none.
    pub(crate) fn from_state(state: Option<&str>) -> Self {
        match state {
            None | Some("running") => Self::Running,
            Some("suspended") => Self::Suspended,
            Some(_) => Self::Stopped,
        }
    }

    /// Whether its processors run, or will when it wakes up.
    pub(crate) fn is_live(self) -> bool {
        self != Self::Stopped
    }
}

/// What a source's QEMU is seen to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceStatus {
    /// Its migration goes on.
    Migrating,
    /// Its migration is complete, and the guest is stopped there (`postmigrate`).
    Completed,
    /// Its migration is complete, and somebody has run the guest there since.
    CompletedThenResumed,
    /// Its migration failed or was cancelled, or there was none: it has its guest, in the state that it had before.
    HasGuest,
    /// Its process has exited: it cannot run the guest any more.
    Exited,
    /// No answer, or the monitor is closed.
    Unknown,
}

/// What a destination's QEMU is seen to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DestinationStatus {
    /// It is there, and stopped by itself: by an error, a panic or its own shutdown. Only a later look tells this from `Loaded`.
    Stopped,
    /// It waits for the guest, or loads it.
    Loading,
    /// It holds the whole guest, and does not run it.
    Loaded,
    /// The guest runs there, or is suspended there and wakes up by itself.
    Running,
    /// It could not load the guest.
    Failed,
    /// Its process has exited.
    Exited,
    /// No answer, or the monitor is closed.
    Unknown,
}

/// What a `cont` at the destination came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StartResult {
    /// The guest is live.
    Live,
    /// It was accepted, and the guest is not live: somebody or something stopped it again.
    StoppedAgain,
    /// QEMU refused it.
    Refused,
    /// QEMU's process has exited.
    Exited,
    /// No answer within the deadline, or the monitor is closed.
    Unknown,
}

/// What the connection to a source that somebody else drives shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SourceLink {
    /// Open, with nothing to read.
    Open,
    /// Closed by the source, which had read everything that was sent to it.
    Closed,
    /// Reset, or closed with something unread: the source gave up before it read the last message.
    Reset,
}

/// What another towline says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PeerMessage {
    /// Of the source's towline: the source is done with the guest, which is the destination's.
    Completed(RunRequest),
    /// Of the source's towline: the source has its guest back.
    Aborted,
    /// Of the destination's towline: the guest is there, running or paused as it was to be.
    Placed(Placement),
    /// Of the destination's towline: it holds the guest, and could not run it.
    NotRun,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// The destination has loaded all but the last bytes, which are to be sent: a destination that runs by itself runs then.
    CommitRequested(GuestRunState),
    /// The destination holds everything and has said so; the source is to be acknowledged.
    AcknowledgeRequested { guest: GuestRunState, source: SourceLink },
    /// The stream went through, the source's acknowledgement with it.
    Delivered,
    /// The stream, or anything that was done meanwhile, failed.
    Failed,
    /// The destination said that it could not load the guest, before or after the last bytes.
    DestinationRefused,
    /// The source was looked at.
    Source(SourceStatus),
    /// The connection to a source that somebody else drives was looked at.
    SourceLink(SourceLink),
    /// The destination was looked at.
    Destination(DestinationStatus),
    /// The guest was to be run at the destination.
    Started(StartResult),
    /// The other towline sent a message.
    Peer(PeerMessage),
    /// The connection to the other towline is lost.
    PeerLost,
    /// A directive was carried out: what was sent is on its way, the source is in order.
    Done,
    /// A directive could not be carried out.
    NotDone,
    /// What is waited for has not come within its deadline.
    TimedOut,
    /// The decision is durable.
    Recorded,
    /// It is not, as far as is known.
    NotRecorded,
    /// The user wants to cancel.
    Cancel,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Directive {
    /// Go on with what is under way.
    Proceed,
    /// Do not send what was to be sent: the stream is to fail.
    Refuse,
    /// Fail the stream and close its connections.
    Abort,
    /// Make this durable, and say when it is: nothing is done by it before.
    Record(Decision),
    /// It is too late to cancel; say so.
    TooLate,
    /// Acknowledge the source, so that it stops for good, although its destination has not answered.
    AcknowledgeUnconfirmed,
    /// Look at the source again.
    QuerySource,
    /// Cancel the migration of the source, which this command began.
    CancelMigration,
    /// Look at the connection to the source again.
    ProbeSourceLink,
    /// Look at the destination again.
    QueryDestination,
    /// Wait for the other towline.
    AwaitPeer,
    /// Run the guest at the destination, and see whether it does.
    RunDestination,
    /// Send this to the other towline.
    Send(PeerMessage),
    /// The destination is in order: put its settings back.
    FinalizeDestination,
    /// Put the source's settings back and leave its guest as it is.
    RestoreSource,
    /// Put the source's settings back and run its guest, which this migration stopped.
    ResumeSource,
    /// End the source's QEMU.
    QuitSource,
    /// The end.
    End(Outcome),
}

//! The switchover: decides which end may run the guest, from the last byte of its stream to the end of the
//! command.
//!
//! ```text
//!   Transfer ─► Committed ─► Acknowledged ─► Starting ─► Finalizing ─► Releasing ─► Ended
//!      │       (a destination   (the source    (it is done:   (the guest    (the source is
//!      │        that runs by     may finish)    `cont`, or     is there)     resumed, ended
//!      │        itself)                         the outcome)                 or restored)
//!      └────────────┴───────────────┴─► Undoing ─► Ended       the source has its guest back
//! ```
//! One state machine for every command that can end with a guest elsewhere. It does no I/O and has no clock.
//! Its inputs are replies of a monitor, events of the stream, the exit of a QEMU's process, messages of the
//! towline at the other end, a cancellation and expired deadlines. It returns one [`Directive`] for each. The
//! driver carries that out and reports the result; [`SwitchoverOutcome`] is the end, and determines the exit status.
//!
//! Invariants, each checked against every order of events by `model`:
//! - A destination is started only when its source cannot run the guest any more: its migration is `completed`,
//!   or its process has exited.
//! - A monitor that does not reply or is disconnected is no evidence about the guest. Only a process that is
//!   seen to exit is.
//! - The run state in the guest's stream decides whether the guest runs at its destination.
//! - Only states that this migration caused are undone, not those that the user or an operator caused.
//! - If it cannot be known which end has the guest, neither is started, and the outcome reports that.
//! - A source that shares its memory with the destination ([`MemorySharing::Shared`]) never runs the guest after `cont` may
//!   have taken effect there. Until then it gets its guest back after every failure.
//! - A decision that another end or a later towline depends on is made durable first (`recording`). If it cannot
//!   be recorded, it is not acted on.
//!
//! A move that was interrupted is finished by its record and the state of both QEMUs (`resume`).

mod completion;
mod events;
mod fault;
mod machine;
mod outcome;
mod postcopy;
mod reconnect;
mod recording;
mod resume;
mod rollback;

#[cfg(test)]
mod model;

pub use events::Decision;
pub(crate) use events::{
    DestinationKind, DestinationStatus, Directive, FinalRunState, GuestRunState, Input, LossCause,
    MemoryLoss, MemorySharing, PeerMessage, RunRequest, SourceAction, SourceKind, SourceLink, SourceStatus,
    StartResult, SwitchoverRequest,
};
pub(crate) use machine::Switchover;
pub use outcome::{AtDestination, AtSource, GuestState, ToDo};
pub(crate) use outcome::{Placement, SwitchoverOutcome};
pub use resume::OtherEnd;
pub(crate) use resume::{Choice, InterruptedMove, Refusal, ResumeAction, RunFailure, Side};

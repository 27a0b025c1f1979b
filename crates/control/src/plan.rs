//! Plans: the phases of a copy, from the first query to a guest that is safe.
//!
//! ```text
//!   prepare source ─► prepare destination ─► preflight ─► start ─► watch (engine in threads) ─► cut over ─► release
//!        │                   │                            │         │                             │
//!        └─── roll back ─────┴────────────────────────────┴─────────┘      from here on the destination may run
//! ```
//!
//! A failure before the cut-over leaves the guest where it was: the source runs it again if it ran. A `qmp:`
//! destination gets `stop` while it waits, so that it loads and stays paused, and `cont` only when its source
//! is `completed` (with an image as source, when everything is loaded). So two guests never run at once.
//!
//! Out of scope: the command line and output. [`Observer`] receives the progress.

mod captured;
mod clones;
mod command_line;
mod context;
mod convergence;
mod copy;
mod destination;
mod direct;
mod disks;
mod endpoint;
mod ends;
mod engine;
mod error;
mod error_origin;
mod executor;
#[cfg(test)]
pub(crate) mod fake_qemu;
mod forward;
mod invalid;
mod outcomes;
mod peer;
mod postcopy;
mod preflight;
mod private_dir;
mod progress;
mod recorder;
mod request;
mod shared_switchover;
mod source;
mod upgrade;
mod validate;
mod vsock;
mod way;

pub use crate::switchover::{AtDestination, AtSource, GuestState, ToDo};
pub use captured::prepare_disks;
#[cfg(feature = "store")]
pub use clones::copy_stored_image_to_all;
pub use clones::{
    CLONES_AT_ONCE, CLONES_MAX, CloneTarget, Clones, CopyResult, copy_image_to_all, copy_to_all,
};
pub(crate) use clones::{copy_captured_to_all, store_captured};
pub use command_line::CommandLineRecordError;
pub(crate) use command_line::record_command_line;
pub use context::OwnQemu;
pub(crate) use context::listen_options;
pub use copy::{copy, inspect_stream, wait_for_socket};
pub use direct::go_on;
pub use endpoint::{DiscardSink, StreamSummary};
pub use ends::{Destination, ProcessDestination, ProcessGuest, ProcessSource, Source};
pub use error::{BlockedBy, Error, Failure};
pub use invalid::{CopiedPages, Invalid, InvalidEnds, InvalidPostcopy, InvalidTls};
pub use outcomes::{GuestAfterFailure, SourceCategory};
pub(crate) use preflight::report_findings;
pub(crate) use private_dir::PrivateDir;
pub use progress::{
    ComparedDisks, CopyPhase, CopyReport, DestinationState, DiskProgress, HostFacts, Observer,
    PostcopyReport, Progress, SourceState,
};
pub(crate) use request::SHARED_CAPABILITIES;
pub use request::{
    AfterCopy, ConnectingEnd, CopyRequest, Devices, Direct, GenerationUse, PostcopyStart, PostcopySwitch,
    RequestedPages, Task, Throttling, Tls, TransferOptions, UpgradeMemory, WritableDisks,
};
pub use upgrade::{UpgradeRequest, check_upgrade, upgrade};
pub(crate) use validate::is_same_file;
pub(crate) use vsock::chardevs as vsock_chardevs;
pub(crate) use way::recovers;

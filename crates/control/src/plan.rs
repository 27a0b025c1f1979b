//! The plans: what a copy of a guest consists of, from the first question to a guest that is safe.
//!
//! ```text
//!   prepare source ─► prepare destination ─► fits? ─► start ─► watch (engine in threads) ─► cut over ─► release
//!        │undo               │undo                      │undo        │undo                     │
//!        └───────────────────┴──────────────────────────┴────────────┘      from here on the destination may run
//! ```
//!
//! Whatever fails before the cut-over leaves the guest where it was: the source runs on if it ran. A `qmp:` destination is
//! told `stop` while it waits, so that it loads and stays paused, and gets `cont` only when its source says `completed`
//! (an image has no say: it gets it when everything is loaded). So there are never two guests that run.
//!
//! What it is not: it reads no command line and prints nothing; [`Observer`] hears how it goes.

mod blame;
mod clones;
mod compression;
mod conclude;
mod context;
mod converge;
mod copy;
mod destination;
mod endpoint;
mod ends;
mod error;
mod fit;
mod local;
mod outcomes;
mod peer;
mod postcopy;
mod private_dir;
mod progress;
mod receive;
mod recorder;
mod report;
mod request;
mod send;
mod source;
mod supervise;
mod survey;
mod switch;
mod tls;
mod transfer;
mod validate;
mod vsock;
mod zero_copy;

pub use clones::{CLONES_AT_ONCE, CLONES_MAX, Outcome, Recipient, copy_to_all};
pub use copy::{copy, survey};
pub use ends::{Destination, MemoryRoom, Source};
pub use error::{Error, Failure};
pub use outcomes::{GuestState, Keeper, Row, Whereabouts};
pub use progress::{Observer, Phase, Progress};
pub use report::{DestinationState, PostcopyReport, Report, SourceState};
pub use request::{Devices, Means, PostcopyStart, Request, Task, Tls};
pub use survey::{Seen, Survey};

//! The worker pool: threads that serve queues, and the session's handles to them.
//!
//! ```text
//!   session ── command ──► mailbox + eventfd ─┐
//!   guest ─── kick ──────────────────────────┼─► poll ─► commands ─► Worker::run ─► publish ─► enable kicks ─┐
//!   tap, sockets ────────────────────────────┘    ▲                                                          │
//!                                                 └──────────────────────────────────────────────────────────┘
//! ```
//! A thread executes a command between two batches and replies afterwards, so when the session has the reply,
//! no ring uses the former memory, the former log or the former state of the log's switch. A command is a
//! closure with a channel for its own reply, so a reply has the type that its command expects. A ring with a
//! fault is logged, its error eventfd is signalled, and it is not processed until the frontend restarts it;
//! the other rings continue.

mod cpu_budget;
mod pool;
mod queues;
mod slot;
mod thread;

pub(crate) use pool::WorkerPool;
pub use queues::Queues;

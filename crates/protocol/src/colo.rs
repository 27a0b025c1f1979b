//! The secondary of COLO, QEMU's protocol of checkpoints (`migration/colo.c`), for a stock QEMU as the primary.
//!
//! A migration with the capability `x-colo` copies the guest once. After it the same connection carries
//! messages of four bytes, and checkpoints: memory and device state of the guest at one stop.
//!
//! ```text
//!   StreamDecoder::with_checkpoints, Collector      the first copy, acknowledged as any migration is
//!     │ FirstCopy::new
//!     ▼ ready()          READY ►
//!   AwaitRequest         ◄ CHECKPOINT_REQUEST       the guest runs until the reply
//!     ▼ reply(buffer)    CHECKPOINT_REPLY ►
//!   AwaitStop            ◄ VMSTATE_SEND             the guest is being stopped
//!     ▼
//!   Stopped                                         the guest is stopped, its devices are quiet: the caller marks here
//!     ▼ marked()
//!   AwaitCheckpoint      ◄ [SWITCHOVER_START] · ram END · EOF · VMSTATE_SIZE · device sections · EOF
//!     ▼
//!   Received                                        the checkpoint is whole and checked
//!     ▼ loaded()         VMSTATE_RECEIVED, VMSTATE_LOADED ►      the guest runs; back to AwaitRequest
//! ```
//!
//! Sans-IO: the driver receives into [`Awaits::room`], reports the bytes with [`Awaits::received`], and sends
//! what is appended to `out`. The stream of a checkpoint is received into its buffer once, and its
//! pages stay there. A checkpoint exists only when all of it has arrived: one that is cut off was none.
//!
//! Between VMSTATE_SEND and VMSTATE_LOADED the guest is stopped. Everything that it has sent before has left its
//! devices, and nothing later can: that instant is [`Stopped`].
//!
//! There is no message for an end. A primary whose guest was shut down, that quits or fails closes the
//! connection; only its monitor distinguishes these. Its guest is stopped until `x-colo-lost-heartbeat` if
//! the connection is lost after [`Requested::reply`].
//!
//! Out of scope: lanes (`multifd`), XBZRLE, replies before a checkpoint has arrived.

mod buffer;
mod checkpoint;
mod message;
mod pass_on;
mod states;

pub use buffer::CheckpointBuffer;
pub use checkpoint::Checkpoint;
pub use message::MESSAGE_BYTES;
pub use pass_on::{REPLIES_BYTES, check_ready, check_replies};
pub use states::{
    AwaitCheckpoint, AwaitMessage, AwaitRequest, AwaitStop, Awaits, FirstCopy, Progress, Received, Requested,
    Stopped,
};

//! Connecting to a destination: the main channel first, as QEMU tells its connections apart by their order, then lanes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{Address, Cancel, Channel, ConnectOptions};

use crate::Result;

/// How long a failed migration waits for the kernel to be done with what was sent without a copy, before it breaks the
/// connections: time for a peer that is alive to take what is on its way.
const LEASE_PATIENCE: Duration = Duration::from_millis(20);
/// And how long after that: a network card may still be reading.
const RESET_PATIENCE: Duration = Duration::from_millis(500);

/// The connections of one outgoing migration.
#[derive(Debug)]
pub struct Connections {
    /// The main channel.
    pub main: Arc<dyn Channel>,
    /// The lanes.
    pub lanes: Vec<Arc<dyn Channel>>,
    /// The uuid that lanes carry: a QEMU destination compares it with its own.
    pub uuid: [u8; 16],
}

impl Connections {
    /// After a failure, when all channels are shut down: returns when the kernel reads no memory any more that was sent
    /// without a copy. A peer that takes nothing is reset.
    pub(crate) fn let_go(&self) {
        let deadline = Instant::now() + LEASE_PATIENCE;
        for lane in &self.lanes {
            let lease = lane.lease();
            if lease.wait(deadline).is_ok() {
                continue;
            }
            let freed = lane.reset().and_then(|()| lease.wait(Instant::now() + RESET_PATIENCE));
            if let Err(error) = freed {
                tracing::warn!(peer = lane.peer(), %error, "the kernel may still read the guest's memory");
            }
        }
    }
}

/// Connects the main channel and `lanes` lanes; `zero_copy` makes zero-copy sends possible on the lanes where the kernel can.
///
/// # Errors
/// The address cannot be reached by `deadline`, or refuses.
pub fn connect(
    address: &Address,
    lanes: usize,
    uuid: [u8; 16],
    zero_copy: bool,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Connections> {
    let one = |zero_copy| {
        let options = ConnectOptions { zero_copy, ..ConnectOptions::default() };
        towline_channel::connect_with(address, deadline, cancel, &options).map(Arc::from)
    };
    let main = one(false)?;
    let lanes = (0..lanes).map(|_| one(zero_copy)).collect::<Result<_, _>>()?;
    Ok(Connections { main, lanes, uuid })
}

//! Connecting to a destination: the main channel first, as QEMU tells its connections apart by their order, then lanes.

use std::sync::Arc;
use std::time::Instant;

use towline_channel::{Address, Cancel, Channel};

use crate::Result;

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

/// Connects the main channel and `lanes` lanes.
///
/// # Errors
/// The address cannot be reached by `deadline`, or refuses.
pub fn connect(
    address: &Address,
    lanes: usize,
    uuid: [u8; 16],
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Connections> {
    let one = || towline_channel::connect(address, deadline, cancel).map(Arc::from);
    let main = one()?;
    let lanes = (0..lanes).map(|_| one()).collect::<Result<_, _>>()?;
    Ok(Connections { main, lanes, uuid })
}

//! Connects to a destination: the main channel first, as QEMU distinguishes its connections by their order,
//! then lanes.

use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ChannelExt, ConnectOptions, Error as ChannelError, IoBuf, SendFlags,
    connect_with,
};

use super::lane::init;
use crate::{Error, Result, Session, Statistics};

/// Time that a failed migration waits for the kernel to finish zero-copy sends before it resets the
/// connections: time for a live peer to receive the data on its way.
const LEASE_PATIENCE: Duration = Duration::from_millis(20);
/// Time after that, during which a network card may still read.
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
    /// The lanes' init packets were sent.
    pub introduced: bool,
}

impl Connections {
    /// Has the channels shut down when `session` fails, and their calls counted.
    pub(crate) fn watch(&self, session: &Session, statistics: &Statistics) {
        for channel in iter::once(&self.main).chain(&self.lanes) {
            session.watch(channel);
            statistics.count_sends_of(channel.as_ref());
        }
    }

    /// After a failure, when all channels are shut down: returns when the kernel no longer reads memory that
    /// was sent without a copy. A peer that does not receive is reset.
    pub(crate) fn drain_zero_copy(&self) {
        let deadline = Instant::now() + LEASE_PATIENCE;
        for lane in &self.lanes {
            let ticket = lane.zero_copy_ticket();
            if ticket.wait(deadline).is_ok() {
                continue;
            }
            let freed = lane.reset().and_then(|()| ticket.wait(Instant::now() + RESET_PATIENCE));
            if let Err(error) = freed {
                tracing::warn!(peer = lane.peer(), %error, "the kernel may still read the guest's memory");
            }
        }
    }
}

/// Connects the main channel and `lanes` lanes, to which zero-copy of the options applies, and sends the
/// lanes' init packets: a QEMU with TLS accepts no other connection while it waits for one. With TLS each
/// connection does its own handshake, the main channel before the first lane connects.
///
/// # Errors
/// The address cannot be reached by `deadline`, or refuses.
pub fn connect(
    address: &Address,
    lanes: usize,
    uuid: [u8; 16],
    options: &ConnectOptions,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Connections> {
    let plain = ConnectOptions { zero_copy: false, ..options.clone() };
    let main = connect_with(address, deadline, cancel, &plain)?.into();
    let lane = |index| -> Result<Arc<dyn Channel>> {
        let lane = connect_with(address, deadline, cancel, options).map_err(|error| match error {
            error @ ChannelError::Tls { .. } => Error::lane(index)(error.into()),
            error => error.into(),
        })?;
        let init = init(index, uuid);
        let sent = lane.send_all(&[IoBuf::from(&init[..])], SendFlags::empty());
        sent.map_err(|error| Error::lane(index)(error.into()))?;
        Ok(lane.into())
    };
    let lanes = (0..lanes).map(lane).collect::<Result<_, _>>()?;
    Ok(Connections { main, lanes, uuid, introduced: true })
}

//! Connects to a destination: the main channel first, as QEMU distinguishes its connections by their order,
//! then lanes.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use towline_channel::{
    Address, Cancel, Channel, ChannelExt, ConnectOptions, Error as ChannelError, IoBuf, IoBufMut, Listener,
    SendFlags, connect_with,
};

use super::lane::{LaneOptions, LaneWriter, init};
use crate::gate::{LinkState, probe_link};
use crate::incoming::ConnectionKind;
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

    /// Writers of the lanes, which number their packets together.
    pub(crate) fn lane_writers(
        &self,
        statistics: &Arc<Statistics>,
        options: LaneOptions,
    ) -> Result<Vec<LaneWriter>> {
        let packets = Arc::new(AtomicU64::new(0));
        let writer = |lane: &Arc<dyn Channel>| {
            LaneWriter::new(Arc::clone(lane), Arc::clone(&packets), Arc::clone(statistics), options)
        };
        self.lanes.iter().map(writer).collect()
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
        introduce(&*lane, index, uuid)?;
        Ok(lane.into())
    };
    let lanes = (0..lanes).map(lane).collect::<Result<_, _>>()?;
    Ok(Connections { main, lanes, uuid, introduced: true })
}

/// Accepts them from a destination that connects ([`incoming::connect`](crate::incoming::connect)), and sends the lanes' init packets.
/// Connections that do not tell their kind within `timeout`, or tell another one, are dropped, as are those in excess.
///
/// # Errors
/// They have not all come by `deadline`.
pub fn accept(
    listener: &Listener,
    lanes: usize,
    uuid: [u8; 16],
    deadline: Instant,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<Connections> {
    const MAIN: u8 = ConnectionKind::Main as u8;
    const LANE: u8 = ConnectionKind::Lane as u8;
    let mut main: Option<Arc<dyn Channel>> = None;
    let mut accepted = Vec::with_capacity(lanes);
    while main.is_none() || accepted.len() < lanes {
        let channel: Arc<dyn Channel> = match listener.accept(deadline, cancel) {
            Ok(channel) => channel.into(),
            Err(error @ (ChannelError::Tls { .. } | ChannelError::WebSocket { .. })) => {
                tracing::warn!(%error, "a connection was dropped");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let mut kind = [0];
        channel.set_timeouts(Some(timeout), None)?;
        if let Err(error) = channel.recv_exact(&mut [IoBufMut::from(&mut kind[..])]) {
            tracing::warn!(%error, "a connection was dropped");
            continue;
        }
        channel.set_timeouts(None, None)?;
        match kind[0] {
            // One whose destination has ended since is replaced.
            MAIN if main.as_deref().is_none_or(|main| probe_link(main) != LinkState::Open) => {
                main = Some(channel);
            }
            LANE if accepted.len() < lanes => {
                introduce(&*channel, accepted.len(), uuid)?;
                accepted.push(channel);
            }
            kind => tracing::warn!(peer = channel.peer(), kind, "dropped an unrelated connection"),
        }
    }
    Ok(Connections { main: main.expect("accepted"), lanes: accepted, uuid, introduced: true })
}

/// Sends a lane's init packet.
fn introduce(lane: &dyn Channel, index: usize, uuid: [u8; 16]) -> Result<()> {
    let init = init(index, uuid);
    let sent = lane.send_all(&[IoBuf::from(&init[..])], SendFlags::empty());
    sent.map_err(|error| Error::lane(index)(error.into()))
}

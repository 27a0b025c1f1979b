//! Connections that the guest requests: their destinations, and connects in progress.

use std::io;
use std::sync::Arc;

use super::handshake_line::{HandshakeLine, parse_ok};
use super::pending_connect::PendingConnect;
use super::socket::{HostSocket, Started};
use super::{Host, SocketEvent};
use crate::connection::{ConnectionId, ConnectionKey};
use crate::local_guests::IncomingConnection;
use crate::packet::{HOST_CID, SocketType};
use crate::rules::{ForwardingRule, HostAddress};
use crate::sockets::{ConnectOutcome, Interest, Readiness};

/// Result of a step of a connect.
enum Step {
    Connected(HostSocket),
    Continues(PendingConnect),
}

impl Host {
    /// Advances a connect in progress after an event of its socket.
    pub(super) fn advance_connect(&mut self, id: ConnectionId) {
        let Some(pending) = self.pending.remove(&id) else { return };
        match Self::step(pending) {
            Ok(Step::Connected(socket)) => match self.modify(id, &socket, Interest::Read) {
                Ok(()) => {
                    let has_data = socket.has_buffered();
                    self.events.push_back(SocketEvent::Connected(id, Some(socket)));
                    if has_data {
                        self.events.push_back(SocketEvent::Readable(id, Readiness::Readable));
                    }
                }
                Err(_) => self.events.push_back(SocketEvent::Connected(id, None)),
            },
            Ok(Step::Continues(pending)) => {
                if let PendingConnect::AwaitingOk(socket) = &pending {
                    let _ = self.modify(id, socket, Interest::Read);
                }
                self.pending.insert(id, pending);
            }
            Err(error) => {
                tracing::debug!(%error, "connect to a destination on the host failed");
                self.events.push_back(SocketEvent::Connected(id, None));
            }
        }
    }

    fn step(pending: PendingConnect) -> io::Result<Step> {
        match pending {
            PendingConnect::Address(socket) => {
                socket.connect_result()?;
                Ok(Step::Connected(socket))
            }
            PendingConnect::PeerGuest(socket, port) => {
                socket.connect_result()?;
                socket.send_line(&format!("CONNECT {port}\n"))?;
                Ok(Step::Continues(PendingConnect::AwaitingOk(socket)))
            }
            PendingConnect::AwaitingOk(socket) => match socket.receive_line(parse_ok)? {
                HandshakeLine::Complete { .. } => Ok(Step::Connected(socket)),
                HandshakeLine::Incomplete => Ok(Step::Continues(PendingConnect::AwaitingOk(socket))),
                HandshakeLine::Invalid => Err(io::ErrorKind::InvalidData.into()),
            },
            retry @ PendingConnect::Retry(..) => Ok(Step::Continues(retry)),
        }
    }

    /// Connects to the destination of a key, if rules or Firecracker's convention permit it.
    pub(super) fn connect_key(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: SocketType,
    ) -> ConnectOutcome<HostSocket> {
        if key.peer_cid != HOST_CID {
            return self.connect_guest(id, key, kind);
        }
        let config = Arc::clone(&self.config);
        let destination = config.rules.iter().find_map(|rule| match rule {
            ForwardingRule::Connect { port, to } if *port == key.peer_port => Some(to),
            _ => None,
        });
        match (destination, &config.uds) {
            (Some(address), _) => self.connect_address(id, address, kind),
            (None, Some(uds)) => {
                let mut path = uds.clone().into_os_string();
                path.push(format!("_{}", key.peer_port));
                self.connect_address(id, &HostAddress::Unix(path.into()), kind)
            }
            (None, None) => ConnectOutcome::Refused,
        }
    }

    pub(super) fn connect_address(
        &mut self,
        id: ConnectionId,
        address: &HostAddress,
        kind: SocketType,
    ) -> ConnectOutcome<HostSocket> {
        match HostSocket::connect(address, kind) {
            Ok(Started::Connected(socket)) => match self.register(id, &socket, Interest::Read) {
                Ok(()) => ConnectOutcome::Connected(socket),
                Err(_) => ConnectOutcome::Refused,
            },
            Ok(Started::InProgress(socket)) => {
                self.wait_for(id, socket, PendingConnect::Address, Interest::ReadWrite)
            }
            Ok(Started::BacklogFull) => {
                self.pending.insert(id, PendingConnect::Retry(address.clone(), kind));
                ConnectOutcome::InProgress
            }
            Err(error) => {
                tracing::debug!(%error, ?address, "connect to a destination on the host failed");
                ConnectOutcome::Refused
            }
        }
    }

    fn wait_for(
        &mut self,
        id: ConnectionId,
        socket: HostSocket,
        pending: impl FnOnce(HostSocket) -> PendingConnect,
        interest: Interest,
    ) -> ConnectOutcome<HostSocket> {
        if self.register(id, &socket, interest).is_err() {
            return ConnectOutcome::Refused;
        }
        self.pending.insert(id, pending(socket));
        ConnectOutcome::InProgress
    }

    /// Connects to another guest: of this process by its accept queue, of another one by the socket of its
    /// device.
    fn connect_guest(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: SocketType,
    ) -> ConnectOutcome<HostSocket> {
        let config = Arc::clone(&self.config);
        if let Some(queue) = config.local_guests.accept_queue(config.cid, key.peer_cid) {
            let Ok((ours, theirs)) = HostSocket::pair(kind) else { return ConnectOutcome::Refused };
            let share = config.local_guests.share(key.peer_cid, queue.capacity());
            let incoming = IncomingConnection { port: key.peer_port, cid: config.cid, socket: theirs };
            if !queue.push(incoming, share) {
                return ConnectOutcome::Refused;
            }
            return self.wait_for(id, ours, PendingConnect::AwaitingOk, Interest::Read);
        }
        let uds = config.rules.iter().find_map(|rule| match rule {
            ForwardingRule::PeerGuest { cid, uds } if *cid == key.peer_cid => Some(uds.clone()),
            _ => None,
        });
        let Some(uds) = uds else { return ConnectOutcome::Refused };
        match HostSocket::connect(&HostAddress::Unix(uds), kind) {
            Ok(Started::Connected(socket) | Started::InProgress(socket)) => {
                let pending = |socket| PendingConnect::PeerGuest(socket, key.peer_port);
                self.wait_for(id, socket, pending, Interest::ReadWrite)
            }
            Ok(Started::BacklogFull) | Err(_) => ConnectOutcome::Refused,
        }
    }
}

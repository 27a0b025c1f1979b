//! Connections that the guest asks for: where each goes, and those that are under way.

use std::io;
use std::sync::Arc;

use super::convention::{self, Line};
use super::socket::{Begun, HostSocket};
use super::{Event, Host};
use crate::connection::{ConnectionId, ConnectionKey};
use crate::engine::Readiness;
use crate::local_guests::Incoming;
use crate::packet::{HOST_CID, Kind};
use crate::rules::{HostAddress, Rule};
use crate::sockets::ConnectOutcome;

/// A connection that the guest has asked for, under way.
pub(super) enum Pending {
    /// To a place.
    Begun(HostSocket),
    /// A place had no room; it is tried again.
    Again(HostAddress, Kind),
    /// To another guest: to its device, which will want to hear where to.
    Device(HostSocket, u32),
    /// And which will say that the other guest has accepted.
    Ok(HostSocket),
}

enum Step {
    Done(HostSocket),
    Goes(Pending),
}

impl Host {
    /// Takes a connection that is under way a step further.
    pub(super) fn advance(&mut self, id: ConnectionId) {
        let outcome = match self.pending.remove(&id) {
            Some(Pending::Begun(socket)) => socket.outcome().map(|()| Step::Done(socket)),
            Some(Pending::Device(socket, port)) => socket
                .outcome()
                .and_then(|()| socket.say(&format!("CONNECT {port}\n")))
                .map(|()| Step::Goes(Pending::Ok(socket))),
            Some(Pending::Ok(socket)) => match socket.hear(convention::ok) {
                Ok(Line::Whole(..)) => Ok(Step::Done(socket)),
                Ok(Line::More) => Ok(Step::Goes(Pending::Ok(socket))),
                Ok(Line::Wrong) => Err(io::ErrorKind::InvalidData.into()),
                Err(error) => Err(error),
            },
            Some(pending) => Ok(Step::Goes(pending)),
            None => return,
        };
        match outcome {
            Ok(Step::Done(socket)) => match self.watch(id, &socket, false, true) {
                Ok(()) => {
                    let early = socket.has_early();
                    self.events.push_back(Event::Connected(id, Some(socket)));
                    if early {
                        self.events.push_back(Event::Readable(id, Readiness::Readable));
                    }
                }
                Err(_) => self.events.push_back(Event::Connected(id, None)),
            },
            Ok(Step::Goes(pending)) => {
                if let Pending::Ok(socket) = &pending {
                    let _ = self.watch(id, socket, false, true);
                }
                self.pending.insert(id, pending);
            }
            Err(error) => {
                tracing::debug!(%error, "what the guest wanted to be connected with is not there");
                self.events.push_back(Event::Connected(id, None));
            }
        }
    }

    /// Where the guest wants to go, if it may.
    pub(super) fn begin_for(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: Kind,
    ) -> ConnectOutcome<HostSocket> {
        if key.peer_cid != HOST_CID {
            return self.begin_sibling(id, key, kind);
        }
        let ears = Arc::clone(&self.ears);
        let out = ears.rules.iter().find_map(|rule| match rule {
            Rule::Connect { port, to } if *port == key.peer_port => Some(to),
            _ => None,
        });
        match (out, &ears.uds) {
            (Some(place), _) => self.begin(id, place, kind),
            (None, Some(uds)) => {
                let mut path = uds.clone().into_os_string();
                path.push(format!("_{}", key.peer_port));
                self.begin(id, &HostAddress::Unix(path.into()), kind)
            }
            (None, None) => ConnectOutcome::Refused,
        }
    }

    pub(super) fn begin(
        &mut self,
        id: ConnectionId,
        place: &HostAddress,
        kind: Kind,
    ) -> ConnectOutcome<HostSocket> {
        match HostSocket::begin(place, kind) {
            Ok(Begun::Connected(socket)) => match self.watch(id, &socket, false, false) {
                Ok(()) => ConnectOutcome::Connected(socket),
                Err(_) => ConnectOutcome::Refused,
            },
            Ok(Begun::Waits(socket)) => self.wait_for(id, socket, Pending::Begun, true),
            Ok(Begun::Full) => {
                self.pending.insert(id, Pending::Again(place.clone(), kind));
                ConnectOutcome::InProgress
            }
            Err(error) => {
                tracing::debug!(%error, ?place, "the guest wants to be connected with this");
                ConnectOutcome::Refused
            }
        }
    }

    fn wait_for(
        &mut self,
        id: ConnectionId,
        socket: HostSocket,
        pending: impl FnOnce(HostSocket) -> Pending,
        write: bool,
    ) -> ConnectOutcome<HostSocket> {
        if self.watch(id, &socket, write, false).is_err() {
            return ConnectOutcome::Refused;
        }
        self.pending.insert(id, pending(socket));
        ConnectOutcome::InProgress
    }

    fn begin_sibling(
        &mut self,
        id: ConnectionId,
        key: ConnectionKey,
        kind: Kind,
    ) -> ConnectOutcome<HostSocket> {
        let ears = Arc::clone(&self.ears);
        if let Some(mailbox) = ears.local_guests.find(ears.cid, key.peer_cid) {
            let Ok((ours, theirs)) = HostSocket::pair(kind) else { return ConnectOutcome::Refused };
            let most = ears.local_guests.share(key.peer_cid, mailbox.most());
            let put =
                mailbox.put(Incoming { port: key.peer_port, kind, cid: ears.cid, socket: theirs }, most);
            return if put { self.wait_for(id, ours, Pending::Ok, false) } else { ConnectOutcome::Refused };
        }
        let uds = ears.rules.iter().find_map(|rule| match rule {
            Rule::PeerGuest { cid, uds } if *cid == key.peer_cid => Some(uds.clone()),
            _ => None,
        });
        let Some(uds) = uds else { return ConnectOutcome::Refused };
        match HostSocket::begin(&HostAddress::Unix(uds), kind) {
            Ok(Begun::Connected(socket) | Begun::Waits(socket)) => {
                self.wait_for(id, socket, |socket| Pending::Device(socket, key.peer_port), true)
            }
            Ok(Begun::Full) | Err(_) => ConnectOutcome::Refused,
        }
    }
}

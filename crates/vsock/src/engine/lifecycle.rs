//! State of the host's end of a connection: its two directions and the peer of its socket. A pure function of
//! events.
//!
//! ```text
//!   guest to socket   Open ◄── full, writable ──► Full            socket to guest   Idle ◄─ drained, ready ─► Readable
//!                       │  refused, peer closed    │                                  guest's credit ─┐ │  ▲ │
//!                       ├────► PeerClosed ◄────────┘                              OutOfCredit ◄───────┴─┘──┘ └► EofDelivered
//!                       │           │ guest has ended it                                  │ guest has ended it
//!                       └───────────┴──► ShutDown                                         └──► ShutDown
//! ```
//! When both directions have ended, the connection closes: gracefully if the guest has ended both, else with
//! a handshake.

use crate::packet::ShutdownFlags;
use crate::sockets::Readiness;

/// State of the direction from the guest to the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SendState {
    /// The socket takes data.
    Open,
    /// The send buffer is full.
    Full,
    /// The peer receives no more: data of the guest is discarded.
    PeerClosed,
    /// The guest has ended the direction, and all of its data was sent.
    ShutDown,
}

/// State of the direction from the socket to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ReceiveState {
    /// Nothing to read.
    Idle,
    /// Data may be available, or a message is partly sent to the guest.
    Readable,
    /// Data is available, and the guest has no credit for it.
    OutOfCredit,
    /// The end of the stream was sent to the guest.
    EofDelivered,
    /// The guest has ended the direction.
    ShutDown,
}

/// State of the socket's peer, as epoll reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum PeerState {
    /// May send and receive.
    Open,
    /// Sends no more.
    WriteClosed,
    /// Neither sends nor receives.
    Closed,
}

/// Event of one of the ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LifecycleEvent {
    /// epoll reports the socket as ready.
    Ready(Readiness),
    /// The socket has nothing more to read for now.
    Drained,
    /// The guest has no credit for data of the socket.
    OutOfCredit,
    /// The guest has credit.
    Credit,
    /// The end of the stream was read.
    Eof,
    /// The socket's send buffer is full.
    Full,
    /// The send buffer has space.
    Writable,
    /// A send failed because the peer receives no more (`EPIPE`).
    SendRefused,
    /// Directions that the guest has ended, or the send queue, may have changed.
    Update {
        /// Directions that the guest has ended.
        guest: ShutdownFlags,
        /// The send queue is empty.
        all_sent: bool,
    },
}

bitflags::bitflags! {
    /// Actions of the engine after an event.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(super) struct Actions: u8 {
        /// Report space in the send buffer.
        const WATCH_WRITABLE = 1;
        /// Report it no more.
        const UNWATCH_WRITABLE = 2;
        /// Send the end of the stream to the guest.
        const DELIVER_EOF = 4;
        /// Discard data of the guest, and notify it that no more is received.
        const REFUSE_DATA = 8;
        /// Shut down the receiving side of the socket.
        const SHUTDOWN_RECEIVE = 16;
        /// Shut down the sending side of the socket.
        const SHUTDOWN_SEND = 32;
        /// Close the socket, and wait for the guest to confirm the end.
        const BEGIN_CLOSING = 64;
        /// Close both ends.
        const CLOSE = 128;
    }
}

/// State of the host's end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Lifecycle {
    pub(super) send: SendState,
    pub(super) receive: ReceiveState,
    pub(super) peer: PeerState,
}

/// Result of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transition {
    pub(super) next: Lifecycle,
    pub(super) actions: Actions,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self { send: SendState::Open, receive: ReceiveState::Idle, peer: PeerState::Open }
    }
}

impl Lifecycle {
    /// Returns the transition on an event, or `None` if the event is not legal in this state.
    pub(super) fn on(self, event: LifecycleEvent) -> Option<Transition> {
        let mut transition = Transition { next: self, actions: Actions::empty() };
        match (event, self.send, self.receive) {
            (LifecycleEvent::Ready(readiness), ..) => transition.ready(readiness),
            (LifecycleEvent::Drained, _, ReceiveState::Readable) => {
                transition.next.receive = ReceiveState::Idle;
            }
            (LifecycleEvent::OutOfCredit, _, ReceiveState::Readable) => {
                transition.next.receive = ReceiveState::OutOfCredit;
            }
            (LifecycleEvent::Credit, _, ReceiveState::OutOfCredit) => {
                transition.next.receive = ReceiveState::Readable;
            }
            (LifecycleEvent::Eof, _, ReceiveState::Readable) => {
                transition.next.receive = ReceiveState::EofDelivered;
                transition.actions |= Actions::DELIVER_EOF;
                transition.refuse_data_after_close();
            }
            (LifecycleEvent::Full, SendState::Open, _) => {
                transition.next.send = SendState::Full;
                transition.actions |= Actions::WATCH_WRITABLE;
            }
            (LifecycleEvent::Writable, SendState::Full, _) => transition.next_send(SendState::Open),
            (LifecycleEvent::SendRefused, SendState::Open | SendState::Full, _) => transition.refuse_data(),
            (LifecycleEvent::Update { guest, all_sent }, ..) => transition.update(guest, all_sent),
            // A late report of epoll or of the guest.
            (LifecycleEvent::Credit | LifecycleEvent::Writable, ..) => {}
            _ => return None,
        }
        Some(transition)
    }
}

impl Transition {
    fn ready(&mut self, readiness: Readiness) {
        let peer = match readiness {
            Readiness::Readable | Readiness::Urgent => PeerState::Open,
            Readiness::ReadClosed => PeerState::WriteClosed,
            Readiness::Closed => PeerState::Closed,
        };
        self.next.peer = self.next.peer.max(peer);
        if self.next.receive == ReceiveState::Idle {
            self.next.receive = ReceiveState::Readable;
        }
        if readiness == Readiness::Closed {
            self.refuse_data_after_close();
        }
    }

    /// Once the end of the stream is delivered, a peer that is closed refuses data too.
    fn refuse_data_after_close(&mut self) {
        let Lifecycle { send, receive, peer } = self.next;
        let takes_data = matches!(send, SendState::Open | SendState::Full);
        if takes_data && receive == ReceiveState::EofDelivered && peer == PeerState::Closed {
            self.refuse_data();
        }
    }

    fn refuse_data(&mut self) {
        self.next_send(SendState::PeerClosed);
        self.actions |= Actions::REFUSE_DATA;
    }

    fn next_send(&mut self, send: SendState) {
        if self.next.send == SendState::Full {
            self.actions |= Actions::UNWATCH_WRITABLE;
        }
        self.next.send = send;
    }

    fn update(&mut self, guest: ShutdownFlags, all_sent: bool) {
        let has_ended = all_sent && guest.contains(ShutdownFlags::SEND);
        if has_ended && guest.contains(ShutdownFlags::RECEIVE) {
            // In one step: a client that sees the directions end one after the other takes the first for all.
            self.actions |= Actions::CLOSE;
            return;
        }
        let receive = self.next.receive;
        let is_open = !matches!(receive, ReceiveState::EofDelivered | ReceiveState::ShutDown);
        if guest.contains(ShutdownFlags::RECEIVE) && is_open {
            self.next.receive = ReceiveState::ShutDown;
            self.actions |= Actions::SHUTDOWN_RECEIVE;
        }
        if has_ended && self.next.send != SendState::ShutDown {
            self.next_send(SendState::ShutDown);
            self.actions |= Actions::SHUTDOWN_SEND;
        }
        let sends_nothing = matches!(self.next.send, SendState::PeerClosed | SendState::ShutDown);
        if self.next.receive == ReceiveState::EofDelivered && sends_nothing {
            self.actions |= Actions::BEGIN_CLOSING;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDS: [SendState; 4] =
        [SendState::Open, SendState::Full, SendState::PeerClosed, SendState::ShutDown];
    const RECEIVES: [ReceiveState; 5] = [
        ReceiveState::Idle,
        ReceiveState::Readable,
        ReceiveState::OutOfCredit,
        ReceiveState::EofDelivered,
        ReceiveState::ShutDown,
    ];
    const PEERS: [PeerState; 3] = [PeerState::Open, PeerState::WriteClosed, PeerState::Closed];

    fn states() -> impl Iterator<Item = Lifecycle> {
        SENDS.into_iter().flat_map(|send| {
            RECEIVES
                .into_iter()
                .flat_map(move |receive| PEERS.into_iter().map(move |peer| Lifecycle { send, receive, peer }))
        })
    }

    fn events() -> Vec<LifecycleEvent> {
        let readiness = [Readiness::Readable, Readiness::Urgent, Readiness::ReadClosed, Readiness::Closed]
            .map(LifecycleEvent::Ready);
        let updates = (0..4).flat_map(|bits| {
            let guest = ShutdownFlags::from_bits_truncate(bits);
            [false, true].map(|all_sent| LifecycleEvent::Update { guest, all_sent })
        });
        let others = [
            LifecycleEvent::Drained,
            LifecycleEvent::OutOfCredit,
            LifecycleEvent::Credit,
            LifecycleEvent::Eof,
            LifecycleEvent::Full,
            LifecycleEvent::Writable,
            LifecycleEvent::SendRefused,
        ];
        readiness.into_iter().chain(updates).chain(others).collect()
    }

    /// Next state of the direction to the guest by event, for an open peer; `None`: not legal.
    #[test]
    fn the_direction_to_the_guest_follows_its_table() {
        use ReceiveState::{EofDelivered, Idle, OutOfCredit, Readable, ShutDown};
        let ended = LifecycleEvent::Update { guest: ShutdownFlags::RECEIVE, all_sent: false };
        // In the order of RECEIVES.
        let table = [
            (
                LifecycleEvent::Ready(Readiness::Readable),
                [Some(Readable), Some(Readable), Some(OutOfCredit), Some(EofDelivered), Some(ShutDown)],
            ),
            (LifecycleEvent::Drained, [None, Some(Idle), None, None, None]),
            (LifecycleEvent::OutOfCredit, [None, Some(OutOfCredit), None, None, None]),
            (
                LifecycleEvent::Credit,
                [Some(Idle), Some(Readable), Some(Readable), Some(EofDelivered), Some(ShutDown)],
            ),
            (LifecycleEvent::Eof, [None, Some(EofDelivered), None, None, None]),
            (ended, [Some(ShutDown), Some(ShutDown), Some(ShutDown), Some(EofDelivered), Some(ShutDown)]),
        ];
        for (event, results) in table {
            for (receive, result) in RECEIVES.into_iter().zip(results) {
                for send in SENDS {
                    let state = Lifecycle { send, receive, peer: PeerState::Open };
                    let next = state.on(event).map(|transition| transition.next.receive);
                    assert_eq!(next, result, "{event:?} in {state:?}");
                }
            }
        }
    }

    /// Next state of the direction to the socket by event, while nothing has ended; `None`: not legal.
    #[test]
    fn the_direction_to_the_socket_follows_its_table() {
        use SendState::{Full, Open, PeerClosed, ShutDown};
        let update = |all_sent| LifecycleEvent::Update { guest: ShutdownFlags::SEND, all_sent };
        // In the order of SENDS.
        let table = [
            (LifecycleEvent::Full, [Some(Full), None, None, None]),
            (LifecycleEvent::Writable, [Some(Open), Some(Open), Some(PeerClosed), Some(ShutDown)]),
            (LifecycleEvent::SendRefused, [Some(PeerClosed), Some(PeerClosed), None, None]),
            (update(false), [Some(Open), Some(Full), Some(PeerClosed), Some(ShutDown)]),
            (update(true), [Some(ShutDown); 4]),
        ];
        for (event, results) in table {
            for (send, result) in SENDS.into_iter().zip(results) {
                let state = Lifecycle { send, ..Lifecycle::default() };
                let next = state.on(event).map(|transition| transition.next.send);
                assert_eq!(next, result, "{event:?} in {state:?}");
            }
        }
    }

    #[test]
    fn no_direction_is_opened_again_and_the_peer_stays_closed() {
        let is_open = |send| matches!(send, SendState::Open | SendState::Full);
        let has_ended = |receive| matches!(receive, ReceiveState::EofDelivered | ReceiveState::ShutDown);
        for state in states() {
            for event in events() {
                let Some(Transition { next, .. }) = state.on(event) else { continue };
                assert!(is_open(state.send) || !is_open(next.send), "{event:?} in {state:?}");
                assert!(!has_ended(state.receive) || next.receive == state.receive, "{event:?} in {state:?}");
                assert!(next.peer >= state.peer, "{event:?} in {state:?}");
            }
        }
    }

    #[test]
    fn each_change_of_a_direction_has_its_action() {
        for state in states() {
            for event in events() {
                let Some(Transition { next, actions }) = state.on(event) else { continue };
                let has = |action| actions.contains(action);
                let sends = |wanted| next.send == wanted && state.send != wanted;
                let receives = |wanted| next.receive == wanted && state.receive != wanted;
                let left_full = state.send == SendState::Full && next.send != SendState::Full;
                assert_eq!(has(Actions::WATCH_WRITABLE), sends(SendState::Full), "{event:?} in {state:?}");
                assert_eq!(has(Actions::UNWATCH_WRITABLE), left_full, "{event:?} in {state:?}");
                assert_eq!(has(Actions::REFUSE_DATA), sends(SendState::PeerClosed), "{event:?} in {state:?}");
                assert_eq!(has(Actions::SHUTDOWN_SEND), sends(SendState::ShutDown), "{event:?} in {state:?}");
                let delivers = receives(ReceiveState::EofDelivered);
                assert_eq!(has(Actions::DELIVER_EOF), delivers, "{event:?} in {state:?}");
                let shuts = receives(ReceiveState::ShutDown);
                assert_eq!(has(Actions::SHUTDOWN_RECEIVE), shuts, "{event:?} in {state:?}");
            }
        }
    }

    #[test]
    fn a_connection_closes_exactly_when_both_directions_have_ended() {
        for state in states() {
            for event in events() {
                let Some(Transition { next, actions }) = state.on(event) else { continue };
                let is_update = matches!(event, LifecycleEvent::Update { .. });
                let guest_ended =
                    event == LifecycleEvent::Update { guest: ShutdownFlags::all(), all_sent: true };
                let both_ended = next.receive == ReceiveState::EofDelivered
                    && matches!(next.send, SendState::PeerClosed | SendState::ShutDown);
                assert_eq!(actions.contains(Actions::CLOSE), guest_ended, "{event:?} in {state:?}");
                let begins = is_update && both_ended && !guest_ended;
                assert_eq!(actions.contains(Actions::BEGIN_CLOSING), begins, "{event:?} in {state:?}");
            }
        }
    }

    #[test]
    fn a_peer_that_closes_after_its_end_was_delivered_refuses_data() {
        for (send, refuses) in SENDS.into_iter().zip([true, true, false, false]) {
            let delivered =
                Lifecycle { send, receive: ReceiveState::EofDelivered, peer: PeerState::WriteClosed };
            let transition = delivered.on(LifecycleEvent::Ready(Readiness::Closed)).unwrap();
            assert_eq!(transition.actions.contains(Actions::REFUSE_DATA), refuses, "{send:?}");
            let closed = Lifecycle { send, receive: ReceiveState::Readable, peer: PeerState::Closed };
            let transition = closed.on(LifecycleEvent::Eof).unwrap();
            assert_eq!(transition.actions.contains(Actions::REFUSE_DATA), refuses, "{send:?}");
        }
    }
}
